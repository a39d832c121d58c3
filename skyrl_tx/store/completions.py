"""Completed requests in order, cancelled samples, and partial results of streamed samples.

Each of the three is a list with ascending positions. The API process reads completions, and the
engine reads cancellations. The cursor of a reader is the position of the last row that the reader
has read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from sqlalchemy import TextClause, bindparam, delete, func, insert, select, text, update
from sqlmodel import Session, col

from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.contract.results import TopK
from skyrl_tx.store import futures
from skyrl_tx.store.database import execute
from skyrl_tx.store.futures import CLONE_STRIDE
from skyrl_tx.store.sessions import CHAT_SESSIONS
from skyrl_tx.store.tables import AnswerCounterRow, CancellationRow, PartialRow, RequestRow, SessionRow


@dataclass(frozen=True, slots=True)
class SampleCompletion:
    """A completed sample request and its position in the completion order."""

    answer_order: int
    request_id: RequestId
    failed: bool
    num_bytes: int
    """Size of the stored result, or 0 after the result was pruned."""


_RAISE_COUNTER = (
    update(AnswerCounterRow)
    .where(col(AnswerCounterRow.value) < bindparam("at_least"))
    .values(value=bindparam("at_least"))
)


def skip_seen_positions(tx: Session, now: float) -> None:
    """Raise the completion counter above every position that a client has seen.

    Called when an engine starts. After a failover to a replica that lagged, or after a restore from
    a backup, some completions are lost. If the counter assigned their positions again, clients with
    a later cursor would miss the new completions. The counter is therefore raised to the
    milliseconds since 1970. This is higher than all earlier positions, as long as the server has
    completed fewer than 1,000 requests per second on average.
    """
    execute(tx, _RAISE_COUNTER, {"at_least": int(now * 1000)})


_COMPLETION_ORDER = col(RequestRow.answer_order)
_LAST_COMPLETION = select(col(AnswerCounterRow.value))
_COMPLETED_SINCE = (
    select(
        _COMPLETION_ORDER, col(RequestRow.request_id), col(RequestRow.sampling_session_id), col(RequestRow.completed_at)
    )
    .where(bindparam("after") < _COMPLETION_ORDER)
    .order_by(_COMPLETION_ORDER)
    .limit(bindparam("limit"))
)
_COMPLETIONS_BY_CLIENT = (
    select(
        _COMPLETION_ORDER,
        col(RequestRow.request_id),
        col(RequestRow.status) == "failed",
        func.coalesce(func.length(col(RequestRow.result)), 0),
    )
    .where(
        col(RequestRow.sampling_session_id) == bindparam("sampling_session_id"),
        bindparam("after") < _COMPLETION_ORDER,
        func.coalesce(col(RequestRow.seq_id), 0).between(bindparam("first"), bindparam("last")),
    )
    .order_by(_COMPLETION_ORDER)
    .limit(bindparam("limit"))
)


def get_last_position(tx: Session) -> int:
    """Return the position of the newest completion, or 0 if there is none."""
    return execute(tx, _LAST_COMPLETION).scalar_one_or_none() or 0


def list_completed(tx: Session, after: int, limit: int) -> list[tuple[int, RequestId, SamplingSessionId | None, float]]:
    """Return position, request, sampling session and time of each completion after a position.

    Requests of all kinds are included.
    """
    rows = execute(tx, _COMPLETED_SINCE, {"after": after, "limit": limit})
    return [(int(order or 0), request_id, session_id, at or 0.0) for order, request_id, session_id, at in rows]


def list_by_client(
    tx: Session, sampling_session_id: SamplingSessionId, clone: int, after: int, limit: int
) -> list[SampleCompletion]:
    """Return the completions of a sampling client after a position.

    Clone 0 is the original client. Its copies have the numbers 1, 2 and so on.
    """
    seq_ids = {"first": clone * CLONE_STRIDE, "last": (clone + 1) * CLONE_STRIDE - 1}
    parameters = {"sampling_session_id": sampling_session_id, "after": after, "limit": limit, **seq_ids}
    rows = execute(tx, _COMPLETIONS_BY_CLIENT, parameters)
    return [SampleCompletion(*row) for row in rows]


_NEW_CANCELLATION = insert(CancellationRow).from_select(
    ["request_id", "engine"],
    select(col(RequestRow.request_id), col(RequestRow.engine)).where(col(RequestRow.request_id) == bindparam("name")),
)


def cancel(
    tx: Session, request_id: RequestId, owner: str | None, failure: bytes, now: float
) -> Literal["cancelled", "over", "no sample"]:
    """Complete an open sample request with an encoded failure and queue the cancellation.

    Returns "over" if the request is complete or unknown, and "no sample" if it is not a sample
    request.
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


_OPEN_CALLS = select(col(RequestRow.request_id)).where(
    col(RequestRow.status) == "open",
    col(RequestRow.session_id).in_(
        select(col(SessionRow.session_id)).where(col(SessionRow.display_name).in_(CHAT_SESSIONS))
    ),
)


def cancel_unread_calls(tx: Session, failure: bytes, now: float) -> int:
    """Cancel all open calls of the chat endpoints, and return their number.

    The API process that submitted them has ended, so nobody can read the results.
    """
    request_ids = [RequestId(request_id) for (request_id,) in execute(tx, _OPEN_CALLS)]
    for request_id in request_ids:
        cancel(tx, request_id, None, failure, now)
        delete_partials(tx, request_id)
    futures.mark_fetched(tx, request_ids, now)
    return len(request_ids)


_CANCELLED_SINCE = (
    select(col(CancellationRow.position), col(CancellationRow.request_id))
    .where(col(CancellationRow.position) > bindparam("after"), col(CancellationRow.engine) == bindparam("engine"))
    .order_by(col(CancellationRow.position))
)


def list_cancelled(tx: Session, position: int, engine: int = 1) -> list[tuple[int, RequestId]]:
    """Return position and request of each cancellation for an engine after a position."""
    rows = execute(tx, _CANCELLED_SINCE, {"after": position, "engine": engine})
    return [(int(row_position or 0), request_id) for row_position, request_id in rows]


def forget_cancellations(tx: Session, position: int | None = None, *, engine: int = 1) -> None:
    """Delete the cancellations that an engine has read, up to a position.

    `position` None deletes all cancellations of the engine, which happens when it starts.
    """
    statement = delete(CancellationRow).where(col(CancellationRow.engine) == engine)
    if position is not None:
        statement = statement.where(col(CancellationRow.position) <= position)
    execute(tx, statement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Part of a streamed sample: its tokens [start, start + n).

    `tokens` is int32 [n], `logprobs` is float32 [n], and the arrays of `topk` are [n, k], if they
    were requested.
    """

    request_id: RequestId
    sample_index: int
    start: int
    tokens: Int32Array
    logprobs: Float32Array
    topk: TopK | None = None


_PARTIAL_COLUMNS = tuple(name for name in PartialRow.model_fields if name != "position")
_MAX_INSERTED = 256
"""Rows of one statement. A database allows some ten thousand parameters."""


def add_partials(tx: Session, partials: Sequence[Partial]) -> None:
    """Insert the new tokens of one decode slice.

    One statement inserts up to 256 rows. For each row of an `executemany`, SQLite's driver releases
    the interpreter and waits for it again, while the transaction keeps other processes from writing.
    """
    for first in range(0, len(partials), _MAX_INSERTED):
        batch = partials[first : first + _MAX_INSERTED]
        values = [(f"{name}_{n}", x) for n, partial in enumerate(batch) for name, x in _encode_partial(partial).items()]
        execute(tx, _make_insert(len(batch)), dict(values))


@lru_cache(maxsize=_MAX_INSERTED)
def _make_insert(num_rows: int) -> TextClause:
    """Return the statement that inserts partial results, with the parameters `<column>_<row>`."""
    rows = (", ".join(f":{name}_{n}" for name in _PARTIAL_COLUMNS) for n in range(num_rows))
    return text(f"INSERT INTO partials ({', '.join(_PARTIAL_COLUMNS)}) VALUES {', '.join(f'({row})' for row in rows)}")


def _encode_partial(partial: Partial) -> dict[str, object]:
    topk = partial.topk
    return {
        "request_id": partial.request_id,
        "sample_index": partial.sample_index,
        "start": partial.start,
        "tokens": partial.tokens.astype("<i4").tobytes(),
        "logprobs": partial.logprobs.astype("<f4").tobytes(),
        "topk_token_ids": None if topk is None else topk.token_ids.astype("<i4").tobytes(),
        "topk_logprobs": None if topk is None else topk.logprobs.astype("<f4").tobytes(),
    }


_PARTIAL_POSITION = col(PartialRow.position)
_PARTIALS_SINCE = (
    select(
        _PARTIAL_POSITION,
        *(col(PartialRow.request_id), col(PartialRow.sample_index), col(PartialRow.start)),
        *(col(PartialRow.tokens), col(PartialRow.logprobs)),
        *(col(PartialRow.topk_token_ids), col(PartialRow.topk_logprobs)),
    )
    .where(bindparam("after") < _PARTIAL_POSITION)
    .order_by(_PARTIAL_POSITION)
    .limit(bindparam("limit"))
)


def list_partials(tx: Session, after: int, limit: int = 1000) -> list[tuple[int, Partial]]:
    """Return the partial results after a position, each with its position, in written order."""
    rows = execute(tx, _PARTIALS_SINCE, {"after": after, "limit": limit})
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


_DELETE_PARTIALS = delete(PartialRow).where(col(PartialRow.request_id) == bindparam("request_id"))
_OPEN_REQUESTS = select(col(RequestRow.request_id)).where(col(RequestRow.status) == "open")
_PRUNE_PARTIALS = delete(PartialRow).where(col(PartialRow.request_id).not_in(_OPEN_REQUESTS))


def delete_partials(tx: Session, request_id: RequestId) -> None:
    """Delete the partial results of a request. Called when the request gets its result."""
    execute(tx, _DELETE_PARTIALS, {"request_id": request_id})


def prune_partials(tx: Session) -> int:
    """Delete partial results whose request is not open, and return their number.

    A cancelled sample may leave such rows.
    """
    return execute(tx, _PRUNE_PARTIALS).rowcount
