"""Embeddings and ropes of checkpoints are the same as in transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx.models import describe_params, find_family, read_model
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from tests.support.client_environments import TORCH

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "reference" / "checkpoint_reference.py"
FACTORS = [1.0 + index / 8 for index in range(8)]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "llama3-without-original": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-without-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-without-factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    "yarn-with-zeros": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": None, "mscale": 0},
    "yarn-with-all": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
    "yarn-with-amplitude": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": [2 * factor for factor in FACTORS],
        "original_max_position_embeddings": 64,
    },
    "theta": {"rope_type": "default", "rope_theta": 777.0},
}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
CONFIGS = {
    **{
        f"{key}/{name}": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], key: rope, **SIZES}
        for key in ("rope_scaling", "rope_parameters")
        for name, rope in ROPES.items()
    },
    "original-beside": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "original_max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        **SIZES,
    },
    "partial": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        **SIZES,
    },
    "gemma": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "layer_types": ["sliding_attention", "full_attention"],
        **SIZES,
    },
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Return models whose config ties the embeddings, with and without another unembedding."""
    found: dict[str, Path] = {}
    for architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        for change in (None, 0.0, 0.5):
            name = f"{architecture}-{change}"
            found[name] = write_model(tmp_path_factory.mktemp(name), architecture, tied_embeddings=True)
            tensors = load_file(found[name] / "model.safetensors")
            if change is not None:
                tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(change)
            save_file(tensors, found[name] / "model.safetensors", metadata={"format": "pt"})
    return found


@pytest.fixture(scope="module")
def theirs(checkpoints, tmp_path_factory, client_environment) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("reference")
    jobs = {name: str(path) for name, path in checkpoints.items()} | CONFIGS
    (folder / "jobs.json").write_text(json.dumps(jobs))
    client_environment(TORCH).run(SCRIPT, folder / "jobs.json", folder / "out.npz")
    return dict(np.load(folder / "out.npz"))


def test_embeddings_are_tied_as_in_transformers(checkpoints, theirs):
    for name, directory in checkpoints.items():
        family, config = read_model(directory)
        params = hf.load(directory, describe_params(config), family.weights)
        np.testing.assert_array_equal(params.embed, theirs[f"{name}/embed"], err_msg=name)
        unembed = params.embed if params.unembed is None else params.unembed
        np.testing.assert_array_equal(unembed, theirs[f"{name}/unembed"], err_msg=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_those_of_transformers(theirs, name):
    config = find_family(CONFIGS[name]).config_from_hf(CONFIGS[name])
    [rope, num_dims] = next(mixer.rotation for mixer in reversed(config.mixers) if mixer.rotation is not None)
    np.testing.assert_allclose(rope.compute_frequencies(num_dims), theirs[f"{name}/frequencies"], rtol=1e-6)
    assert rope.amplitude == pytest.approx(theirs[f"{name}/amplitude"].item(), rel=1e-6)
