"""Numbers about the whole store, for metrics and the status screen."""

from dataclasses import dataclass

from sqlalchemy import bindparam, func, literal_column, select
from sqlmodel import Session, col

from skyrl_tx.store.checkpoints import is_visible
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import CheckpointRow, RequestRow, SessionRow, SnapshotRow

ACTIVE_S = 60.0
"""Time since its last heartbeat for which a session counts as active. Clients send one each ten seconds."""
_IS_OPEN = col(RequestRow.status) == literal_column("'open'")  # a literal, so that the partial index is used
_NUM_OPEN = select(func.count()).select_from(RequestRow).where(_IS_OPEN)
_OLDEST = select(col(RequestRow.created_at)).where(_IS_OPEN).order_by(col(RequestRow.position)).limit(1)
_ACTIVE = (
    select(func.count())
    .select_from(SessionRow)
    .where(col(SessionRow.finished_at).is_(None), col(SessionRow.last_heartbeat_at) > bindparam("after"))
)


@dataclass(frozen=True, slots=True)
class StoreTotals:
    """Requests without a result and active sessions; the creation of the oldest such request in epoch seconds."""

    num_open: int
    oldest_at: float | None
    num_active_sessions: int


def read(tx: Session, now: float) -> StoreTotals:
    """Count open requests and active sessions."""
    return StoreTotals(
        num_open=execute(tx, _NUM_OPEN).scalar_one(),
        oldest_at=execute(tx, _OLDEST).scalar_one_or_none(),
        num_active_sessions=execute(tx, _ACTIVE, {"after": now - ACTIVE_S}).scalar_one(),
    )


def artifacts(tx: Session, now: float) -> dict[str, tuple[int, int | None]]:
    """Return the number and the bytes of the visible checkpoints of each kind, and of the snapshots without bytes."""
    size = func.coalesce(func.sum(col(CheckpointRow.size_bytes)), 0)
    wanted = (
        select(col(CheckpointRow.kind), func.count(), size).where(is_visible(now)).group_by(col(CheckpointRow.kind))
    )
    found: dict[str, tuple[int, int | None]] = {
        str(getattr(kind, "value", kind)): (count, int(num_bytes)) for kind, count, num_bytes in execute(tx, wanted)
    }
    num_snapshots = execute(tx, select(func.count()).select_from(SnapshotRow)).scalar_one()
    return {**found, "snapshot": (num_snapshots, None)}
