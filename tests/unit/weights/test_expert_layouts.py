"""Stacked experts and separate expert tensors give the same arrays and the same merged models."""

import itertools
import re
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
from skyrl_tx.weights.merge import merge_adapter
from skyrl_tx.weights.peft import AdapterError, AdapterFiles, Factors
from skyrl_tx.weights.weight_map import bind_rows, fit_to_checkpoint, get_rule_path

Tensors = dict[str, np.ndarray]
D, F, E = 32, 24, 8
FILE = "model.safetensors"


def same(tensors: Tensors) -> Tensors:
    return tensors


def split(tensors: Tensors) -> Tensors:
    """Return the tensors with three tensors for each expert instead of two for each layer."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        prefix, _, leaf = name.rpartition(".experts.")
        if leaf not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            own = f"{prefix}.experts.{expert}"
            if leaf == "gate_up_proj":
                found |= {f"{own}.gate_proj.weight": matrix[:F], f"{own}.up_proj.weight": matrix[F:]}
            else:
                found[f"{own}.down_proj.weight"] = matrix
    return {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}


def with_images(tensors: Tensors) -> Tensors:
    """Return the tensors under the names of a model with images.

    The model also predicts further tokens, with split experts.
    """
    nested = {re.sub("^model[.]", "model.language_model.", name): tensor for name, tensor in tensors.items()}
    others = ("mtp.layers.0.mlp.experts.0.up_proj.weight", "mtp.fc.weight", "model.visual.blocks.0.attn.qkv.weight")
    return nested | dict.fromkeys(others, np.ones((2, 2), np.float32))


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "stacked": same,
    "split": split,
    "stacked-with-images": with_images,
    "split-with-images": lambda tensors: with_images(split(tensors)),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", "Qwen3_5MoeForCausalLM", tied_embeddings=False, num_layers=4)


def rewrite(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(directory / FILE)), directory / FILE)


def load(directory: Path, **options: Any) -> Tensors:
    content = hf.read_json(directory, "config.json")
    family = find_family(content)
    return flatten(hf.load(directory, describe_params(family.config_from_hf(content)), family.weights, **options))


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_all_layouts_load_to_the_same_arrays(directory, layout, dtype):
    expected = load(directory, dtype=dtype)
    rewrite(directory, LAYOUTS[layout])
    assert_equal(load(directory, dtype=dtype), expected)


def test_the_rows_of_gates_come_before_those_of_up_projections(directory):
    loaded, tensors = load(directory), load_file(directory / FILE)
    for stack, numbers in (("0", (0, 1, 2)), ("1", (3,))):  # linear and softmax attention
        for index, layer in enumerate(numbers):
            mlp = f"model.layers.{layer}.mlp"
            rows = tensors[f"{mlp}.experts.gate_up_proj"]
            assert rows.shape == (E, 2 * F, D)

            found = {leaf: loaded[f"layers.{stack}.{leaf}"][index] for leaf in ("expert_gate_proj", "expert_up_proj")}
            np.testing.assert_array_equal(found["expert_gate_proj"], rows[:, :F].swapaxes(1, 2))
            np.testing.assert_array_equal(found["expert_up_proj"], rows[:, F:].swapaxes(1, 2))

            down = loaded[f"layers.{stack}.expert_down_proj"][index]
            np.testing.assert_array_equal(down, tensors[f"{mlp}.experts.down_proj"].swapaxes(1, 2))

            shared = loaded[f"layers.{stack}.shared_up_proj"][index]
            np.testing.assert_array_equal(shared, tensors[f"{mlp}.shared_expert.up_proj.weight"].T)

            gate = loaded[f"layers.{stack}.shared_gate"][index]
            np.testing.assert_array_equal(gate, tensors[f"{mlp}.shared_expert_gate.weight"])


def halves(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Return the parts of an array that is cut in two in every dim."""
    ends = [(slice(0, size // 2), slice(size // 2, size)) for size in shape]
    return list(itertools.product(*ends))


@pytest.mark.parametrize("layout", ["stacked", "split"])
def test_parts_are_parts_of_the_whole(directory, layout):
    """A mesh reads halves of experts, inputs and outputs."""
    rewrite(directory, LAYOUTS[layout])
    whole, tensors = load(directory), load_file(directory / FILE)
    content = hf.read_json(directory, "config.json")
    family = find_family(content)
    parameters: dict[str, Parameter] = flatten(describe_params(family.config_from_hf(content)))
    rules = {rule.path: rule for rule in bind_rows(fit_to_checkpoint(family.weights, tensors), parameters)}

    for path in [path for path in parameters if "expert_" in path]:
        rule = rules[get_rule_path(path)]
        for index, name in rule.iterate_tensors(parameters[path]):
            own = whole[path][index]
            for part in halves(own.shape):
                ours = tuple((cut.start, cut.stop) for cut in part)
                theirs = tensors[name][tuple(slice(*cut) for cut in rule.get_tensor_part(ours))]
                found = rule.view_part(theirs, ours)
                np.testing.assert_array_equal(found, own[part], err_msg=name)


@pytest.mark.parametrize(
    ("layout", "name", "shape"),
    [
        ("stacked", "experts.gate_up_proj", (E, 2 * F, D)),
        ("stacked", "experts.down_proj", (E, D, F)),
        ("split", "experts.3.up_proj.weight", (F, D)),
        ("split", "shared_expert_gate.weight", (1, D)),
    ],
)
def test_a_tensor_of_a_wrong_shape_is_named(directory, layout, name, shape):
    full, wrong = f"model.layers.1.mlp.{name}", (*shape[:-1], shape[-1] + 1)
    rewrite(directory, lambda tensors: LAYOUTS[layout](tensors) | {full: np.zeros(wrong, np.float32)})
    with pytest.raises(hf.CheckpointError) as raised:
        load(directory)
    assert f"{full} has shape {wrong}, the config says {shape}" in str(raised.value)


def test_a_checkpoint_with_both_layouts_is_refused_by_name(directory):
    rewrite(directory, lambda tensors: tensors | split(tensors))
    with pytest.raises(hf.CheckpointError, match=r"unexpected tensor 'model\.layers\.0\.mlp\.experts\.down_proj'"):
        load(directory)


def draw(seed: int, inputs: int, outputs: int) -> Factors:
    generator = np.random.default_rng(seed)
    return tuple(generator.normal(size=shape).astype(np.float32) for shape in ((2, inputs), (outputs, 2)))


MLP = "model.layers.1.mlp"
UPDATES = {
    f"{MLP}.experts.2.gate_proj": draw(1, D, F),
    f"{MLP}.experts.2.up_proj": draw(2, D, F),
    f"{MLP}.experts.5.down_proj": draw(3, F, D),
    f"{MLP}.shared_expert.down_proj": draw(4, 40, D),
}


def make_adapter(factors: dict[str, Factors]) -> AdapterFiles:
    return AdapterFiles(config={"r": 2, "lora_alpha": 32}, factors=factors)


def merge(directory: Path, factors: dict[str, Factors], out: Path) -> Tensors:
    content = hf.read_json(directory, "config.json")
    family = find_family(content)
    out.mkdir()
    merge_adapter(directory, family.bind_weights(family.config_from_hf(content)), make_adapter(factors), out)
    return load_file(out / FILE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merging_changes_the_updated_maps_only(directory, tmp_path, layout):
    before = load_file(directory / FILE)
    expected = split(before)
    for module, (a, b) in UPDATES.items():
        expected[f"{module}.weight"] = expected[f"{module}.weight"] + 16 * (b @ a)
    rewrite(directory, LAYOUTS[layout])
    found = merge(directory, UPDATES, tmp_path / "out")
    assert found.keys() == load_file(directory / FILE).keys()
    own = split({re.sub("^model[.]language_model[.]", "model.", name): tensor for name, tensor in found.items()})
    for name, tensor in expected.items():
        np.testing.assert_allclose(own[name], tensor, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "message"),
    [("stacked", "has no expert 8 in the base model"), ("split", "has no tensor 'model.layers.1.mlp.experts.8")],
)
def test_an_update_of_an_expert_that_is_not_there_is_refused(directory, tmp_path, layout, message):
    rewrite(directory, LAYOUTS[layout])
    with pytest.raises(AdapterError, match=message):
        merge(directory, {f"{MLP}.experts.8.up_proj": draw(0, D, F)}, tmp_path / "out")
