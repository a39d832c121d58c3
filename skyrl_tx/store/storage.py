"""How much is stored: checkpoints, counted and summed."""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlmodel import Session, col

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store.checkpoints import lasting, total_bytes
from skyrl_tx.store.tables import CheckpointRow, ModelRow, SessionRow


@dataclass(frozen=True, slots=True)
class Stored:
    """How many checkpoints there are of something, and how long their files are together."""

    num_checkpoints: int = 0
    num_bytes: int = 0


_COUNTED = (func.count(), total_bytes())


def of_sessions(tx: Session, session_ids: Collection[SessionId], now: float) -> dict[SessionId, Stored]:
    """What is stored of each of the sessions that have checkpoints."""
    wanted = (
        select(col(ModelRow.session_id), *_COUNTED)
        .join(CheckpointRow, col(CheckpointRow.model_id) == col(ModelRow.model_id))
        .where(col(ModelRow.session_id).in_(session_ids), lasting(now))
        .group_by(col(ModelRow.session_id))
    )
    return {session_id: Stored(count, size) for session_id, count, size in tx.connection().execute(wanted)}


def of_owners(
    tx: Session, owner: str | None, project_id: str | None, now: float
) -> list[tuple[str, str | None, Stored]]:
    """What is stored for an owner (None: for each), by owner and project; a project confines it."""
    groups = col(SessionRow.owner), col(SessionRow.project_id)
    wanted = (
        select(*groups, *_COUNTED)
        .join(ModelRow, col(ModelRow.session_id) == col(SessionRow.session_id))
        .join(CheckpointRow, col(CheckpointRow.model_id) == col(ModelRow.model_id))
        .where(lasting(now))
        .group_by(*groups)
        .order_by(*groups)
    )
    if owner is not None:
        wanted = wanted.where(groups[0] == owner)
    if project_id is not None:
        wanted = wanted.where(groups[1] == project_id)
    rows = tx.connection().execute(wanted)
    return [(whose, project, Stored(count, size)) for whose, project, count, size in rows]
