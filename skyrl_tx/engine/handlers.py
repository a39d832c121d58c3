"""What each kind of request does to a model, but passes: one function a kind."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sqlmodel import Session

from skyrl_tx.artifacts import Artifact
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.errors import ErrorCategory, ServerError, UserError
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, ModelId, SamplerId
from skyrl_tx.contract.requests import (
    CreateModel,
    LoadWeights,
    OptimStep,
    Rejected,
    SaveWeights,
    UnloadModel,
)
from skyrl_tx.contract.results import (
    CreateModelOutput,
    Failure,
    LoadWeightsOutput,
    OptimStepOutput,
    SaveWeightsOutput,
    UnloadModelOutput,
)
from skyrl_tx.engine import validate
from skyrl_tx.engine.answers import Answer
from skyrl_tx.engine.export import write_export
from skyrl_tx.engine.room import ENDS_ENGINE, Room
from skyrl_tx.engine.save_unnamed import save_unnamed
from skyrl_tx.engine.work import Work
from skyrl_tx.store import checkpoints, models, snapshots
from skyrl_tx.store.tables import CheckpointRow

_SAVED_PARTS = {
    "weights": frozenset({StatePart.WEIGHTS, StatePart.OPTIMIZER}),
    "sampler_weights": frozenset({StatePart.WEIGHTS}),
    "external_weights": frozenset({StatePart.WEIGHTS}),
}


def handle(room: Room, work: Work) -> None:
    """Do what a request asks and answer it, now or when its files are written."""
    handler = _HANDLERS.get(type(work.request))
    if handler is None:
        room.user_failure(work, f"{work.kind} is not a request to a model")
        return
    try:
        handler(room, work, work.request)
    except Exception as error:
        room.fail(work, error)


def _create_model(room: Room, work: Work, request: CreateModel) -> None:
    model = room.models.get(_model_id(work), creating=True)
    try:
        validate.check_create(request, room.capabilities, room.settings.base_models)
        room.models.make_room()
        room.backend.create_model(model.model_id, request.spec)
    except Exception as error:
        _never_made(room, model.model_id, error)
        raise
    model.is_resident = True
    room.models.use(model)
    room.answers.give(
        [Answer(work=work, result=CreateModelOutput(model_id=model.model_id), effect_order=model.next_effect())],
        lambda tx: models.made(tx, model.model_id, room.capabilities.base_model_hash),
    )


def _load_weights(room: Room, work: Work, request: LoadWeights) -> None:
    model = room.models.get(_model_id(work), creating=request.create)
    try:
        current = None if request.create else model.spec
        validate.check_load(request, room.capabilities, room.settings.base_models, current)
        if not model.is_resident:
            room.models.make_room()
        room.recovery.load(model.model_id, request, model.spec)
    except Exception as error:
        if request.create:
            _never_made(room, model.model_id, error)
        raise
    model.is_resident, model.poisoned_by = True, None
    room.models.use(model)

    def rows(tx: Session) -> None:
        models.made(tx, model.model_id, room.capabilities.base_model_hash)
        models.set_poison(tx, model.model_id, None)

    result = LoadWeightsOutput(path=request.path, model_id=model.model_id)
    room.answers.give([Answer(work=work, result=result, effect_order=model.next_effect())], rows)


def _never_made(room: Room, model_id: ModelId, error: Exception) -> None:
    if isinstance(error, ENDS_ENGINE):
        return  # the request stays open, and is tried again by the next engine
    room.models.forget(model_id)
    room.store.write(lambda tx: models.set_status(tx, model_id, "failed"))


def _unload_model(room: Room, work: Work, request: UnloadModel) -> None:
    model = room.models.get(_model_id(work))
    room.jobs.finish(wait=True)  # what the model's unnamed samplers would be made from again goes with it
    room.models.forget(model.model_id)

    def rows(tx: Session) -> None:
        models.set_status(tx, model.model_id, "unloaded")
        snapshots.delete(tx, model.model_id)

    result = UnloadModelOutput(model_id=model.model_id)
    room.answers.give([Answer(work=work, result=result, effect_order=model.next_effect())], rows)


def _optim_step(room: Room, work: Work, request: OptimStep) -> None:
    model = room.models.get(_model_id(work))
    room.models.ensure([model.model_id])
    if model.poisoned_by is not None:
        room.backend.clear_gradient(model.model_id)
        message = f"the gradient is incomplete and was dropped, because a forward_backward failed: {model.poisoned_by}"
        result, model.poisoned_by = Failure(message=message, category=ErrorCategory.USER), None
        room.answers.give(
            [Answer(work=work, result=result, effect_order=model.next_effect())],
            lambda tx: models.set_poison(tx, model.model_id, None),
        )
        return
    validate.check_optim(request.params)
    metrics = room.backend.optim_step(model.model_id, request.params)
    result = OptimStepOutput(metrics=dict(metrics))
    room.answers.give([Answer(work=work, result=result, effect_order=model.next_effect())])


def _save_weights(room: Room, work: Work, request: SaveWeights) -> None:
    model_id = room.models.get(_model_id(work)).model_id
    validate.check_save(request)
    if request.name is None:
        save_unnamed(room, work, request)
        return
    path = CheckpointPath(model_id, CheckpointKind(request.kind), request.name)
    _check_free(room, path, request)
    room.models.ensure([model_id])
    snapshot = room.backend.capture(model_id, _SAVED_PARTS[request.kind])

    def answer(written: Future[Artifact]) -> None:
        try:
            artifact = written.result()
            room.answers.settle(wait=True)
            _record_save(room, work, request, path, artifact)
            if request.kind == "sampler_weights":
                room.samplers.offer(SamplerId(artifact.artifact_id), snapshot, work.session_id)
        except Exception as error:
            room.fail(work, _as_user_error(error))

    def write(directory: Path) -> None:
        if request.kind == "external_weights":
            write_export(snapshot, directory, room.settings.base_models[0], request.age_recipients)
        else:
            snapshot.write(directory)

    extra = {"model_id": model_id, "kind": request.kind, "base_model": room.settings.base_models[0]}
    # The model is held: were later requests answered first, a crash would repeat this save with later weights.
    room.jobs.start(lambda: room.recovery.write(write, extra), answer, hold=model_id)


def _check_free(room: Room, path: CheckpointPath, request: SaveWeights) -> None:
    if not request.overwrite and room.store.read(lambda tx: checkpoints.get(tx, path, time.time())) is not None:
        way_out = "pass overwrite" if path.kind is CheckpointKind.TRAINING else "delete it first"
        raise UserError(f"path {path.name!r}: {path} exists already; choose another name or {way_out}")


def _as_user_error(error: Exception) -> Exception:
    return UserError(f"path: {error}") if isinstance(error, checkpoints.CheckpointExists) else error


def _record_save(room: Room, work: Work, request: SaveWeights, path: CheckpointPath, artifact: Artifact) -> None:
    now = time.time()
    checkpoint = CheckpointRow(
        model_id=path.model_id,
        kind=path.kind,
        name=path.name,
        artifact_id=artifact.artifact_id,
        created_at=now,
        expires_at=None if request.ttl_s is None else now + request.ttl_s,
        size_bytes=artifact.size_bytes,
        user_metadata=request.user_metadata,
    )
    result = SaveWeightsOutput(kind=request.kind, path=str(path), size_bytes=artifact.size_bytes)
    room.answers.give_now([Answer(work=work, result=result)], lambda tx: _put(tx, checkpoint, request.overwrite))


def _put(tx: Session, checkpoint: CheckpointRow, overwrite: bool) -> None:
    checkpoints.put(tx, checkpoint, overwrite)


def _rejected(room: Room, work: Work, request: Rejected) -> None:
    if request.kind in ("create_model", "load_weights") and work.model_id is not None:
        _fail_unmade(room, work.model_id)
    raise (ServerError if work.is_damaged else UserError)(request.message)


def _fail_unmade(room: Room, model_id: ModelId) -> None:
    def mark(tx: Session) -> None:
        row = models.get(tx, model_id)
        if row is not None and row.status == "creating":
            models.set_status(tx, model_id, "failed")

    room.store.write(mark)


def _model_id(work: Work) -> ModelId:
    if work.model_id is None:
        raise UserError("model_id is missing")
    return work.model_id


_HANDLERS: dict[type, Callable[[Room, Work, Any], None]] = {
    CreateModel: _create_model,
    LoadWeights: _load_weights,
    OptimStep: _optim_step,
    SaveWeights: _save_weights,
    UnloadModel: _unload_model,
    Rejected: _rejected,
}
