"""Training runs and their checkpoints, as the management client sees them."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.api import lookup
from skyrl_tx.api.context import AccessScope, Call, Incoming, Limit, Offset
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
from skyrl_tx.store.tables import CheckpointRow

router = APIRouter()

_TYPES: dict[CheckpointKind, Literal["training", "sampler", "external"]] = {
    CheckpointKind.TRAINING: "training",
    CheckpointKind.SAMPLER: "sampler",
    CheckpointKind.EXTERNAL: "external",
}


@router.get("/training_runs")
def list_runs(
    call: Incoming,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
    project_id: str | None = None,
) -> TrainingRunsAnswer:
    """A page of the caller's runs, the last used first; `accessible`: also what others published, for admins all."""
    is_wide = access_scope == "accessible"
    owner = call.caller.reach if is_wide else call.caller.owner
    now = time.time()

    def work(tx: Session) -> TrainingRunsAnswer:
        published_at = now if is_wide else None
        rows, total = models.list_owned(tx, owner, limit, offset, project_id=project_id, published_at=published_at)
        runs = [_run(*lookup.readable_run(tx, call.caller, row.model_id, now)) for row in rows]
        return TrainingRunsAnswer(training_runs=runs, cursor=Cursor(offset=offset, limit=limit, total_count=total))

    return call.store.read(work)


@router.get("/training_runs/{run_id}")
def get_run(run_id: str, call: Incoming, access_scope: AccessScope = "owned") -> TrainingRun:
    """One run, with the metadata it was made with; what the caller may read exists, whatever the scope."""
    return _run(*call.store.read(lambda tx: lookup.readable_run(tx, call.caller, ModelId(run_id), time.time())))


@router.get("/training_runs/{run_id}/checkpoints")
def list_checkpoints_of_run(run_id: str, call: Incoming) -> CheckpointsAnswer:
    """All checkpoints of one run; of another's run, those that are published."""
    _, found = call.store.read(lambda tx: lookup.readable_run(tx, call.caller, ModelId(run_id), time.time()))
    return CheckpointsAnswer(checkpoints=[_checkpoint(checkpoint) for checkpoint in found])


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


@router.post("/training_runs/{run_id}/checkpoints/{kind}/{name}/publish")
def publish(run_id: str, kind: str, name: str, call: Incoming) -> dict[str, str]:
    """Let everyone read a checkpoint by its path; of no effect where it is so already, as the client retries a 409."""
    call.store.write(lambda tx: checkpoints.set_public(tx, _existing(tx, call, run_id, kind, name), True))
    return {}


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}/publish")
def unpublish(run_id: str, kind: str, name: str, call: Incoming) -> dict[str, str]:
    """Keep a checkpoint to its owner again; what others made of it stays theirs."""
    call.store.write(lambda tx: checkpoints.set_public(tx, _existing(tx, call, run_id, kind, name), False))
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


def _run(run: lookup.Run, saved: Sequence[CheckpointRow]) -> TrainingRun:
    row = run.model
    return TrainingRun(
        training_run_id=row.model_id,
        base_model=row.base_model,
        model_owner=run.owner,
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
