"""What all tests of servers as processes share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect what the SDK leaves here, where the warnings about it are ignored, and not after the last test."""
    yield
    gc.collect()
