"""Searching sessions."""

import time
from collections.abc import Collection
from datetime import UTC, datetime
from itertools import islice
from typing import get_args

from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.api.context import Incoming
from skyrl_tx.api.principal import USER_URN, Principal
from skyrl_tx.api.schemas.search import (
    Active,
    ClientFinished,
    CursorAnswer,
    FinishReasonAnswer,
    FinishReasonType,
    SearchCursor,
    SearchOwner,
    SessionSearchAnswer,
    SessionSearchRequest,
    SessionSummary,
    StatusQuery,
)
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import sessions, storage
from skyrl_tx.store.storage import Stored
from skyrl_tx.store.tables import SessionRow

router = APIRouter()

_SILENT_S = 600.0
"""A client beats every 10 s; one not heard of for so long is not known to be running."""


@router.post("/sessions/search", response_model_exclude_none=True)
def search(call: Incoming) -> SessionSearchAnswer:
    """A page of sessions that fit, newest first."""
    request = call.body.model(SessionSearchRequest)
    owners = _owners(call.caller, request.owner)
    now = time.time()

    def work(tx: Session) -> SessionSearchAnswer:
        rows = sessions.newest_first(tx, owners, request.project_ids, _place(tx, request.cursor))
        found = [*islice((row for row in rows if _fits(row, request, now)), request.limit + 1)]
        page = found[: request.limit]
        stored = storage.of_sessions(tx, [row.session_id for row in page], now)
        return SessionSearchAnswer(
            sessions=[_summary(row, stored.get(row.session_id, Stored()), now) for row in page],
            next_cursor=_cursor(page[-1]) if len(found) > len(page) else None,
        )

    return call.store.read(work)


def _owners(caller: Principal, asked: SearchOwner) -> Collection[str] | None:
    """Whose sessions are looked through; None: everyone's."""
    match asked.type:
        case "own":
            return [caller.owner]
        case "accessible":
            return None if caller.is_admin else [caller.owner]
        case "user":
            return [owner for urn in asked.owner_urns if caller.may_see(owner := urn.removeprefix(USER_URN))]


def _place(tx: Session, cursor: SearchCursor | None) -> tuple[float, SessionId] | None:
    """Where a page begins; its time is read anew, as texts of times are rounded."""
    if cursor is None:
        return None
    last = sessions.get(tx, SessionId(cursor.last_session_id))
    created_at = cursor.last_created_at.timestamp() if last is None else last.created_at
    return created_at, SessionId(cursor.last_session_id)


def _fits(row: SessionRow, request: SessionSearchRequest, now: float) -> bool:
    metadata = _metadata(row)
    if any(metadata.get(name) != value for name, value in request.user_metadata.items()):
        return False
    if request.statuses is not None:
        status = _status(row, now)
        if not any(_has(status, wanted) for wanted in request.statuses):
            return False
    if request.session_id is None and request.display_name is None:
        return True
    name = (row.display_name or "").lower()
    is_named = request.display_name is not None and all(word in name for word in request.display_name.lower().split())
    return is_named or row.session_id == request.session_id


def _has(status: ClientFinished | Active | None, wanted: StatusQuery) -> bool:
    if status is None or status.type != wanted.type:
        return False
    return wanted.reasons is None or not isinstance(status, ClientFinished) or status.reason.type in wanted.reasons


def _status(row: SessionRow, now: float) -> ClientFinished | Active | None:
    if row.finished_at is None:
        return Active() if row.last_heartbeat_at > now - _SILENT_S else None
    reason, _, detail = (row.finish_reason or "").partition(": ")
    if reason not in get_args(FinishReasonType):
        return None
    return ClientFinished(reason=FinishReasonAnswer.model_validate({"type": reason}), detail=detail or None)


def _summary(row: SessionRow, stored: Stored, now: float) -> SessionSummary:
    return SessionSummary(
        session_id=row.session_id,
        created_at=_time(row.created_at),
        owner=f"{USER_URN}{row.owner}",
        project_id=row.project_id or "",
        status=_status(row, now),
        checkpoints_count=stored.num_checkpoints,
        display_name=row.display_name,
        user_metadata=_metadata(row),
        checkpoint_storage_bytes=stored.num_bytes,
    )


def _metadata(row: SessionRow) -> dict[str, str]:
    return {name: str(value) for name, value in row.user_metadata.items()}


def _cursor(row: SessionRow) -> CursorAnswer:
    return CursorAnswer(last_created_at=_time(row.created_at), last_session_id=row.session_id)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
