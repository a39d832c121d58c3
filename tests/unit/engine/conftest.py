"""Fixtures of the engine's tests."""

import pytest

from skyrl_tx.testing.engine_house import House


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path)
    yield house
    house.close()
