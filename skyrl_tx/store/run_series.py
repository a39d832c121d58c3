"""Reads what runs did, request by request."""

from collections.abc import Collection, Sequence

from sqlalchemy import func
from sqlalchemy import select as select_columns
from sqlmodel import Session, col, select

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store.database import execute
from skyrl_tx.store.history_tables import PointKind, RunPointRow


def read_points(tx: Session, model_id: ModelId, *, after: int = 0, limit: int = 1000) -> Sequence[RunPointRow]:
    """Return points of a run after a position, in order of arrival."""
    wanted = (
        select(RunPointRow)
        .where(col(RunPointRow.model_id) == model_id, col(RunPointRow.position) > after)
        .order_by(col(RunPointRow.position))
    )
    return tx.exec(wanted.limit(limit)).all()


def last_points(
    tx: Session, model_id: ModelId, *, kinds: Collection[PointKind] = ("train", "forward", "step"), limit: int
) -> Sequence[RunPointRow]:
    """Return the last points of these kinds of a run, in order of arrival."""
    wanted = (
        select(RunPointRow)
        .where(col(RunPointRow.model_id) == model_id, col(RunPointRow.kind).in_(kinds))
        .order_by(col(RunPointRow.position).desc())
    )
    return tx.exec(wanted.limit(limit)).all()[::-1]


def count_points(tx: Session, model_id: ModelId) -> int:
    """Return the number of points of a run."""
    return execute(tx, select_columns(func.count()).where(col(RunPointRow.model_id) == model_id)).scalar_one()
