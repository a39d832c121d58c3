"""Fixtures of the engine's tests."""

import pytest

from skyrl_tx.testing.engine_house import House


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def house(request, tmp_path):
    url = None if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    house = House(tmp_path, database_url=url)
    yield house
    house.close()
