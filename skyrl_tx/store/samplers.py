"""Sampling sessions: what clients sample from."""

from collections import Counter
from dataclasses import dataclass

from sqlalchemy import update
from sqlmodel import Session, col, select

from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId, SamplingSessionId, SessionId
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


def ids_of_model(tx: Session, model_id: ModelId) -> list[SamplingSessionId]:
    """All sampling sessions that a model's unnamed saves began."""
    wanted = select(SamplingSessionRow.sampling_session_id).where(SamplingSessionRow.model_id == model_id)
    return [SamplingSessionId(found) for found in tx.exec(wanted)]


def find(
    tx: Session, session_id: SessionId, model_path: str | None, sampler: SamplerId | None
) -> SamplingSessionRow | None:
    """A sampling session of a client session that samples from just these weights, known by that path."""
    wanted = select(SamplingSessionRow).where(
        SamplingSessionRow.session_id == session_id,
        col(SamplingSessionRow.model_id).is_(None),
        col(SamplingSessionRow.model_path).is_not_distinct_from(model_path),
        col(SamplingSessionRow.sampler_id).is_not_distinct_from(sampler),
    )
    return tx.exec(wanted).first()


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


@dataclass(frozen=True, slots=True)
class Unnamed:
    """An unnamed save and the sampler that its session has now: its own, or if it follows its model a later one."""

    model_id: ModelId
    sampler_id: SamplerId
    request_id: RequestId


def unnamed(tx: Session) -> list[Unnamed]:
    """Unnamed saves whose sessions have a sampler."""
    columns = (
        col(SamplingSessionRow.model_id),
        col(SamplingSessionRow.sampler_id),
        col(SamplingSessionRow.request_id),
    )
    kept = select(*columns).where(*(column.is_not(None) for column in columns))
    return [Unnamed(*row) for row in tx.connection().execute(kept)]


def set_size(tx: Session, model_id: ModelId, sampler: SamplerId, size_bytes: int) -> None:
    """Note how much room an unnamed sampler takes on the disk."""
    its_own = col(SamplingSessionRow.model_id) == model_id, col(SamplingSessionRow.sampler_id) == sampler
    tx.connection().execute(update(SamplingSessionRow).where(*its_own).values(size_bytes=size_bytes))


def follow(tx: Session, model_id: ModelId, sampler: SamplerId) -> None:
    """Give new weights to all sampling sessions that follow a model."""
    following = col(SamplingSessionRow.model_id) == model_id, col(SamplingSessionRow.is_inflight)
    tx.connection().execute(update(SamplingSessionRow).where(*following).values(sampler_id=sampler, size_bytes=None))


def release_unused(
    tx: Session, before: float, *, keep_newest: int = 4, max_bytes: int | None = None
) -> list[SamplerId]:
    """Let go of unnamed samplers not used since a time, but for each model's newest; returns those let go.

    Then of more, the one used longest ago first, while they take more than `max_bytes`; each model's newest stays.
    Their sessions stay, without a sampler: sampling from one is then a user error that says to save with a name.
    """
    kept: list[list[SamplingSessionRow]] = []
    released: list[list[SamplingSessionRow]] = []
    newest: dict[SamplerId, bool] = {}
    num_newer: Counter[str] = Counter()
    for rows in _by_sampler(tx):
        model_id = str(rows[0].model_id)
        num_newer[model_id] += 1
        newest[_sampler(rows)] = num_newer[model_id] == 1
        is_old = num_newer[model_id] > keep_newest and _last_used(rows) < before
        (released if is_old else kept).append(rows)
    if max_bytes is not None:
        num_bytes = sum(rows[0].size_bytes or 0 for rows in kept)
        for rows in sorted((rows for rows in kept if not newest[_sampler(rows)]), key=_last_used):
            if num_bytes <= max_bytes:
                break
            num_bytes -= rows[0].size_bytes or 0
            released.append(rows)
    names = [_sampler(rows) for rows in released]
    for row in (row for rows in released for row in rows):
        row.sampler_id = None
    tx.flush()
    return names


def _by_sampler(tx: Session) -> list[list[SamplingSessionRow]]:
    """The sessions of each unnamed sampler, the newest sampler first; in-flight sessions share one."""
    rows = select(SamplingSessionRow).where(
        col(SamplingSessionRow.model_id).is_not(None), col(SamplingSessionRow.sampler_id).is_not(None)
    )
    sessions: dict[SamplerId, list[SamplingSessionRow]] = {}
    newest_first = (col(SamplingSessionRow.created_at).desc(), col(SamplingSessionRow.sampling_session_id))
    for row in tx.exec(rows.order_by(*newest_first)):
        sessions.setdefault(SamplerId(str(row.sampler_id)), []).append(row)
    return list(sessions.values())


def _sampler(rows: list[SamplingSessionRow]) -> SamplerId:
    return SamplerId(str(rows[0].sampler_id))


def _last_used(rows: list[SamplingSessionRow]) -> float:
    return max(row.last_used_at for row in rows)
