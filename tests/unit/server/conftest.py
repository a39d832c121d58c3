"""A store in a new directory, opened with the role of the API."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_tx.store.database import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path, role="api")
    yield store
    store.close()
