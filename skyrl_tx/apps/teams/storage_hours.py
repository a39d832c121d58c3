"""The storage of checkpoints by hour, which the engine records once in each hour that it runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, exists, insert, literal, select
from sqlmodel import Session, col

from skyrl_tx.apps.teams.tables import StorageHourRow
from skyrl_tx.apps.teams.usage import HOUR_S, RETENTION_S
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store.checkpoints import is_visible, sum_bytes
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import CheckpointRow, ModelRow, SessionRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageHour:
    """The size of a session's checkpoints in one hour."""

    hour_at: int
    session_id: SessionId
    owner: str
    project_id: str | None
    """The project that the session belongs to now."""
    num_bytes: int


def record_hour(tx: Session, now: float) -> bool:
    """Record the storage of the current hour. Return False if it was recorded before.

    Hours older than `RETENTION_S` are deleted.
    """
    hour_at = int(now) // HOUR_S * HOUR_S
    if execute(tx, select(exists().where(col(StorageHourRow.hour_at) == hour_at))).scalar():
        return False

    stored = (
        select(literal(hour_at), col(SessionRow.session_id), col(SessionRow.owner), sum_bytes())
        .join(ModelRow, col(ModelRow.session_id) == col(SessionRow.session_id))
        .join(CheckpointRow, col(CheckpointRow.model_id) == col(ModelRow.model_id))
        .where(is_visible(now))
        .group_by(col(SessionRow.session_id), col(SessionRow.owner))
    )
    execute(tx, insert(StorageHourRow).from_select(["hour_at", "session_id", "owner", "num_bytes"], stored))
    execute(tx, delete(StorageHourRow).where(col(StorageHourRow.hour_at) < int(now - RETENTION_S)))
    return True


def read_hours(
    tx: Session, owner: str | None, since: float, until: float | None = None, *, limit: int = 10_000
) -> Sequence[StorageHour]:
    """Return the recorded hours from `since` until `until`, in order.

    `owner` None means all owners.
    """
    row = StorageHourRow
    statement = (
        select(col(row.hour_at), col(row.session_id), col(row.owner), col(SessionRow.project_id), col(row.num_bytes))
        .outerjoin(SessionRow, col(SessionRow.session_id) == col(row.session_id))
        .where(col(row.hour_at) >= int(since) // HOUR_S * HOUR_S)
        .order_by(col(row.hour_at), col(row.session_id))
        .limit(limit)
    )
    if until is not None:
        statement = statement.where(col(row.hour_at) < until)
    if owner is not None:
        statement = statement.where(col(row.owner) == owner)

    return [
        StorageHour(hour_at=hour_at, session_id=session_id, owner=row_owner, project_id=project_id, num_bytes=num_bytes)
        for hour_at, session_id, row_owner, project_id, num_bytes in execute(tx, statement)
    ]
