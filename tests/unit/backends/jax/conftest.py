"""Fixtures: a tiny dense model for unit tests of the JAX backend."""

import pytest

from tests.support.shared_traces import share_traces as share_traces
from tests.support.tiny import TinyModel, tiny_dense


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    return tiny_dense()
