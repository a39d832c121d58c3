"""What a server's database holds, looked up past the server, on any kind of database."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg

from skyrl_tx.store.sqlite import DATABASE_NAME


def rows(data_dir: Path, database_url: str | None, query: str) -> Sequence[tuple[Any, ...]]:
    """Run a query; nothing is found before there are tables. `database_url` as in `--database-url`."""
    if database_url is not None:
        with psycopg.connect(database_url) as connection:
            return connection.execute(query.encode()).fetchall()
    try:
        with closing(sqlite3.connect(f"file:{data_dir / DATABASE_NAME}?mode=ro", uri=True, timeout=10)) as connection:
            return connection.execute(query).fetchall()
    except sqlite3.OperationalError:  # a server may be killed before there was a file, or a table in it
        return []


def size_bytes(data_dir: Path, database_url: str | None) -> int:
    """How much room the database takes."""
    if database_url is not None:
        return int(rows(data_dir, database_url, "SELECT pg_database_size(current_database())")[0][0])
    return sum(path.stat().st_size for path in data_dir.glob(f"{DATABASE_NAME}*"))
