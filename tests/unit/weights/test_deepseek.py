"""DeepSeek-V3 checkpoints: joint maps of keys and values, layers that predict further tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx import models
from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models.deepseek_v3 import DEEPSEEK_V3
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from skyrl_tx.weights.merge import merge_adapter
from skyrl_tx.weights.peft import AdapterFiles

HEADS, PLAIN, VALUE, LATENT = 4, 16, 12, 16
FILE = "model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path, DEEPSEEK_V3.architecture, tied_embeddings=False)


def load(directory: Path) -> dict[str, np.ndarray]:
    config = DEEPSEEK_V3.config_from_hf(hf.read_json(directory, "config.json"))
    return flatten(hf.load(directory, models.describe_params(config), DEEPSEEK_V3.weights))


def test_the_maps_of_keys_and_of_values_are_gathered_from_all_heads(directory):
    loaded, tensors = load(directory), load_file(directory / FILE)
    for layer in range(2):
        by_head = tensors[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].reshape(HEADS, PLAIN + VALUE, LATENT)
        np.testing.assert_array_equal(loaded[f"layers.{layer}.k_b"][0], by_head[:, :PLAIN].reshape(-1, LATENT))
        np.testing.assert_array_equal(loaded[f"layers.{layer}.v_b"][0], by_head[:, PLAIN:].reshape(-1, LATENT))


@pytest.mark.parametrize(("further", "is_read"), [(1, True), (0, False), (None, False)])
def test_layers_that_predict_further_tokens_are_left_out_if_the_config_has_them(directory, further, is_read):
    before = load(directory)
    tensors = load_file(directory / FILE)
    tensors |= {f"model.layers.2.{name}.weight": np.ones((3, 4), np.float32) for name in ("eh_proj", "mlp.gate")}
    save_file(tensors, directory / FILE)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": further}))
    if is_read:
        found = load(directory)
        assert all(np.array_equal(found[name], array) for name, array in before.items())
    else:
        with pytest.raises(hf.CheckpointError, match=r"unexpected tensor 'model\.layers\.2\.eh_proj\.weight'"):
            load(directory)


def nest(directory: Path) -> None:
    """Rewrite the files in the format of Kimi K2.5, which also reads images."""
    nested = {f"language_model.{name}": tensor for name, tensor in load_file(directory / FILE).items()}
    others = ("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight")
    save_file(nested | dict.fromkeys(others, np.ones((2, 2), np.float32)), directory / FILE)
    text = json.loads((directory / "config.json").read_text())
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (directory / "config.json").write_text(json.dumps(config))


def test_the_names_of_kimi_k2_5_load_to_the_same_arrays(directory):
    plain = load(directory)
    nest(directory)
    assert models.find_family(hf.read_json(directory, "config.json")) is DEEPSEEK_V3
    nested = load(directory)
    assert nested.keys() == plain.keys()
    for path in plain:
        np.testing.assert_array_equal(nested[path], plain[path], err_msg=path)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.experts.7.up_proj.weight"])
def test_a_missing_tensor_of_kimi_k2_5_is_named_as_there(directory, name):
    nest(directory)
    tensors = load_file(directory / FILE)
    del tensors[f"language_model.{name}"]
    save_file(tensors, directory / FILE)
    with pytest.raises(hf.CheckpointError, match=f"lacks tensor 'language_model.{name}'"):
        load(directory)


def test_further_layers_of_a_nested_model_are_left_out(directory):
    nest(directory)
    tensors = load_file(directory / FILE)
    save_file(tensors | {"language_model.model.layers.2.eh_proj.weight": np.ones((3, 4), np.float32)}, directory / FILE)
    with pytest.raises(hf.CheckpointError, match=r"unexpected tensor 'language_model\.model\.layers\.2\.eh_proj"):
        load(directory)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    load(directory)


def test_an_adapter_is_merged_into_kimi_k2_5_under_its_names(directory, tmp_path):
    nest(directory)
    draw = np.random.default_rng(0)
    sizes = {"model.layers.1.self_attn.o_proj": (48, 32), "lm_head": (32, 256)}
    factors = {
        name: (draw.standard_normal((2, inputs), np.float32), draw.standard_normal((outputs, 2), np.float32))
        for name, (inputs, outputs) in sizes.items()
    }
    config = DEEPSEEK_V3.config_from_hf(hf.read_json(directory, "config.json"))
    out = tmp_path / "merged"
    out.mkdir()
    adapter = AdapterFiles(config={"r": 2, "lora_alpha": 1}, factors=factors)
    merge_adapter(directory, DEEPSEEK_V3.bind_weights(config), adapter, out)
    before, after = load_file(directory / FILE), load_file(out / FILE)
    assert after.keys() == before.keys()

    for name, tensor in before.items():
        a, b = factors.get(name.removeprefix("language_model.").removesuffix(".weight"), (None, None))
        wanted = tensor if a is None or b is None else tensor + 0.5 * (b @ a)
        np.testing.assert_allclose(after[name], wanted, rtol=1e-6, atol=1e-6, err_msg=name)
