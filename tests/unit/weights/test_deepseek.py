"""Checkpoints of DeepSeek-V3: maps of keys and values next to each other, and layers that predict further tokens."""

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
