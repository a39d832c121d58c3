"""Training runs and their checkpoints, as the management client sees them."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.api import lookup
from skyrl_tx.api.context import Call, Incoming, Limit, Offset
from skyrl_tx.api.errors import bad_request, not_found
from skyrl_tx.api.schemas.weights import (
    Checkpoint,
    CheckpointsAnswer,
    Cursor,
    TrainingRun,
    TrainingRunsAnswer,
    TtlRequest,
)
from skyrl_tx.api.translate.checks import ttl
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, ModelId, checkpoint_name
from skyrl_tx.store import checkpoints, models
from skyrl_tx.store.tables import CheckpointRow, ModelRow

router = APIRouter()

_TYPES: dict[CheckpointKind, Literal["training", "sampler", "external"]] = {
    CheckpointKind.TRAINING: "training",
    CheckpointKind.SAMPLER: "sampler",
    CheckpointKind.EXTERNAL: "external",
}


@router.get("/training_runs")
def list_runs(
    call: Incoming, limit: Limit = 20, offset: Offset = 0, project_id: str | None = None
) -> TrainingRunsAnswer:
    """A page of the caller's runs, the last used first."""
    if project_id is not None:
        raise bad_request(f"project_id {project_id[:80]!r}: runs cannot be listed by project on this server yet")

    def work(tx: Session) -> TrainingRunsAnswer:
        rows, total = models.list_owned(tx, call.caller.owner, limit, offset)
        runs = [_run(call, row, checkpoints.list_of_run(tx, row.model_id, time.time())) for row in rows]
        return TrainingRunsAnswer(training_runs=runs, cursor=Cursor(offset=offset, limit=limit, total_count=total))

    return call.store.read(work)


@router.get("/training_runs/{run_id}")
def get_run(run_id: str, call: Incoming) -> TrainingRun:
    """One run, with the metadata it was made with."""

    def work(tx: Session) -> TrainingRun:
        row = lookup.model(tx, call.caller, ModelId(run_id))
        return _run(call, row, checkpoints.list_of_run(tx, row.model_id, time.time()))

    return call.store.read(work)


@router.get("/training_runs/{run_id}/checkpoints")
def list_checkpoints_of_run(run_id: str, call: Incoming) -> CheckpointsAnswer:
    """All checkpoints of one run."""

    def work(tx: Session) -> CheckpointsAnswer:
        row = lookup.model(tx, call.caller, ModelId(run_id))
        found = checkpoints.list_of_run(tx, row.model_id, time.time())
        return CheckpointsAnswer(checkpoints=[_checkpoint(checkpoint) for checkpoint in found])

    return call.store.read(work)


@router.get("/checkpoints")
def list_checkpoints(call: Incoming, limit: Limit = 100, offset: Offset = 0) -> CheckpointsAnswer:
    """A page of the caller's checkpoints, newest first."""

    def work(tx: Session) -> CheckpointsAnswer:
        rows, total = checkpoints.list_owned(tx, call.caller.owner, limit, offset, time.time())
        return CheckpointsAnswer(
            checkpoints=[_checkpoint(row) for row in rows],
            cursor=Cursor(offset=offset, limit=limit, total_count=total),
        )

    return call.store.read(work)


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=HTTPStatus.NO_CONTENT)
def delete_checkpoint(run_id: str, kind: str, name: str, call: Incoming) -> None:
    """Remove a checkpoint; samplers made from it go on."""

    def work(tx: Session) -> None:
        checkpoints.delete(tx, _existing(tx, call, run_id, kind, name))

    call.store.write(work)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")
def set_ttl(run_id: str, kind: str, name: str, call: Incoming) -> dict[str, str]:
    """Give a checkpoint a lifetime from now on, or take it away."""
    seconds = call.body.model(TtlRequest).ttl_seconds
    try:
        ttl(seconds, "ttl_seconds")
    except UserError as error:
        raise bad_request(error.message) from error

    def work(tx: Session) -> None:
        path = _existing(tx, call, run_id, kind, name)
        checkpoints.set_ttl(tx, path, None if seconds is None else time.time() + seconds)

    call.store.write(work)
    return {}


def _existing(tx: Session, call: Call, run_id: str, kind: str, name: str) -> CheckpointPath:
    """Find one of the caller's checkpoints by the parts of its URL."""
    row = lookup.model(tx, call.caller, ModelId(run_id))
    if kind not in list(CheckpointKind):
        raise bad_request(f"checkpoint kind {kind[:80]!r} is not one of {', '.join(CheckpointKind)}")
    try:
        path = CheckpointPath(row.model_id, CheckpointKind(kind), checkpoint_name(name))
    except UserError as error:
        raise bad_request(error.message) from error
    if checkpoints.get(tx, path, time.time()) is None:
        raise not_found(f"checkpoint {path} does not exist")
    return path


def _run(call: Call, row: ModelRow, saved: Sequence[CheckpointRow]) -> TrainingRun:
    return TrainingRun(
        training_run_id=row.model_id,
        base_model=row.base_model,
        model_owner=call.caller.owner,
        corrupted=row.status == "failed",
        lora_rank=lookup.spec_of(row).lora.rank,
        last_request_time=_time(row.last_request_at),
        last_checkpoint=_last(saved, CheckpointKind.TRAINING),
        last_sampler_checkpoint=_last(saved, CheckpointKind.SAMPLER),
        user_metadata=None if row.user_metadata is None else dict(row.user_metadata),
    )


def _last(saved: Sequence[CheckpointRow], kind: CheckpointKind) -> Checkpoint | None:
    return next((_checkpoint(row) for row in reversed(saved) if row.kind == kind), None)


def _checkpoint(row: CheckpointRow) -> Checkpoint:
    path = row.path
    return Checkpoint(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=_TYPES[path.kind],
        time=_time(row.created_at),
        tinker_path=str(path),
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata=None if row.user_metadata is None else dict(row.user_metadata),
        expires_at=None if row.expires_at is None else _time(row.expires_at),
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
