"""Gauges of the server over time: one row each ten seconds for a day, one a minute for a month."""

from collections.abc import Mapping

from sqlalchemy import delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import Session, col

from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import ServerPointRow

PERIOD_S = 10
"""Rows have times that are multiples of this, so that several API processes write one row."""
_FINE_S, _COARSE_S = 86_400, 30 * 86_400
_MINUTE_S = 60
_AT = col(ServerPointRow.at)
_INSERT_SQLITE = sqlite.insert(ServerPointRow).on_conflict_do_nothing()
_INSERT_POSTGRESQL = postgresql.insert(ServerPointRow).on_conflict_do_nothing()


def add(tx: Session, at: int, values: Mapping[str, float]) -> None:
    """Add the gauges of one time, a multiple of ten seconds; no effect if another process was first."""
    assert at % PERIOD_S == 0, at
    is_postgresql = tx.connection().dialect.name == "postgresql"
    insert = _INSERT_POSTGRESQL if is_postgresql else _INSERT_SQLITE
    execute(tx, insert, {"at": at, "values": values})


def thin(tx: Session, now: float) -> int:
    """Delete rows of the last month that are older than a day and begin no minute, and all older ones."""
    is_fine = (int(now) - _FINE_S > _AT) & (_AT % _MINUTE_S != 0)
    return execute(tx, delete(ServerPointRow).where(or_(is_fine, int(now) - _COARSE_S > _AT))).rowcount


def list_since(tx: Session, at: float, limit: int = 10_000) -> list[tuple[int, Mapping[str, float]]]:
    """Return the times and gauges after a time, in order."""
    wanted = select(_AT, col(ServerPointRow.values)).where(int(at) < _AT).order_by(_AT).limit(limit)
    return [(found_at, values) for found_at, values in execute(tx, wanted)]
