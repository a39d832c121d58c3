"""What samplers recorded of the sequences they drew, for training on them (`record_stability_info`)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from sqlalchemy import String, bindparam, delete, insert, or_, select, update
from sqlmodel import Session, col

from skyrl_tx.contract.arrays import Float32Array
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store.parts import in_parts, is_some
from skyrl_tx.store.tables import SessionRow, StabilityRow

KEPT_UNUSED_S = 86_400.0
"""How long a record is kept after its last use; being made is the first."""
_DTYPE = np.dtype("<f4")
_NEW = insert(StabilityRow)
_DRAWN_AGAIN = delete(StabilityRow).where(is_some(col(StabilityRow.sequence_id)))
_KEPT = select(col(StabilityRow.sequence_id), col(StabilityRow.prompt_length), col(StabilityRow.logprobs)).where(
    is_some(col(StabilityRow.sequence_id)),
    or_(bindparam("owner", type_=String).is_(None), col(StabilityRow.owner) == bindparam("owner", type_=String)),
    col(StabilityRow.last_used_at) >= bindparam("used_since"),
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One sequence as it was drawn: how long its prompt was, and the log-probability of each drawn token."""

    prompt_length: int
    logprobs: Float32Array


def record(
    tx: Session, session_id: SessionId, prompt_length: int, logprobs: Mapping[str, Float32Array], now: float
) -> None:
    """Keep the sequences of one prompt, by their ids, for the owner of a session."""
    owner = tx.connection().execute(select(col(SessionRow.owner)).where(col(SessionRow.session_id) == session_id))
    common = {"owner": owner.scalar_one(), "prompt_length": prompt_length, "last_used_at": now}
    rows = [
        {"sequence_id": sequence_id, "logprobs": np.ascontiguousarray(drawn, _DTYPE).tobytes(), **common}
        for sequence_id, drawn in logprobs.items()
    ]
    for some in in_parts(sorted(logprobs)):  # drawn again, a sequence is the same
        tx.connection().execute(_DRAWN_AGAIN, {"some": some})
    tx.connection().execute(_NEW, rows)


def find(tx: Session, owner: str | None, sequence_ids: Collection[str], now: float) -> dict[str, Recorded]:
    """Those of the sequences that are kept for this owner; None: for any."""
    found: dict[str, Recorded] = {}
    told = {"owner": owner, "used_since": now - KEPT_UNUSED_S}
    for some in in_parts(sorted(sequence_ids)):
        for sequence_id, prompt_length, logprobs in tx.connection().execute(_KEPT, {"some": some, **told}):
            found[sequence_id] = Recorded(prompt_length, np.frombuffer(logprobs, _DTYPE).astype(np.float32))
    return found


def touch(tx: Session, sequence_ids: Collection[str], now: float) -> None:
    """Note that sequences were used: their day begins anew."""
    if sequence_ids:
        used = update(StabilityRow).where(col(StabilityRow.sequence_id) == bindparam("used")).values(last_used_at=now)
        tx.connection().execute(used, [{"used": sequence_id} for sequence_id in sequence_ids])


def expire(tx: Session, now: float) -> int:
    """Forget what was not used for a day; returns how many sequences that were."""
    unused = delete(StabilityRow).where(col(StabilityRow.last_used_at) < now - KEPT_UNUSED_S)
    return tx.connection().execute(unused).rowcount
