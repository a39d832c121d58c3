"""Endpoints to list and change training runs and their checkpoints."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Literal

from fastapi import APIRouter, Response
from sqlmodel import Session

from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, ModelId
from skyrl_tx.server.context import AccessScope, ApiCall, Incoming, IncomingList, Limit, Offset
from skyrl_tx.server.errors import not_found
from skyrl_tx.server.http.responses import make_list_response
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.access import ReadableRun, find_search_owners
from skyrl_tx.server.schemas import weights as schemas
from skyrl_tx.server.schemas.base import describe_body, to_utc_time
from skyrl_tx.server.submission.validation import check_ttl
from skyrl_tx.store import audit, checkpoints, models
from skyrl_tx.store.tables import CheckpointRow

router = APIRouter()

_TYPES: dict[CheckpointKind, Literal["training", "sampler", "external"]] = {
    CheckpointKind.TRAINING: "training",
    CheckpointKind.SAMPLER: "sampler",
    CheckpointKind.EXTERNAL: "external",
}


@router.get("/training_runs", response_model=schemas.TrainingRunsResponse)
def list_runs(
    call: IncomingList,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
    project_id: str | None = None,
) -> Response:
    """List the caller's training runs, newest first.

    With `access_scope=accessible`, the list also has the runs of the caller's projects, and other
    owners' runs with published checkpoints.
    """
    is_accessible = access_scope == "accessible"
    owner = call.caller.owner_filter if is_accessible else call.caller.owner  # the filter of an admin is None
    now = time.time()

    def work(tx: Session) -> schemas.TrainingRunsResponse:
        # With `published_at`, the list also has other owners' runs with checkpoints that are published at this time.
        published_at = now if is_accessible else None
        rows, total = models.list_owned(tx, owner, limit, offset, project_id=project_id, published_at=published_at)
        runs = access.find_readable_runs(tx, call.caller, rows, now)
        return schemas.TrainingRunsResponse(
            training_runs=[_describe_run(run) for run in runs],
            cursor=schemas.Cursor(offset=offset, limit=limit, total_count=total),
        )

    return make_list_response(call.store.read(work))


@router.get("/training_runs/{run_id}")
def get_run(run_id: str, call: Incoming, access_scope: AccessScope = "owned") -> schemas.TrainingRun:
    """Describe one training run."""
    run = call.store.read(lambda tx: access.find_readable_run(tx, call.caller, ModelId(run_id), time.time()))
    return _describe_run(run)


@router.get("/training_runs/{run_id}/checkpoints", response_model=schemas.CheckpointsResponse)
def list_checkpoints_of_run(run_id: str, call: IncomingList) -> Response:
    """List those checkpoints of a run that the caller may read."""
    run = call.store.read(lambda tx: access.find_readable_run(tx, call.caller, ModelId(run_id), time.time()))
    page = schemas.CheckpointsResponse(
        checkpoints=[_describe_checkpoint(row, run.row.base_model, run.is_fully_visible) for row in run.checkpoints]
    )
    return make_list_response(page)


@router.get("/checkpoints", response_model=schemas.CheckpointsResponse)
def list_checkpoints(call: IncomingList, limit: Limit = 100, offset: Offset = 0) -> Response:
    """List the caller's checkpoints, newest first."""

    def work(tx: Session) -> schemas.CheckpointsResponse:
        rows, total = checkpoints.list_owned(tx, call.caller.owner, limit, offset, time.time())
        return schemas.CheckpointsResponse(
            checkpoints=[_describe_checkpoint(*row) for row in rows],
            cursor=schemas.Cursor(offset=offset, limit=limit, total_count=total),
        )

    return make_list_response(call.store.read(work))


_SEARCH = partial(
    router.post,
    response_model=schemas.CheckpointSearchResponse,
    **describe_body(schemas.CheckpointSearchRequest),
)


@_SEARCH("/checkpoints/search")
@_SEARCH("/search_checkpoints")  # the path is not in the reference pages of the SDK
def search_checkpoints(call: IncomingList) -> Response:
    """Search checkpoints, newest first."""
    request = call.body.parse_model(schemas.CheckpointSearchRequest)
    kind = next((kind for kind, name in _TYPES.items() if name == request.checkpoint_type), None)
    now = time.time()

    def work(tx: Session) -> schemas.CheckpointSearchResponse:
        rows = checkpoints.iterate(
            tx,
            viewer=call.caller.owner_filter,
            owners=find_search_owners(call.caller, request.owner),
            project_ids=request.project_ids,
            kind=kind,
            base_models=request.base_models,
            after=None if request.cursor is None else _find_position(tx, request.cursor),
            now=now,
        )
        matches = [*islice((row for row in rows if _has_metadata(row[0], request.user_metadata)), request.limit + 1)]

        page = matches[: request.limit]
        last = page[-1][0] if len(matches) > len(page) else None
        return schemas.CheckpointSearchResponse(
            checkpoints=[_describe_checkpoint(*row) for row in page],
            next_cursor=None
            if last is None
            else schemas.CheckpointSearchCursor(
                last_created_at=to_utc_time(last.created_at), last_checkpoint_uuid=str(last.path)
            ),
        )

    return make_list_response(call.store.read(work), exclude_none=True)


def _find_position(tx: Session, cursor: schemas.CheckpointSearchCursor) -> tuple[float, CheckpointPath]:
    """Return the creation time and path of the last checkpoint of the previous page.

    The time is read from the database if possible, because the time in the cursor was rounded when
    it was written as JSON.
    """
    path = CheckpointPath.parse(cursor.last_checkpoint_uuid)
    row = checkpoints.get(tx, path, -math.inf)
    return cursor.last_created_at.timestamp() if row is None else row.created_at, path


def _has_metadata(row: CheckpointRow, wanted: Mapping[str, str]) -> bool:
    metadata = row.user_metadata or {}
    return all(metadata.get(name) == value for name, value in wanted.items())


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=HTTPStatus.NO_CONTENT)
def delete_checkpoint(run_id: str, kind: str, name: str, call: Incoming) -> None:
    """Delete a checkpoint. Samplers that were created from it keep working.

    An operator can restore the checkpoint for a while.
    """
    _change(call, "checkpoint_delete", run_id, kind, name, checkpoints.mark_deleted)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", **describe_body(schemas.TtlRequest))
def set_ttl(run_id: str, kind: str, name: str, call: Incoming) -> dict[str, str]:
    """Set the lifetime of a checkpoint, counted from now, or make it unlimited."""
    seconds = check_ttl(call.body.parse_model(schemas.TtlRequest).ttl_seconds, "ttl_seconds")

    def change(tx: Session, path: CheckpointPath, now: float) -> None:
        checkpoints.set_ttl(tx, path, None if seconds is None else now + seconds)

    _change(call, "checkpoint_ttl_set", run_id, kind, name, change, ttl_seconds=seconds)
    return {}


@router.post("/training_runs/{run_id}/checkpoints/{kind}/{name}/publish")
def publish(run_id: str, kind: str, name: str, call: Incoming) -> dict[str, str]:
    """Publish a checkpoint, so that every caller can read it by its path."""
    # A checkpoint that is published already is no error. Clients would retry a 409.
    _change(call, "checkpoint_publish", run_id, kind, name, lambda tx, path, _: checkpoints.set_public(tx, path, True))
    return {}


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}/publish")
def unpublish(run_id: str, kind: str, name: str, call: Incoming) -> dict[str, str]:
    """Unpublish a checkpoint. Copies that other owners have made are not deleted."""
    _change(
        call, "checkpoint_unpublish", run_id, kind, name, lambda tx, path, _: checkpoints.set_public(tx, path, False)
    )
    return {}


def _change(
    call: ApiCall,
    event: audit.Event,
    run_id: str,
    kind: str,
    name: str,
    change: Callable[[Session, CheckpointPath, float], object],
    **details: audit.Detail,
) -> None:
    """Change a checkpoint with `change(tx, path, now)`, and record the change in the audit log.

    Raises UserError or ApiError if there is no such checkpoint that the caller may change.
    """

    def work(tx: Session) -> None:
        now = time.time()
        row = access.find_editable_run(tx, call.caller, ModelId(run_id))
        path = CheckpointPath.of_parts(row.model_id, kind, name)
        if checkpoints.get(tx, path, now) is None:
            raise not_found(f"checkpoint {path} does not exist")
        change(tx, path, now)
        audit.record(tx, event, call.caller.actor, now, path=path, **details)

    call.store.write(work)


def _describe_run(run: ReadableRun) -> schemas.TrainingRun:
    """Describe a run.

    A caller who may only read published checkpoints gets only what loading a checkpoint needs, and
    no personal data.
    """
    row, is_visible = run.row, run.is_fully_visible
    return schemas.TrainingRun(
        training_run_id=row.model_id,
        base_model=row.base_model,
        model_owner=run.owner if is_visible else run.owner.partition("@")[0],
        corrupted=row.status == "failed",
        lora_rank=access.decode_spec(row).lora.rank,
        last_request_time=to_utc_time(row.last_request_at if is_visible else run.checkpoints[-1].created_at),
        last_checkpoint=_describe_last(run, CheckpointKind.TRAINING),
        last_sampler_checkpoint=_describe_last(run, CheckpointKind.SAMPLER),
        user_metadata=access.filter_metadata(row, is_visible),
    )


def _describe_last(run: ReadableRun, kind: CheckpointKind) -> schemas.Checkpoint | None:
    newest = next((row for row in reversed(run.checkpoints) if row.kind == kind), None)
    return None if newest is None else _describe_checkpoint(newest, run.row.base_model, run.is_fully_visible)


def _describe_checkpoint(row: CheckpointRow, base_model: str, is_visible: bool = True) -> schemas.Checkpoint:
    path = row.path
    return schemas.Checkpoint(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=_TYPES[path.kind],
        time=to_utc_time(row.created_at),
        tinker_path=str(path),
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata=access.filter_metadata(row, is_visible),
        expires_at=None if row.expires_at is None else to_utc_time(row.expires_at),
        base_model=base_model,
    )
