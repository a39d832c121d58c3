"""Endpoints for the metrics of runs: what each request did, and what clients logged."""

import secrets
import time
from typing import Annotated

from fastapi import APIRouter, Path, Query
from sqlmodel import Session

from skyrl_tx.apps.history import logged, logged_runs, schemas
from skyrl_tx.apps.history import points as stored_points
from skyrl_tx.apps.history.client_metrics import metrics_of_model, store_metrics
from skyrl_tx.apps.history.logged import Logged, LoggedPoint
from skyrl_tx.apps.history.points import Point
from skyrl_tx.apps.history.tables import LoggedRunRow
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.server.context import AccessScope, Incoming, Limit, Offset
from skyrl_tx.server.errors import bad_request
from skyrl_tx.server.identity import access
from skyrl_tx.store import models

router = APIRouter()
PageSize = Annotated[int, Query(ge=1, le=5000)]
Position = Annotated[int, Query(ge=0, lt=2**63)]
LoggedRunId = Annotated[int, Path(ge=0, lt=2**63)]


@router.post("/training_runs/{run_id}/metrics")
def log_metrics(run_id: str, call: Incoming) -> dict[str, bool]:
    """Store metrics of one step of a training run; `is_new` is false for a retry."""
    request = call.body.model(schemas.LogMetricsRequest)
    model_id = ModelId(run_id)

    def find_owner(tx: Session) -> str:
        row = access.model(tx, call.caller, model_id)
        return models.owner(tx, row.model_id) or call.caller.owner

    log_id = request.log_id or call.idempotency_key or secrets.token_hex(16)
    point = Logged(log_id=log_id[: schemas.MAX_NAME_LENGTH], step=request.step, values=request.metrics)
    metrics = metrics_of_model(call.store.read(find_owner), model_id, [point])
    return {"is_new": store_metrics(call.store, metrics, time.time()) > 0}


@router.get("/training_runs/{run_id}/metrics")
def get_metrics(run_id: str, call: Incoming, cursor: str = "0-0", limit: PageSize = 1000) -> schemas.MetricsResponse:
    """Return the points of a training run after a cursor: one of each request, and what clients logged."""
    after, logged_after = _positions(cursor)

    def work(tx: Session) -> schemas.MetricsResponse:
        model_id = access.visible_run(tx, call.caller, ModelId(run_id)).model_id
        points = stored_points.series(tx, model_id, after, limit)
        found = logged.read_points_of_model(tx, model_id, after=logged_after, limit=limit)
        last = points[-1].position if points else after
        last_logged = found[-1].position if found else logged_after
        return schemas.MetricsResponse(
            training_run_id=model_id,
            points=[_run_point(row) for row in points],
            logged=[_logged_metrics(point) for point in found],
            cursor=f"{last}-{last_logged}",
            has_more=limit in (len(points), len(found)),
        )

    return call.store.read(work)


@router.get("/logged_runs")
def list_logged_runs(
    call: Incoming,
    limit: Limit = 100,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
    project: str | None = None,
) -> schemas.LoggedRunsResponse:
    """List the runs that the caller's loggers named; `accessible` lists all owners' for an admin."""
    owner = call.caller.owner_filter if access_scope == "accessible" else call.caller.owner

    def work(tx: Session) -> schemas.LoggedRunsResponse:
        rows = logged.list_runs(tx, owner, project=project, limit=limit, offset=offset)
        return schemas.LoggedRunsResponse(logged_runs=[_logged_run(row) for row in rows])

    return call.store.read(work)


@router.get("/logged_runs/{logged_run_id}/metrics")
def get_logged_metrics(
    logged_run_id: LoggedRunId, call: Incoming, cursor: Position = 0, limit: PageSize = 1000
) -> schemas.LoggedMetricsResponse:
    """Return the points of a logged run after a cursor."""

    def work(tx: Session) -> schemas.LoggedMetricsResponse:
        logged_runs.visible(tx, call.caller, logged_run_id)
        found = logged.read_points(tx, [logged_run_id], after=cursor, limit=limit)
        return schemas.LoggedMetricsResponse(
            logged=[_logged_metrics(point) for point in found],
            cursor=found[-1].position if found else cursor,
            has_more=len(found) == limit,
        )

    return call.store.read(work)


@router.put("/logged_runs/{logged_run_id}/training_run")
def join_training_run(logged_run_id: LoggedRunId, call: Incoming) -> dict[str, str | None]:
    """Join a logged run to a training run of the same owner, or separate them."""
    run_id = call.body.model(schemas.JoinRunRequest).training_run_id

    call.store.write(lambda tx: logged_runs.join(tx, call.caller, logged_run_id, run_id))
    return {"training_run_id": run_id}


def _positions(cursor: str) -> tuple[int, int]:
    """Parse a cursor: the last position of each list. Raises ApiError 400."""
    parts = cursor.split("-")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise bad_request(f"cursor {cursor[:50]!r}: must be one that this endpoint returned")
    return int(parts[0]), int(parts[1])


def _run_point(row: Point) -> schemas.RunPoint:
    return schemas.RunPoint(
        kind=row.kind,
        step=row.step,
        created_at=row.created_at,
        started_at=row.started_at,
        at=row.at,
        device_s=row.device_s,
        tokens=row.tokens,
        datums=row.datums,
        metrics=dict(row.values),
    )


def _logged_metrics(point: LoggedPoint) -> schemas.LoggedMetrics:
    return schemas.LoggedMetrics(
        project=point.project, run=point.run, step=point.step, at=point.at, metrics=dict(point.values)
    )


def _logged_run(row: LoggedRunRow) -> schemas.LoggedRunResponse:
    return schemas.LoggedRunResponse(
        logged_run_id=row.logged_run_id or 0,
        project=row.project,
        name=row.name,
        owner=row.owner,
        training_run_id=row.model_id,
        config=dict(row.config),
        num_points=row.num_points,
        created_at=row.created_at,
        last_at=row.last_at,
    )
