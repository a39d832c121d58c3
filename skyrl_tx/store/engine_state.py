"""The status that each engine publishes every second, and the server's gauges over time.

The status contains the pauses: owners, keys and projects whose requests wait because of a quota.
"""

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from heapq import nlargest
from typing import Any, Literal, cast

from sqlalchemy import ColumnElement, and_, delete, false, or_, text, update
from sqlalchemy import select as select_columns
from sqlmodel import Session, col, select

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import EngineStateRow, RequestRow, ServerPointRow, SessionRow, SubjectKind

REQUEST_BYTES = 4096
"""Upper estimate of the memory of a queued sample request, in addition to its prompt."""

FRESH_S = 10.0
"""An engine counts as running if its status is at most this old. Engines publish every second."""
_MAX_PUBLISHED_OWNERS = 256
_MAXIMA = frozenset({"trainer_gap_max_nats"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLoad:
    """Memory of an engine's queued sample requests.

    Each request counts `REQUEST_BYTES` in addition to its prompt.
    """

    position: int
    """Requests that arrived later are not included."""
    num_bytes: int
    max_bytes: int
    by_owner: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes of the owners with the most bytes, see `take_largest_owners`."""
    num_requests: int = 0
    """Number of sample requests without a result."""


def take_largest_owners(num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the 256 owners with the most bytes, so that the published status stays small."""
    if len(num_bytes) <= _MAX_PUBLISHED_OWNERS:
        return dict(num_bytes)
    return dict(nlargest(_MAX_PUBLISHED_OWNERS, num_bytes.items(), key=lambda owner: owner[1]))


_DATABASE_TIME = text("SELECT extract(epoch FROM clock_timestamp())::float8")


def get_shared_time(tx: Session) -> float:
    """Return the time of a clock that all processes share, in seconds since the epoch.

    With PostgreSQL this is the clock of the database server, because the clocks of two machines may
    differ by more than `FRESH_S`. With SQLite all processes run on this machine.
    """
    connection = tx.connection()
    return connection.execute(_DATABASE_TIME).scalar_one() if connection.dialect.name == "postgresql" else time.time()


def publish(tx: Session, row: EngineStateRow) -> None:
    """Replace the status of an engine."""
    tx.merge(row)


def report_waiting(tx: Session, number: int, detail: str) -> None:
    """Record why an engine waits. The next status of the engine replaces the reason."""
    statement = update(EngineStateRow).where(col(EngineStateRow.number) == number)
    execute(tx, statement.values(detail=detail, updated_at=get_shared_time(tx)))


def list_engines(tx: Session) -> list[EngineStateRow]:
    """Return the latest status of every engine that ever ran, ordered by number."""
    return list(tx.exec(select(EngineStateRow).order_by(col(EngineStateRow.number))))


def choose_main_engine(rows: Sequence[EngineStateRow]) -> EngineStateRow | None:
    """Return the status of a ready engine, or else the newest status; None without any status."""
    newest = max((row.updated_at for row in rows), default=0.0)
    return max(rows, key=lambda row: (is_ready(row, newest), row.updated_at), default=None)


def sum_meters(rows: Sequence[EngineStateRow]) -> Mapping[str, object] | None:
    """Return the sums of the meters of all running engines, or None if there are none."""
    newest = max((row.updated_at for row in rows), default=0.0)
    meters = [row.meters for row in rows if row.meters is not None and is_running(row, newest)]
    return cast(Mapping[str, object], reduce(_add_meters, meters)) if meters else None


def can_sample(rows: Sequence[EngineStateRow]) -> bool:
    """Return whether samples can be drawn: not all sampling servers are lost, or the trainer draws them."""
    meters = sum_meters(rows) or {}
    backend = cast(Mapping[str, int], meters.get("backend", {}))
    num_servers, num_lost = backend.get("sampler_servers", 0), backend.get("sampler_servers_lost", 0)
    return not num_servers or num_lost < num_servers or "fallback_samples" in backend


def get_backend_text(rows: Sequence[EngineStateRow], name: Literal["outage", "progress"]) -> str | None:
    """Return what a backend reports about itself, or None.

    `outage` names a part of the backend that does not work, and `progress` describes background
    work. If multiple engines report one, the first is returned.
    """
    backend = (sum_meters(rows) or {}).get("backend")
    text = cast(Mapping[str, object], backend).get(name) if isinstance(backend, dict) else None
    return None if text is None else str(text)


def _add_meters(one: object, other: object) -> object:
    """Add the meters of two engines.

    Numbers are added, lists are joined, and mappings are merged recursively. A key that only one
    engine has keeps its value. For keys in `_MAXIMA` the larger value is kept.
    """
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
    """Return whether an engine has published a status within `silence_s`.

    `now` comes from `get_shared_time`.
    """
    return now - row.updated_at <= silence_s


def is_ready(row: EngineStateRow, now: float, silence_s: float = FRESH_S) -> bool:
    """Return whether an engine is running and executes requests."""
    return row.status == "ready" and is_running(row, now, silence_s)


def get(tx: Session) -> EngineStateRow | None:
    """Return the status that `choose_main_engine` selects, or None if no engine ever ran."""
    return choose_main_engine(list_engines(tx))


def make_boot_id() -> str:
    """Return a random id for one run of an engine."""
    return secrets.token_hex(8)


def find_number(tx: Session, boot_id: str) -> int | None:
    """Return the number of an engine by the boot id of its run.

    Returns None if the run has not published a status yet, or if a later run has taken its number.
    """
    return tx.exec(select(EngineStateRow.number).where(col(EngineStateRow.boot_id) == boot_id)).first()


def read_sample_load(row: EngineStateRow | None) -> SampleLoad | None:
    """Return the memory load that an engine has published, or None if it has published none."""
    if row is None or row.load is None:
        return None
    return SampleLoad(**row.load)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The reason why requests of an owner, a key or a project wait."""

    subject_kind: SubjectKind
    subject: str
    """The owner, the number of the key, or the project."""
    limit: str
    """The name of the limit that was reached, for example `training_tokens_per_day`.

    If the name starts with `training_`, training requests wait, otherwise sample requests.
    """
    reason: str
    """Message for clients."""

    @property
    def concerns_training(self) -> bool:
        """Whether training requests wait. Otherwise sample requests wait."""
        return self.limit.startswith("training_")


def collect_pauses(*rows: EngineStateRow | None) -> tuple[Pause, ...]:
    """Return the pauses that engines have published, without duplicates."""
    pauses = [Pause(**pause) for row in rows if row is not None for pause in row.pauses or ()]  # pyright: ignore
    return tuple(dict.fromkeys(pauses))


def belongs_to_subject(kind: SubjectKind, name: str) -> ColumnElement[bool]:
    """Return the condition that a session belongs to an owner, a key or a project."""
    match kind:
        case "owner":
            return col(SessionRow.owner) == name
        case "key":
            return col(SessionRow.key_id) == int(name)
        case "project":
            return col(SessionRow.project_id) == name


def is_paused(pauses: Collection[Pause]) -> ColumnElement[bool]:
    """Return the condition that a request is paused. The query must join the request's session."""
    is_sample: ColumnElement[bool] = col(RequestRow.kind) == "sample"
    conditions = (
        and_(
            ~is_sample if pause.concerns_training else is_sample, belongs_to_subject(pause.subject_kind, pause.subject)
        )
        for pause in pauses
    )
    return or_(false(), *conditions)


def find_wait_reason(tx: Session, request_id: RequestId, pauses: Collection[Pause]) -> str | None:
    """Return the reason of the pause that a request waits for.

    Returns None if the request has started or has a result, or if no pause concerns it.
    """
    statement = (
        select_columns(col(RequestRow.kind), col(SessionRow.owner), col(SessionRow.key_id), col(SessionRow.project_id))
        .join(SessionRow, col(SessionRow.session_id) == col(RequestRow.session_id))
        .where(
            col(RequestRow.request_id) == request_id, col(RequestRow.status) == "open", col(RequestRow.attempts) == 0
        )
    )
    row: Any = execute(tx, statement).first()
    if row is None:
        return None

    kind, owner, key_id, project_id = row
    subjects = {("owner", owner), ("key", str(key_id)), ("project", project_id)}
    return next(
        (
            pause.reason
            for pause in pauses
            if pause.concerns_training is (kind != "sample") and (pause.subject_kind, pause.subject) in subjects
        ),
        None,
    )


PERIOD_S = 10
"""Times of the gauges are multiples of this, so that multiple API processes write a single row."""
_FINE_S, _COARSE_S = 86_400, 30 * 86_400
_MINUTE_S = 60
_GAUGES_AT = col(ServerPointRow.at)


def add_gauges(tx: Session, at: int, values: Mapping[str, float]) -> None:
    """Store the gauges of one time, a multiple of `PERIOD_S`.

    Does nothing if another process was first.
    """
    assert at % PERIOD_S == 0, at
    if tx.get(ServerPointRow, at) is None:
        tx.add(ServerPointRow(at=at, values=values))


def thin_gauges(tx: Session, now: float) -> int:
    """Delete old gauges and return the number of deleted rows.

    After a day one row per minute is kept, and after 30 days none.
    """
    is_fine = (int(now) - _FINE_S > _GAUGES_AT) & (_GAUGES_AT % _MINUTE_S != 0)
    return execute(tx, delete(ServerPointRow).where(or_(is_fine, int(now) - _COARSE_S > _GAUGES_AT))).rowcount


def list_gauges(tx: Session, after: float, limit: int = 10_000) -> list[tuple[int, Mapping[str, float]]]:
    """Return the gauges after a time, each with its time, in order."""
    statement = (
        select(_GAUGES_AT, col(ServerPointRow.values)).where(int(after) < _GAUGES_AT).order_by(_GAUGES_AT).limit(limit)
    )
    return [(at, values) for at, values in execute(tx, statement)]
