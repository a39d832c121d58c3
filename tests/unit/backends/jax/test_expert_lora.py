"""Adapter checkpoints with shared or separate expert factors, loaded by servers of either form."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from skyrl_tx import models
from skyrl_tx.backends.jax import checkpoint
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.train.training_state import make_training_state
from skyrl_tx.contract.backend import ALL_PARTS, StatePart
from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.models.config import ExpertLora
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from skyrl_tx.weights.peft import AdapterError, AdapterFormat, read_adapter
from tests.support.tiny import TINY_CONFIG, tiny_directory

LORA = LoraSpec(rank=3, seed=1)
WEIGHTS = {StatePart.WEIGHTS}


def make_model(folder: Path, form: ExpertLora) -> tuple[models.ModelConfig, AdapterFormat]:
    content = hf.read_json(write_model(folder, "GptOssForCausalLM"), "config.json")
    family = models.find_family(content)
    config = replace(family.config_from_hf(content), expert_lora=form)
    return config, models.make_adapter_format(config, family.weights, "tiny")


def make_trained_state(config: models.ModelConfig) -> checkpoint.TrainingState:
    """Return a training state whose B is not zero."""
    state = make_training_state(config, LORA)
    draw = np.random.default_rng(0)
    for pair in state.adapter.weights.values():
        np.asarray(pair.b)[..., : LORA.rank, :] = draw.normal(size=(*pair.b.shape[:-2], LORA.rank, pair.b.shape[-1]))
    on_device = {part: jax.tree.map(jax.numpy.asarray, getattr(state, part)) for part in ("adapter", "optimizer")}
    return replace(state, **on_device)


def save_adapter(folder: Path, form: ExpertLora, *, all_parts: bool = False) -> Path:
    config, files = make_model(folder / "model", form)
    (folder / "adapter").mkdir()
    checkpoint.capture(make_trained_state(config), ALL_PARTS if all_parts else WEIGHTS, files).write(folder / "adapter")
    return folder / "adapter"


def test_shared_factors_are_one_tensor_in_files(tmp_path: Path) -> None:
    tensors = load_file(save_adapter(tmp_path, "shared") / "adapter_model.safetensors")
    for stack, sizes in {"w1": (1, 8), "w3": (1, 8), "w2": (8, 1)}.items():
        name = f"base_model.model.model.layers.1.mlp.experts.{stack}.lora_"
        assert tuple(len(tensors[f"{name}{factor}.weight"]) for factor in "AB") == sizes


@pytest.mark.parametrize("form", ["shared", "own"])
def test_a_checkpoint_is_restored_bit_equal(tmp_path: Path, form: ExpertLora) -> None:
    folder = save_adapter(tmp_path, form, all_parts=True)
    config, files = make_model(tmp_path / "model", form)
    restored = checkpoint.restore(make_training_state(config, LORA), checkpoint.open_snapshot(folder, files), ALL_PARTS)
    jax.tree.map(np.testing.assert_array_equal, restored.adapter, make_trained_state(config).adapter)


def test_shared_factors_are_given_to_each_expert_of_a_server_with_own_ones(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, "shared")
    config, files = make_model(tmp_path / "model", "own")
    found = checkpoint.open_snapshot(folder, files).make_adapter(LORA.rank).weights
    shared = make_trained_state(make_model(tmp_path / "model", "shared")[0]).adapter.weights
    assert models.choose_expert_lora(config, read_adapter(folder)) == "shared"
    for name, pair in found.items():
        for array, expected in ((pair.a, shared[name].a), (pair.b, shared[name].b)):
            expected = np.asarray(expected)[..., : LORA.rank, :] if array is pair.b else expected[..., : LORA.rank]
            np.testing.assert_array_equal(array, np.broadcast_to(expected, array.shape))


def test_own_factors_are_refused_where_experts_share_them(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, "own")
    config, files = make_model(tmp_path / "model", "shared")
    assert models.choose_expert_lora(config, read_adapter(folder)) == "own"
    with pytest.raises(AdapterError, match=r"experts\.w1.*load it on a server with --backend-config\.expert-lora own"):
        checkpoint.open_snapshot(folder, files)


def test_a_training_state_is_refused_in_the_other_form(tmp_path: Path) -> None:
    """Optimizer moments of a shared factor are not the moments of separate factors."""
    folder = save_adapter(tmp_path, "shared", all_parts=True)
    with pytest.raises(AdapterError, match=r"--backend-config\.expert-lora shared"):
        checkpoint.open_snapshot(folder, make_model(tmp_path / "model", "own")[1])


@pytest.mark.slow
def test_the_form_of_adapters_is_a_part_of_the_hash_of_models_with_experts() -> None:
    hashes = dict[tuple[str, str], str]()
    for architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        for form in ("shared", "own"):
            config = TINY_CONFIG.model_copy(update={"expert_lora": form})
            backend = JaxBackend(str(tiny_directory(architecture)), config)
            hashes[architecture, form] = backend.start().base_model_hash
            backend.close()
    assert hashes["Qwen3ForCausalLM", "shared"] == hashes["Qwen3ForCausalLM", "own"]
    own = hashes["Qwen3MoeForCausalLM", "own"]
    assert hashes["Qwen3MoeForCausalLM", "shared"] == f"{own}+expert_lora=shared" and "+" not in own
