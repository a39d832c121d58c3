"""Reads when the requests of a session arrived, started and ended."""

from dataclasses import dataclass

from sqlalchemy import select
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId, SessionId
from skyrl_tx.store.database import execute
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


_REQUESTS = select(
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
).order_by(col(RequestRow.position).desc())


def requests_of_session(tx: Session, session_id: SessionId, limit: int) -> list[RequestTimes]:
    """Return the newest requests of a session whose rows are not pruned yet, in order of arrival."""
    rows = execute(tx, _REQUESTS.where(col(RequestRow.session_id) == session_id).limit(limit)).all()
    return [
        RequestTimes(
            position=row.position or 0,
            request_id=row.request_id,
            kind=row.kind,
            model_id=row.model_id,
            sampling_session_id=row.sampling_session_id,
            seq_id=row.seq_id,
            status=row.status,
            created_at=row.created_at,
            started_at=row.started_at,
            completed_at=row.completed_at,
        )
        for row in reversed(rows)
    ]
