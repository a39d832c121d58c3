"""Checkpoints of Nemotron-H, with one part per layer, and adapters of maps that share a tensor."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx import models
from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models.nemotron_h import NEMOTRON_H
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from skyrl_tx.weights.merge import merge_adapter
from skyrl_tx.weights.peft import AdapterError, AdapterFiles, AdapterFormat, read_adapter

FILE = "model.safetensors"
INNER, GROUPS, HEADS = 8 * 8, 2 * 16, 8
ROWS = {
    "z": slice(0, INNER),
    "x": slice(INNER, 2 * INNER),
    "b": slice(2 * INNER, 2 * INNER + GROUPS),
    "c": slice(2 * INNER + GROUPS, 2 * INNER + 2 * GROUPS),
    "dt": slice(2 * INNER + 2 * GROUPS, None),
}
"""The rows of each part of a Mamba layer in `in_proj`."""
MAMBA, EXPERTS, ATTENTION, DENSE = (0, 2), (1, 3), 4, 5


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", "NemotronHForCausalLM")


def read_config(directory: Path) -> models.ModelConfig:
    return NEMOTRON_H.config_from_hf(hf.read_json(directory, "config.json"))


def load(directory: Path) -> dict[str, np.ndarray]:
    return flatten(hf.load(directory, models.describe_params(read_config(directory)), NEMOTRON_H.weights))


def make_format(directory: Path) -> AdapterFormat:
    return models.make_adapter_format(read_config(directory), NEMOTRON_H.weights, "base")


def make_adapter(directory: Path) -> AdapterFiles:
    """Return an adapter of all modules, as the server writes it."""
    draw, format = np.random.default_rng(0), make_format(directory)
    weights = models.init_adapter(read_config(directory), LoraSpec(rank=2, seed=0)).weights
    for pair in weights.values():
        np.asarray(pair.b)[:] = draw.standard_normal(pair.b.shape)
    out = directory.parent / "adapter"
    out.mkdir()
    save_file(dict(format.to_tensors(weights)), out / "adapter_model.safetensors")
    format.write_config(out, tuple(weights), 2, 32.0)
    return read_adapter(out)


def test_parameters_are_rows_of_one_tensor(directory):
    loaded, tensors = load(directory), load_file(directory / FILE)
    for index, layer in enumerate(MAMBA):
        mixer = f"backbone.layers.{layer}.mixer"
        for name, rows in ROWS.items():
            theirs = tensors[f"{mixer}.in_proj.weight"][rows]
            ours = loaded[f"layers.0.in_proj_{name}"][index]
            np.testing.assert_array_equal(ours, theirs.T if name in "zx" else theirs)

        for name in "xbc":
            rows = slice(ROWS[name].start - INNER, ROWS[name].stop - INNER)
            np.testing.assert_array_equal(
                loaded[f"layers.0.{name}_conv"][index], tensors[f"{mixer}.conv1d.weight"][rows]
            )
            bias = loaded[f"layers.0.{name}_conv_bias"][index]
            np.testing.assert_array_equal(bias, tensors[f"{mixer}.conv1d.bias"][rows])


def test_each_layer_has_its_norm(directory):
    """In the checkpoint, norms of mixers and of feed-forwards have the same names."""
    loaded, tensors = load(directory), load_file(directory / FILE)
    for path, layers in {
        "layers.0.attn_norm": MAMBA,
        "layers.1.mlp_norm": EXPERTS,
        "layers.2.attn_norm": (ATTENTION,),
        "layers.3.mlp_norm": (DENSE,),
    }.items():
        np.testing.assert_array_equal(
            loaded[path], np.stack([tensors[f"backbone.layers.{layer}.norm.weight"] for layer in layers])
        )
    assert {path for path in loaded if path.endswith("p_norm")} == {"layers.1.mlp_norm", "layers.3.mlp_norm"}


def test_names_of_transformers_and_further_layers_load_to_the_same_arrays(directory):
    plain, tensors = load(directory), load_file(directory / FILE)
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"mtp.layers.0.norm.weight": np.ones(32, np.float32)}, directory / FILE)
    found = load(directory)
    assert found.keys() == plain.keys()
    for path in plain:
        np.testing.assert_array_equal(found[path], plain[path], err_msg=path)


def test_a_missing_tensor_is_named_as_in_the_checkpoint(directory):
    tensors = load_file(directory / FILE)
    del tensors["backbone.layers.1.mixer.experts.7.up_proj.weight"]
    save_file(tensors, directory / FILE)
    with pytest.raises(hf.CheckpointError, match=r"lacks tensor 'backbone\.layers\.1\.mixer\.experts\.7\.up_proj\.w"):
        load(directory)


def test_modules_have_the_names_of_the_hosted_service(directory):
    modules = {name: entry.module for name, entry in make_format(directory).modules.items()}
    mixer = "model.layers.{layer}.mixer"
    assert modules == {
        "in_proj_z": f"{mixer}.gate_proj",
        "in_proj_x": f"{mixer}.x_proj",
        "out_proj": f"{mixer}.out_proj",
        **{f"{name}_proj": f"{mixer}.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")},
        **{name: f"{mixer}.{name}" for name in ("fc1_latent_proj", "fc2_latent_proj")},
        **{f"shared_{name}_proj": f"{mixer}.shared_experts.{name}_proj" for name in ("up", "down")},
        "expert_up_proj": f"{mixer}.experts.w1",
        "expert_down_proj": f"{mixer}.experts.w2",
        "unembed": "lm_head",
    }


@pytest.mark.parametrize("layout", ["cookbook", "peft"])
def test_an_adapter_in_either_layout_is_read_back(directory, tmp_path, layout):
    adapter, format = make_adapter(directory), make_format(directory)
    out = tmp_path / "out"
    out.mkdir()
    adapter.to_layout(layout, format.fused).write(out)
    read = read_adapter(out)
    names = {name.rpartition(".")[2] for name in read.factors}
    assert ("in_proj" in names) == (layout == "peft") and ("x_proj" in names) == (layout == "cookbook")
    _, found = models.fit_adapter(read_config(directory), format, read)
    _, wanted = models.fit_adapter(read_config(directory), format, adapter)
    for name, pair in wanted.items():
        np.testing.assert_array_equal(found[name].a, pair.a, err_msg=name)
        np.testing.assert_array_equal(found[name].b, pair.b, err_msg=name)


def test_maps_that_experts_lack_may_be_there_without_numbers(directory, tmp_path):
    """The hosted service writes such empty tensors."""
    adapter, out = make_adapter(directory), tmp_path / "out"
    out.mkdir()
    adapter.to_layout("cookbook").write(out)
    tensors = load_file(out / "adapter_model.safetensors")
    stack = "base_model.model.model.layers.1.mixer.experts.w3.lora_"
    empty = {f"{stack}{factor}.weight": np.zeros((0,), np.float32) for factor in "AB"}
    save_file(tensors | empty, out / "adapter_model.safetensors")
    assert read_adapter(out).factors.keys() == adapter.factors.keys()
    full = {f"{stack}{factor}.weight": np.ones((8, 2, 2), np.float32) for factor in "AB"}
    save_file(tensors | full, out / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"mixer\.experts\.w3"):
        read_adapter(out)


def test_an_adapter_of_other_rows_is_refused(directory):
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal((2, 32), np.float32), draw.standard_normal((200, 2), np.float32)
    module = "model.layers.0.mixer.in_proj"
    adapter = AdapterFiles(config={"r": 2, "lora_alpha": 1}, factors={module: (a, b)})
    with pytest.raises(AdapterError, match=r"'model\.layers\.0\.mixer\.in_proj' changes rows outside gate_p"):
        models.fit_adapter(read_config(directory), make_format(directory), adapter)
    b[2 * INNER :] = 0
    _, found = models.fit_adapter(read_config(directory), make_format(directory), adapter)
    np.testing.assert_array_equal(found["in_proj_z"].a[0], a.T)
    np.testing.assert_allclose(found["in_proj_x"].b[0] * 32 / 2, b[ROWS["x"]].T / 2, rtol=1e-6)


@pytest.mark.parametrize("layout", ["cookbook", "peft"])
def test_an_adapter_is_merged_into_rows_and_experts(directory, tmp_path, layout):
    adapter, out, read = make_adapter(directory), tmp_path / "merged", tmp_path / "read"
    out.mkdir()
    read.mkdir()
    adapter.to_layout(layout, make_format(directory).fused).write(read)
    merge_adapter(directory, NEMOTRON_H.bind_weights(read_config(directory)), read_adapter(read), out)
    before, after = load_file(directory / FILE), load_file(out / FILE)
    wanted = dict(before)

    for module, (a, b) in adapter.factors.items():
        name, rows = f"{module}.weight".replace("model.layers.", "backbone.layers."), slice(None)
        for leaf, part in (("gate_proj", "z"), ("x_proj", "x")):
            if module.endswith(f".mixer.{leaf}"):
                name, rows = name.replace(leaf, "in_proj"), ROWS[part]
        wanted[name] = np.array(wanted[name])
        wanted[name][rows] += adapter.scale * (b @ a)

    assert after.keys() == wanted.keys() and len(adapter.factors) == 2 * 3 + 2 * (2 + 2 + 8 * 2) + 4 + 2 + 1
    for name, tensor in wanted.items():
        np.testing.assert_allclose(after[name], tensor, rtol=1e-5, atol=1e-5, err_msg=name)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["NemotronHForCausalLM"]
