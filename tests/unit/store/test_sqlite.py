"""SQLite only: vacuum."""

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlmodel import col, func, select

from skyrl_tx.store import futures, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
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
