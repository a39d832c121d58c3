"""The engine's published status, which the API serves."""

import time
from dataclasses import dataclass

from sqlalchemy import text, update
from sqlmodel import Session

from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import EngineStateRow

REQUEST_BYTES = 4096
"""Upper estimate of the memory of a queued sample in addition to its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLoad:
    """Memory of the queued samples that arrived up to `position`: `num_bytes` of at most `max_bytes`.

    Each request counts `REQUEST_BYTES` in addition to its prompt.
    """

    position: int
    num_bytes: int
    max_bytes: int


_DATABASE_TIME = text("SELECT extract(epoch FROM clock_timestamp())::float8")


def shared_time(tx: Session) -> float:
    """Return the time by the clock that API and engine share: the PostgreSQL server's, or with SQLite this machine's.

    The clocks of two machines may differ by more than the silence after which an engine counts as gone.
    """
    connection = tx.connection()
    return connection.execute(_DATABASE_TIME).scalar_one() if connection.dialect.name == "postgresql" else time.time()


def publish(tx: Session, row: EngineStateRow) -> None:
    """Replace the engine's status."""
    tx.merge(row)


def report_waiting(tx: Session, detail: str) -> None:
    """Record why the engine waits; its next published status replaces the reason."""
    execute(tx, update(EngineStateRow).values(detail=detail, updated_at=shared_time(tx)))


def get(tx: Session) -> EngineStateRow | None:
    """Return the engine's latest status, or None if no engine ever ran."""
    return tx.get(EngineStateRow, 1)


def sample_load(tx: Session) -> SampleLoad | None:
    """Return the latest memory load of queued samples, or None if it is unknown."""
    state = get(tx)
    return None if state is None or state.load is None else SampleLoad(**state.load)
