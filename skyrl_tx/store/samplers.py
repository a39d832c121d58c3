"""Sampling sessions: what clients sample from."""

from sqlmodel import Session, col, select

from skyrl_tx.contract.ids import SamplerId, SamplingSessionId, SessionId
from skyrl_tx.store.tables import SamplingSessionRow


def create_session(tx: Session, row: SamplingSessionRow) -> bool:
    """Begin a sampling session; False if its id exists already, which then stays as it is."""
    if get(tx, row.sampling_session_id) is not None:
        return False
    tx.add(row)
    tx.flush()
    return True


def get(tx: Session, sampling_session_id: SamplingSessionId) -> SamplingSessionRow | None:
    """Read a sampling session."""
    return tx.get(SamplingSessionRow, sampling_session_id)


def ids_of_session(tx: Session, session_id: SessionId) -> list[SamplingSessionId]:
    """All sampling sessions that a client session began, oldest first."""
    oldest_first = (col(SamplingSessionRow.created_at), col(SamplingSessionRow.sampling_session_id))
    wanted = select(SamplingSessionRow.sampling_session_id).where(SamplingSessionRow.session_id == session_id)
    return [SamplingSessionId(found) for found in tx.exec(wanted.order_by(*oldest_first))]


def add_clone(tx: Session, sampling_session_id: SamplingSessionId) -> int:
    """Number one more copy of a session's client; the first is 1. Raises LookupError if there is no such session."""
    row = get(tx, sampling_session_id)
    if row is None:
        raise LookupError(f"no sampling session {sampling_session_id!r}")
    row.num_clones += 1
    tx.flush()
    return row.num_clones


def touch(tx: Session, sampling_session_id: SamplingSessionId, now: float) -> None:
    """Note that a sampling session is in use. Raises LookupError if there is none."""
    row = get(tx, sampling_session_id)
    if row is None:
        raise LookupError(f"no sampling session {sampling_session_id!r}")
    row.last_used_at = max(now, row.last_used_at)
    tx.flush()


def release_unused(tx: Session, before: float, *, keep_newest: int = 4) -> list[SamplerId]:
    """Let go of unnamed samplers not used since a time, but for each model's newest; returns those let go.

    Their sessions stay, without a sampler: sampling from one is then a user error that says to save with a name.
    """
    unnamed = (
        select(SamplingSessionRow)
        .where(col(SamplingSessionRow.model_id).is_not(None), col(SamplingSessionRow.sampler_id).is_not(None))
        .order_by(col(SamplingSessionRow.created_at).desc())
    )
    num_newer: dict[str, int] = {}
    released: list[SamplerId] = []
    for row in tx.exec(unnamed):
        model_id = str(row.model_id)
        num_newer[model_id] = num_newer.get(model_id, 0) + 1
        if num_newer[model_id] > keep_newest and row.last_used_at < before and row.sampler_id is not None:
            released.append(row.sampler_id)
            row.sampler_id = None
    tx.flush()
    return released
