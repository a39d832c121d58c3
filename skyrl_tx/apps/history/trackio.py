"""The metrics part of the trackio protocol (trackio 0.43, remote_client.py and server.py).

With `TRACKIO_SERVER_URL=http://host:8000/trackio`, recipes send their metrics to this server. If a
request gets an error, trackio sends all its data again. So the server skips entries that it cannot
read, instead of refusing the request.
"""

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from skyrl_tx import __version__
from skyrl_tx.apps.history import logged_metrics
from skyrl_tx.apps.history.client_metrics import (
    clean_config,
    clean_name,
    clean_step,
    clean_values,
    store_metrics,
    to_object,
)
from skyrl_tx.apps.history.logged_metrics import LoggedRun, NewLoggedPoint
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.context import ApiCall, receive_call
from skyrl_tx.server.errors import bad_request
from skyrl_tx.server.http.body import LOG_LIMITS
from skyrl_tx.server.http.connections import ThrottledWarning
from skyrl_tx.server.identity.authentication import Principal, authenticate_credential
from skyrl_tx.server.submission.validation import quote_value

router = APIRouter(prefix="/trackio")
_log = logging.getLogger(__name__)
_warn = ThrottledWarning(_log)
_API_VERSION = 1
_MAX_LISTED = 1000
_Arguments = Mapping[str, object]


async def _authenticate(request: Request) -> Principal:
    """Authenticate the caller.

    trackio sends the API key as its write token. Other clients send it in one of the usual headers.
    """
    headers = request.headers
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return await authenticate_credential(
        request, headers.get("x-trackio-write-token") or headers.get("x-api-key") or bearer
    )


async def _read_call(request: Request, caller: Annotated[Principal, Depends(_authenticate)]) -> AsyncGenerator[ApiCall]:
    async with receive_call(request, caller, LOG_LIMITS) as call:
        yield call


@router.get("/version")
async def get_version() -> dict[str, object]:
    """Return the protocol version. The trackio client asks for it without an API key."""
    return {"version": __version__, "api_version": _API_VERSION, "api_transport": "http"}


@router.post("/api/{name}")
def call_api(name: str, call: Annotated[ApiCall, Depends(_read_call, scope="function")]) -> JSONResponse:
    """Store metrics that trackio logs, or list its runs. Media and artifacts are refused."""
    # Refuse functions that this server does not have
    function = _FUNCTIONS.get(name)
    if function is None:
        text = (
            f"{quote_value(name)} is not supported: this server stores numbers that trackio logs, but no media, tables "
            "or artifacts"
        )
        # The trackio client shows the error only with status 200. For an upload, it needs an error
        # status.
        status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE if name == "upload" else HTTPStatus.OK
        return JSONResponse({"data": None, "error": text}, status_code=status)

    # Call the function
    arguments = call.body.parse_request().value.get("kwargs", {})
    if not isinstance(arguments, dict):
        raise bad_request("kwargs: must be an object")
    try:
        data = function(call, cast(_Arguments, arguments))
    except UserError as error:
        return JSONResponse({"data": None, "error": error.message})
    return JSONResponse({"data": data, "error": None})


def _log_metrics(call: ApiCall, arguments: _Arguments) -> dict[str, int]:
    """Store logged entries.

    Return how many entries were new, and how many were ignored, because they have no number or no
    valid name.
    """
    # Sort the entries by run
    entries = _read_entries(arguments)
    points: defaultdict[LoggedRun, list[NewLoggedPoint]] = defaultdict(list)
    configs: dict[LoggedRun, dict[str, object]] = {}
    for entry in entries:
        run_and_point = _read_point(call.caller.owner, entry)
        if run_and_point is not None:
            run, point = run_and_point
            points[run].append(point)
            if run not in configs and (config := clean_config(to_object(entry).get("config"))):
                configs[run] = config

    num_ignored = len(entries) - sum(map(len, points.values()))
    if num_ignored:
        _warn(
            f"ignored {num_ignored} metrics that {call.caller.owner!r} logged with trackio, because they have no "
            "number or no valid name"
        )

    # Store the points
    call.add_stored(len(call.body.raw))
    now = time.time()
    num_new = sum(
        store_metrics(call.store, run, new_points, now, configs.get(run)) for run, new_points in points.items()
    )
    return {"stored": num_new, "ignored": num_ignored}


def _read_point(owner: str, entry: object) -> tuple[LoggedRun, NewLoggedPoint] | None:
    """Return the run and the point of a logged entry, or None if the entry cannot be stored."""
    fields = to_object(entry)
    project, name = clean_name(fields.get("project")), clean_name(fields.get("run"))
    log_id = secrets.token_hex(16) if fields.get("log_id") is None else clean_name(fields.get("log_id"))
    key = name if fields.get("run_id") is None else clean_name(fields.get("run_id"))
    step, values = clean_step(fields.get("step")), clean_values(to_object(fields.get("metrics")))
    if project is None or name is None or key is None or log_id is None or step is None or not values:
        return None
    run = LoggedRun(owner=owner, project=project, key=key, name=name, seeks_model=True)
    return run, NewLoggedPoint(log_id=log_id, step=step, values=values)


def _ignore(call: ApiCall, arguments: _Arguments) -> None:
    """Discard system metrics of the client's machine, and alerts.

    The client prints alerts itself.
    """


def _list_runs(call: ApiCall, arguments: _Arguments) -> list[dict[str, str]]:
    """List the caller's runs in a project."""
    project = _read_project(arguments)
    rows = call.store.read(
        lambda tx: logged_metrics.list_runs(tx, call.caller.owner, project=project, limit=_MAX_LISTED)
    )
    return [
        {"id": row.key, "name": row.name, "created_at": datetime.fromtimestamp(row.created_at, UTC).isoformat()}
        for row in rows
    ]


def _summarize_run(call: ApiCall, arguments: _Arguments) -> dict[str, object]:
    """Describe a run. A client that resumes the run counts its steps after `last_step`."""
    project = _read_project(arguments)
    key, name = _read_name(arguments, "run_id"), _read_name(arguments, "run")
    rows = call.store.read(
        lambda tx: logged_metrics.list_runs(tx, call.caller.owner, project=project, limit=_MAX_LISTED)
    )

    run = next((row for row in rows if (row.key == key if key is not None else row.name == name)), None)
    run_id = 0 if run is None else run.logged_run_id or 0
    return {
        "project": project,
        "run": name if run is None else run.name,
        "run_id": key if run is None else run.key,
        "num_logs": 0 if run is None else run.num_points,
        "metrics": [],
        "config": {} if run is None else dict(run.config),
        "last_step": call.store.read(lambda tx: logged_metrics.get_last_step(tx, run_id)),
    }


def _read_entries(arguments: _Arguments) -> list[object]:
    entries = arguments.get("logs")
    if not isinstance(entries, list):
        raise bad_request("kwargs.logs: must be a list")
    return cast(list[object], entries)


def _read_project(arguments: _Arguments) -> str:
    project = _read_name(arguments, "project")
    if project is None:
        raise bad_request("kwargs.project: missing")
    return project


def _read_name(arguments: _Arguments, field: str) -> str | None:
    """Return a name among the arguments, or None if it is absent. Raises ApiError 400 for an invalid name."""
    value = arguments.get(field)
    name = clean_name(value)
    if name is None and value is not None:
        raise bad_request(f"kwargs.{field} {quote_value(value)}: must be a text of 1 to 200 characters")
    return name


_FUNCTIONS: Mapping[str, Callable[[ApiCall, _Arguments], object]] = {
    "bulk_log": _log_metrics,
    "bulk_log_system": _ignore,
    "bulk_alert": _ignore,
    "get_runs_for_project": _list_runs,
    "get_run_summary": _summarize_run,
}
