"""New tokens of samples whose clients read a stream, until the samples have results."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import bindparam, delete, insert, select
from sqlmodel import Session, col

from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.results import TopK
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import PartialRow, RequestRow


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
