"""Sessions for sample requests that name their weights instead of a sampling session.

The server creates a session and sampling sessions for such requests. All requests of an owner share
one session per kind of client, for example one for the OpenAI endpoints. Each request counts as a
heartbeat of that session.
"""

import time

from sqlmodel import Session

from skyrl_tx.contract.ids import CheckpointPath, SamplerId, SamplingSessionId, SessionId
from skyrl_tx.contract.ids import sampling_session_id as sampling_session_id_of
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.store import audit, sampling_sessions, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import SamplingSessionRow

_HEARTBEAT_EVERY_S = 20.0


def find_or_create_sampling_session(
    store: Store, caller: Principal, kind: str, base_model: str, path: CheckpointPath | None
) -> SamplingSessionRow:
    """Find or create the caller's sampling session for a base model or checkpoint.

    `kind` is one of `sessions.SERVER_SESSIONS`. Raises ApiError 404 if the caller may not read the
    checkpoint at `path`.
    """
    path_text = None if path is None else str(path)

    def find(tx: Session) -> tuple[SessionId | None, SamplerId | None, SamplingSessionRow | None]:
        session_id = sessions.find_unfinished(tx, caller.owner, kind)
        sampler = find_sampler_id(tx, caller, path)
        if session_id is None:
            return None, sampler, None
        return session_id, sampler, sampling_sessions.find(tx, session_id, path_text, sampler)

    # The usual case needs no write: the sampling session exists, and its heartbeat is recent.
    def find_recent(tx: Session) -> SamplingSessionRow | None:
        session_id, _, row = find(tx)
        session = None if session_id is None else sessions.find(tx, session_id)
        is_recent = session is not None and session.last_heartbeat_at > time.time() - _HEARTBEAT_EVERY_S
        return row if is_recent else None

    def create(tx: Session) -> SamplingSessionRow:
        now = time.time()
        session_id, sampler, row = find(tx)
        if session_id is None:
            session_id = sessions.create(tx, owner=caller.owner, display_name=kind, now=now)
        sessions.record_heartbeat(tx, session_id, now)  # no client sends heartbeats for this session
        if row is not None:
            return row
        name = _choose_free_name(tx, session_id)
        return insert_sampling_session(tx, caller, session_id, name, base_model, path_text, sampler)

    return store.read(find_recent) or store.write(create)


def _choose_free_name(tx: Session, session_id: SessionId) -> SamplingSessionId:
    """Return a free name for a sampling session.

    The search starts at the number of existing sampling sessions. The name with this number may be
    in use, if older sampling sessions were removed.
    """
    number = len(sampling_sessions.list_ids_by_session(tx, session_id))
    while sampling_sessions.get(tx, name := sampling_session_id_of(session_id, number)) is not None:
        number += 1
    return name


def find_sampler_id(tx: Session, caller: Principal, path: CheckpointPath | None) -> SamplerId | None:
    """Return the id of the weights at a path, or None for the base model.

    Raises ApiError 404 if the caller may read no checkpoint at this path.
    """
    if path is None:
        return None
    checkpoint, _ = access.find_readable_checkpoint(tx, caller, path)
    return SamplerId(checkpoint.artifact_id)


def insert_sampling_session(
    tx: Session,
    caller: Principal,
    session_id: SessionId,
    name: SamplingSessionId,
    base_model: str,
    path: str | None,
    sampler: SamplerId | None,
) -> SamplingSessionRow:
    """Insert a sampling session, and record in the audit log that its checkpoint is read."""
    now = time.time()
    if path is not None:
        audit.record(tx, "checkpoint_read", caller.actor, now, path=path, purpose="sample")
    row = SamplingSessionRow(
        sampling_session_id=name,
        session_id=session_id,
        base_model=base_model,
        model_path=path,
        sampler_id=sampler,
        created_at=now,
        last_used_at=now,
    )
    sampling_sessions.create_session(tx, row)
    return row
