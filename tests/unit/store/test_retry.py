"""Writes with a retry policy wait for a database that is full or locked."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, event
from sqlmodel import Session

from skyrl_tx.store import StoreBlocked, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.writer import RetryPolicy
from tests.support.polling import until

LARGE = "x" * 2**20


class Disk:
    """A disk that can be full for new connections, because SQLite limits the size per connection."""

    def __init__(self) -> None:
        self.is_full = False

    def limit_size(self, connection: sqlite3.Connection, _record: object) -> None:
        if self.is_full:
            connection.execute("PRAGMA max_page_count = 1")


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    event.listen(Engine, "connect", disk.limit_size)
    yield disk
    event.remove(Engine, "connect", disk.limit_size)


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, disk: Disk, stop: threading.Event, reports: list[str]) -> Iterator[Store]:
    retry = RetryPolicy(until=stop, report=lambda tx, why: reports.append(why))
    with closing(Store.open(tmp_path, role="engine", busy_timeout_s=0.05, retry=retry)) as store:
        store.write(add)
        yield store
        stop.set()


def add(tx: Session, name: str = "") -> str:
    return sessions.create(tx, owner="ann", display_name=name, now=1.0)


def fill(store: Store, disk: Disk) -> None:
    """Make large writes fail on the current connection and on new connections."""
    disk.is_full = True
    store.write(lambda tx: tx.connection().exec_driver_sql("PRAGMA max_page_count = 1").scalar())


def test_small_writes_succeed_and_large_ones_wait_for_space(store: Store, disk: Disk, reports: list[str]) -> None:
    fill(store, disk)
    gate = threading.Event()
    store.write_soon(lambda tx: gate.wait(10))
    small, large, behind = [store.write_soon(lambda tx, name=name: add(tx, name)) for name in ("s", LARGE, "t")]
    gate.set()
    assert small.result(300), "it was written alone"
    until(lambda: len(reports) >= 3)
    assert not large.done() and not behind.done(), "writes stay in order"
    assert "no space left on its disk" in reports[-1] and store.write_failure == reports[-1]
    disk.is_full = False
    large.result(300)
    behind.result(300)
    assert store.write_failure is None
    assert len(store.read(lambda tx: sessions.list_ids(tx, "ann", 10, 0))) == 4


def test_writes_wait_for_a_lock_longer_than_the_busy_timeout(tmp_path: Path, store: Store, caplog) -> None:
    with closing(sqlite3.connect(tmp_path / "skyrl_tx.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        written = store.write_soon(add)
        until(lambda: "another process holds its lock" in caplog.text)
        assert store.write_failure and not written.done()
        other.execute("ROLLBACK")
        assert written.result(300)


def test_stop_fails_blocked_writes_but_not_small_ones(store: Store, disk: Disk, stop: threading.Event) -> None:
    fill(store, disk)
    large, small = store.write_soon(lambda tx: add(tx, LARGE)), store.write_soon(lambda tx: add(tx, "s"))
    until(lambda: store.write_failure)
    stop.set()
    with pytest.raises(StoreBlocked, match="no space left"):
        large.result(300)
    assert small.result(300)


def test_retried_work_returns_its_last_outcome(store: Store, disk: Disk) -> None:
    fill(store, disk)
    runs = 0

    def once(tx: Session) -> None:
        nonlocal runs
        runs += 1
        if runs > 1:
            raise KeyError("changed since")

    gate = threading.Event()
    store.write_soon(lambda tx: gate.wait(10))
    first, large = store.write_soon(once), store.write_soon(lambda tx: add(tx, LARGE))
    gate.set()
    with pytest.raises(KeyError, match="changed since"):
        first.result(300)
    disk.is_full = False
    large.result(300)
