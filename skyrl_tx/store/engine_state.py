"""The status that each engine publishes, which the API serves."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from heapq import nlargest
from typing import Any, cast

from sqlalchemy import delete, or_, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import Session, col, select

from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import EngineStateRow, ServerPointRow

REQUEST_BYTES = 4096
"""Upper estimate of the memory of a queued sample in addition to its prompt."""

FRESH_S = 10.0
"""Age of a status up to which its engine counts as running; engines publish each second."""
_MAX_PUBLISHED_OWNERS = 256
_MAXIMA = frozenset({"trainer_gap_max_nats"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLoad:
    """Memory of the queued samples that arrived up to `position`: `num_bytes` of at most `max_bytes`.

    Each request counts `REQUEST_BYTES` in addition to its prompt. `by_owner` has the bytes of the owners with the most.
    `num_requests` counts those without a result.
    """

    position: int
    num_bytes: int
    max_bytes: int
    by_owner: Mapping[str, int] = field(default_factory=dict[str, int])
    num_requests: int = 0


def take_largest_owners(num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the owners with the most bytes, at most 256, so that the published status stays small."""
    if len(num_bytes) <= _MAX_PUBLISHED_OWNERS:
        return dict(num_bytes)
    return dict(nlargest(_MAX_PUBLISHED_OWNERS, num_bytes.items(), key=lambda owner: owner[1]))


_DATABASE_TIME = text("SELECT extract(epoch FROM clock_timestamp())::float8")


def get_shared_time(tx: Session) -> float:
    """Return the time by the clock that API and engine share: the PostgreSQL server's, or with SQLite this machine's.

    The clocks of two machines may differ by more than the silence after which an engine counts as gone.
    """
    connection = tx.connection()
    return connection.execute(_DATABASE_TIME).scalar_one() if connection.dialect.name == "postgresql" else time.time()


def publish(tx: Session, row: EngineStateRow) -> None:
    """Replace the status of an engine."""
    tx.merge(row)


def report_waiting(tx: Session, number: int, detail: str) -> None:
    """Record why an engine waits; its next published status replaces the reason."""
    own = update(EngineStateRow).where(col(EngineStateRow.number) == number)
    execute(tx, own.values(detail=detail, updated_at=get_shared_time(tx)))


def list_engines(tx: Session) -> list[EngineStateRow]:
    """Return the latest status of each engine that ever ran, by number."""
    return list(tx.exec(select(EngineStateRow).order_by(col(EngineStateRow.number))))


def choose_main_engine(rows: Sequence[EngineStateRow]) -> EngineStateRow | None:
    """Return the status that says whether requests are executed: a ready engine's if there is one; None without any."""
    newest = max((row.updated_at for row in rows), default=0.0)
    return max(rows, key=lambda row: (is_ready(row, newest), row.updated_at), default=None)


def sum_meters(rows: Sequence[EngineStateRow]) -> Mapping[str, object] | None:
    """Return the sums of what the engines that run have published; None if there is none."""
    newest = max((row.updated_at for row in rows), default=0.0)
    found = [row.meters for row in rows if row.meters is not None and is_running(row, newest)]
    return cast(Mapping[str, object], reduce(_add_meters, found)) if found else None


def get_outage(rows: Sequence[EngineStateRow]) -> str | None:
    """Return which part of a backend does not work, as the first engine with one says; None if all work."""
    return _get_backend_text(rows, "outage")


def get_progress(rows: Sequence[EngineStateRow]) -> str | None:
    """Return the progress of a backend's work in the background, of the first engine with such work; None without."""
    return _get_backend_text(rows, "progress")


def _get_backend_text(rows: Sequence[EngineStateRow], name: str) -> str | None:
    backend = (sum_meters(rows) or {}).get("backend")
    found = cast(Mapping[str, object], backend).get(name) if isinstance(backend, dict) else None
    return None if found is None else str(found)


def _add_meters(one: object, other: object) -> object:
    """Add numbers, join lists, and do both in mappings; what only one has stays as it is, and maxima are no sums."""
    if isinstance(one, dict) and isinstance(other, dict):
        first, second = cast(dict[str, Any], one), cast(dict[str, Any], other)
        both = first.keys() & second.keys()
        added = {name: (max if name in _MAXIMA else _add_meters)(first[name], second[name]) for name in both}
        return {**second, **first, **added}
    if isinstance(one, list) and isinstance(other, list):
        return [*cast(list[object], one), *cast(list[object], other)]
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return cast(object, one)


def is_running(row: EngineStateRow, now: float, silence_s: float = FRESH_S) -> bool:
    """Whether an engine has published a status within `silence_s`. `now` is a `get_shared_time`."""
    return now - row.updated_at <= silence_s


def is_ready(row: EngineStateRow, now: float, silence_s: float = FRESH_S) -> bool:
    """Whether an engine that `is_running` has said that it executes requests."""
    return row.status == "ready" and is_running(row, now, silence_s)


def get(tx: Session) -> EngineStateRow | None:
    """Return the latest status of the `choose_main_engine`, or None if no engine ever ran."""
    return choose_main_engine(list_engines(tx))


def make_boot_id() -> str:
    """Return a random id of a run of an engine, which no other run ever has."""
    return secrets.token_hex(8)


def find_number(tx: Session, boot_id: str) -> int | None:
    """Return the number of a run of an engine; None if it has published no status, or another run has its number."""
    return tx.exec(select(EngineStateRow.number).where(col(EngineStateRow.boot_id) == boot_id)).first()


def read_sample_load(row: EngineStateRow | None) -> SampleLoad | None:
    """Return the published memory load of an engine's queued samples, or None if it is unknown."""
    if row is None or row.load is None:
        return None
    return SampleLoad(**row.load)  # pyright: ignore[reportArgumentType]


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
