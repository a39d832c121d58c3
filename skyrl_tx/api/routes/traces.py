"""Endpoints that export the timeline of a session: a signed URL, which needs no API key, and the file behind it."""

import time
from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from itertools import chain
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from sqlmodel import Session

from skyrl_tx.api import access, session_trace
from skyrl_tx.api.context import ApiContext, Incoming, base_url, get_context
from skyrl_tx.api.errors import ApiError
from skyrl_tx.api.schemas.base import Response
from skyrl_tx.api.session_trace import MAX_SLICES, Group, Span
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.store import logged, models, points, sessions, timeline
from skyrl_tx.store.timeline import RequestTimes

router = APIRouter()
_PURPOSE = "trace"
_MAX_GROUPS = 200
"""Models, and samplers, in a trace; the oldest are left out."""


class TraceExport(Response):
    """The state of an export as the SDK polls it. This server builds the trace when it is fetched, so it is ready."""

    status: Literal["ready"] = "ready"
    url: str


@router.get("/sessions/{session_id}/trace_export")
def trace_export(session_id: str, call: Incoming, request: Request) -> TraceExport:
    """Return a signed URL of a session's timeline as a Perfetto trace."""
    found = call.store.read(lambda tx: access.session(tx, call.caller, SessionId(session_id)))
    expires = int(time.time() + call.settings.download_url_ttl_s)
    key_id = call.caller.key_id
    signature = call.context.signing_key.sign(_PURPOSE, found.session_id, str(expires), str(key_id))
    key = "" if key_id is None else f"&key={key_id}"
    base = base_url(call.settings, request)
    return TraceExport(url=f"{base}/api/v1/traces/{found.session_id}?expires={expires}{key}&signature={signature}")


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
        found = access.session(tx, asker, SessionId(session_id))
        row = sessions.get(tx, found.session_id)
        title = found.session_id if row is None or not row.display_name else row.display_name
        return title, _groups(tx, found.session_id, now)

    title, groups = context.store.read(work)
    parts: Iterator[bytes] = session_trace.trace_parts(title, groups)
    first = next(parts)  # an error here becomes a status
    headers = {
        "content-disposition": f'attachment; filename="{session_id}.pftrace"',
        "cache-control": "private",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(chain([first], parts), HTTPStatus.OK, headers, "application/octet-stream")


def _groups(tx: Session, session_id: SessionId, now: float) -> list[Group]:
    """Return the newest requests of a session, by model and by sampler."""
    by_model: defaultdict[ModelId, list[RequestTimes]] = defaultdict(list)
    by_sampler: defaultdict[str, list[Span]] = defaultdict(list)
    for row in timeline.requests_of_session(tx, session_id, MAX_SLICES):
        if row.model_id is not None:
            by_model[row.model_id].append(row)
        else:
            name = "other requests" if row.sampling_session_id is None else f"sampler {row.sampling_session_id}"
            by_sampler[name].append(session_trace.request_span(row, now))
    groups: list[Group] = []
    left = MAX_SLICES
    for model in reversed(models.of_session(tx, session_id)[-_MAX_GROUPS:]):  # the oldest models get what is left
        found = points.newest(tx, model.model_id, left)
        logged_points = logged.read_points_of_model(tx, model.model_id, limit=left)
        title = f"model {model.model_id.partition(':')[2] or model.model_id}"
        groups.append(session_trace.model_group(title, by_model[model.model_id], found, logged_points, now))
        left = max(0, left - len(found) - len(logged_points))
    groups.reverse()
    samplers = list(by_sampler.items())[-_MAX_GROUPS:]
    return groups + [Group(title=title, spans=spans) for title, spans in samplers]
