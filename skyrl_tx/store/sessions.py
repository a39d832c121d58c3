"""Client sessions: who is there, since when, until when."""

import secrets
from collections.abc import Mapping, Sequence

from sqlmodel import Session, col, select

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store.tables import SessionRow


def create(
    tx: Session,
    *,
    owner: str,
    tags: Sequence[str],
    user_metadata: Mapping[str, object] | None,
    sdk_version: str | None,
    project_id: str | None,
    display_name: str | None,
    now: float,
) -> SessionId:
    """Begin a session under a new unguessable id."""
    session_id = SessionId(f"session-{secrets.token_hex(16)}")
    tx.add(
        SessionRow(
            session_id=session_id,
            owner=owner,
            project_id=project_id,
            display_name=display_name,
            tags=list(tags),
            user_metadata=dict(user_metadata or {}),
            sdk_version=sdk_version,
            created_at=now,
            last_heartbeat_at=now,
        )
    )
    tx.flush()
    return session_id


def get(tx: Session, session_id: SessionId) -> SessionRow | None:
    """Read a session."""
    return tx.get(SessionRow, session_id)


def heartbeat(tx: Session, session_id: SessionId, now: float) -> bool:
    """Note that a client still lives; False if there is no such session."""
    row = get(tx, session_id)
    if row is None:
        return False
    row.last_heartbeat_at = max(now, row.last_heartbeat_at)
    tx.flush()
    return True


def finish(tx: Session, session_id: SessionId, reason: str, now: float) -> bool:
    """End a session; the first reason stays. False if there is no such session."""
    row = get(tx, session_id)
    if row is None:
        return False
    if row.finished_at is None:
        row.finished_at, row.finish_reason = now, reason
        tx.flush()
    return True


def list_ids(tx: Session, owner: str, limit: int, offset: int) -> list[SessionId]:
    """An owner's sessions, newest first."""
    newest_first = (col(SessionRow.created_at).desc(), col(SessionRow.session_id))
    wanted = select(SessionRow.session_id).where(SessionRow.owner == owner).order_by(*newest_first)
    return [SessionId(session_id) for session_id in tx.exec(wanted.limit(limit).offset(offset))]


def silent_since(tx: Session, before: float) -> list[SessionId]:
    """Unfinished sessions not heard of since a time, longest silent first."""
    heard = col(SessionRow.last_heartbeat_at)
    wanted = select(SessionRow.session_id).where(col(SessionRow.finished_at).is_(None), heard < before).order_by(heard)
    return [SessionId(session_id) for session_id in tx.exec(wanted)]
