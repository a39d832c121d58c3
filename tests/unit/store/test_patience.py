"""A database that is full or locked for a while is waited for by who asked to."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, event
from sqlmodel import Session

from skyrl_tx.store import sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreBlocked
from skyrl_tx.store.patience import Patience
from skyrl_tx.testing.waiting import until

LARGE = "x" * 2**20


class Disk:
    """Is full or not, for connections made from then on; SQLite's limit is one of the connection."""

    def __init__(self) -> None:
        self.is_full = False

    def connected(self, connection: sqlite3.Connection, _record: object) -> None:
        if self.is_full:
            connection.execute("PRAGMA max_page_count = 1")


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    event.listen(Engine, "connect", disk.connected)
    yield disk
    event.remove(Engine, "connect", disk.connected)


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, disk: Disk, stop: threading.Event, told: list[str]) -> Iterator[Store]:
    patience = Patience(until=stop, tell=lambda tx, why: told.append(why))
    with closing(Store.open(tmp_path, role="engine", busy_timeout_s=0.05, patience=patience)) as store:
        store.write(add)
        yield store
        stop.set()


def add(tx: Session, name: str = "") -> str:
    return sessions.create(
        tx, owner="ann", tags=[], user_metadata=None, sdk_version=None, project_id=None, display_name=name, now=1.0
    )


def fill(store: Store, disk: Disk) -> None:
    """From here on nothing large fits: neither on the connection that is there, nor on later ones."""
    disk.is_full = True
    store.write(lambda tx: tx.connection().exec_driver_sql("PRAGMA max_page_count = 1").scalar())


def test_what_fits_is_written_and_what_does_not_waits_for_room(store: Store, disk: Disk, told: list[str]) -> None:
    fill(store, disk)
    gate = threading.Event()
    store.write_soon(lambda tx: gate.wait(10))
    small, large, behind = [store.write_soon(lambda tx, name=name: add(tx, name)) for name in ("s", LARGE, "t")]
    gate.set()
    assert small.result(60), "it was written by itself"
    until(lambda: len(told) >= 3)
    assert not large.done() and not behind.done(), "nothing is written out of its order"
    assert "no space left for it on the disk" in told[-1] and store.trouble == told[-1]
    disk.is_full = False
    large.result(60)
    behind.result(60)
    assert store.trouble is None
    assert len(store.read(lambda tx: sessions.list_ids(tx, "ann", 10, 0))) == 4


def test_a_lock_that_outlasts_the_busy_timeout_is_waited_for(tmp_path: Path, store: Store, caplog) -> None:
    with closing(sqlite3.connect(tmp_path / "skyrl_tx.db", isolation_level=None)) as intruder:
        intruder.execute("BEGIN IMMEDIATE")
        written = store.write_soon(add)
        until(lambda: "another process keeps it locked" in caplog.text)
        assert store.trouble and not written.done()
        intruder.execute("ROLLBACK")
        assert written.result(60)


def test_it_ends_when_told_and_what_fits_is_still_written(store: Store, disk: Disk, stop: threading.Event) -> None:
    fill(store, disk)
    large, small = store.write_soon(lambda tx: add(tx, LARGE)), store.write_soon(lambda tx: add(tx, "s"))
    until(lambda: store.trouble)
    stop.set()
    with pytest.raises(StoreBlocked, match="no space left"):
        large.result(60)
    assert small.result(60)


def test_work_that_ran_before_gives_what_it_came_to_at_last(store: Store, disk: Disk) -> None:
    fill(store, disk)
    runs = 0

    def once(tx: Session) -> None:
        nonlocal runs
        runs += 1
        if runs > 1:
            raise KeyError("changed meanwhile")

    gate = threading.Event()
    store.write_soon(lambda tx: gate.wait(10))
    first, large = store.write_soon(once), store.write_soon(lambda tx: add(tx, LARGE))
    gate.set()
    with pytest.raises(KeyError, match="changed meanwhile"):
        first.result(60)
    disk.is_full = False
    large.result(60)
