"""Answers in the order in which they were given, for whoever waits for them."""

from dataclasses import dataclass

from sqlalchemy import bindparam, func, select
from sqlmodel import Session, col

from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.store.tables import AnswerCounterRow, RequestRow

CLONE_STRIDE = 1_000_000_000
"""Copies of a sampling client number their requests from a multiple of this (tinker/lib/public_interfaces)."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample that was answered, at a place in the order of answers."""

    answer_order: int
    request_id: RequestId
    failed: bool
    num_bytes: int
    """Of the stored result; 0 once that is pruned."""


_order = col(RequestRow.answer_order)
_LAST = select(col(AnswerCounterRow.value))
_SINCE = (
    select(_order, col(RequestRow.request_id), col(RequestRow.sampling_session_id))
    .where(_order > bindparam("after"))
    .order_by(_order)
    .limit(bindparam("limit"))
)
_OF_CLIENT = (
    select(
        _order,
        col(RequestRow.request_id),
        col(RequestRow.status) == "failed",
        func.coalesce(func.length(col(RequestRow.result)), 0),
    )
    .where(
        col(RequestRow.sampling_session_id) == bindparam("sampling_session_id"),
        _order > bindparam("after"),
        func.coalesce(col(RequestRow.seq_id), 0).between(bindparam("first"), bindparam("last")),
    )
    .order_by(_order)
    .limit(bindparam("limit"))
)


def last_order(tx: Session) -> int:
    """The place of the newest answer; 0 if there is none."""
    return tx.connection().execute(_LAST).scalar_one_or_none() or 0


def since(tx: Session, after: int, limit: int) -> list[tuple[int, RequestId, SamplingSessionId | None]]:
    """Answers of any kind after a place: their places, requests and sampling sessions."""
    rows = tx.connection().execute(_SINCE, {"after": after, "limit": limit})
    return [(int(order or 0), request_id, sampling_session_id) for order, request_id, sampling_session_id in rows]


def of_client(
    tx: Session, sampling_session_id: SamplingSessionId, clone: int, after: int, limit: int
) -> list[Completion]:
    """Answers after a place to one client of a sampling session: clone 0 is the original, the others are copies."""
    first = clone * CLONE_STRIDE
    where = {"sampling_session_id": sampling_session_id, "first": first, "last": first + CLONE_STRIDE - 1}
    rows = tx.connection().execute(_OF_CLIENT, {**where, "after": after, "limit": limit})
    return [Completion(*row) for row in rows]
