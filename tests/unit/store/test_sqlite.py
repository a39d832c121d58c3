"""SQLite only: vacuum, and the integrity check when a file is opened."""

import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlmodel import col, func, select

from skyrl_tx.store import StoreError, futures, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.sqlite import Sqlite
from skyrl_tx.store.tables import RequestRow


def test_vacuum_shrinks_the_file(tmp_path: Path) -> None:
    store = Store.open(tmp_path, role="engine")
    new = {"owner": "o", "tags": [], "user_metadata": None, "sdk_version": None, "project_id": None}
    session_id = store.write(lambda tx: sessions.create(tx, now=1.0, **new))
    big = NewRequest(key="", kind="sample", owner="o", session_id=session_id, body=bytes(20_000))
    for _ in range(200):
        store.write_soon(lambda tx: futures.submit(tx, big, 1.0))
    store.write(lambda tx: tx.exec(select(RequestRow).where(col(RequestRow.position) < 0)).all())

    def pages() -> int:
        return store.read(lambda tx: tx.connection().exec_driver_sql("PRAGMA page_count").scalar_one())

    full = pages()
    store.write(lambda tx: [tx.delete(row) for row in tx.exec(select(RequestRow))])
    steps = 0
    while store.vacuum():
        steps += 1
    assert steps > 1 and pages() < full / 10
    assert store.read(lambda tx: tx.exec(select(func.count()).select_from(RequestRow)).one()) == 0
    store.close()


def test_files_of_early_releases_become_vacuumable(tmp_path: Path) -> None:
    Store.open(tmp_path, role="engine").close()
    with closing(sqlite3.connect(tmp_path / "skyrl_tx.db", isolation_level=None)) as earlier:
        earlier.execute("PRAGMA auto_vacuum=NONE")
        earlier.execute("VACUUM")
        assert earlier.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    for _ in range(2):
        store = Store.open(tmp_path, role="engine")
        assert store.read(lambda tx: tx.connection().exec_driver_sql("PRAGMA auto_vacuum").scalar_one()) == 2
        store.close()


@pytest.fixture
def num_checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count how often database files are checked."""
    checked: list[Path] = []
    check = Sqlite.check

    def count_and_check(database: Sqlite) -> None:
        checked.append(database._path)
        check(database)

    monkeypatch.setattr(Sqlite, "check", count_and_check)
    return lambda: len(checked)


def test_a_file_is_checked_once_while_any_process_has_it_open(tmp_path: Path, num_checks: Callable[[], int]) -> None:
    api = Store.open(tmp_path, role="api")
    for _ in range(2):  # simulates an engine that crashes and restarts
        Store.open(tmp_path, role="engine").close()
    assert num_checks() == 1
    engine = Store.open(tmp_path, role="engine")
    api.close()
    Store.open(tmp_path, role="api").close()
    assert num_checks() == 1
    engine.close()
    Store.open(tmp_path, role="engine").close()
    assert num_checks() == 2


def test_a_process_that_waited_for_a_check_that_failed_checks_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.open(tmp_path, role="api").close()
    may_end, roles = threading.Event(), ("api", "engine")

    def fail(database: Sqlite) -> None:
        may_end.wait(20)
        raise StoreError("damaged")

    monkeypatch.setattr(Sqlite, "check", fail)
    with ThreadPoolExecutor(len(roles)) as threads:
        opened = [threads.submit(Store.open, tmp_path, role=role) for role in roles]
        time.sleep(0.2)
        may_end.set()
        for future in opened:
            assert isinstance(future.exception(20), StoreError)
