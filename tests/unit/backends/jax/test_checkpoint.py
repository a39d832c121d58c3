"""Adapter files: PEFT names and shapes, the true rank, and errors for files that do not fit."""

import json
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx import models
from skyrl_tx.backends.jax import checkpoint
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.train.optimizer import OptimizerState
from skyrl_tx.backends.jax.train.training_state import (
    TrainingStates,
    choose_smallest_rank,
    make_training_state,
    pad_rank,
    resize_rank,
)
from skyrl_tx.contract.backend import ALL_PARTS, StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch
from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.testing.backend_driver import drawn_examples
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from skyrl_tx.weights.peft import AdapterFormat

WEIGHTS = {StatePart.WEIGHTS}


@dataclass(frozen=True)
class Fixture:
    config: models.ModelConfig
    files: AdapterFormat


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def form(request, tmp_path_factory) -> Fixture:
    directory = write_model(tmp_path_factory.mktemp("model"), tied_embeddings=request.param)
    content = hf.read_json(directory, "config.json")
    family = models.find_family(content)
    config = family.config_from_hf(content)
    return Fixture(config, models.make_adapter_format(config, family.weights, "tiny"))


def make_trained_state(form: Fixture, alpha: float = 32.0, **lora) -> checkpoint.TrainingState:
    """Return a training state with different numbers in every part, and zeros in the padding."""
    spec = LoraSpec(**{"rank": 5, "seed": 3, **lora})
    state = make_training_state(form.config, spec, alpha=alpha)
    weights = jax.tree.map(np.array, state.adapter.weights)
    for name in state.targets:
        weights[name].b[..., : spec.rank, :] = np.random.default_rng(0).normal(
            size=weights[name].b[..., : spec.rank, :].shape
        )

    def scale_weights(factor: float):
        return jax.tree.map(lambda leaf: jax.numpy.asarray(leaf * np.float32(factor)), weights)

    return checkpoint.TrainingState(
        lora=spec,
        alpha=alpha,
        targets=state.targets,
        adapter=state.adapter.replace(weights=scale_weights(1)),
        optimizer=OptimizerState(first=scale_weights(2), second=scale_weights(3), step=jax.numpy.int32(4)),
        gradient=scale_weights(5),
    )


def assert_same(left, right):
    for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_names_and_shapes_are_those_of_peft(form, tmp_path):
    checkpoint.capture(make_trained_state(form), WEIGHTS, form.files).write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (5, 64)
    assert tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"].shape == (32, 5)
    unembed = "model.unembed_tokens" if form.config.tied_embeddings else "lm_head"
    assert tensors[f"base_model.model.{unembed}.lora_A.weight"].shape == (5, 32)
    assert len(tensors) == 2 * (2 * 7 + 1)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (5, 32, "LORA")
    assert unembed.rpartition(".")[2] in config["target_modules"] and "q_proj" in config["target_modules"]


def test_untrained_modules_are_not_written(form, tmp_path):
    checkpoint.capture(make_trained_state(form, train_mlp=False, train_unembed=False), WEIGHTS, form.files).write(
        tmp_path
    )
    names = {name.split(".")[-3] for name in load_file(tmp_path / "adapter_model.safetensors")}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("rank", [1, 5, 8])
@pytest.mark.parametrize("pending", [True, False])
def test_all_parts_are_restored_bit_equal(form, tmp_path, rank, pending):
    state = make_trained_state(form, rank=rank)
    state = state if pending else state.with_gradient(None)
    checkpoint.capture(state, ALL_PARTS, form.files).write(tmp_path)
    fresh = make_training_state(form.config, state.lora)
    opened = checkpoint.open_snapshot(tmp_path, form.files)
    restored = checkpoint.restore(fresh, opened, ALL_PARTS)
    for part in ("adapter", "optimizer", "gradient"):
        assert_same(getattr(restored, part), getattr(state, part))
    only_weights = checkpoint.restore(fresh, opened, WEIGHTS)
    assert_same(only_weights.adapter, state.adapter)
    assert_same(only_weights.optimizer, fresh.optimizer)
    assert only_weights.gradient is None


def test_a_sampler_gets_its_own_rank(form):
    state = make_trained_state(form, rank=2)
    adapter = checkpoint.capture(state, WEIGHTS, form.files).make_adapter(6)
    assert adapter.weights["q_proj"].a.shape[-1] == 6 and float(adapter.scale) == 16.0
    np.testing.assert_array_equal(adapter.weights["q_proj"].a, np.asarray(state.adapter.weights["q_proj"].a)[..., :6])


def test_files_that_do_not_fit_are_refused_by_name(form, tmp_path):
    checkpoint.capture(make_trained_state(form), ALL_PARTS, form.files).write(tmp_path)
    file, name = tmp_path / "adapter_model.safetensors", "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    tensors = load_file(file)

    def check_refused(match: str) -> None:
        with pytest.raises(UserError, match=match):
            checkpoint.open_snapshot(tmp_path, form.files)

    save_file({**tensors, name: np.zeros((5, 31), np.float32)}, file)
    check_refused(rf"{name}.*\(5, 31\).*\(5, 32\)")

    save_file({other_name: tensor for other_name, tensor in tensors.items() if other_name != name}, file)
    check_refused(f"lacks tensor '{name}'")

    save_file({**tensors, "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": tensors[name]}, file)
    check_refused("unexpected tensor .*layers.9")

    file.write_bytes(b"not safetensors")
    check_refused("adapter_model.safetensors")

    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["experts"]}))
    check_refused("'experts'")

    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "r": 0}))
    check_refused("r = 0")

    (tmp_path / "adapter_config.json").unlink()
    check_refused("adapter_config.json")


def test_a_snapshot_of_another_kind_of_model_is_refused(form):
    source = checkpoint.capture(make_trained_state(form, rank=2), WEIGHTS, form.files)
    other = make_training_state(form.config, LoraSpec(rank=3, seed=0))
    with pytest.raises(UserError, match="rank is 2, but the rank of the model is 3"):
        checkpoint.restore(other, source, WEIGHTS)
    fewer = make_training_state(form.config, LoraSpec(rank=2, seed=0, train_mlp=False))
    with pytest.raises(UserError, match="targets"):
        checkpoint.restore(fewer, source, WEIGHTS)
    same = make_training_state(form.config, LoraSpec(rank=2, seed=0))
    with pytest.raises(UserError, match="holds no optimizer"):
        checkpoint.restore(same, source, {StatePart.OPTIMIZER})


def test_weights_keep_the_alpha_that_they_were_trained_with(form, tmp_path):
    trained = make_trained_state(form, alpha=7.5)
    checkpoint.capture(trained, ALL_PARTS, form.files).write(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 7.5

    # The server now gives new models another alpha.
    fresh = make_training_state(form.config, trained.lora, alpha=64.0)
    opened = checkpoint.open_snapshot(tmp_path, form.files)
    restored = checkpoint.restore(fresh, opened, ALL_PARTS)
    assert (restored.alpha, float(restored.adapter.scale)) == (7.5, 1.5)
    on_device = replace(restored, adapter=jax.device_put(restored.adapter))
    again = checkpoint.capture(on_device, WEIGHTS, form.files)
    assert again.alpha == 7.5 and float(again.make_adapter(8).scale) == 1.5
    with pytest.raises(UserError, match=r"its lora_alpha is 7\.5, but the lora_alpha of the model is 64"):
        checkpoint.restore(fresh, opened, {StatePart.GRADIENT})


def test_the_setting_is_the_alpha_of_new_models(tmp_path):
    directory = str(write_model(tmp_path))
    gradients = []
    for alpha in (32.0, 64.0):
        backend = JaxBackend(directory, JaxConfig(compile_cache_dir=None, max_lora_adapters=1, lora_alpha=alpha))
        backend.start()
        model = ModelId("m")
        backend.create_model(model, ModelSpec(lora=LoraSpec(rank=4, seed=0)))
        backend.forward_backward(PreparedModelPassBatch(examples=drawn_examples(model, (20,))))
        (tmp_path / str(alpha)).mkdir()
        backend.capture(model, ALL_PARTS).write(tmp_path / str(alpha))
        gradients.append(load_file(tmp_path / str(alpha) / "gradient.safetensors"))
        backend.close()

    # With B = 0, the gradient by B is proportional to alpha.
    for name, gradient in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], 2 * gradient, rtol=1e-5, atol=1e-8)


def test_a_full_pool_takes_no_new_model(form):
    pool, state = TrainingStates(1), make_trained_state(form)
    pool.put(ModelId("a"), state)
    pool.put(ModelId("a"), state)
    with pytest.raises(CapacityError, match="all 1 adapter slots"):
        pool.put(ModelId("b"), state)
    pool.drop(ModelId("a"))
    pool.drop(ModelId("a"))
    with pytest.raises(UserError, match="'a'"):
        pool.get(ModelId("a"))


def test_a_snapshot_is_restored_with_another_padding(form, tmp_path):
    state = make_trained_state(form, rank=5)
    checkpoint.capture(state, ALL_PARTS, form.files).write(tmp_path)
    fresh = make_training_state(form.config, state.lora, 16)
    restored = checkpoint.restore(fresh, checkpoint.open_snapshot(tmp_path, form.files, 16), ALL_PARTS)
    assert restored.adapter.weights["unembed"].a.shape[-1] == 16
    for ours, theirs in (
        (restored.adapter.weights, state.adapter.weights),
        (restored.optimizer.second, state.optimizer.second),
        (restored.gradient, state.gradient),
    ):
        assert_same(resize_rank(ours, 8), theirs)


def test_ranks_share_a_few_sizes():
    assert [pad_rank(rank) for rank in (1, 8, 9, 16, 17, 32, 33, 64)] == [8, 8, 12, 16, 24, 32, 48, 64]
    assert [pad_rank(rank, 32) for rank in (1, 16, 32, 33, 64)] == [32, 32, 32, 48, 64]

    def choose(platform: str, **settings: int) -> int:
        return choose_smallest_rank(JaxConfig(**settings).with_platform_defaults(platform))

    assert (choose("cpu"), choose("gpu"), choose("gpu", max_lora_rank=12), choose("gpu", max_lora_rank=4)) == (
        8,
        32,
        12,
        8,
    )
