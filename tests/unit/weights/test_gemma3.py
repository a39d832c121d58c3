"""Checkpoints of Gemma 3: four norms per layer, relative to 1, and names of models with images."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models import describe_params, find_family
from skyrl_tx.models.gemma3 import GEMMA3
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from skyrl_tx.weights.merge import merge_adapter
from skyrl_tx.weights.peft import AdapterError, AdapterFiles

Tensors = dict[str, np.ndarray]
FILE = "model.safetensors"
NORMS = {
    "attn_norm": "input_layernorm",
    "attn_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
NESTED = {"old": ("language_model.model.", ""), "new": ("model.language_model.", "model.")}
"""Prefixes of the text model's tensors and of all other tensors, for models with images."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", "Gemma3ForCausalLM", num_layers=4)


def load(directory: Path, **options: Any) -> Tensors:
    """Return the loaded arrays by path."""
    content = hf.read_json(directory, "config.json")
    family = find_family(content)
    return flatten(hf.load(directory, describe_params(family.config_from_hf(content)), family.weights, **options))


def nest(directory: Path, form: str) -> None:
    """Rewrite the files in the format of a model with images, whose config leaves defaults out."""
    text, others = NESTED[form]
    nested = {f"{text}{name.removeprefix('model.')}": tensor for name, tensor in load_file(directory / FILE).items()}
    names = ("vision_tower.vision_model.post_layernorm.bias", "multi_modal_projector.mm_input_projection_weight")
    save_file(nested | {f"{others}{name}": np.ones((2, 2), np.float32) for name in names}, directory / FILE)
    config = json.loads((directory / "config.json").read_text())
    for key in ("architectures", "tie_word_embeddings"):
        del config[key]
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_all_norms_are_relative_to_1_and_keep_all_bits(directory: Path, dtype: Any) -> None:
    tensors = {name: tensor.astype(dtype) for name, tensor in load_file(directory / FILE).items()}
    save_file(tensors, directory / FILE)
    loaded = load(directory, dtype=dtype)
    np.testing.assert_array_equal(loaded["final_norm"], 1 + tensors["model.norm.weight"].astype(np.float32))
    for leaf, name in NORMS.items():
        windows, whole = (loaded[f"layers.{stack}.{leaf}"] for stack in range(2))
        for layer, found in enumerate((windows[0], whole[0], windows[1], whole[1])):
            stored = tensors[f"model.layers.{layer}.{name}.weight"].astype(np.float32)
            assert found.dtype == np.float32 and np.any(stored != 0)
            np.testing.assert_array_equal(found, 1 + stored, err_msg=leaf)


@pytest.mark.parametrize("form", NESTED)
def test_the_names_of_a_model_with_images_load_to_the_same_arrays(directory: Path, form: str) -> None:
    plain = load(directory)
    nest(directory, form)
    assert find_family(hf.read_json(directory, "config.json")) is GEMMA3
    nested = load(directory)
    assert nested.keys() == plain.keys()
    for path in plain:
        np.testing.assert_array_equal(nested[path], plain[path], err_msg=path)


@pytest.mark.parametrize("form", NESTED)
def test_a_missing_norm_is_named_as_there(directory: Path, form: str) -> None:
    nest(directory, form)
    name, tensors = f"{NESTED[form][0]}layers.1.pre_feedforward_layernorm.weight", load_file(directory / FILE)
    del tensors[name]
    save_file(tensors, directory / FILE)
    with pytest.raises(hf.CheckpointError, match=f"lacks tensor '{name}'"):
        load(directory)


@pytest.mark.parametrize(("form", "unembed"), [("old", "language_model.lm_head.weight"), ("new", "lm_head.weight")])
def test_a_merged_unembedding_is_no_longer_tied(directory: Path, tmp_path: Path, form: str, unembed: str) -> None:
    """The config need not say that embeddings are tied, because that is the family's default."""
    nest(directory, form)
    draw = np.random.default_rng(0)
    sizes = {"model.layers.1.self_attn.o_proj": (64, 32), "model.unembed_tokens": (32, 256)}
    factors = {
        name: (draw.standard_normal((2, inputs), np.float32), draw.standard_normal((outputs, 2), np.float32))
        for name, (inputs, outputs) in sizes.items()
    }
    adapter = AdapterFiles(config={"r": 2, "lora_alpha": 2}, factors=factors)
    config = GEMMA3.config_from_hf(hf.read_json(directory, "config.json"))
    out, rules = tmp_path / "merged", GEMMA3.bind_weights(config)
    out.mkdir()
    with pytest.raises(AdapterError, match=f"no tensor '{unembed}'"):
        merge_adapter(directory, rules, adapter, out)

    merge_adapter(directory, rules, adapter, out, is_tied=config.tied_embeddings)
    before, after = load_file(directory / FILE), load_file(out / FILE)
    prefix = NESTED[form][0]
    embed, changed = before[f"{prefix}embed_tokens.weight"], f"{prefix}layers.1.self_attn.o_proj.weight"
    updates = {name: b @ a for name, (a, b) in factors.items()}
    wanted = before | {
        changed: before[changed] + updates["model.layers.1.self_attn.o_proj"],
        unembed: embed + updates["model.unembed_tokens"],
    }

    assert after.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(after[name], tensor, rtol=1e-6, atol=1e-6, err_msg=name)

    merged = GEMMA3.config_from_hf(hf.read_json(out, "config.json"))
    assert not merged.tied_embeddings and merged.groups == config.groups
    np.testing.assert_array_equal(load(out)["unembed"], after[unembed])
