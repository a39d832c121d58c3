"""Samples that their clients cancelled, until the engine has read the cancellations."""

from typing import Literal

from sqlalchemy import bindparam, delete, insert, select
from sqlmodel import Session, col

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store import futures
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import CancellationRow, RequestRow

_INSERT = insert(CancellationRow).from_select(
    ["request_id", "engine"],
    select(col(RequestRow.request_id), col(RequestRow.engine)).where(col(RequestRow.request_id) == bindparam("name")),
)


def cancel(
    tx: Session, request_id: RequestId, owner: str | None, failure: bytes, now: float
) -> Literal["cancelled", "over", "no sample"]:
    """Complete an open sample with the encoded `failure` and queue the cancellation for the engine.

    Returns "over" if the request is complete or unknown, and "no sample" for a request of another kind.
    """
    state = futures.result(tx, request_id, owner)
    if state.status == "unknown":
        return "over"
    if state.kind != "sample":
        return "no sample"
    if not futures.complete(tx, request_id, failure, failed=True, effect_order=None, now=now):
        return "over"
    execute(tx, _INSERT, {"name": request_id})
    return "cancelled"


_CANCELLED_SINCE = (
    select(col(CancellationRow.position), col(CancellationRow.request_id))
    .where(col(CancellationRow.position) > bindparam("after"), col(CancellationRow.engine) == bindparam("engine"))
    .order_by(col(CancellationRow.position))
)


def cancelled_since(tx: Session, position: int, engine: int = 1) -> list[tuple[int, RequestId]]:
    """Return position and request of the cancellations of an engine's samples after a position."""
    rows = execute(tx, _CANCELLED_SINCE, {"after": position, "engine": engine})
    return [(int(found or 0), request_id) for found, request_id in rows]


def forget(tx: Session, position: int | None = None, *, engine: int = 1) -> None:
    """Delete the cancellations up to a position that an engine has read; None deletes all of its own, for its start."""
    read = delete(CancellationRow).where(col(CancellationRow.engine) == engine)
    if position is not None:
        read = read.where(col(CancellationRow.position) <= position)
    execute(tx, read)
