"""The order in which requests were completed, and the samples that were completed because their clients cancelled them.

Readers keep a position in either as their cursor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from sqlalchemy import bindparam, delete, func, insert, select, update
from sqlmodel import Session, col

from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.contract.results import TopK
from skyrl_tx.store import futures
from skyrl_tx.store.database import execute
from skyrl_tx.store.futures import CLONE_STRIDE
from skyrl_tx.store.tables import AnswerCounterRow, CancellationRow, PartialRow, RequestRow


@dataclass(frozen=True, slots=True)
class SampleCompletion:
    """A completed sample request and its position in the completion order."""

    answer_order: int
    request_id: RequestId
    failed: bool
    num_bytes: int
    """Size of the stored result; 0 once it is pruned."""


_RAISE_COUNTER = (
    update(AnswerCounterRow)
    .where(col(AnswerCounterRow.value) < bindparam("at_least"))
    .values(value=bindparam("at_least"))
)


def skip_seen_positions(tx: Session, now: float) -> None:
    """Let completion positions continue above those that any client has seen; called when an engine starts.

    A replica that lagged at a failover, or a restored copy, would assign the positions of lost completions again, and
    cursors would hide the new ones. Milliseconds since 1970 are above all of them, unless more than 1,000 requests a
    second were completed on average.
    """
    execute(tx, _RAISE_COUNTER, {"at_least": int(now * 1000)})


_ORDER = col(RequestRow.answer_order)
_LAST_COMPLETION = select(col(AnswerCounterRow.value))
_COMPLETED_SINCE = (
    select(_ORDER, col(RequestRow.request_id), col(RequestRow.sampling_session_id), col(RequestRow.completed_at))
    .where(bindparam("after") < _ORDER)
    .order_by(_ORDER)
    .limit(bindparam("limit"))
)
_COMPLETIONS_OF_CLIENT = (
    select(
        _ORDER,
        col(RequestRow.request_id),
        col(RequestRow.status) == "failed",
        func.coalesce(func.length(col(RequestRow.result)), 0),
    )
    .where(
        col(RequestRow.sampling_session_id) == bindparam("sampling_session_id"),
        bindparam("after") < _ORDER,
        func.coalesce(col(RequestRow.seq_id), 0).between(bindparam("first"), bindparam("last")),
    )
    .order_by(_ORDER)
    .limit(bindparam("limit"))
)


def get_last_position(tx: Session) -> int:
    """Return the position of the newest completion; 0 if there is none."""
    return execute(tx, _LAST_COMPLETION).scalar_one_or_none() or 0


def list_completed(tx: Session, after: int, limit: int) -> list[tuple[int, RequestId, SamplingSessionId | None, float]]:
    """Return position, request, sampling session and time of the completions of any kind after a position."""
    rows = execute(tx, _COMPLETED_SINCE, {"after": after, "limit": limit})
    return [(int(order or 0), request_id, session_id, at or 0.0) for order, request_id, session_id, at in rows]


def list_by_client(
    tx: Session, sampling_session_id: SamplingSessionId, clone: int, after: int, limit: int
) -> list[SampleCompletion]:
    """Return a sampling client's completions after a position; clone 0 is the original client, others are copies."""
    of_clone = {"first": clone * CLONE_STRIDE, "last": (clone + 1) * CLONE_STRIDE - 1}
    parameters = {"sampling_session_id": sampling_session_id, "after": after, "limit": limit, **of_clone}
    rows = execute(tx, _COMPLETIONS_OF_CLIENT, parameters)
    return [SampleCompletion(*row) for row in rows]


_NEW_CANCELLATION = insert(CancellationRow).from_select(
    ["request_id", "engine"],
    select(col(RequestRow.request_id), col(RequestRow.engine)).where(col(RequestRow.request_id) == bindparam("name")),
)


def cancel(
    tx: Session, request_id: RequestId, owner: str | None, failure: bytes, now: float
) -> Literal["cancelled", "over", "no sample"]:
    """Complete an open sample with the encoded `failure` and queue the cancellation for the engine.

    Returns "over" if the request is complete or unknown, and "no sample" for a request of another kind.
    """
    state = futures.get_state(tx, request_id, owner)
    if state.status == "unknown":
        return "over"
    if state.kind != "sample":
        return "no sample"
    if not futures.complete(tx, request_id, failure, failed=True, effect_order=None, now=now):
        return "over"
    execute(tx, _NEW_CANCELLATION, {"name": request_id})
    return "cancelled"


_CANCELLED_SINCE = (
    select(col(CancellationRow.position), col(CancellationRow.request_id))
    .where(col(CancellationRow.position) > bindparam("after"), col(CancellationRow.engine) == bindparam("engine"))
    .order_by(col(CancellationRow.position))
)


def list_cancelled(tx: Session, position: int, engine: int = 1) -> list[tuple[int, RequestId]]:
    """Return position and request of the cancellations of an engine's samples after a position."""
    rows = execute(tx, _CANCELLED_SINCE, {"after": position, "engine": engine})
    return [(int(found or 0), request_id) for found, request_id in rows]


def forget_cancellations(tx: Session, position: int | None = None, *, engine: int = 1) -> None:
    """Delete the cancellations up to a position that an engine has read; None deletes all of its own, for its start."""
    read = delete(CancellationRow).where(col(CancellationRow.engine) == engine)
    if position is not None:
        read = read.where(col(CancellationRow.position) <= position)
    execute(tx, read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Tokens [start, start + n) of one sample: tokens int32 [n], logprobs float32 [n], topk [n, k] if requested."""

    request_id: RequestId
    sample_index: int
    start: int
    tokens: Int32Array
    logprobs: Float32Array
    topk: TopK | None = None


_ADD = insert(PartialRow)


def add(tx: Session, new: Sequence[Partial]) -> None:
    """Insert the new tokens of one decode slice, with one statement for all samples."""
    execute(
        tx,
        _ADD,
        [
            {
                "request_id": each.request_id,
                "sample_index": each.sample_index,
                "start": each.start,
                "tokens": each.tokens.astype("<i4").tobytes(),
                "logprobs": each.logprobs.astype("<f4").tobytes(),
                "topk_token_ids": None if each.topk is None else each.topk.token_ids.astype("<i4").tobytes(),
                "topk_logprobs": None if each.topk is None else each.topk.logprobs.astype("<f4").tobytes(),
            }
            for each in new
        ],
    )


_POSITION = col(PartialRow.position)
_SINCE = (
    select(
        _POSITION,
        *(col(PartialRow.request_id), col(PartialRow.sample_index), col(PartialRow.start)),
        *(col(PartialRow.tokens), col(PartialRow.logprobs)),
        *(col(PartialRow.topk_token_ids), col(PartialRow.topk_logprobs)),
    )
    .where(bindparam("after") < _POSITION)
    .order_by(_POSITION)
    .limit(bindparam("limit"))
)


def list_since(tx: Session, after: int, limit: int = 1000) -> list[tuple[int, Partial]]:
    """Return position and content of the rows after a position, of all requests, in the order of writing."""
    rows = execute(tx, _SINCE, {"after": after, "limit": limit})
    return [(int(row[0] or 0), _decode_partial(*row[1:])) for row in rows]


def _decode_partial(
    request_id: RequestId,
    sample_index: int,
    start: int,
    tokens: bytes,
    logprobs: bytes,
    topk_token_ids: bytes | None,
    topk_logprobs: bytes | None,
) -> Partial:
    topk = None
    ids = np.frombuffer(tokens, "<i4").astype(np.int32)
    if topk_token_ids is not None and topk_logprobs is not None:
        topk = TopK(
            token_ids=np.frombuffer(topk_token_ids, "<i4").astype(np.int32).reshape(len(ids), -1),
            logprobs=np.frombuffer(topk_logprobs, "<f4").astype(np.float32).reshape(len(ids), -1),
        )
    return Partial(
        request_id=request_id,
        sample_index=sample_index,
        start=start,
        tokens=ids,
        logprobs=np.frombuffer(logprobs, "<f4").astype(np.float32),
        topk=topk,
    )


_DELETE = delete(PartialRow).where(col(PartialRow.request_id) == bindparam("request_id"))
_OPEN = select(col(RequestRow.request_id)).where(col(RequestRow.status) == "open")
_PRUNE = delete(PartialRow).where(col(PartialRow.request_id).not_in(_OPEN))


def delete_by_request(tx: Session, request_id: RequestId) -> None:
    """Delete the rows of a request that has its result."""
    execute(tx, _DELETE, {"request_id": request_id})


def prune(tx: Session) -> int:
    """Delete the rows of requests that are completed or gone: a cancelled sample may leave some. Returns how many."""
    return execute(tx, _PRUNE).rowcount
