"""A real vLLM server draws samples from adapters that JAX trained, as the contract requires.

Start a server in float32 as docs/guides/vllm.md describes, and set VLLM_URL=http://… and
VLLM_MODEL=directory. `tests/contract/test_vllm.py` uses stubs instead.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from skyrl_tx.backends.composed import ComposedBackend, ComposedConfig
from skyrl_tx.backends.jax import BACKEND
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.integrations.vllm import SAMPLER, VllmConfig
from skyrl_tx.testing.backend_driver import BackendDriver
from skyrl_tx.testing.sampling_checks import SamplingChecks

URL, MODEL = os.environ.get("VLLM_URL"), os.environ.get("VLLM_MODEL")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(not (URL and MODEL), reason="no vLLM server is named by VLLM_URL and VLLM_MODEL"),
]


class TestJaxAndVllm(SamplingChecks):
    tolerance = 2e-5
    highest_temperature = 2.0
    filters: Mapping[str, float] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendDriver]:
        """JAX and a real vLLM server, shared by the tests of the class."""
        assert URL and MODEL
        sampler = VllmConfig(url=URL, filtered_logprobs="renormalized")
        trainer = {"trainer": BACKEND, "trainer_config": JaxConfig(compile_cache_dir=None)}
        config = ComposedConfig(**trainer, sampler=SAMPLER, sampler_config=sampler, check_share=1.0)
        backend = ComposedBackend(MODEL, config)
        yield BackendDriver(backend, backend.start(), tmp_path_factory.mktemp("snapshots"))
        backend.close()

    @pytest.fixture
    def driver(self, started: BackendDriver, tmp_path: Path) -> Iterator[BackendDriver]:
        driver = BackendDriver(started.backend, started.capabilities, tmp_path)
        yield driver
        driver.clean()
