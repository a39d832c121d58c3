"""Direct queries of a server's database, of either kind."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg

from skyrl_tx.store.dialect import DATABASE_NAME


def rows(data_dir: Path, database_url: str | None, query: str) -> Sequence[tuple[Any, ...]]:
    """Return the rows of a query, none before the tables exist; `database_url` is as in `--database-url`."""
    if database_url is not None:
        with psycopg.connect(database_url) as connection:
            return connection.execute(query.encode()).fetchall()
    try:
        with closing(sqlite3.connect(f"file:{data_dir / DATABASE_NAME}?mode=ro", uri=True, timeout=10)) as connection:
            return connection.execute(query).fetchall()
    except sqlite3.OperationalError:  # a server may be killed before it has created the file or its tables
        return []


def size_bytes(data_dir: Path, database_url: str | None) -> int:
    """Return the size of the database on disk."""
    if database_url is not None:
        return int(rows(data_dir, database_url, "SELECT pg_database_size(current_database())")[0][0])
    return sum(path.stat().st_size for path in data_dir.glob(f"{DATABASE_NAME}*"))
