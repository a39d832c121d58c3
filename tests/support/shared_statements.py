"""SQL statements are compiled once per process, not once per store that a test opens.

Compiling them takes a fifth of the time of the engine's tests. SQLAlchemy's own cache belongs to one engine.
"""

from typing import Any

from sqlalchemy import Engine, create_engine

from skyrl_tx.store import postgresql, sqlite


class _Statements(dict[Any, Any]):
    """Compiled statements by the type of dialect, where SQLAlchemy's key has the dialect of one engine."""

    def get(self, key: tuple[Any, ...], default: Any = None) -> Any:
        return super().get((type(key[0]), *key[1:]), default)

    def __setitem__(self, key: tuple[Any, ...], compiled: Any) -> None:
        super().__setitem__((type(key[0]), *key[1:]), compiled)


_statements = _Statements()


def share_statements() -> None:
    """Let all engines that the store creates from now on share their compiled statements."""
    sqlite.create_engine = postgresql.create_engine = _create_engine


def _create_engine(*arguments: Any, **options: Any) -> Engine:
    engine = create_engine(*arguments, **options)
    engine.update_execution_options(compiled_cache=_statements)
    return engine
