"""Deletion of old results, requests, sampling sessions, runs and sessions.

Each call deletes a limited number of rows, so that other writes wait only briefly. Requests are
pruned in two stages. First a request loses its body and its result and becomes a tombstone. A late
poll for the result then gets status 410 instead of 404. Later the tombstone is deleted, and a
high-water mark covers its sequence number, so that a repeated submission is refused.
"""

from collections.abc import Callable, Collection, Sequence

from sqlalchemy import Float, bindparam, delete, exists, func, literal_column, or_, select, update
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId, SamplingSessionId
from skyrl_tx.store.database import execute, execute_in_batches, is_in_batch
from skyrl_tx.store.futures import get_high_water_mark, get_sequence_scope
from skyrl_tx.store.sessions import CHAT_SESSIONS, SERVER_SESSIONS
from skyrl_tx.store.tables import (
    CheckpointRow,
    CustomLossRow,
    ModelRow,
    PrunedRow,
    RequestRow,
    SamplingSessionRow,
    SessionRow,
    SnapshotRow,
)

RemoveRows = Callable[[Session, Sequence[ModelId]], object]
"""Removes the rows of optional features for these runs."""
MAX_ROWS = 1000
"""Largest number of rows that are deleted in a transaction."""
_CREATIONS = ("create_model", "load_weights")
_HAS_RESULT = col(RequestRow.result).is_not(None)
_HAS_ENDED = col(ModelRow.status).in_(("failed", "unloaded", "expired"))
_IS_TOMBSTONE = col(RequestRow.result).is_(None) & (col(RequestRow.status) != literal_column("'open'"))

# Statements are built once, because other writes wait while a pruning transaction runs.
_EFFECT = col(RequestRow.effect_order)
_COVERED = (
    select(col(SnapshotRow.effect_order)).where(col(SnapshotRow.model_id) == col(RequestRow.model_id))
).scalar_subquery()
_IS_ABANDONED = col(RequestRow.fetched_at).is_(None) & or_(
    col(RequestRow.session_id).in_(
        select(col(SessionRow.session_id)).where(col(SessionRow.finished_at) < bindparam("before"))
    ),
    (col(RequestRow.completed_at) < bindparam("before"))
    & col(RequestRow.session_id).in_(
        select(col(SessionRow.session_id)).where(col(SessionRow.display_name).in_(CHAT_SESSIONS))
    ),
)
_PRUNABLE = (
    select(col(RequestRow.position))
    .where(
        _HAS_RESULT,
        or_(col(RequestRow.fetched_at) < bindparam("before"), _IS_ABANDONED),
        or_(
            _EFFECT.is_(None),
            _EFFECT <= _COVERED,
            col(RequestRow.model_id).in_(select(col(ModelRow.model_id)).where(_HAS_ENDED)),
        ),
    )
    .limit(bindparam("limit"))
)
_PRUNE = (
    update(RequestRow)
    .where(col(RequestRow.position).in_(_PRUNABLE))
    .values(
        body=b"",
        body_crc=None,
        result=None,
        fetched_at=func.coalesce(col(RequestRow.fetched_at), bindparam("now", type_=Float)),
    )
)


def prune_results(tx: Session, now: float, *, retention_s: float, limit: int = MAX_ROWS) -> int:
    """Turn completed requests into tombstones, and return the number of new tombstones.

    This happens `retention_s` after the result was fetched. If it was never fetched, it happens
    `retention_s` after the session finished, or after a call of a chat endpoint was completed,
    because the API process that submitted the call has ended. Requests that a recovery would replay are kept.
    """
    return execute(tx, _PRUNE, {"before": now - retention_s, "now": now, "limit": limit}).rowcount


_OLD_TOMBSTONES = (
    select(col(RequestRow.position))
    .where(
        _IS_TOMBSTONE,
        col(RequestRow.fetched_at) < bindparam("before"),
        or_(
            ~(col(RequestRow.kind).in_(_CREATIONS) & (func.coalesce(col(RequestRow.seq_id), 0) == 0)),
            col(RequestRow.session_id).in_(
                select(col(SessionRow.session_id)).where(col(SessionRow.last_heartbeat_at) < bindparam("silent_since"))
            ),
        ),
    )
    .limit(bindparam("limit"))
)
_DELETE_TOMBSTONES = (
    delete(RequestRow)
    .where(col(RequestRow.position).in_(_OLD_TOMBSTONES))
    .returning(col(RequestRow.model_id), col(RequestRow.sampling_session_id), col(RequestRow.seq_id))
)


def delete_tombstones(
    tx: Session, now: float, *, retention_s: float, session_retention_s: float, limit: int = MAX_ROWS
) -> int:
    """Delete tombstones `retention_s` after their result was fetched, and return their number.

    The high-water marks are raised. A request that created a model is kept until its session has
    sent no heartbeat for `session_retention_s`, because until then the session may resume.
    """
    limits = {"before": now - retention_s, "silent_since": now - session_retention_s, "limit": limit}
    rows = execute(tx, _DELETE_TOMBSTONES, limits).all()

    # Raise the high-water marks.
    marks: dict[str, int] = {}
    for model_id, sampling_session_id, seq_id in rows:
        scope = get_sequence_scope(model_id, sampling_session_id, seq_id)
        if scope is not None and seq_id is not None:
            marks[scope] = max(seq_id, marks.get(scope, 0))
    for scope, up_to in marks.items():
        if get_high_water_mark(tx, scope) < up_to:
            tx.merge(PrunedRow(numbered_by=scope, up_to=up_to))
    return len(rows)


_UNUSED_SAMPLING = (
    select(col(SamplingSessionRow.sampling_session_id))
    .where(
        col(SamplingSessionRow.last_used_at) < bindparam("before"),
        or_(
            col(SamplingSessionRow.model_id).is_not(None)
            & col(SamplingSessionRow.sampler_id).is_(None)
            & ~col(SamplingSessionRow.is_inflight),
            col(SamplingSessionRow.session_id).in_(
                select(col(SessionRow.session_id)).where(
                    or_(
                        col(SessionRow.finished_at).is_not(None)
                        & (col(SessionRow.last_heartbeat_at) < bindparam("before")),
                        col(SessionRow.display_name).in_(SERVER_SESSIONS),
                    )
                )
            ),
        ),
        ~exists().where(col(RequestRow.sampling_session_id) == col(SamplingSessionRow.sampling_session_id)),
    )
    .limit(bindparam("limit"))
)
_DELETE_SAMPLING = (
    delete(SamplingSessionRow)
    .where(col(SamplingSessionRow.sampling_session_id).in_(_UNUSED_SAMPLING))
    .returning(col(SamplingSessionRow.sampling_session_id))
)


def delete_sampling_sessions(tx: Session, before: float, *, limit: int = MAX_ROWS) -> int:
    """Delete sampling sessions that can no longer be used, and return their number.

    A sampling session is deleted if it was not used since `before`, no request of it is stored, and
    one of the following holds: its ephemeral sampler was released, its client session has finished
    and sent no heartbeat since `before`, or it belongs to a session of the server, which has no
    client.
    """
    names = list(execute(tx, _DELETE_SAMPLING, {"before": before, "limit": limit}).scalars())
    delete_sampling_marks(tx, names)
    return len(names)


_SAMPLING_MARKS = select(col(PrunedRow.numbered_by)).where(col(PrunedRow.numbered_by).startswith("sample/"))


def delete_sampling_marks(tx: Session, names: Collection[SamplingSessionId]) -> None:
    """Delete the high-water marks of deleted sampling sessions, including their clones."""
    if names:
        scopes, deleted = execute(tx, _SAMPLING_MARKS).scalars(), {f"sample/{name}" for name in names}
        delete_high_water_marks(tx, [scope for scope in scopes if scope.rpartition("/")[0] in deleted])


# A finished session without a heartbeat since `before` creates nothing any more.
_HAS_FINISHED = (col(SessionRow.finished_at) < bindparam("before")) & (
    col(SessionRow.last_heartbeat_at) < bindparam("before")
)
_UNUSED_MODELS = (
    select(col(ModelRow.model_id))
    .join(SessionRow, col(SessionRow.session_id) == col(ModelRow.session_id))
    .where(
        _HAS_ENDED,
        col(ModelRow.deleted_at).is_(None),
        col(ModelRow.last_request_at) < bindparam("before"),
        _HAS_FINISHED,
        *(
            ~exists().where(col(table.model_id) == col(ModelRow.model_id))
            for table in (CheckpointRow, SnapshotRow, RequestRow, SamplingSessionRow)
        ),
    )
    .limit(bindparam("limit"))
)
_DELETE_MODELS = delete(ModelRow).where(col(ModelRow.model_id).in_(_UNUSED_MODELS)).returning(col(ModelRow.model_id))


def delete_ended_models(tx: Session, before: float, remove_rows: RemoveRows, *, limit: int = MAX_ROWS) -> int:
    """Delete ended models that nothing refers to, and return their number.

    Such a model was last used before `before` and has no checkpoint, snapshot, sampling session or
    stored request. Its session has finished, so its id is never used again.
    """
    names: list[ModelId] = list(execute(tx, _DELETE_MODELS, {"before": before, "limit": limit}).scalars())
    delete_high_water_marks(tx, [f"model/{name}" for name in names])
    remove_rows(tx, names)
    return len(names)


_UNUSED_SESSIONS = (
    select(col(SessionRow.session_id))
    .where(
        _HAS_FINISHED,
        *(
            ~exists().where(col(table.session_id) == col(SessionRow.session_id))
            for table in (ModelRow, SamplingSessionRow, RequestRow, CustomLossRow)
        ),
    )
    .limit(bindparam("limit"))
)
_DELETE_SESSIONS = delete(SessionRow).where(col(SessionRow.session_id).in_(_UNUSED_SESSIONS))


def delete_finished_sessions(tx: Session, before: float, *, limit: int = MAX_ROWS) -> int:
    """Delete finished sessions that nothing refers to, and return their number.

    Such a session finished and sent its last heartbeat before `before`. Such a session has no
    model, sampling session, custom loss or stored request.
    """
    return execute(tx, _DELETE_SESSIONS, {"before": before, "limit": limit}).rowcount


_DELETE_MARKS = delete(PrunedRow).where(is_in_batch(col(PrunedRow.numbered_by)))


def delete_high_water_marks(tx: Session, scopes: Collection[str]) -> None:
    """Delete the high-water marks of models or sampling clients that no longer exist."""
    execute_in_batches(tx, _DELETE_MARKS, scopes)
