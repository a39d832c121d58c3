"""Stores that tests open share compiled statements, and their commits to SQLite do not wait for the disk.

Compiling statements takes a fifth of the time of the engine's tests. SQLAlchemy's own cache belongs to one engine.
A commit that waits for the disk takes 4 ms instead of 0.1 ms. Only a loss of power would show the difference:
what a process has written survives its end. The PostgreSQL server of the tests does not wait for the disk either.
"""

import sqlite3
from typing import Any

from sqlalchemy import URL, Engine, create_engine, make_url

from skyrl_tx.store import postgresql, sqlite


class _Statements(dict[Any, Any]):
    """Compiled statements by the type of dialect, where SQLAlchemy's key has the dialect of one engine."""

    def get(self, key: tuple[Any, ...], default: Any = None) -> Any:
        return super().get((type(key[0]), *key[1:]), default)

    def __setitem__(self, key: tuple[Any, ...], compiled: Any) -> None:
        super().__setitem__((type(key[0]), *key[1:]), compiled)


_statements = _Statements()


class _QuickConnection(sqlite3.Connection):
    """A connection whose commits do not wait for the disk, although the store asks for it."""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        return super().execute("PRAGMA synchronous=OFF" if sql == "PRAGMA synchronous=FULL" else sql, *parameters)


def make_stores_quick() -> None:
    """Let the engines that the store creates from now on share compiled statements and not wait for the disk."""
    sqlite.create_engine = postgresql.create_engine = _create_engine


def _create_engine(url: URL | str, **options: Any) -> Engine:
    if make_url(url).get_backend_name() == "sqlite":
        options["connect_args"] = {**options.get("connect_args", {}), "factory": _QuickConnection}
    engine = create_engine(url, **options)
    engine.update_execution_options(compiled_cache=_statements)
    return engine
