"""Qwen3-Next checkpoints, where maps of a key head are adjacent: read, cut, fused and merged."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx import models
from skyrl_tx.layers.parameter import Parameter, flatten
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from skyrl_tx.weights.adapter_factors import fuse_modules, split_modules
from skyrl_tx.weights.merge import merge_adapter
from skyrl_tx.weights.peft import AdapterError, AdapterFiles, Factors
from skyrl_tx.weights.weight_map import bind_rows, get_rule_path

D, HEADS, KEY, VALUE, RANK = 32, 2, 64, 2 * 16, 3  # VALUE counts all value heads of a key head
SIZES = {"q": KEY, "k": KEY, "v": VALUE, "z": VALUE}
NET = "model.layers.1.linear_attn"
FILE = "model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", "Qwen3NextForCausalLM", tied_embeddings=False, num_layers=4)


def describe_model(directory: Path) -> tuple[models.ModelFamily, models.ModelConfig]:
    content = hf.read_json(directory, "config.json")
    family = models.find_family(content)
    return family, family.config_from_hf(content)


def load(directory: Path) -> dict[str, np.ndarray]:
    family, config = describe_model(directory)
    return flatten(hf.load(directory, models.describe_params(config), family.weights))


def by_map(rows: np.ndarray, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the rows of each map, as transformers' fix_query_key_value_ordering splits them."""
    heads = rows.reshape(HEADS, sum(sizes.values()), -1)
    ends = np.cumsum([*sizes.values()])[:-1]
    parts = np.split(heads, ends, axis=1)
    return {name: part.reshape(-1, rows.shape[-1]) for name, part in zip(sizes, parts, strict=True)}


def test_the_maps_of_all_heads_are_gathered(directory):
    loaded, tensors = load(directory), load_file(directory / FILE)
    for layer in range(3):
        net = f"model.layers.{layer}.linear_attn"
        for name, rows in by_map(tensors[f"{net}.in_proj_qkvz.weight"], SIZES).items():
            np.testing.assert_array_equal(loaded[f"layers.0.in_proj_{name}"][layer], rows.T)
        for name, rows in by_map(tensors[f"{net}.in_proj_ba.weight"], {"b": 2, "a": 2}).items():
            np.testing.assert_array_equal(loaded[f"layers.0.in_proj_{name}"][layer], rows)
        kernels = np.split(tensors[f"{net}.conv1d.weight"], [HEADS * KEY, 2 * HEADS * KEY])
        for name, rows in zip("qkv", kernels, strict=True):
            np.testing.assert_array_equal(loaded[f"layers.0.{name}_conv"][layer], rows)


@pytest.mark.parametrize("ends", [(0, 1, 2), (0, 1, 3, 4), (0, 0, 4)])
def test_parts_are_parts_of_the_whole(directory, ends):
    """A mesh reads whole heads, but other cuts work too. The numbers are quarters of a dim."""
    family, config = describe_model(directory)
    parameters: dict[str, Parameter] = flatten(models.describe_params(config))
    rules = {rule.path: rule for rule in bind_rows(family.weights, parameters)}
    loaded, tensors = load(directory), load_file(directory / FILE)
    read = 0

    for path, parameter in parameters.items():
        rule = rules[get_rule_path(path)]
        if not rule.by_head:
            continue
        cuts = [[(size * a // 4, size * b // 4) for a, b in itertools.pairwise(ends)] for size in parameter.shape[1:]]

        for part in itertools.product(*cuts):
            if any(start == stop for start, stop in part):
                continue
            for (index,), name in rule.iterate_tensors(parameter):
                theirs = tensors[name][tuple(slice(*own) for own in rule.get_tensor_part(part))]
                ours = loaded[path][index][tuple(slice(*own) for own in part)]
                np.testing.assert_array_equal(rule.view_part(theirs, part), ours, err_msg=path)
                read += 1

    assert read >= 6 * 3


@pytest.mark.parametrize(
    ("name", "shape"),
    [("in_proj_qkvz", (HEADS * sum(SIZES.values()), D)), ("in_proj_ba", (8, D))],
)
def test_a_tensor_of_a_wrong_shape_is_named(directory, name, shape):
    tensors, wrong = load_file(directory / FILE), (shape[0] - 2, D)
    save_file(tensors | {f"{NET}.{name}.weight": np.zeros(wrong, np.float32)}, directory / FILE)
    with pytest.raises(hf.CheckpointError) as raised:
        load(directory)
    assert f"{NET}.{name}.weight has shape {wrong}, the config says {shape}" in str(raised.value)


def draw(seed: int, inputs: int, outputs: int) -> Factors:
    generator = np.random.default_rng(seed)
    return tuple(generator.normal(size=shape).astype(np.float32) for shape in ((RANK, inputs), (outputs, RANK)))


def draw_layer_factors() -> dict[str, Factors]:
    return {f"{NET}.in_proj_{name}": draw(i, D, HEADS * size) for i, (name, size) in enumerate(SIZES.items())}


def make_format(directory: Path) -> Any:
    family, config = describe_model(directory)
    return models.make_adapter_format(config, family.weights, "base")


def test_one_module_has_the_update_of_all_its_maps(directory):
    factors, fused = draw_layer_factors(), make_format(directory).fused
    ((module, (a, b)),) = fuse_modules(factors, fused).items()
    assert module == f"{NET}.in_proj_qkvz" and a.shape == (4 * RANK, D)
    for name, rows in by_map(b @ a, SIZES).items():
        own_a, own_b = factors[f"{NET}.in_proj_{name}"]
        np.testing.assert_allclose(rows, own_b @ own_a, rtol=1e-5, atol=1e-5)
    again = split_modules({module: (a, b)}, fused, RANK)
    assert again.keys() == factors.keys()
    for name, pair in factors.items():
        for found, expected in zip(again[name], pair, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_one_pair_for_the_module_is_one_for_each_map(directory):
    a, b = draw(7, D, HEADS * sum(SIZES.values()))
    found = split_modules({f"{NET}.in_proj_qkvz": (a, b)}, make_format(directory).fused, RANK)
    for name, rows in by_map(b @ a, SIZES).items():
        own_a, own_b = found[f"{NET}.in_proj_{name}"]
        np.testing.assert_allclose(own_b @ own_a, rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", [f"{NET}.in_proj_qkvz", f"{NET}.in_proj_qkv"])
def test_a_module_of_another_shape_or_family_is_refused_by_name(directory, module):
    with pytest.raises(AdapterError, match=f"module '{module}' has a factor .* does not fit the base model"):
        split_modules({module: draw(7, D, 10)}, make_format(directory).fused, RANK)


def test_merging_changes_the_rows_of_the_map_only(directory, tmp_path):
    family, config = describe_model(directory)
    factors = {f"{NET}.in_proj_v": draw(1, D, HEADS * VALUE), f"{NET}.in_proj_q": draw(2, D, HEADS * KEY)}
    adapter = AdapterFiles(config={"r": RANK, "lora_alpha": 6}, factors=factors)
    (tmp_path / "out").mkdir()
    merge_adapter(directory, family.bind_weights(config), adapter, tmp_path / "out")
    before, after = load_file(directory / FILE), load_file(tmp_path / "out" / FILE)
    assert before.keys() == after.keys()

    changed = f"{NET}.in_proj_qkvz.weight"
    for name in before.keys() - {changed}:
        np.testing.assert_array_equal(after[name], before[name])

    found, expected = by_map(after[changed], SIZES), by_map(before[changed], SIZES)
    for name in SIZES:
        a, b = factors.get(f"{NET}.in_proj_{name}", (np.zeros((1, D)), np.zeros((len(expected[name]), 1))))
        np.testing.assert_allclose(found[name], expected[name] + 2 * (b @ a), rtol=1e-5, atol=1e-5)
