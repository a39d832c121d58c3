"""Tiny models of every family, read back from the files they were written to."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.testing.tiny_models import LLAMA3_ROPE, write_model
from skyrl_tx.weights import hf


@dataclass(frozen=True)
class Loaded:
    config: models.ModelConfig
    params: models.DecoderParams
    family: models.ModelFamily

    def adapter(self, seed: int, rank: int = 4, max_rank: int | None = None) -> Adapter:
        """Return an adapter whose B is not zero, so that it acts."""
        made = models.init_adapter(self.config, models.AdapterSpec(rank=rank, seed=seed), max_rank)
        generator = np.random.default_rng(seed)
        for pair in made.weights.values():
            b = np.asarray(pair.b)
            b[..., :rank, :] = 0.05 * generator.standard_normal(b[..., :rank, :].shape)
        return made


VARIANTS = {
    "qwen3-tied": {"architecture": "Qwen3ForCausalLM", "tied_embeddings": True},
    "qwen2-untied": {"architecture": "Qwen2ForCausalLM", "tied_embeddings": False},
    "llama3-untied": {"architecture": "LlamaForCausalLM", "tied_embeddings": False, "rope_scaling": LLAMA3_ROPE},
}


@pytest.fixture(scope="module", params=VARIANTS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    directory: Path = write_model(tmp_path_factory.mktemp(request.param), **VARIANTS[request.param])
    content = hf.read_json(directory, "config.json")
    family = models.find_family(content)
    config = family.config_from_hf(content)
    params = hf.load(directory, models.describe_params(config), family.weights)
    return Loaded(config=config, params=jax.tree.map(jax.numpy.asarray, params), family=family)
