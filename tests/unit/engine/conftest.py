"""Fixtures of the engine's tests."""

from itertools import count
from types import SimpleNamespace

import pytest

from skyrl_tx.engine import presence
from skyrl_tx.testing.engine_house import House


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def house(request, tmp_path):
    url = None if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    house = House(tmp_path, database_url=url)
    yield house
    house.close()


@pytest.fixture
def api_is_there_for_long(monkeypatch):
    """Each look at the API finds that it was there for one more minute."""
    minutes = count()
    monkeypatch.setattr(presence, "time", SimpleNamespace(monotonic=lambda: 60.0 * next(minutes)))
