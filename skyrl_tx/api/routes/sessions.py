"""Client sessions."""

import time
from http import HTTPStatus

from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.api import lookup
from skyrl_tx.api.context import AccessScope, Incoming, Limit, Offset
from skyrl_tx.api.errors import ApiError
from skyrl_tx.api.schemas.service import (
    CreateSessionAnswer,
    CreateSessionRequest,
    FinishRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    ProjectRequest,
    SessionAnswer,
    SessionsAnswer,
)
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import models, samplers, sessions

router = APIRouter()


@router.post("/create_session", response_model_exclude_none=True)
def create_session(call: Incoming) -> CreateSessionAnswer:
    """Begin a session, once: a repetition, told by its idempotency key, gives the same."""
    request = call.body.model(CreateSessionRequest)
    session_id = call.session_id("session")

    def work(tx: Session) -> SessionId:
        if session_id is not None and sessions.get(tx, session_id) is not None:
            return session_id
        return sessions.create(
            tx,
            session_id=session_id,
            owner=call.caller.owner,
            tags=request.tags,
            user_metadata=request.user_metadata,
            sdk_version=request.sdk_version,
            project_id=request.project_id,
            display_name=request.display_name,
            now=time.time(),
        )

    return CreateSessionAnswer(session_id=call.store.write(work))


@router.post("/session_heartbeat")
def heartbeat(call: Incoming) -> HeartbeatAnswer:
    """Keep a session; 410 tells the client that it has finished, and to stop."""
    session_id = SessionId(call.body.model(HeartbeatRequest).session_id)

    def work(tx: Session) -> None:
        row = lookup.session(tx, call.caller, session_id)
        if row.finished_at is not None:
            raise ApiError(HTTPStatus.GONE, f"session {session_id!r} has finished ({row.finish_reason})")
        sessions.heartbeat(tx, session_id, time.time())

    call.store.write(work)
    return HeartbeatAnswer()


@router.post("/sessions/{session_id}/finish")
def finish(session_id: str, call: Incoming) -> dict[str, str]:
    """End a session; the first reason stays."""
    request = call.body.model(FinishRequest)
    reason = request.reason.type + (f": {request.detail}" if request.detail else "")

    def work(tx: Session) -> None:
        row = lookup.session(tx, call.caller, SessionId(session_id))
        sessions.finish(tx, row.session_id, reason, time.time())

    call.store.write(work)
    return {}


@router.get("/sessions")
def list_sessions(
    call: Incoming, limit: Limit = 20, offset: Offset = 0, access_scope: AccessScope = "owned"
) -> SessionsAnswer:
    """A page of the caller's sessions, newest first; `accessible`: to an admin, everyone's."""
    owner = call.caller.reach if access_scope == "accessible" else call.caller.owner
    return SessionsAnswer(sessions=[*call.store.read(lambda tx: sessions.list_ids(tx, owner, limit, offset))])


@router.get("/sessions/{session_id}", response_model_exclude_none=True)
def get_session(session_id: str, call: Incoming, access_scope: AccessScope = "owned") -> SessionAnswer:
    """What was made in one session; what the caller may read exists, whatever the scope."""

    def work(tx: Session) -> SessionAnswer:
        row = lookup.session(tx, call.caller, SessionId(session_id))
        return SessionAnswer(
            training_run_ids=[model.model_id for model in models.of_session(tx, row.session_id)],
            sampler_ids=[*samplers.ids_of_session(tx, row.session_id)],
            user_metadata={name: str(value) for name, value in row.user_metadata.items()},
            display_name=row.display_name,
        )

    return call.store.read(work)


@router.put("/sessions/{session_id}/project")
def set_project(session_id: str, call: Incoming) -> dict[str, str]:
    """Move a session, and with it what was made in it, into a project."""
    project_id = call.body.model(ProjectRequest).project_id

    def work(tx: Session) -> None:
        row = lookup.session(tx, call.caller, SessionId(session_id))
        sessions.set_project(tx, row.session_id, project_id)

    call.store.write(work)
    return {}
