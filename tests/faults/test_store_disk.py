"""Full disks, failing disks and locked databases: clear errors, no partial writes, and the store continues."""

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy.exc import DBAPIError
from sqlmodel import Session

from skyrl_tx.store import StoreError, sessions
from skyrl_tx.store.database import Store

BREAK_THE_DISK = """
import resource, signal, sys, threading
from pathlib import Path
from skyrl_tx.store import sessions
from skyrl_tx.store.database import Store

def add(tx, owner):
    return sessions.create(tx, owner=owner, tags=[], user_metadata=None, sdk_version=None, project_id=None,
                           display_name=None, now=1.0)

store = Store.open(Path(sys.argv[1]), role="api")
kept = store.write(lambda tx: add(tx, "kept"))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))  # no file can grow past 1 MiB from here on
gate = threading.Event()
store.write_soon(lambda tx: gate.wait(10))
group = [store.write_soon(lambda tx, owner=owner: add(tx, owner)) for owner in ("small", "x" * 3 * 2**20, "small")]
gate.set()
errors = [write.exception(20) for write in group]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print([type(error).__name__ for error in errors])
print(errors[0])
after = store.write(lambda tx: add(tx, "kept"))
print(sorted(store.read(lambda tx: sessions.list_ids(tx, "kept", 10, 0))) == sorted([kept, after]))
print(store.read(lambda tx: sessions.list_ids(tx, "small", 10, 0)))
store.close()
"""


def test_disk_error_fails_the_group_commit_and_later_writes_succeed(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", BREAK_THE_DISK, tmp_path], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    kinds, message, is_kept, lost = child.stdout.splitlines()
    assert kinds == "['StoreError', 'StoreError', 'StoreError']"
    assert message == f"database {tmp_path}/skyrl_tx.db: the disk failed (disk I/O error)"
    assert (is_kept, lost) == ("True", "[]")


def add(tx: Session, name: str = "") -> str:
    return sessions.create(tx, owner="ann", display_name=name, now=1.0)


def list_sessions(store: Store) -> list[str]:
    return sorted(store.read(lambda tx: sessions.list_ids(tx, "ann", 10, 0)))


def fill_the_disk(store: Store) -> None:
    """Set `max_page_count`, so that SQLite behaves as on a full disk.

    New connections have no such limit.
    """
    store.write(lambda tx: tx.connection().exec_driver_sql("PRAGMA max_page_count = 1").scalar())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path, role="api", busy_timeout_s=0.3)
    yield store
    store.close()


@pytest.fixture
def intruder(tmp_path: Path, store: Store) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "skyrl_tx.db", isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


def test_full_disk_fails_the_group_commit_and_later_writes_succeed(store: Store) -> None:
    kept = store.write(add)
    fill_the_disk(store)
    gate = threading.Event()
    store.write_soon(lambda tx: gate.wait(10))
    large = "x" * 2**20
    group = [store.write_soon(lambda tx, name=name: add(tx, name)) for name in ("small", large, "small")]
    gate.set()

    for write in group:
        with pytest.raises(StoreError, match=r"skyrl_tx\.db: no space left on its disk"):
            write.result(20)
    after = store.write(lambda tx: add(tx, large))
    assert list_sessions(store) == sorted([kept, after])


def test_database_error_that_the_caller_swallows_fails_the_write(store: Store) -> None:
    def hide(tx: Session) -> None:
        with suppress(DBAPIError):
            add(tx, "x" * 2**20)

    fill_the_disk(store)
    with pytest.raises(StoreError):
        store.write(hide)
    assert list_sessions(store) == []


def test_write_waits_for_another_writer(store: Store, intruder: sqlite3.Connection) -> None:
    threading.Timer(0.1, lambda: intruder.execute("COMMIT")).start()
    assert store.write(add)


def test_a_writer_tries_again_every_millisecond(
    store: Store, intruder: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite itself would wait longer after each attempt, up to 0.1 s."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 20:
            intruder.execute("COMMIT")

    monkeypatch.setattr("skyrl_tx.store.sqlite.time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    assert store.write(add)
    assert pauses == [0.001] * 20


def test_database_locked_for_too_long_is_an_error_and_the_store_continues(
    store: Store, intruder: sqlite3.Connection
) -> None:
    with pytest.raises(StoreError, match=r"skyrl_tx\.db: another process holds its lock"):
        store.write(add)
    assert list_sessions(store) == [], "readers do not wait"
    intruder.execute("ROLLBACK")
    session_id = store.write(add)
    assert list_sessions(store) == [session_id]
