"""Client sessions and their heartbeats."""

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Float, bindparam, case, func, true, update
from sqlalchemy import select as select_columns
from sqlmodel import Session, col, select

from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.store.database import execute, execute_in_batches, is_in_batch
from skyrl_tx.store.tables import ModelRow, ProjectMemberRow, RequestRow, SamplingSessionRow, SessionRow

_ROWS_PER_FETCH = 200
DIRECT, OPENAI, ANTHROPIC = "samples without a sampling session", "OpenAI endpoint", "Anthropic endpoint"
PLAYGROUND = "Playground"
SERVER_SESSIONS = (DIRECT, OPENAI, ANTHROPIC, PLAYGROUND)
"""Display names of sessions that the server creates for samples without a client session.

There is one such session for each owner and name.
"""
CHAT_SESSIONS = (OPENAI, ANTHROPIC, PLAYGROUND)
"""Server sessions whose results only the API process that submitted the request can read."""
_WAITING_WITHOUT_HEARTBEAT = (
    select(SessionRow.session_id)
    .distinct()
    .where(
        is_in_batch(col(RequestRow.request_id)),
        col(RequestRow.status) == "open",
        col(RequestRow.session_id) == col(SessionRow.session_id),
        col(SessionRow.finished_at).is_(None),
        col(SessionRow.last_heartbeat_at) < bindparam("before"),
    )
)


@dataclass(frozen=True, slots=True)
class SessionRef:
    """The columns of a session that every call needs.

    The client's metadata is left out because it may be long.
    """

    session_id: SessionId
    owner: str
    project_id: str | None
    created_at: float
    last_heartbeat_at: float
    finished_at: float | None
    finish_reason: str | None


# These statements run for every request and heartbeat: they are built once and load no ORM objects.
_NOW = bindparam("now", type_=Float())
_HAS_ID = col(SessionRow.session_id) == bindparam("name")
_FIND = select_columns(
    col(SessionRow.session_id),
    col(SessionRow.owner),
    col(SessionRow.project_id),
    col(SessionRow.created_at),
    col(SessionRow.last_heartbeat_at),
    col(SessionRow.finished_at),
    col(SessionRow.finish_reason),
).where(_HAS_ID)
_HEARTBEAT = (
    update(SessionRow)
    .where(_HAS_ID)
    .values(
        last_heartbeat_at=case(
            (col(SessionRow.last_heartbeat_at) < _NOW, _NOW),
            else_=col(SessionRow.last_heartbeat_at),
        )
    )
)
_FINISH = (
    update(SessionRow)
    .where(_HAS_ID)
    .values(
        finished_at=func.coalesce(col(SessionRow.finished_at), bindparam("now")),
        finish_reason=func.coalesce(col(SessionRow.finish_reason), bindparam("reason")),
    )
)
_SET_PROJECT = update(SessionRow).where(_HAS_ID).values(project_id=bindparam("project"))


def make_id() -> SessionId:
    """Return a random session id."""
    return SessionId(f"session-{secrets.token_hex(16)}")


def create(
    tx: Session,
    *,
    owner: str,
    now: float,
    tags: Sequence[str] = (),
    user_metadata: Mapping[str, object] | None = None,
    sdk_version: str | None = None,
    project_id: str | None = None,
    display_name: str | None = None,
    session_id: SessionId | None = None,
    key_id: int | None = None,
) -> SessionId:
    """Insert a session and return its id, which is random by default.

    `key_id` is the API key whose quotas its work counts for.
    """
    session_id = session_id or make_id()
    row = SessionRow(
        session_id=session_id,
        owner=owner,
        project_id=project_id,
        display_name=display_name,
        key_id=key_id,
        tags=list(tags),
        user_metadata=dict(user_metadata or {}),
        sdk_version=sdk_version,
        created_at=now,
        last_heartbeat_at=now,
    )

    tx.add(row)
    return session_id


def get(tx: Session, session_id: SessionId) -> SessionRow | None:
    """Return a session with its metadata, or None if it does not exist."""
    return tx.get(SessionRow, session_id)


_METADATA = select_columns(col(SessionRow.session_id), col(SessionRow.user_metadata)).where(
    is_in_batch(col(SessionRow.session_id))
)


def get_metadata(tx: Session, session_ids: Collection[SessionId]) -> dict[SessionId, Mapping[str, object]]:
    """Return the client's metadata of each session. Sessions that were removed are left out."""
    return {name: metadata or {} for name, metadata in execute_in_batches(tx, _METADATA, session_ids)}


def find(tx: Session, session_id: SessionId) -> SessionRef | None:
    """Return a session without its metadata, or None if it does not exist."""
    row = execute(tx, _FIND, {"name": session_id}).one_or_none()
    return None if row is None else SessionRef(*row)


def record_heartbeat(tx: Session, session_id: SessionId, now: float) -> bool:
    """Record a heartbeat. Return False if the session does not exist."""
    return execute(tx, _HEARTBEAT, {"name": session_id, "now": now}).rowcount > 0


def find_waiting_without_heartbeat(tx: Session, request_ids: Iterable[RequestId], before: float) -> set[SessionId]:
    """Return the unfinished sessions of these open requests without a heartbeat since `before`."""
    rows = execute_in_batches(tx, _WAITING_WITHOUT_HEARTBEAT, request_ids, before=before)
    return {SessionId(session_id) for (session_id,) in rows}


def finish(tx: Session, session_id: SessionId, reason: str, now: float) -> bool:
    """Finish a session.

    A finished session keeps its first reason. Return False if the session does not exist.
    """
    return execute(tx, _FINISH, {"name": session_id, "now": now, "reason": reason}).rowcount > 0


_NEWEST_FIRST = (col(SessionRow.created_at).desc(), col(SessionRow.session_id))


def is_visible_to(owner: str | None) -> ColumnElement[bool]:
    """Return the condition on `SessionRow` that an owner may see a session.

    Owners see their own sessions and all sessions of projects they are a member of. `owner` None
    sees all sessions.
    """
    if owner is None:
        return true()
    projects = select_columns(col(ProjectMemberRow.project_id)).where(col(ProjectMemberRow.owner) == owner)
    return (col(SessionRow.owner) == owner) | col(SessionRow.project_id).in_(projects)


def list_ids(
    tx: Session, owner: str | None, limit: int, offset: int, *, with_projects: bool = False
) -> list[SessionId]:
    """Return a page of an owner's sessions, newest first; `owner` None means all owners.

    `with_projects` adds the sessions of the projects that the owner is a member of.
    """
    statement = select(SessionRow.session_id).order_by(*_NEWEST_FIRST)
    if with_projects:
        statement = statement.where(is_visible_to(owner))
    elif owner is not None:
        statement = statement.where(SessionRow.owner == owner)
    return [SessionId(session_id) for session_id in tx.exec(statement.limit(limit).offset(offset))]


def iterate(
    tx: Session,
    viewer: str | None,
    owners: Collection[str] | None,
    project_ids: Collection[str] | None,
    after: tuple[float, SessionId] | None,
) -> Iterator[SessionRow]:
    """Yield sessions, newest first.

    Args:
        tx: The transaction.
        viewer: Yield only sessions that this owner may see; None sees all.
        owners: Yield only sessions of these owners; None means all owners.
        project_ids: Yield only sessions of these projects; None means any project or none.
        after: Creation time and id of the previous page's last session; None starts at the newest.
    """
    statement = select(SessionRow).where(is_visible_to(viewer)).order_by(*_NEWEST_FIRST)
    if owners is not None:
        statement = statement.where(col(SessionRow.owner).in_(owners))
    if project_ids is not None:
        statement = statement.where(col(SessionRow.project_id).in_(project_ids))
    if after is not None:
        created_at, session_id = after
        is_older = col(SessionRow.created_at) < created_at
        has_later_id = (col(SessionRow.created_at) == created_at) & (col(SessionRow.session_id) > session_id)
        statement = statement.where(is_older | has_later_id)
    yield from tx.exec(statement.execution_options(yield_per=_ROWS_PER_FETCH))


def find_unfinished(tx: Session, owner: str, display_name: str) -> SessionId | None:
    """Return an owner's newest unfinished session with a display name, or None."""
    statement = select(SessionRow.session_id).where(
        SessionRow.owner == owner, SessionRow.display_name == display_name, col(SessionRow.finished_at).is_(None)
    )
    session_id = tx.exec(statement.order_by(*_NEWEST_FIRST)).first()
    return None if session_id is None else SessionId(session_id)


def set_project(tx: Session, session_id: SessionId, project_id: str) -> bool:
    """Move a session, with everything created in it, to a project.

    Return False if the session does not exist.
    """
    return execute(tx, _SET_PROJECT, {"name": session_id, "project": project_id}).rowcount > 0


_FINISH_TIMED_OUT = (
    update(SessionRow)
    .where(
        col(SessionRow.finished_at).is_(None),
        col(SessionRow.last_heartbeat_at) < bindparam("before"),
        col(SessionRow.session_id).not_in(
            select(ModelRow.session_id).where(col(ModelRow.last_request_at) >= bindparam("before"))
        ),
        col(SessionRow.session_id).not_in(
            select(SamplingSessionRow.session_id).where(col(SamplingSessionRow.last_used_at) >= bindparam("before"))
        ),
    )
    .values(finished_at=bindparam("now"), finish_reason=bindparam("reason"))
    .returning(col(SessionRow.session_id))
)


def finish_timed_out(tx: Session, before: float, reason: str, now: float) -> list[SessionId]:
    """Finish the sessions without a heartbeat, training request or sample since `before`.

    Returns their ids.
    """
    rows = execute(tx, _FINISH_TIMED_OUT, {"before": before, "reason": reason, "now": now})
    return [SessionId(session_id) for (session_id,) in rows]
