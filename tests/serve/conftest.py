"""Fixtures of the tests that run servers as processes."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _collect_garbage() -> Iterator[None]:
    """Collect the SDK's open connections here, where their warnings are ignored."""
    yield
    gc.collect()
