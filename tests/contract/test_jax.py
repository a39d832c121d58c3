"""The JAX backend passes the backend suite, with tiny models that contain every kind of part and block."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_tx.backends.jax import BACKEND
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.testing.backend_suite import BackendSuite
from tests.support.fast_jit import IS_ON_CPU, compiles_as_the_product
from tests.support.lost_jax_device import lost_jax_device
from tests.support.tiny import (
    BY_HEAD,
    DENSE,
    GLM,
    GLM_LATENTS,
    HYBRID,
    HYBRID_MOE,
    LATENTS,
    MAMBA,
    MOE,
    OUTPUT_NORMS,
    SINKS,
    TINY_CONFIG,
    WINDOWS,
    tiny_directory,
)


class TestJax(BackendSuite):
    spec = BACKEND
    architecture = DENSE
    config = TINY_CONFIG
    # 1.9e-6 on an H200. Programs with little optimization add the terms of a loss with other roundings.
    pass_tolerance = 0.0 if IS_ON_CPU and compiles_as_the_product() else 1e-5

    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        return JaxBackend(str(tiny_directory(cls.architecture)), cls.config)

    @contextmanager
    def lost_device(self, backend: AbstractBackend) -> Generator[None]:
        with lost_jax_device():
            yield


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithExperts(TestJax):
    architecture = MOE


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithFactorsOfEachExpert(TestJaxWithExperts):
    config = TINY_CONFIG.model_copy(update={"expert_lora": "own"})


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithWindows(TestJax):
    architecture = WINDOWS


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithSinks(TestJax):
    architecture = SINKS


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithLatents(TestJax):
    architecture = LATENTS


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithStates(TestJax):
    architecture = HYBRID


@pytest.mark.slow
class TestJaxWithStatesAndExperts(TestJax):
    architecture = HYBRID_MOE


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithMamba(TestJax):
    architecture = MAMBA


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithStatesByHead(TestJax):
    architecture = BY_HEAD


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithGlm(TestJax):
    architecture = GLM


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithLatentsOfGlm(TestJax):
    architecture = GLM_LATENTS


@pytest.mark.slow
@pytest.mark.exhaustive
class TestJaxWithOutputNorms(TestJax):
    architecture = OUTPUT_NORMS
