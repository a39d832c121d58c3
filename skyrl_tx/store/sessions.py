"""Client sessions: who is there, since when, until when."""

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from sqlalchemy import bindparam
from sqlmodel import Session, col, select

from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.store.parts import in_parts, is_some
from skyrl_tx.store.tables import ModelRow, RequestRow, SamplingSessionRow, SessionRow

_READ_AT_ONCE = 200
_SILENT_ASKERS = (
    select(SessionRow.session_id)
    .distinct()
    .where(
        is_some(col(RequestRow.request_id)),
        col(RequestRow.status) == "open",
        col(RequestRow.session_id) == col(SessionRow.session_id),
        col(SessionRow.finished_at).is_(None),
        col(SessionRow.last_heartbeat_at) < bindparam("before"),
    )
)


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
    session_id: SessionId | None = None,
) -> SessionId:
    """Begin a session, under a new unguessable id where none is given."""
    session_id = session_id or SessionId(f"session-{secrets.token_hex(16)}")
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


def silent_askers(tx: Session, request_ids: Iterable[RequestId], before: float) -> set[SessionId]:
    """The sessions of those of the requests that are open, as far as they live and were not heard of since a time."""
    found: set[SessionId] = set()
    for some in in_parts(request_ids):
        names = tx.connection().execute(_SILENT_ASKERS, {"some": some, "before": before}).scalars()
        found.update(SessionId(name) for name in names)
    return found


def finish(tx: Session, session_id: SessionId, reason: str, now: float) -> bool:
    """End a session; the first reason stays. False if there is no such session."""
    row = get(tx, session_id)
    if row is None:
        return False
    if row.finished_at is None:
        row.finished_at, row.finish_reason = now, reason
        tx.flush()
    return True


_NEWEST_FIRST = (col(SessionRow.created_at).desc(), col(SessionRow.session_id))


def list_ids(tx: Session, owner: str | None, limit: int, offset: int) -> list[SessionId]:
    """An owner's sessions, newest first; None: every owner's."""
    wanted = select(SessionRow.session_id).order_by(*_NEWEST_FIRST)
    if owner is not None:
        wanted = wanted.where(SessionRow.owner == owner)
    return [SessionId(session_id) for session_id in tx.exec(wanted.limit(limit).offset(offset))]


def newest_first(
    tx: Session,
    owners: Collection[str] | None,
    project_ids: Collection[str] | None,
    after: tuple[float, SessionId] | None,
) -> Iterator[SessionRow]:
    """Sessions of owners and in projects (None: of all), newest first, after the one made then and of that id."""
    wanted = select(SessionRow).order_by(*_NEWEST_FIRST)
    if owners is not None:
        wanted = wanted.where(col(SessionRow.owner).in_(owners))
    if project_ids is not None:
        wanted = wanted.where(col(SessionRow.project_id).in_(project_ids))
    if after is not None:
        created_at, session_id = after
        is_older = col(SessionRow.created_at) < created_at
        is_beside = (col(SessionRow.created_at) == created_at) & (col(SessionRow.session_id) > session_id)
        wanted = wanted.where(is_older | is_beside)
    yield from tx.exec(wanted.execution_options(yield_per=_READ_AT_ONCE))


def unfinished(tx: Session, owner: str, display_name: str) -> SessionId | None:
    """An owner's newest session of that display name which has not finished."""
    wanted = select(SessionRow.session_id).where(
        SessionRow.owner == owner, SessionRow.display_name == display_name, col(SessionRow.finished_at).is_(None)
    )
    found = tx.exec(wanted.order_by(*_NEWEST_FIRST)).first()
    return None if found is None else SessionId(found)


def set_project(tx: Session, session_id: SessionId, project_id: str) -> bool:
    """Move a session, and all that was made in it, into a project; False if there is no such session."""
    row = get(tx, session_id)
    if row is None:
        return False
    row.project_id = project_id
    tx.flush()
    return True


def end_silent(tx: Session, before: float, reason: str, now: float) -> list[SessionId]:
    """End the sessions not heard of, and of which nothing was asked, since a time; returns them."""
    asked = select(ModelRow.session_id).where(col(ModelRow.last_request_at) >= before)
    sampled = select(SamplingSessionRow.session_id).where(col(SamplingSessionRow.last_used_at) >= before)
    silent = select(SessionRow).where(
        col(SessionRow.finished_at).is_(None),
        col(SessionRow.last_heartbeat_at) < before,
        col(SessionRow.session_id).not_in(asked),
        col(SessionRow.session_id).not_in(sampled),
    )
    ended = list(tx.exec(silent))
    for row in ended:
        row.finished_at, row.finish_reason = now, reason
    tx.flush()
    return [row.session_id for row in ended]
