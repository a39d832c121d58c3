"""Recorded log-probabilities of sampled sequences, used in training (`record_stability_info`)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from sqlalchemy import String, bindparam, delete, insert, or_, select, update
from sqlmodel import Session, col

from skyrl_tx.contract.arrays import Float32Array
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store.database import execute, execute_in_batches, is_in_batch
from skyrl_tx.store.tables import SessionRow, StabilityRow

RETENTION_S = 86_400.0
"""How long a record is kept after its creation or last use."""
_DTYPE = np.dtype("<f4")
_NEW = insert(StabilityRow)
_DELETE = delete(StabilityRow).where(is_in_batch(col(StabilityRow.sequence_id)))
_TOUCH = update(StabilityRow).where(is_in_batch(col(StabilityRow.sequence_id))).values(last_used_at=bindparam("now"))
_EXPIRE = delete(StabilityRow).where(col(StabilityRow.last_used_at) < bindparam("before"))
_FIND = select(col(StabilityRow.sequence_id), col(StabilityRow.prompt_length), col(StabilityRow.logprobs)).where(
    is_in_batch(col(StabilityRow.sequence_id)),
    or_(bindparam("owner", type_=String).is_(None), col(StabilityRow.owner) == bindparam("owner", type_=String)),
    col(StabilityRow.last_used_at) >= bindparam("used_since"),
)


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """The prompt length of a sampled sequence and the log-probability of each sampled token."""

    prompt_length: int
    logprobs: Float32Array


def record(
    tx: Session, session_id: SessionId, prompt_length: int, logprobs: Mapping[str, Float32Array], now: float
) -> None:
    """Store the log-probabilities of one prompt's sequences, by sequence id.

    The records belong to the owner of the session.
    """
    owner = execute(tx, select(col(SessionRow.owner)).where(col(SessionRow.session_id) == session_id))
    common = {"owner": owner.scalar_one(), "prompt_length": prompt_length, "last_used_at": now}
    rows = [
        {"sequence_id": sequence_id, "logprobs": np.ascontiguousarray(values, _DTYPE).tobytes(), **common}
        for sequence_id, values in logprobs.items()
    ]
    execute_in_batches(tx, _DELETE, logprobs)  # a request that is executed again has the same sequence ids
    execute(tx, _NEW, rows)


def find(tx: Session, owner: str | None, sequence_ids: Collection[str], now: float) -> dict[str, SampledLogprobs]:
    """Return the records of these sequences by id.

    Sequences that are unknown or belong to another owner are left out. `owner` None means any
    owner.
    """
    return {
        sequence_id: SampledLogprobs(prompt_length, np.frombuffer(logprobs, _DTYPE).astype(np.float32))
        for sequence_id, prompt_length, logprobs in execute_in_batches(
            tx, _FIND, sequence_ids, owner=owner, used_since=now - RETENTION_S
        )
    }


def touch(tx: Session, sequence_ids: Collection[str], now: float) -> None:
    """Record a use of these sequences, which extends their retention."""
    execute_in_batches(tx, _TOUCH, sequence_ids, now=now)


def expire(tx: Session, now: float) -> int:
    """Delete the records that were not used for `RETENTION_S`, and return their number."""
    return execute(tx, _EXPIRE, {"before": now - RETENTION_S}).rowcount
