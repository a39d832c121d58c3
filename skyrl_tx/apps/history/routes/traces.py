"""Endpoints that export the timeline of a session: a signed URL, which needs no API key, and the file behind it."""

import time
from collections.abc import Iterator
from http import HTTPStatus
from itertools import chain
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from sqlmodel import Session

from skyrl_tx.apps.history import session_trace
from skyrl_tx.apps.history.session_groups import session_groups
from skyrl_tx.apps.history.session_trace import MAX_SLICES, Group
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.server.context import ApiContext, Incoming, base_url, get_context
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.identity.scopes import API_PREFIX
from skyrl_tx.server.schemas.base import Response
from skyrl_tx.store import sessions

router = APIRouter(prefix=API_PREFIX)
_PURPOSE = "trace"


class TraceExport(Response):
    """The state of an export as the SDK polls it. This server builds the trace when it is fetched, so it is ready."""

    status: Literal["ready"] = "ready"
    url: str


@router.get("/sessions/{session_id}/trace_export")
def trace_export(session_id: str, call: Incoming, request: Request) -> TraceExport:
    """Return a signed URL of a session's timeline as a Perfetto trace."""
    found = call.store.read(lambda tx: access.visible_session(tx, call.caller, SessionId(session_id)))
    return TraceExport(url=trace_url(call.context, call.caller, request, found.session_id))


def trace_url(context: ApiContext, caller: Principal, request: Request, session_id: SessionId) -> str:
    """Return a signed URL of the trace of a session that the caller may see."""
    expires = int(time.time() + context.settings.download_url_ttl_s)
    signature = context.signing_key.sign(_PURPOSE, session_id, str(expires), str(caller.key_id))
    key = "" if caller.key_id is None else f"&key={caller.key_id}"
    base = base_url(context.settings, request)
    return f"{base}/api/v1/traces/{session_id}?expires={expires}{key}&signature={signature}"


@router.get("/traces/{session_id}")
def fetch(
    session_id: str,
    context: Annotated[ApiContext, Depends(get_context)],
    expires: Annotated[int, Query(ge=0, lt=2**40)],
    signature: str,
    key: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
) -> StreamingResponse:
    """Send the trace that a signed URL names; no API key is needed while the one that asked for the URL is valid."""
    if not context.signing_key.verify(signature, _PURPOSE, session_id, str(expires), str(key)):
        raise ApiError(HTTPStatus.FORBIDDEN, "this URL was not signed by this server")
    if expires < time.time():
        raise ApiError(HTTPStatus.FORBIDDEN, "this URL has expired; ask for a new one")
    now = time.time()

    def work(tx: Session) -> tuple[str, list[Group]]:
        asker = context.authenticator.find_key(tx, key)
        if asker is None:
            raise ApiError(HTTPStatus.FORBIDDEN, "the API key with which this URL was made was revoked or has expired")
        found = access.visible_session(tx, asker, SessionId(session_id))
        row = sessions.get(tx, found.session_id)
        title = found.session_id if row is None or not row.display_name else row.display_name
        return title, session_groups(tx, found.session_id, now, MAX_SLICES)

    title, groups = context.store.read(work)
    parts: Iterator[bytes] = session_trace.trace_parts(title, groups)
    first = next(parts)  # an error here becomes a status
    headers = {
        "content-disposition": f'attachment; filename="{session_id}.pftrace"',
        "cache-control": "private",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(chain([first], parts), HTTPStatus.OK, headers, "application/octet-stream")
