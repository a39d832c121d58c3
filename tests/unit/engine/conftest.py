"""Fixtures of the engine's tests."""

import math
from types import SimpleNamespace

import pytest

from skyrl_tx.engine import housekeeping
from skyrl_tx.store import sqlite
from tests.support.engine_harness import EngineHarness


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def harness(request, tmp_path):
    url = None if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    harness = EngineHarness(tmp_path, database_url=url)
    yield harness
    harness.close()


@pytest.fixture
def api_is_there_for_long(monkeypatch):
    """Each check of the API's uptime adds one minute. The time of day can be set without an effect on expiry."""
    monkeypatch.setattr(sqlite, "SILENT_S", math.inf)
    monkeypatch.setattr(housekeeping.ApiUptime, "has_steady_clock", lambda self: True)
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        now += 60.0
        return now

    monkeypatch.setattr(housekeeping, "time", SimpleNamespace(monotonic=monotonic, time=lambda: now))
