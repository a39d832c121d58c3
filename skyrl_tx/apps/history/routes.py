"""Endpoints for the metrics of runs, and for traces of sessions."""

import math
import secrets
import time
from collections.abc import Iterator
from http import HTTPStatus
from itertools import chain
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response as HttpResponse
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from sqlmodel import Session

from skyrl_tx.apps.history import logged_metrics, timeline
from skyrl_tx.apps.history import points as stored_points
from skyrl_tx.apps.history.client_metrics import (
    MAX_METRICS,
    MAX_NAME_LENGTH,
    MAX_STEP,
    Values,
    make_client_run,
    store_metrics,
)
from skyrl_tx.apps.history.logged_metrics import NewLoggedPoint
from skyrl_tx.apps.history.timeline import MAX_SLICES, TimelineGroup, read_session_groups
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.server.context import (
    AccessScope,
    ApiContext,
    Incoming,
    IncomingList,
    Limit,
    Offset,
    get_base_url,
    get_context,
)
from skyrl_tx.server.errors import ApiError, bad_request
from skyrl_tx.server.http.responses import make_list_response
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.identity.scopes import API_PREFIX
from skyrl_tx.server.schemas.base import Name, Response, WireModel, describe_body
from skyrl_tx.store import models, sessions

router = APIRouter(prefix=API_PREFIX)
_PURPOSE = "trace"
PageSize = Annotated[int, Query(ge=1, le=5000)]
Position = Annotated[int, Query(ge=0, lt=2**63)]
LoggedRunId = Annotated[int, Path(ge=0, lt=2**63)]


def _check_metric_count(value: object) -> object:
    """Raise ValueError if an object has too many names.

    Runs before its values are validated, to save time.
    """
    if isinstance(value, dict) and len(cast(dict[str, object], value)) > MAX_METRICS:
        raise ValueError(f"must have at most {MAX_METRICS} names")
    return cast(object, value)


def _replace_non_finite(values: Values) -> Values:
    return {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}


MetricName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
_Number = Annotated[float, Field(allow_inf_nan=True)]


class LogMetricsRequest(WireModel):
    """Metrics of one step. NaN and infinity are stored as null."""

    step: Annotated[int, Field(ge=-MAX_STEP, le=MAX_STEP)]
    metrics: Annotated[
        dict[MetricName, _Number | None], BeforeValidator(_check_metric_count), AfterValidator(_replace_non_finite)
    ]
    log_id: Annotated[Name, Field(min_length=1)] | None = None
    """The same in all retries of a request.

    Default: the `X-Idempotency-Key` header, or a random id.
    """


class JoinRunRequest(WireModel):
    """The training run that a logged run belongs to, or null for none."""

    training_run_id: Name | None


class RunPoint(Response):
    """One completed request of a run, with its metrics and times. Times are Unix seconds."""

    model_config = ConfigDict(from_attributes=True)
    kind: Literal["train", "forward", "step"]
    step: int
    created_at: float
    started_at: float
    at: float
    device_s: float
    tokens: int
    datums: int
    metrics: Annotated[Values, Field(validation_alias="values")]


class LoggedMetrics(Response):
    """Metrics that a client logged for one step."""

    model_config = ConfigDict(from_attributes=True)
    project: str
    run: str
    step: int
    at: float
    metrics: Annotated[Values, Field(validation_alias="values")]


class MetricsResponse(Response):
    """A page of a run's points, in order of arrival. Pass `cursor` to get the next page.

    Times are Unix seconds.
    """

    training_run_id: str
    points: list[RunPoint]
    logged: list[LoggedMetrics]
    cursor: str
    has_more: bool


class LoggedMetricsResponse(Response):
    """A page of a logged run's points, in order of arrival. Pass `cursor` to get the next page."""

    logged: list[LoggedMetrics]
    cursor: int
    has_more: bool


class LoggedRunResponse(Response):
    """A run of a client's logger, and the training run that it belongs to, if known."""

    model_config = ConfigDict(from_attributes=True)
    logged_run_id: int
    project: str
    name: str
    owner: str
    training_run_id: Annotated[str | None, Field(validation_alias="model_id")]
    config: dict[str, object]
    num_points: int
    created_at: float
    last_at: float


class LoggedRunsResponse(Response):
    """A page of logged runs, most recently written first."""

    logged_runs: list[LoggedRunResponse]


class TraceExport(Response):
    """The state of an export, which the SDK polls.

    It is always ready: the trace is built when it is downloaded.
    """

    status: Literal["ready"] = "ready"
    url: str


@router.post("/training_runs/{run_id}/metrics", **describe_body(LogMetricsRequest))
def log_metrics(run_id: str, call: Incoming) -> dict[str, bool]:
    """Store metrics of one step of a training run. `is_new` is false if the request is a retry."""
    call.add_stored(len(call.body.raw))
    request = call.body.parse_model(LogMetricsRequest)
    model_id = ModelId(run_id)

    def find_owner(tx: Session) -> str:
        row = access.find_model(tx, call.caller, model_id)
        return models.get_owner(tx, row.model_id) or call.caller.owner

    log_id = request.log_id or call.idempotency_key or secrets.token_hex(16)
    point = NewLoggedPoint(log_id=log_id[:MAX_NAME_LENGTH], step=request.step, values=request.metrics)
    run = make_client_run(call.store.read(find_owner), model_id)
    return {"is_new": store_metrics(call.store, run, [point], time.time()) > 0}


@router.get("/training_runs/{run_id}/metrics", response_model=MetricsResponse)
def get_metrics(run_id: str, call: IncomingList, cursor: str = "0-0", limit: PageSize = 1000) -> HttpResponse:
    """Return a page of a training run's metrics: a point per request, and what clients logged."""
    after, logged_after = _parse_cursor(cursor)

    def work(tx: Session) -> MetricsResponse:
        model_id = access.find_visible_run(tx, call.caller, ModelId(run_id)).model_id
        points = stored_points.read_points(tx, model_id, after, limit)
        logged_runs = logged_metrics.list_run_ids(tx, model_id)
        logged = logged_metrics.read_points(tx, logged_runs, after=logged_after, limit=limit)
        last = points[-1].position if points else after
        last_logged = logged[-1].position if logged else logged_after
        return MetricsResponse(
            training_run_id=model_id,
            points=list(map(RunPoint.model_validate, points)),
            logged=list(map(LoggedMetrics.model_validate, logged)),
            cursor=f"{last}-{last_logged}",
            has_more=len(points) == limit or logged_metrics.has_points(tx, logged_runs, after=last_logged),
        )

    return make_list_response(call.store.read(work))


@router.get("/logged_runs", response_model=LoggedRunsResponse)
def list_logged_runs(
    call: IncomingList,
    limit: Limit = 100,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
    project: str | None = None,
) -> HttpResponse:
    """List the caller's logged runs, or all logged runs for an admin with `accessible`."""
    owner = call.caller.owner_filter if access_scope == "accessible" else call.caller.owner

    def work(tx: Session) -> LoggedRunsResponse:
        rows = logged_metrics.list_runs(tx, owner, project=project, limit=limit, offset=offset)
        return LoggedRunsResponse(logged_runs=list(map(LoggedRunResponse.model_validate, rows)))

    return make_list_response(call.store.read(work))


@router.get("/logged_runs/{logged_run_id}/metrics", response_model=LoggedMetricsResponse)
def get_logged_metrics(
    logged_run_id: LoggedRunId, call: IncomingList, cursor: Position = 0, limit: PageSize = 1000
) -> HttpResponse:
    """Return a page of a logged run's points."""

    def work(tx: Session) -> LoggedMetricsResponse:
        logged_metrics.find_logged_run(tx, call.caller, logged_run_id)
        points = logged_metrics.read_points(tx, [logged_run_id], after=cursor, limit=limit)
        last = points[-1].position if points else cursor
        return LoggedMetricsResponse(
            logged=list(map(LoggedMetrics.model_validate, points)),
            cursor=last,
            has_more=logged_metrics.has_points(tx, [logged_run_id], after=last),
        )

    return make_list_response(call.store.read(work))


@router.put("/logged_runs/{logged_run_id}/training_run", **describe_body(JoinRunRequest))
def join_training_run(logged_run_id: LoggedRunId, call: Incoming) -> dict[str, str | None]:
    """Assign a logged run to a training run of the same owner, or to no training run."""
    run_id = call.body.parse_model(JoinRunRequest).training_run_id

    call.store.write(lambda tx: logged_metrics.join_logged_run(tx, call.caller, logged_run_id, run_id))
    return {"training_run_id": run_id}


@router.get("/sessions/{session_id}/trace_export")
def get_trace_export(session_id: str, call: Incoming, request: Request) -> TraceExport:
    """Return a signed URL for the timeline of a session as a Perfetto trace."""
    session = call.store.read(lambda tx: access.find_session(tx, call.caller, SessionId(session_id), access.MEMBERS))
    return TraceExport(url=make_trace_url(call.context, call.caller, request, session.session_id))


def make_trace_url(context: ApiContext, caller: Principal, request: Request, session_id: SessionId) -> str:
    """Return a signed URL for the trace of a session.

    The caller must have access to the session.
    """
    expires = int(time.time() + context.settings.download_url_ttl_s)
    signature = context.signing_key.sign(_PURPOSE, session_id, str(expires), str(caller.key_id))
    key = "" if caller.key_id is None else f"&key={caller.key_id}"
    base = get_base_url(context.settings, request)
    return f"{base}/api/v1/traces/{session_id}?expires={expires}{key}&signature={signature}"


@router.get("/traces/{session_id}")
def fetch_trace(
    session_id: str,
    context: Annotated[ApiContext, Depends(get_context)],
    expires: Annotated[int, Query(ge=0, lt=2**40)],
    signature: str,
    key: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
) -> StreamingResponse:
    """Download a trace by its signed URL, without an API key.

    The URL works until it expires or the API key that asked for it is revoked.
    """
    # Check the URL
    if not context.signing_key.verify(signature, _PURPOSE, session_id, str(expires), str(key)):
        raise ApiError(HTTPStatus.FORBIDDEN, "this URL was not signed by this server")
    if expires < time.time():
        raise ApiError(HTTPStatus.FORBIDDEN, "this URL has expired; ask for a new one")

    # Read the session with the rights of the key that asked for the URL
    now = time.time()

    def work(tx: Session) -> tuple[str, list[TimelineGroup]]:
        asker = context.authenticator.find_key_principal(tx, key)
        if asker is None:
            raise ApiError(HTTPStatus.FORBIDDEN, "this URL is invalid: its API key was revoked or has expired")
        session = access.find_session(tx, asker, SessionId(session_id), access.MEMBERS)
        row = sessions.get(tx, session.session_id)
        title = session.session_id if row is None or not row.display_name else row.display_name
        return title, read_session_groups(tx, session.session_id, now, MAX_SLICES)

    title, groups = context.store.read(work)

    # Encode the first part before the response starts, so that an error gets an error status
    parts: Iterator[bytes] = timeline.encode_trace(title, groups)
    first = next(parts)
    headers = {
        "content-disposition": f'attachment; filename="{session_id}.pftrace"',
        "cache-control": "private",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(chain([first], parts), HTTPStatus.OK, headers, "application/octet-stream")


def _parse_cursor(cursor: str) -> tuple[int, int]:
    """Parse a cursor such as "120-35", the last positions of both lists.

    Raises ApiError 400 if it is malformed.
    """
    parts = cursor.split("-")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise bad_request(f"cursor {cursor[:50]!r}: must be a cursor from an earlier response of this endpoint")
    return int(parts[0]), int(parts[1])
