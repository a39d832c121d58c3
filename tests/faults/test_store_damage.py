"""Damaged and unwritable databases are refused with an error message."""

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlmodel import Session

from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.store import StoreError, futures, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.dialect import Role

NUM_REQUESTS = 200

OPEN_READ_ONLY = """
import os, sys
from pathlib import Path
from skyrl_tx.store import StoreError
from skyrl_tx.store.database import Store
os.chdir(sys.argv[1])
os.chmod(".", 0o555)
if os.geteuid() == 0:
    os.seteuid(65534)  # no mode stops root
try:
    Store.open(Path("."), role="engine")
except StoreError as error:
    print(error)
"""


def add(tx: Session) -> SessionId:
    return sessions.create(tx, owner="ann", now=1.0)


def fill(data_dir: Path) -> list[RequestId]:
    store = Store.open(data_dir, role="api")
    session_id = store.write(add)

    def submit(tx: Session) -> list[RequestId]:
        new = [
            futures.NewRequest(key=f"k/{i}", kind="sample", owner="ann", session_id=session_id, body=bytes([i]) * 3000)
            for i in range(NUM_REQUESTS)
        ]
        return [futures.submit(tx, one, 1.0).request_id for one in new]

    ids = store.write(submit)
    store.close()
    return ids


def damage(path: Path, root: str) -> None:
    """Overwrite the root page of a table or an index."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (root,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(random.Random(5).randbytes(size))


@pytest.mark.parametrize("root", ["requests", "sessions", "ix_requests_model_effect"])
@pytest.mark.parametrize("role", ["api", "engine"])
def test_damaged_page_is_found_at_start_up(tmp_path: Path, root: str, role: Role) -> None:
    fill(tmp_path)
    damage(tmp_path / "skyrl_tx.db", root)
    before = (tmp_path / "skyrl_tx.db").read_bytes()
    with pytest.raises(StoreError, match=r"skyrl_tx\.db: it is damaged and cannot be served; .*backup"):
        Store.open(tmp_path, role=role)
    assert (tmp_path / "skyrl_tx.db").read_bytes() == before, "the file is unchanged"


def test_file_that_is_no_database_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "skyrl_tx.db").write_bytes(b"my only poem\n" * 1000)
    with pytest.raises(StoreError, match=r"skyrl_tx\.db: it is damaged"):
        Store.open(tmp_path, role="api")
    assert (tmp_path / "skyrl_tx.db").read_bytes() == b"my only poem\n" * 1000


def test_page_damaged_at_run_time_is_an_error(tmp_path: Path) -> None:
    ids = fill(tmp_path)
    store = Store.open(tmp_path, role="api")
    damage(tmp_path / "skyrl_tx.db", "requests")
    for request_id in ids[:3]:
        with pytest.raises(StoreError, match=r"skyrl_tx\.db: it is damaged"):
            store.read(lambda tx, request_id=request_id: futures.get_state(tx, request_id, "ann"))
    with pytest.raises(StoreError, match=r"skyrl_tx\.db: it is damaged"):
        store.write(lambda tx: futures.complete(tx, ids[0], b"", failed=False, effect_order=None, now=2.0))
    store.close()


def test_error_names_the_directory_that_cannot_be_written(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    fill(data_dir)
    (data_dir / "skyrl_tx.db").chmod(0o444)
    (data_dir / "engine.lock").unlink(missing_ok=True)
    try:
        child = subprocess.run(
            [sys.executable, "-c", OPEN_READ_ONLY, data_dir], capture_output=True, text=True, timeout=60
        )
    finally:
        data_dir.chmod(0o700)

    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("database skyrl_tx.db: it cannot be written; check the file permissions"), (
        child.stdout
    )


def test_read_only_disk_fails_the_write_and_later_writes_succeed(tmp_path: Path) -> None:
    store = Store.open(tmp_path, role="api")
    kept = store.write(add)
    store.write(lambda tx: tx.connection().exec_driver_sql("PRAGMA query_only = ON") and None)
    with pytest.raises(StoreError, match=r"skyrl_tx\.db: it cannot be written"):
        store.write(add)
    assert store.read(lambda tx: sessions.list_ids(tx, "ann", 10, 0)) == [kept]
    assert store.write(add)  # on a new connection
    store.close()
