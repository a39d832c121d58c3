"""Open work, active sessions and failed requests, for metrics, `status` and the console."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, bindparam, case, cast, func, or_, select
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store.database import execute
from skyrl_tx.store.engine_state import Pause, is_paused
from skyrl_tx.store.futures import IS_OPEN
from skyrl_tx.store.tables import CustomLossRow, RequestRow, SamplingSessionRow, SessionRow

ACTIVE_S = 60.0
"""A session is active for this time after its last heartbeat.

Clients send a heartbeat every ten seconds.
"""
_NUM_OPEN = select(func.count()).select_from(RequestRow).where(IS_OPEN)
_OLDEST = (
    select(col(RequestRow.created_at))
    .join(SessionRow, col(SessionRow.session_id) == col(RequestRow.session_id))
    .where(IS_OPEN)
    .order_by(col(RequestRow.position))
    .limit(1)
)
_ACTIVE = (
    select(func.count())
    .select_from(SessionRow)
    .where(col(SessionRow.finished_at).is_(None), col(SessionRow.last_heartbeat_at) > bindparam("after"))
)


_NUM_BYTES = func.length(col(RequestRow.body)) + func.coalesce(func.length(col(RequestRow.result)), 0)
_METADATA_BYTES = func.length(cast(col(SessionRow.user_metadata), Text)) + func.length(cast(col(SessionRow.tags), Text))
_ROW_BYTES = 256
_NO_LIMIT = 2**60


def _sum_requests(condition: ColumnElement[bool]) -> Select[Any, Any]:
    """Sum the sizes of requests and results by owner.

    `_NO_LIMIT` makes SQLite compute the sizes before it sorts by owner. Without a limit in the
    query, SQLite would sort the contents, which takes 40 times as long.
    """
    owner, num_bytes = col(RequestRow.owner), _NUM_BYTES.label("num_bytes")
    sizes = select(owner, num_bytes).where(condition).limit(_NO_LIMIT).subquery()
    return select(sizes.c.owner, func.sum(sizes.c.num_bytes)).group_by(sizes.c.owner)


_STORED = (
    # Each condition has its own partial index, so that requests without contents are not read.
    _sum_requests(IS_OPEN),
    _sum_requests(col(RequestRow.result).is_not(None)),
    select(col(SessionRow.owner), func.sum(_METADATA_BYTES + _ROW_BYTES)).group_by(col(SessionRow.owner)),
    select(col(SessionRow.owner), func.count() * _ROW_BYTES)
    .join(SamplingSessionRow, col(SamplingSessionRow.session_id) == col(SessionRow.session_id))
    .group_by(col(SessionRow.owner)),
    select(col(CustomLossRow.owner), func.sum(func.length(col(CustomLossRow.body)))).group_by(col(CustomLossRow.owner)),
)


def count_stored_bytes(tx: Session) -> Counter[str]:
    """Return the bytes of each owner in sessions, requests, results and custom losses."""
    total: Counter[str] = Counter()
    for statement in _STORED:
        total.update({owner: int(num_bytes) for owner, num_bytes in execute(tx, statement)})
    return total


@dataclass(frozen=True, slots=True)
class StoreTotals:
    """Counts of the whole store."""

    num_open: int
    """Requests without a result."""
    oldest_at: float | None
    """Unix time at which the oldest open request was created, without requests that are paused."""
    num_active_sessions: int


def read_totals(tx: Session, now: float, pauses: Collection[Pause] = ()) -> StoreTotals:
    """Count open requests and active sessions, and find the oldest open request.

    Requests that have not started because of one of the `pauses` are ignored in the search for the
    oldest request.
    """
    is_counted = or_(col(RequestRow.attempts) > 0, ~is_paused(pauses))
    return StoreTotals(
        num_open=execute(tx, _NUM_OPEN).scalar_one(),
        oldest_at=execute(tx, _OLDEST.where(is_counted)).scalar_one_or_none(),
        num_active_sessions=execute(tx, _ACTIVE, {"after": now - ACTIVE_S}).scalar_one(),
    )


@dataclass(frozen=True, slots=True)
class OpenWork:
    """The open requests of one kind from one owner for one model. Samples have no `model_id`."""

    owner: str
    model_id: ModelId | None
    kind: str
    num_waiting: int
    num_running: int
    oldest_at: float


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A failed request whose result is still stored."""

    at: float
    owner: str
    kind: str
    model_id: ModelId | None
    result: bytes


_IS_RUNNING = case((col(RequestRow.attempts) > 0, 1), else_=0)
_OPEN_WORK = (
    select(
        col(RequestRow.owner),
        col(RequestRow.model_id),
        col(RequestRow.kind),
        func.count(),
        func.sum(_IS_RUNNING),
        func.min(col(RequestRow.created_at)),
    )
    .where(IS_OPEN)
    .group_by(col(RequestRow.owner), col(RequestRow.model_id), col(RequestRow.kind))
    .order_by(func.sum(_IS_RUNNING).desc(), func.count().desc())
    .limit(bindparam("limit"))
)
_FAILED = (
    select(
        col(RequestRow.completed_at),
        col(RequestRow.owner),
        col(RequestRow.kind),
        col(RequestRow.model_id),
        col(RequestRow.result),
    )
    .where(col(RequestRow.status) == "failed", col(RequestRow.result).is_not(None))
    .order_by(col(RequestRow.answer_order).desc())
    .limit(bindparam("limit"))
)


def list_open_work(tx: Session, limit: int = 100) -> list[OpenWork]:
    """Count the open requests by owner, model and kind.

    Groups with the most running requests come first. The query reads all open requests.
    """
    return [
        OpenWork(owner, model_id, kind, count - int(running), int(running), oldest_at)
        for owner, model_id, kind, count, running, oldest_at in execute(tx, _OPEN_WORK, {"limit": limit})
    ]


def list_failed(tx: Session, limit: int = 5) -> list[FailedRequest]:
    """Return the newest failed requests, newest first."""
    return [
        FailedRequest(at or 0.0, owner, kind, model_id, result or b"")
        for at, owner, kind, model_id, result in execute(tx, _FAILED, {"limit": limit})
    ]
