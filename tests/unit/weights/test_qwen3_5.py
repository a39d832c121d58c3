"""Checkpoints of Qwen3.5: maps as rows of a tensor, norms relative to 1, and models with images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx.layers.parameter import Parameter, flatten
from skyrl_tx.models import describe_params, find_family
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from skyrl_tx.weights.weight_map import bind_rows, get_rule_path

Tensors = dict[str, np.ndarray]
KEYS, VALUES = 2 * 64, 4 * 16
ROWS = {"q": slice(0, KEYS), "k": slice(KEYS, 2 * KEYS), "v": slice(2 * KEYS, None)}
LINEAR, SOFTMAX = (0, 1, 2, 4, 5, 6), (3, 7)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path, "Qwen3_5ForCausalLM", tied_embeddings=False, num_layers=8)


def describe_model(directory: Path) -> tuple[Any, Any]:
    """Return the family and its parameters."""
    content = hf.read_json(directory, "config.json")
    family = find_family(content)
    return family, describe_params(family.config_from_hf(content))


def load(directory: Path, **options: Any) -> Tensors:
    """Return the loaded arrays by path."""
    family, parameters = describe_model(directory)
    return flatten(hf.load(directory, parameters, family.weights, **options))


def by_layer(loaded: Tensors, directory: Path, leaf: str) -> dict[int, np.ndarray]:
    """Return the array of each layer that has the leaf."""
    _, parameters = describe_model(directory)
    return {
        layer: loaded[path][index]
        for path, parameter in flatten(parameters).items()
        if get_rule_path(path) == f"layers.{leaf}"
        for index, layer in enumerate(parameter.layers)
    }


def rewrite(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file)


def test_queries_keys_and_values_are_rows_of_one_tensor(directory):
    loaded, tensors = load(directory), load_file(directory / "model.safetensors")
    for name, rows in ROWS.items():
        maps, kernels = (by_layer(loaded, directory, leaf) for leaf in (f"in_proj_{name}", f"{name}_conv"))
        assert tuple(sorted(maps)) == tuple(sorted(kernels)) == LINEAR
        for layer in LINEAR:
            net = f"model.layers.{layer}.linear_attn"
            np.testing.assert_array_equal(maps[layer], tensors[f"{net}.in_proj_qkv.weight"][rows].T)
            np.testing.assert_array_equal(kernels[layer], tensors[f"{net}.conv1d.weight"][rows])
    for name in ("a", "b"):
        for layer, array in by_layer(loaded, directory, f"in_proj_{name}").items():
            np.testing.assert_array_equal(array, tensors[f"model.layers.{layer}.linear_attn.in_proj_{name}.weight"])


def test_norms_are_relative_to_1_but_for_that_of_linear_attention(directory):
    loaded, tensors = load(directory), load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(loaded["final_norm"], 1 + tensors["model.norm.weight"])
    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q_norm": "self_attn.q_norm"}
    for leaf, name in names.items():
        found = by_layer(loaded, directory, leaf)
        assert tuple(sorted(found)) == (SOFTMAX if leaf == "q_norm" else tuple(range(8)))
        for layer, array in found.items():
            np.testing.assert_array_equal(array, 1 + tensors[f"model.layers.{layer}.{name}.weight"])
    for layer, array in by_layer(loaded, directory, "out_norm").items():
        np.testing.assert_array_equal(array, tensors[f"model.layers.{layer}.linear_attn.norm.weight"])


def test_norms_of_a_bfloat16_checkpoint_keep_all_bits(directory):
    """A sum with 1 in bfloat16 would lose the bits of small weights."""
    rewrite(directory, lambda tensors: {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()})
    loaded, tensors = load(directory, dtype=ml_dtypes.bfloat16), load_file(directory / "model.safetensors")
    stored = tensors["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(loaded["final_norm"], 1 + stored)
    assert loaded["final_norm"].dtype == np.float32 and loaded["embed"].dtype == ml_dtypes.bfloat16
    assert np.any((1 + stored).astype(ml_dtypes.bfloat16).astype(np.float32) != 1 + stored)
    for path, array in loaded.items():
        if get_rule_path(path) in ("layers.decay_log", "layers.dt_bias", "layers.out_norm"):
            assert array.dtype == np.float32


def as_with_images(tensors: Tensors) -> Tensors:
    """Return the tensors under the names of a model with images.

    The model also predicts further tokens.
    """
    nested = {
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    others = ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.visual.blocks.0.attn.qkv.weight")
    return nested | dict.fromkeys(others, np.ones((2, 2), np.float32))


def test_the_names_of_a_model_with_images_load_to_the_same_arrays(directory):
    plain = load(directory)
    rewrite(directory, as_with_images)
    nested = load(directory)
    assert nested.keys() == plain.keys()
    for path in plain:
        np.testing.assert_array_equal(nested[path], plain[path], err_msg=path)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("linear_attn.in_proj_qkv.weight", (2 * KEYS + VALUES, 32)),
        ("linear_attn.conv1d.weight", (2 * KEYS + VALUES, 1, 4)),
        ("linear_attn.A_log", (4,)),
        ("input_layernorm.weight", (32,)),
    ],
)
def test_a_tensor_of_a_wrong_shape_is_named(directory, is_nested, name, shape):
    if is_nested:
        rewrite(directory, as_with_images)
    full = f"model.{'language_model.' if is_nested else ''}layers.1.{name}"
    wrong = (shape[0] - 1, *shape[1:])
    rewrite(directory, lambda tensors: tensors | {full: np.zeros(wrong, np.float32)})
    with pytest.raises(hf.CheckpointError) as raised:
        load(directory)
    assert f"{full} has shape {wrong}, the config says {shape}" in str(raised.value)


def test_a_missing_tensor_of_a_model_with_images_is_named_as_there(directory):
    rewrite(directory, as_with_images)
    gone = "model.language_model.layers.2.linear_attn.dt_bias"
    rewrite(directory, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != gone})
    with pytest.raises(hf.CheckpointError, match=r"lacks tensor 'model\.language_model\.layers\.2\.linear_attn\.dt_b"):
        load(directory)


def test_parts_of_rows_are_parts_of_the_whole(directory):
    """A mesh reads half the inputs and half the outputs of each map."""
    family, parameters = describe_model(directory)
    tensors = load_file(directory / "model.safetensors")
    own: dict[str, Parameter] = flatten(parameters)
    rules = {rule.path: rule for rule in bind_rows(family.weights, own)}
    loaded = load(directory)

    for path, parameter in own.items():
        rule = rules[get_rule_path(path)]
        if rule.rows is None:
            continue
        halves = [(size // 2, size) if size > 1 else (0, 1) for size in parameter.shape[1:]]

        for (index,), name in rule.iterate_tensors(parameter):
            theirs = tensors[name][tuple(slice(*part) for part in rule.get_tensor_part(tuple(halves)))]
            ours = loaded[path][index][tuple(slice(*part) for part in halves)]
            np.testing.assert_array_equal(rule.view_part(theirs, tuple(halves)), ours, err_msg=path)
