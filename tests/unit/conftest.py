"""Fixtures: a store in a new data directory, with one session; each test runs on both kinds of databases."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.dialect import Role

OpenStore = Callable[..., Store]


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "sqlite" else request.getfixturevalue("postgresql_url")


@pytest.fixture
def open_store(tmp_path: Path, database_url: str | None) -> Iterator[OpenStore]:
    with ExitStack() as stack:

        def open_one(role: Role = "api", data_dir: Path = tmp_path, **options: float) -> Store:
            store = Store.open(data_dir, role=role, url=database_url, **options)
            stack.callback(store.close)
            return store

        yield open_one


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    return open_store()


@pytest.fixture
def session_id(store: Store) -> SessionId:
    return store.write(
        lambda tx: sessions.create(tx, owner="ann", tags=["a"], user_metadata={"k": 1}, sdk_version="0.38.0", now=1.0)
    )
