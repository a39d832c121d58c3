"""Endpoints for client sessions and for searching them."""

import logging
import time
from collections.abc import Iterator
from http import HTTPStatus
from itertools import islice
from typing import get_args

from fastapi import APIRouter, Request, Response
from sqlmodel import Session

from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.server.context import AccessScope, ApiCall, Incoming, IncomingList, Limit, Offset
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.responses import make_list_response
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import USER_URN
from skyrl_tx.server.schemas import service as schemas
from skyrl_tx.server.schemas.base import describe_body, parse_version, to_utc_time
from skyrl_tx.store import audit, checkpoints, models, sampling_sessions, sessions
from skyrl_tx.store.checkpoints import StorageUsage
from skyrl_tx.store.database import get_existing
from skyrl_tx.store.tables import SessionRow

_log = logging.getLogger(__name__)
router = APIRouter()

_LOSS_DIFFERENCES = (
    "loss stable_reinforce: Tinker's formula is not public, so this server uses its own definition; "
    "importance_sampling, ppo and cispo are as Tinker documents them"
)
NEWEST_TESTED_SDK = 0, 38
"""The newest release of the SDK that the tests run. A client that uses a newer release gets a warning."""
_SESSIONS_PER_QUERY = 200
_ACTIVE_S = 600.0
"""A session is active if its last heartbeat is less than this many seconds old.

The SDK sends a heartbeat every 10 s.
"""


def _collect_info_lines(call: ApiCall, request: Request, session_id: SessionId) -> Iterator[str]:
    """Ask each extension for a line about a new session, and yield these lines for the client.

    If an extension fails, its error is only logged: the client can use the session without its line.
    """
    # The console is registered last. Its line comes first: it has the address of the session's page.
    for name, extension in reversed([*call.context.extensions.items()]):
        if extension.describe_session is None:
            continue
        try:
            line = extension.describe_session(call, request, session_id)
        except Exception:  # an extension may raise anything
            _log.exception("%s cannot describe session %s", name, session_id)
        else:
            if line is not None:
                yield line


@router.post("/create_session", **describe_body(schemas.CreateSessionRequest))
def create_session(call: Incoming, request: Request) -> dict[str, str]:
    """Create a session. A retry with the same idempotency key returns the same session.

    Clients log the `info_message`, which has the address of the session's page, and the
    `warning_message`.
    """
    new = call.body.parse_model(schemas.CreateSessionRequest)
    session_id = call.derive_session_id("session")

    def work(tx: Session) -> SessionId:
        if session_id is not None and sessions.find(tx, session_id) is not None:
            return session_id
        access.check_can_use_project(tx, call.caller, new.project_id)

        return sessions.create(
            tx,
            session_id=session_id,
            owner=call.caller.owner,
            key_id=call.caller.quota_key_id,
            tags=new.tags,
            user_metadata=new.user_metadata,
            sdk_version=new.sdk_version,
            project_id=new.project_id,
            display_name=new.display_name,
            now=time.time(),
        )

    call.add_stored(len(call.body.raw))
    created = call.store.write(work)

    # Tell the client what differs from Tinker, and what extensions say about the session.
    response = {"type": "create_session", "session_id": str(created)}
    response["info_message"] = "\n".join((*_collect_info_lines(call, request, created), _LOSS_DIFFERENCES))
    version = parse_version(call.sdk_version)
    if version is not None and version > NEWEST_TESTED_SDK:
        tested = ".".join(map(str, NEWEST_TESTED_SDK))
        response["warning_message"] = (
            f"this server was tested with releases of tinker up to {tested}, and the client has {call.sdk_version}: "
            "features added since then may fail; update the server if a newer release supports this SDK"
        )
    return response


@router.post("/session_heartbeat", **describe_body(schemas.HeartbeatRequest))
def record_heartbeat(call: Incoming) -> dict[str, str]:
    """Record a heartbeat of a session. Returns 410 if the session has finished."""
    session_id = SessionId(call.body.parse_model(schemas.HeartbeatRequest).session_id)

    def work(tx: Session) -> None:
        row = access.find_session(tx, call.caller, session_id)
        if row.finished_at is not None:
            raise ApiError(HTTPStatus.GONE, f"session {session_id!r} has finished ({row.finish_reason})")
        sessions.record_heartbeat(tx, session_id, time.time())

    call.store.write(work)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", **describe_body(schemas.FinishRequest))
def finish_session(session_id: str, call: Incoming) -> dict[str, str]:
    """Finish a session. Finishing it again does not change the reason."""
    request = call.body.parse_model(schemas.FinishRequest)
    reason = request.reason.type + (f": {request.detail}" if request.detail else "")

    def work(tx: Session) -> None:
        row = access.find_session(tx, call.caller, SessionId(session_id))
        sessions.finish(tx, row.session_id, reason, time.time())

    call.store.write(work)
    return {}


@router.get("/sessions")
def list_sessions(
    call: IncomingList, limit: Limit = 20, offset: Offset = 0, access_scope: AccessScope = "owned"
) -> dict[str, list[str]]:
    """List the caller's sessions, newest first.

    With `access_scope=accessible`, the list also has the sessions of the caller's projects. For an
    admin, it then has the sessions of all owners.
    """
    is_wide = access_scope == "accessible"
    owner = call.caller.owner_filter if is_wide else call.caller.owner
    return {
        "sessions": [*call.store.read(lambda tx: sessions.list_ids(tx, owner, limit, offset, with_projects=is_wide))]
    }


@router.get("/sessions/{session_id}", response_model_exclude_none=True)
def get_session(session_id: str, call: IncomingList, access_scope: AccessScope = "owned") -> schemas.SessionResponse:
    """Describe one session: its training runs and samplers."""

    def work(tx: Session) -> schemas.SessionResponse:
        ref = access.find_session(tx, call.caller, SessionId(session_id), access.MEMBERS)
        row = get_existing(tx, SessionRow, ref.session_id)
        return schemas.SessionResponse(
            training_run_ids=[model.model_id for model in models.list_by_session(tx, row.session_id)],
            sampler_ids=[*sampling_sessions.list_ids_by_session(tx, row.session_id)],
            user_metadata=_decode_metadata(row),
            display_name=row.display_name,
        )

    return call.store.read(work)


@router.put("/sessions/{session_id}/project", **describe_body(schemas.ProjectRequest))
def set_project(session_id: str, call: Incoming) -> dict[str, str]:
    """Move a session, with its runs and checkpoints, into a project."""
    project_id = call.body.parse_model(schemas.ProjectRequest).project_id

    def work(tx: Session) -> None:
        row = access.find_session(tx, call.caller, SessionId(session_id), access.EDITORS)
        access.check_can_use_project(tx, call.caller, project_id)
        sessions.set_project(tx, row.session_id, project_id)
        audit.record(
            tx,
            "project_session_assigned",
            call.caller.actor,
            time.time(),
            project_id=project_id,
            session_id=row.session_id,
        )

    call.store.write(work)
    return {}


@router.post(
    "/sessions/search", response_model=schemas.SessionSearchResponse, **describe_body(schemas.SessionSearchRequest)
)
def search_sessions(call: IncomingList) -> Response:
    """Search sessions, newest first."""
    request = call.body.parse_model(schemas.SessionSearchRequest)
    owners = access.find_search_owners(call.caller, request.owner)
    now = time.time()

    def work(tx: Session) -> schemas.SessionSearchResponse:
        rows = sessions.iterate(
            tx, call.caller.owner_filter, owners, request.project_ids, _find_position(tx, request.cursor)
        )

        # Read one more than the page has, to know whether there are more.
        found = _add_statuses(tx, rows, now)
        matches = [*islice((match for match in found if _matches(*match, request)), request.limit + 1)]
        page = matches[: request.limit]
        stored = checkpoints.get_usage_by_session(tx, [row.session_id for row, _ in page], now)

        last = page[-1][0] if len(matches) > len(page) else None
        return schemas.SessionSearchResponse(
            sessions=[
                _summarize_session(row, status, stored.get(row.session_id, StorageUsage())) for row, status in page
            ],
            next_cursor=None
            if last is None
            else schemas.SearchCursor(last_created_at=to_utc_time(last.created_at), last_session_id=last.session_id),
        )

    return make_list_response(call.store.read(work), exclude_none=True)


def _find_position(tx: Session, cursor: schemas.SearchCursor | None) -> tuple[float, SessionId] | None:
    """Return the creation time and the id of the last session of the previous page.

    The time is read from the database, because the time in the cursor was rounded when it was
    written as JSON. The time in the cursor is used only if that session was deleted.
    """
    if cursor is None:
        return None
    last = sessions.find(tx, SessionId(cursor.last_session_id))
    created_at = cursor.last_created_at.timestamp() if last is None else last.created_at
    return created_at, SessionId(cursor.last_session_id)


def _add_statuses(
    tx: Session, rows: Iterator[SessionRow], now: float
) -> Iterator[tuple[SessionRow, schemas.SessionStatus | None]]:
    """Yield sessions with their status."""
    while chunk := list(islice(rows, _SESSIONS_PER_QUERY)):
        failed = models.find_failed_by_session(tx, [row.session_id for row in chunk])
        for row in chunk:
            yield row, _get_status(row, failed.get(row.session_id), now)


def _matches(row: SessionRow, status: schemas.SessionStatus | None, request: schemas.SessionSearchRequest) -> bool:
    metadata = _decode_metadata(row)
    if any(metadata.get(name) != value for name, value in request.user_metadata.items()):
        return False
    if request.statuses is not None and not any(_has_status(status, query) for query in request.statuses):
        return False
    if request.session_id is None and request.display_name is None:
        return True
    name = (row.display_name or "").lower()
    is_named = request.display_name is not None and all(word in name for word in request.display_name.lower().split())
    return is_named or row.session_id == request.session_id


def _has_status(status: schemas.SessionStatus | None, query: schemas.StatusQuery) -> bool:
    if status is None or status.type != query.type:
        return False
    return (
        query.reasons is None or not isinstance(status, schemas.ClientFinished) or status.reason.type in query.reasons
    )


def _get_status(row: SessionRow, failed_run: ModelId | None, now: float) -> schemas.SessionStatus | None:
    """Return the status of a session. None means that it has not finished and sends no heartbeats."""
    reason, _, detail = (row.finish_reason or "").partition(": ")
    was_finished_by_client = reason in get_args(schemas.FinishReasonType)
    if failed_run is not None and not was_finished_by_client:
        return schemas.Failed(reason=schemas.FailedRun(training_run_id=failed_run))
    if row.finished_at is None:
        return schemas.Active() if row.last_heartbeat_at > now - _ACTIVE_S else None
    if not was_finished_by_client:
        return schemas.Cancelled(detail=row.finish_reason)
    return schemas.ClientFinished(reason=schemas.FinishReason.model_validate({"type": reason}), detail=detail or None)


def _summarize_session(
    row: SessionRow, status: schemas.SessionStatus | None, stored: StorageUsage
) -> schemas.SessionSummary:
    return schemas.SessionSummary(
        session_id=row.session_id,
        created_at=to_utc_time(row.created_at),
        owner=f"{USER_URN}{row.owner}",
        project_id=row.project_id or "",
        status=status,
        checkpoints_count=stored.num_checkpoints,
        display_name=row.display_name,
        user_metadata=_decode_metadata(row),
        checkpoint_storage_bytes=stored.num_bytes,
    )


def _decode_metadata(row: SessionRow) -> dict[str, str]:
    return {name: str(value) for name, value in row.user_metadata.items()}
