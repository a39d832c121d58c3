"""What nobody will ask for any more: results, requests, what was sampled from; a limited number at a time.

A request's number is never used again. Once its row is gone a mark says up to which number that is so, and a repetition
is refused.
"""

from collections.abc import Collection

from sqlalchemy import bindparam, delete, exists, func, literal_column, or_, select, update
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId, SamplingSessionId
from skyrl_tx.store.completions import CLONE_STRIDE
from skyrl_tx.store.parts import in_parts, is_some
from skyrl_tx.store.tables import ModelRow, PrunedRow, RequestRow, SamplingSessionRow, SessionRow, SnapshotRow

AT_ONCE = 1000
"""Rows of one transaction, so that answers do not wait behind it for long."""
_CREATIONS = ("create_model", "load_weights")
_HAS_RESULT = col(RequestRow.result).is_not(None)
_FORGET = delete(RequestRow).where(is_some(col(RequestRow.position)))
_IS_PRUNED = col(RequestRow.result).is_(None) & (col(RequestRow.status) != literal_column("'open'"))


class RequestForgotten(Exception):
    """A number at or below the mark: its request was answered, and is forgotten."""


def numbered_by(
    model_id: ModelId | None, sampling_session_id: SamplingSessionId | None, seq_id: int | None
) -> str | None:
    """Name whose numbers these are, a model's or of one client of a sampling session; None: there is none."""
    if sampling_session_id is not None and seq_id is not None:
        return f"sample/{sampling_session_id}/{seq_id // CLONE_STRIDE}"
    return f"model/{model_id}" if model_id is not None and seq_id else None


_FORGET_MARKS = delete(PrunedRow).where(is_some(col(PrunedRow.numbered_by)))
_FORGET_SAMPLING = delete(SamplingSessionRow).where(is_some(col(SamplingSessionRow.sampling_session_id)))
_SAMPLE_MARKS = select(col(PrunedRow.numbered_by)).where(col(PrunedRow.numbered_by).startswith("sample/"))
_MARK = select(col(PrunedRow.up_to)).where(col(PrunedRow.numbered_by) == bindparam("numbered_by"))


def mark(tx: Session, numbered_by: str) -> int:
    """The highest number whose request is forgotten; below any number if there is none."""
    found = tx.connection().execute(_MARK, {"numbered_by": numbered_by}).scalar_one_or_none()
    return -1 if found is None else found


def forget_results(tx: Session, now: float, *, retention_s: float, limit: int = AT_ONCE) -> int:
    """Forget bodies and results that nobody needs, fetched that long ago or of a session that finished then.

    Their effect is in a snapshot, or there is none. Ids and digests stay. Returns how many were forgotten.
    """
    covered = (
        select(col(SnapshotRow.effect_order)).where(col(SnapshotRow.model_id) == col(RequestRow.model_id))
    ).scalar_subquery()
    gone = select(col(ModelRow.model_id)).where(col(ModelRow.status).in_(("failed", "unloaded", "expired")))
    finished = select(col(SessionRow.session_id)).where(col(SessionRow.finished_at) < now - retention_s)
    order = col(RequestRow.effect_order)
    is_fetched = col(RequestRow.fetched_at) < now - retention_s
    is_abandoned = col(RequestRow.fetched_at).is_(None) & col(RequestRow.session_id).in_(finished)
    prunable = (
        select(col(RequestRow.position))
        .where(
            _HAS_RESULT,
            or_(is_fetched, is_abandoned),
            or_(order.is_(None), order <= covered, col(RequestRow.model_id).in_(gone)),
        )
        .limit(limit)
    )
    pruned = tx.connection().execute(
        update(RequestRow)
        .where(col(RequestRow.position).in_(prunable))
        .values(body=b"", body_crc=None, result=None, fetched_at=func.coalesce(col(RequestRow.fetched_at), now))
    )
    return pruned.rowcount


def forget_requests(
    tx: Session, now: float, *, retention_s: float, session_retention_s: float, limit: int = AT_ONCE
) -> int:
    """Forget requests whose result was forgotten, and fetched that long ago, and mark their numbers as used.

    What made a model stays while its session can be taken up again. Returns how many were forgotten.
    """
    over = select(col(SessionRow.session_id)).where(col(SessionRow.last_heartbeat_at) < now - session_retention_s)
    makes_a_model = col(RequestRow.kind).in_(_CREATIONS) & (func.coalesce(col(RequestRow.seq_id), 0) == 0)
    old = (
        select(
            col(RequestRow.position),
            col(RequestRow.model_id),
            col(RequestRow.sampling_session_id),
            col(RequestRow.seq_id),
        )
        .where(
            _IS_PRUNED,
            col(RequestRow.fetched_at) < now - retention_s,
            or_(~makes_a_model, col(RequestRow.session_id).in_(over)),
        )
        .limit(limit)
    )
    positions: list[int | None] = []
    marks: dict[str, int] = {}
    for position, model_id, sampling_session_id, seq_id in tx.connection().execute(old):
        positions.append(position)
        name = numbered_by(model_id, sampling_session_id, seq_id)
        if name is not None and seq_id is not None:
            marks[name] = max(seq_id, marks.get(name, 0))
    for name, up_to in marks.items():
        if mark(tx, name) < up_to:
            tx.merge(PrunedRow(numbered_by=name, up_to=up_to))
    tx.flush()
    for some in in_parts(positions):
        tx.connection().execute(_FORGET, {"some": some})
    return len(positions)


def forget_sampling_sessions(tx: Session, before: float, *, limit: int = AT_ONCE) -> int:
    """Forget sampling sessions, not used since a time, whose weights were let go, or whose client was gone by then.

    Not while requests of theirs are known. Returns how many were forgotten.
    """
    gone = select(col(SessionRow.session_id)).where(
        col(SessionRow.finished_at).is_not(None), col(SessionRow.last_heartbeat_at) < before
    )
    was_let_go = col(SamplingSessionRow.model_id).is_not(None) & col(SamplingSessionRow.sampler_id).is_(None)
    unused = (
        select(col(SamplingSessionRow.sampling_session_id))
        .where(
            col(SamplingSessionRow.last_used_at) < before,
            or_(was_let_go & ~col(SamplingSessionRow.is_inflight), col(SamplingSessionRow.session_id).in_(gone)),
            ~exists().where(col(RequestRow.sampling_session_id) == col(SamplingSessionRow.sampling_session_id)),
        )
        .limit(limit)
    )
    names = list(tx.connection().execute(unused).scalars())
    for some in in_parts(names):
        tx.connection().execute(_FORGET_SAMPLING, {"some": some})
    forget_sample_marks(tx, names)
    return len(names)


def forget_sample_marks(tx: Session, names: Collection[SamplingSessionId]) -> None:
    """Forget which numbers the clients of sampling sessions used, when those are gone."""
    if names:
        marks, gone = tx.connection().execute(_SAMPLE_MARKS).scalars(), {f"sample/{name}" for name in names}
        forget_marks(tx, [mark for mark in marks if mark.rpartition("/")[0] in gone])


def forget_marks(tx: Session, names: Collection[str]) -> None:
    """Forget that numbers were used, where what they numbered is gone."""
    for some in in_parts(names):
        tx.connection().execute(_FORGET_MARKS, {"some": some})
