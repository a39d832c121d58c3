"""The JAX backend keeps every promise of the contract, with a tiny Qwen3 on CPU, dense and with experts."""

from pathlib import Path

import pytest

from skyrl_tx.backends.jax import BACKEND
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.testing.backend_suite import BackendSuite
from skyrl_tx.testing.tiny_models import write_model


class TestJax(BackendSuite):
    architecture = "Qwen3ForCausalLM"

    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        model = write_model(directory / "model", cls.architecture, vocab_size=64, max_context_length=128)
        config = JaxConfig(
            compile_cache_dir=None,
            max_lora_adapters=3,
            max_lora_rank=8,
            max_sampler_adapters=2,
            micro_batch_tokens=64,
            sample_slots=4,
            max_sample_tokens=512,
        )
        return BACKEND.load()(str(model), config)


@pytest.mark.slow
class TestJaxWithExperts(TestJax):
    architecture = "Qwen3MoeForCausalLM"
