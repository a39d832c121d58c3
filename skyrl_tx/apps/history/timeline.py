"""Reads when the requests of a session arrived, started and ended.

Completed passes and optimizer steps are not among them: their points have the same times and are kept longer. So the
large bodies of passes are not read.
"""

from dataclasses import dataclass

from sqlalchemy import Select, literal_column, select
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId, SessionId
from skyrl_tx.store.database import execute, execute_in_batches, is_in_batch
from skyrl_tx.store.tables import RequestRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """A stored request without its body and result; times are seconds since the epoch."""

    position: int
    request_id: RequestId
    kind: str
    model_id: ModelId | None
    sampling_session_id: SamplingSessionId | None
    seq_id: int | None
    status: str
    created_at: float
    started_at: float | None
    completed_at: float | None


_COLUMNS = (
    col(RequestRow.position),
    col(RequestRow.request_id),
    col(RequestRow.kind),
    col(RequestRow.model_id),
    col(RequestRow.sampling_session_id),
    col(RequestRow.seq_id),
    col(RequestRow.status),
    col(RequestRow.created_at),
    col(RequestRow.started_at),
    col(RequestRow.completed_at),
)
_WITH_POINTS = ("model_pass", "optim_step")
_LOOKED_AT = 5
"""Rows that are looked at for each one that is wanted."""
_MAX_PASSES = 200
"""Open and failed passes that are read: SQLite reads the body of a row before the columns behind it."""


def requests_of_session(tx: Session, session_id: SessionId, limit: int, after: int = 0) -> list[RequestTimes]:
    """Return the newest requests of a session after a position, in order of arrival.

    Those whose rows are pruned are missing, and completed ones that have a point.
    """
    of_session = (col(RequestRow.session_id) == session_id) & (col(RequestRow.position) > after)
    newest = _heads().where(of_session).limit(limit * _LOOKED_AT).subquery().c
    others = select(newest.position).where(newest.kind.not_in(_WITH_POINTS)).limit(limit)
    positions = set(execute(tx, others.order_by(newest.position.desc())).scalars())
    for status in ("open", "failed"):
        of_status = of_session & (col(RequestRow.status) == literal_column(f"'{status}'"))
        positions |= {position for position, _ in execute(tx, _heads().where(of_status).limit(_MAX_PASSES))}
    wanted = select(*_COLUMNS).where(is_in_batch(col(RequestRow.position)))
    chosen = sorted(positions, reverse=True)[:limit]
    rows = sorted(execute_in_batches(tx, wanted, chosen), key=lambda row: row.position)
    return [RequestTimes(**row._mapping) for row in rows]


def _heads() -> Select[int | None, str]:
    """Return a query of columns before the body, newest first."""
    return select(col(RequestRow.position), col(RequestRow.kind)).order_by(col(RequestRow.position).desc())
