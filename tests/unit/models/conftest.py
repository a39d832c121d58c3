"""Tiny models of every family, read back from the files they were written to."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.testing.tiny_models import LLAMA3_ROPE, write_model
from skyrl_tx.weights import hf


@dataclass(frozen=True)
class LoadedModel:
    config: models.ModelConfig
    params: models.DecoderParams
    family: models.ModelFamily

    def adapter(self, seed: int, rank: int = 4, max_rank: int | None = None) -> Adapter:
        """Return an adapter whose B is not zero, so that it has an effect."""
        made = models.init_adapter(self.config, LoraSpec(rank=rank, seed=seed), max_rank)
        generator = np.random.default_rng(seed)
        for pair in made.weights.values():
            b = np.asarray(pair.b)
            b[..., :rank, :] = 0.05 * generator.standard_normal(b[..., :rank, :].shape)
        return made


CYCLE = "qwen3-moe-alternating"
"""Dense and sparse layers alternate: one loop, whose body is two layers."""

SINKS = "gpt-oss-untied"
"""Windows in every other layer, attention sinks and biased experts.

The windows are shorter than prompts, chunks and packed sequences.
"""

OWN_FACTORS = "qwen3-moe-untied"
"""Each expert has its own LoRA factors. Other models share the factors next to the hidden size."""

HYBRID = "qwen3_5-untied"
"""Three layers of linear attention, with a recurrent state, for each layer of softmax attention."""

SHARED = "qwen3_5-moe-untied"
"""Linear attention, and mixtures with a shared expert."""

LATENTS = "deepseek"
"""Latent attention, a dense layer before sparse ones, and sigmoid scores of grouped experts."""

OUTPUT_NORMS = "gemma3"
"""Norms after attention and feed-forward, scaled embeddings, and different ropes for windows."""

BY_HEAD = "qwen3-next"
"""Linear attention whose maps are stored head by head."""

MAMBA = "nemotron"
"""Layers of one part each: Mamba-2, attention without ropes, latent experts, and a dense layer."""

VARIANTS = {
    CYCLE: {
        "architecture": "Qwen3MoeForCausalLM",
        "tied_embeddings": True,
        "num_layers": 4,
        "experts": {"decoder_sparse_step": 2},
    },
    "qwen3-tied": {"architecture": "Qwen3ForCausalLM", "tied_embeddings": True},
    "qwen2-untied": {"architecture": "Qwen2ForCausalLM", "tied_embeddings": False},
    OWN_FACTORS: {"architecture": "Qwen3MoeForCausalLM", "tied_embeddings": False},
    SINKS: {"architecture": "GptOssForCausalLM", "tied_embeddings": False, "keys": {"sliding_window": 9}},
    "mistral-untied": {"architecture": "MistralForCausalLM", "tied_embeddings": False, "keys": {"sliding_window": 9}},
    # A deviation of 0.1 minimizes the effect of a change in the last bit of the weights (tried:
    # 0.03, 0.05, 0.1, 0.2).
    HYBRID: {"architecture": "Qwen3_5ForCausalLM", "tied_embeddings": False, "num_layers": 4, "std": 0.1},
    SHARED: {"architecture": "Qwen3_5MoeForCausalLM", "tied_embeddings": False, "num_layers": 4, "std": 0.1},
    BY_HEAD: {"architecture": "Qwen3NextForCausalLM", "num_layers": 4, "std": 0.1, "split_experts": True},
    MAMBA: {"architecture": "NemotronHForCausalLM", "std": 0.1},
    LATENTS: {"architecture": "DeepseekV3ForCausalLM", "tied_embeddings": False, "num_layers": 3, "std": 0.1},
    OUTPUT_NORMS: {"architecture": "Gemma3ForCausalLM", "num_layers": 3, "keys": {"sliding_window": 9}},
    "llama3-untied": {"architecture": "LlamaForCausalLM", "tied_embeddings": False, "rope_scaling": LLAMA3_ROPE},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return one model, for tests that do not depend on the family."""
    return read_back(tmp_path_factory.mktemp("model"), "qwen3-tied")


DEFAULT = ("qwen3-tied", SINKS)
"""A dense model, and a model with experts and windows in every other layer."""
SLOW = (CYCLE, LATENTS)
"""Models with parts that the default models lack: delta nets and latents.

The remaining models run with `make exhaustive`. The conformance tests cover them too.
"""


def mark_family(name: str) -> Any:
    """Return a family as a parameter, with the marks of its test level."""
    if name in DEFAULT:
        return name
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else [pytest.mark.slow, pytest.mark.exhaustive])


@pytest.fixture(scope="module")
def alternating(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return a model with alternating layers."""
    return read_back(tmp_path_factory.mktemp("model"), CYCLE)


@pytest.fixture(
    scope="module",
    params=[SINKS, SHARED, LATENTS, MAMBA, OUTPUT_NORMS, pytest.param(BY_HEAD, marks=pytest.mark.exhaustive)],
)
def unlike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return models whose layers do not simply attend to whole sequences."""
    return read_back(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return a model with a recurrent state."""
    return read_back(tmp_path_factory.mktemp("model"), HYBRID)


@pytest.fixture(
    scope="module",
    params=[mark_family(name) for name in VARIANTS],
)
def each_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return a model of every family."""
    return read_back(tmp_path_factory.mktemp("model"), request.param)


def read_back(directory: Path, variant: str) -> LoadedModel:
    write_model(directory, **VARIANTS[variant])
    content = hf.read_json(directory, "config.json")
    family = models.find_family(content)
    config = replace(family.config_from_hf(content), expert_lora="own" if variant == OWN_FACTORS else "shared")
    params = hf.load(directory, models.describe_params(config), family.weights)
    return LoadedModel(config=config, params=params, family=family)
