"""One tiny Qwen3 for all tests of the JAX backend's parts."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf

RANK = 4


@dataclass(frozen=True)
class TinyModel:
    config: models.ModelConfig
    params: models.DecoderParams

    def adapter(self, seed: int) -> Adapter:
        """Return an adapter whose B is not zero, so that it acts."""
        made = models.init_adapter(self.config, models.AdapterSpec(rank=RANK, seed=seed), RANK)
        generator = np.random.default_rng(seed)
        for pair in made.weights.values():
            np.asarray(pair.b)[:] = 0.1 * generator.standard_normal(pair.b.shape)
        return made


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    directory = write_model(tmp_path_factory.mktemp("tiny"), std=0.3)
    content = hf.read_json(directory, "config.json")
    family = models.find_family(content)
    config = family.config_from_hf(content)
    params = hf.load(directory, models.describe_params(config), family.weights)
    return TinyModel(config=config, params=jax.tree.map(jax.numpy.asarray, params))
