"""The part of the trackio protocol that logs metrics (trackio 0.43, remote_client.py and server.py).

`TRACKIO_SERVER_URL=http://host:8000/trackio` sends what recipes log here. A logger that gets an error keeps its data
and sends all of it again, so one entry that cannot be read is left out instead of refused.
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
    RunMetrics,
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
    """Authenticate by trackio's write token, which is an API key, or by the headers of other clients."""
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
    """Name the protocol version that the trackio client asks for; no API key is needed."""
    return {"version": __version__, "api_version": _API_VERSION, "api_transport": "http"}


@router.post("/api/{name}")
def call_api(name: str, call: Annotated[ApiCall, Depends(_read_call)]) -> JSONResponse:
    """Store metrics that the trackio client logs, and list its runs; media and artifacts are refused."""
    function = _FUNCTIONS.get(name)
    if function is None:
        text = f"{quote_value(name)}: this server stores the numbers that trackio logs, no media, tables or artifacts"
        # The client shows the text of a 200 alone; an upload must have another status.
        status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE if name == "upload" else HTTPStatus.OK
        return JSONResponse({"data": None, "error": text}, status_code=status)
    arguments = call.body.parse_object().get("kwargs", {})
    if not isinstance(arguments, dict):
        raise bad_request("kwargs: must be an object")
    try:
        data = function(call, cast(_Arguments, arguments))
    except UserError as error:
        return JSONResponse({"data": None, "error": error.message})
    return JSONResponse({"data": data, "error": None})


def _log_metrics(call: ApiCall, arguments: _Arguments) -> dict[str, int]:
    """Store logged entries; return how many were new, and how many were left out because they have no number."""
    entries = _read_entries(arguments)
    points: defaultdict[LoggedRun, list[NewLoggedPoint]] = defaultdict(list)
    configs: dict[LoggedRun, dict[str, object]] = {}
    for entry in entries:
        found = _read_point(call.caller.owner, entry)
        if found is not None:
            run, point = found
            points[run].append(point)
            if run not in configs and (config := clean_config(to_object(entry).get("config"))):
                configs[run] = config
    num_ignored = len(entries) - sum(map(len, points.values()))
    if num_ignored:
        _warn(f"{num_ignored} metrics that {call.caller.owner!r} logged with trackio hold no number, or no valid name")
    now = time.time()
    num_new = sum(
        store_metrics(call.store, RunMetrics(run=run, points=of_run, config=configs.get(run), seeks_model=True), now)
        for run, of_run in points.items()
    )
    return {"stored": num_new, "ignored": num_ignored}


def _read_point(owner: str, entry: object) -> tuple[LoggedRun, NewLoggedPoint] | None:
    """Return a logged entry and its run; None for one that cannot be stored."""
    fields = to_object(entry)
    project, name = clean_name(fields.get("project")), clean_name(fields.get("run"))
    log_id = secrets.token_hex(16) if fields.get("log_id") is None else clean_name(fields.get("log_id"))
    key = name if fields.get("run_id") is None else clean_name(fields.get("run_id"))
    step, values = clean_step(fields.get("step")), clean_values(to_object(fields.get("metrics")))
    if project is None or name is None or key is None or log_id is None or step is None or not values:
        return None
    return LoggedRun(owner=owner, project=project, key=key, name=name), NewLoggedPoint(
        log_id=log_id, step=step, values=values
    )


def _ignore(call: ApiCall, arguments: _Arguments) -> None:
    """Accept and discard CPU metrics of the client, and alerts, which the client prints by itself."""


def _list_runs(call: ApiCall, arguments: _Arguments) -> list[dict[str, str]]:
    """List the owner's runs of a project."""
    project = _read_project(arguments)
    rows = call.store.read(
        lambda tx: logged_metrics.list_runs(tx, call.caller.owner, project=project, limit=_MAX_LISTED)
    )
    return [
        {"id": row.key, "name": row.name, "created_at": datetime.fromtimestamp(row.created_at, UTC).isoformat()}
        for row in rows
    ]


def _summarize_run(call: ApiCall, arguments: _Arguments) -> dict[str, object]:
    """Return the last step of a run, from which a resumed one counts on."""
    project, key, name = _read_project(arguments), arguments.get("run_id"), arguments.get("run")
    rows = call.store.read(
        lambda tx: logged_metrics.list_runs(tx, call.caller.owner, project=project, limit=_MAX_LISTED)
    )
    found = next((row for row in rows if (row.key == key if key is not None else row.name == name)), None)
    run_id = 0 if found is None else found.logged_run_id or 0
    return {
        "project": project,
        "run": name if found is None else found.name,
        "run_id": key if found is None else found.key,
        "num_logs": 0 if found is None else found.num_points,
        "metrics": [],
        "config": {} if found is None else dict(found.config),
        "last_step": call.store.read(lambda tx: logged_metrics.get_last_step(tx, run_id)),
    }


def _read_entries(arguments: _Arguments) -> list[object]:
    entries = arguments.get("logs")
    if not isinstance(entries, list):
        raise bad_request("kwargs.logs: must be a list")
    return cast(list[object], entries)


def _read_project(arguments: _Arguments) -> str:
    project = clean_name(arguments.get("project"))
    if project is None:
        raise bad_request("kwargs.project: must be a name of at most 200 characters")
    return project


_FUNCTIONS: Mapping[str, Callable[[ApiCall, _Arguments], object]] = {
    "bulk_log": _log_metrics,
    "bulk_log_system": _ignore,
    "bulk_alert": _ignore,
    "get_runs_for_project": _list_runs,
    "get_run_summary": _summarize_run,
}
