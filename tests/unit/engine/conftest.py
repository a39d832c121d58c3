"""Fixtures of the engine's tests."""

import time
from itertools import count
from types import SimpleNamespace

import pytest

from skyrl_tx.engine import housekeeping
from tests.support.engine_harness import EngineHarness


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def harness(request, tmp_path):
    url = None if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    harness = EngineHarness(tmp_path, database_url=url)
    yield harness
    harness.close()


@pytest.fixture
def api_is_there_for_long(monkeypatch):
    """Each check of the API's uptime adds one minute."""
    minutes = count()
    clock = SimpleNamespace(monotonic=lambda: 60.0 * next(minutes), time=time.time)
    monkeypatch.setattr(housekeeping, "time", clock)
