"""Samples that clients want no more: answered at once, and named here until the engine has heard of it."""

from typing import Literal

from sqlalchemy import delete, select
from sqlmodel import Session, col

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store import futures
from skyrl_tx.store.tables import CancellationRow

_SAMPLE = "sample"


def cancel(
    tx: Session, request_id: RequestId, owner: str | None, result: bytes, now: float
) -> Literal["cancelled", "over", "no sample"]:
    """Answer an open sample with a failure; "over": it is answered already, or there is no such request."""
    state = futures.result(tx, request_id, owner)
    if state.status == "unknown":
        return "over"
    if state.kind != _SAMPLE:
        return "no sample"
    if not futures.complete(tx, request_id, result, failed=True, effect_order=None, now=now):
        return "over"
    tx.add(CancellationRow(request_id=request_id))
    tx.flush()
    return "cancelled"


def since(tx: Session, position: int) -> list[tuple[int, RequestId]]:
    """Samples cancelled after a position, and their positions."""
    place = col(CancellationRow.position)
    wanted = select(place, col(CancellationRow.request_id)).where(place > position).order_by(place)
    return [(int(found or 0), request_id) for found, request_id in tx.connection().execute(wanted)]


def forget(tx: Session, position: int | None = None) -> None:
    """Drop what was heard of, up to a position; None: all, by an engine that begins and has read nothing yet."""
    gone = delete(CancellationRow)
    if position is not None:
        gone = gone.where(col(CancellationRow.position) <= position)
    tx.connection().execute(gone)
