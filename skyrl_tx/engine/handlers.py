"""Execute and replay the requests to a model. `KINDS` has one entry per kind of request.

Passes are executed in `training`, because multiple passes share a batch.
"""

import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from sqlmodel import Session

from skyrl_tx.artifacts import Artifact
from skyrl_tx.artifacts.files import encrypt_files
from skyrl_tx.contract import results
from skyrl_tx.contract.backend import Snapshot, StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch
from skyrl_tx.contract.errors import ErrorCategory, ServerError, UserError
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, ModelId, SamplerId
from skyrl_tx.contract.requests import (
    CreateModel,
    LoadWeights,
    ModelPass,
    OptimStep,
    Rejected,
    SaveWeights,
    UnloadModel,
)
from skyrl_tx.contract.state_files import CONFIG_FILE
from skyrl_tx.engine import prepare, request_checks
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.background_writer import make_sampler_id
from skyrl_tx.engine.context import FATAL_ERRORS, EngineContext
from skyrl_tx.engine.device_cache import LiveModel
from skyrl_tx.engine.recovery import LoggedRequest, Recovery
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.store import audit, checkpoints, manifests, models, sampling_sessions
from skyrl_tx.store.tables import CheckpointRow, SamplingSessionRow


def handle(context: EngineContext, queued: QueuedRequest) -> None:
    """Execute a request. Its result is committed now, or after its files are written."""
    kind = KINDS.get(type(queued.request))
    try:
        queued.check_crashes(context.settings.max_attempts)
        context.attempts.count([queued.request_id])
        if kind is None or kind.execute is None or queued.model_id is None:
            raise UserError(f"{queued.kind} is not a request to a model")
        kind.execute(context, queued, queued.model_id, queued.request)
    except Exception as error:
        context.fail(queued, error)


def replay(recovery: Recovery, logged: LoggedRequest) -> None:
    """Repeat the effect of a request on a restored model.

    The result of the request exists already.
    """
    kind = KINDS.get(type(logged.queued.request))
    if kind is None or kind.replay is None:
        raise ServerError(f"cannot replay the {logged.queued.kind} request {logged.queued.request_id}")
    kind.replay(recovery, logged, logged.queued.request)


def refuse(context: EngineContext, queued: QueuedRequest, reason: str) -> None:
    """Fail a request that admission rejected.

    If it should have created a model, discard the model.
    """
    error, request = UserError(reason), queued.request
    is_creating = isinstance(request, CreateModel) or (isinstance(request, LoadWeights) and request.create)
    if is_creating and queued.model_id is not None:
        _discard_uncreated(context, queued.model_id, error)
    context.fail(queued, error)


def _create_model(context: EngineContext, queued: QueuedRequest, model_id: ModelId, request: CreateModel) -> None:
    model = context.models.get(model_id, creating=True)
    try:
        request_checks.check_create(request, context.capabilities, context.settings.base_models)
        context.models.free_slot()
        context.backend.create_model(model_id, request.spec)
    except Exception as error:
        _discard_uncreated(context, model_id, error)
        raise

    model.is_resident = True
    context.models.mark_used(model)
    context.request_log.commit(
        queued,
        results.CreateModelOutput(model_id=model_id),
        lambda tx: models.set_ready(tx, model_id, context.capabilities.base_model_hash),
        effect_order=model.assign_effect_order(),
    )


def _replay_create_model(recovery: Recovery, logged: LoggedRequest, request: CreateModel) -> None:
    recovery.backend.create_model(logged.model_id, request.spec)


def _load_weights(context: EngineContext, queued: QueuedRequest, model_id: ModelId, request: LoadWeights) -> None:
    model = context.models.get(model_id, creating=request.create)

    # Load the checkpoint.
    try:
        current = None if request.create else model.spec
        request_checks.check_load(request, context.capabilities, context.settings.base_models, current)
        if not model.is_resident:
            context.models.free_slot()
        context.recovery.load(model_id, request, model.spec)
    except Exception as error:
        if request.create:
            _discard_uncreated(context, model_id, error)
        raise

    # Commit. Loading weights also clears the gradient.
    model.is_resident, model.gradient_error = True, None
    context.models.mark_used(model)

    def rows(tx: Session) -> None:
        models.set_ready(tx, model_id, context.capabilities.base_model_hash)
        models.set_loaded_from(tx, model_id, request.path)
        actor = audit.get_actor(tx, queued.session_id, queued.owner)
        audit.record(tx, "checkpoint_read", actor, time.time(), path=request.path, purpose="load", loaded_by=model_id)
        models.set_incomplete_gradient(tx, model_id, None)

    result = results.LoadWeightsOutput(path=request.path, model_id=model_id)
    context.request_log.commit(queued, result, rows, effect_order=model.assign_effect_order())


def _replay_load_weights(recovery: Recovery, logged: LoggedRequest, request: LoadWeights) -> None:
    recovery.load(logged.model_id, request, request.spec)


def _discard_uncreated(context: EngineContext, model_id: ModelId, error: Exception) -> None:
    if isinstance(error, FATAL_ERRORS):
        return  # the request has no result, so the next engine tries again
    context.models.discard(model_id)
    context.store.write(lambda tx: models.set_status(tx, model_id, "failed"))


def _unload_model(context: EngineContext, queued: QueuedRequest, model_id: ModelId, request: UnloadModel) -> None:
    model = context.models.get(model_id)
    context.background_writer.wait_for(model_id)  # afterwards, lost ephemeral samplers cannot be replayed
    context.models.discard(model_id)

    def rows(tx: Session) -> None:
        models.set_status(tx, model_id, "unloaded")
        models.delete_snapshot(tx, model_id)

    result = results.UnloadModelOutput(model_id=model_id)
    context.request_log.commit(queued, result, rows, effect_order=model.assign_effect_order())


def _run_optim_step(context: EngineContext, queued: QueuedRequest, model_id: ModelId, request: OptimStep) -> None:
    model = context.models.get(model_id)
    context.models.ensure_resident([model_id])
    if model.gradient_error is not None:
        cause = f"is incomplete and was dropped, because a forward_backward failed: {model.gradient_error}"
        advice = "send all passes of this step again, then optim_step; the weights are unchanged"
        _drop_gradient(context, queued, model, f"the gradient {cause}; {advice}")
        return
    request_checks.check_optim(request.params)

    # Check the gradient.
    taken = DeviceTime("step")
    with context.device_clock.measure_completion(taken):
        norm = context.backend.gradient_norm(model_id)
    if norm is not None and not math.isfinite(norm):
        cause = f"the norm of the gradient is {norm}, not a finite number: the model has diverged, or a loss overflowed"
        context.request_log.meters.count_nonfinite("gradient")
        _drop_gradient(context, queued, model, f"{cause}; the gradient was dropped, the weights are unchanged")
        return

    # Take the optimizer step.
    with context.device_clock.measure_call(taken):
        metrics = context.backend.optim_step(model_id, request.params)
    result = results.OptimStepOutput(metrics=dict(metrics))
    model.num_steps += 1

    observed = context.observers.collect_rows(lambda observer: observer.observe_step(queued, model, result, taken))
    context.request_log.commit(queued, result, effect_order=model.assign_effect_order(), observed=observed)


def _replay_optim_step(recovery: Recovery, logged: LoggedRequest, request: OptimStep) -> None:
    if logged.failed:
        recovery.backend.clear_gradient(logged.model_id)  # as `_drop_gradient` did
    else:
        recovery.backend.optim_step(logged.model_id, request.params)


def _replay_pass(recovery: Recovery, logged: LoggedRequest, request: ModelPass) -> None:
    examples = prepare.make_pass_examples(logged.queued.request_id, logged.model_id, request, recovery.capabilities)
    recovery.backend.forward_backward(PreparedModelPassBatch(examples=tuple(examples)))


def _drop_gradient(context: EngineContext, queued: QueuedRequest, model: LiveModel, message: str) -> None:
    """Fail an optimizer step and clear the gradient.

    The failure has a log record, so replay clears it too.
    """
    context.backend.clear_gradient(model.model_id)
    model.gradient_error = None
    context.request_log.commit(
        queued,
        results.Failure(message=message, category=ErrorCategory.USER),
        lambda tx: models.set_incomplete_gradient(tx, model.model_id, None),
        effect_order=model.assign_effect_order(),
    )


def _save_weights(context: EngineContext, queued: QueuedRequest, model_id: ModelId, request: SaveWeights) -> None:
    model = context.models.get(model_id)
    request_checks.check_save(request)
    if request.name is None:
        _save_ephemeral(context, queued, model_id, request)
        return

    # Check that the name is free.
    path = CheckpointPath(model_id, CheckpointKind(request.kind), request.name)
    if not request.overwrite and context.store.read(lambda tx: checkpoints.get(tx, path, time.time())) is not None:
        way_out = "pass overwrite" if path.kind is CheckpointKind.TRAINING else "delete it first"
        raise UserError(f"path {path.name!r}: {path} exists already; choose another name or {way_out}")
    # Copy the weights from the device.
    context.models.ensure_resident([model_id])
    parts = {StatePart.WEIGHTS, StatePart.OPTIMIZER} if request.kind == "weights" else {StatePart.WEIGHTS}
    snapshot, step = context.backend.capture(model_id, parts), model.num_steps
    write = snapshot.write
    if request.kind == "external_weights":
        write = partial(_write_external, snapshot, context.settings.base_models[0], request.age_recipients)

    def on_written(written: Future[Artifact]) -> None:
        try:
            artifact = written.result()
            context.request_log.wait_for_commits()
            _record_checkpoint(context, queued, request, path, artifact, step)
            if request.kind == "sampler_weights":
                context.samplers.preload(SamplerId(artifact.artifact_id), snapshot, queued.session_id)
        except checkpoints.CheckpointExists as error:
            context.fail(queued, UserError(f"path: {error}"))
        except Exception as error:
            context.fail(queued, error)

    # Describe the checkpoint.
    run = model.make_metadata(context.settings.base_models[0])
    saved = manifests.make_checkpoint_metadata(
        kind=request.kind,
        name=request.name,
        expires_at=None if request.ttl_s is None else time.time() + request.ttl_s,
        user_metadata=request.user_metadata,
    )
    # Write the files. Later requests of the model wait: if they were committed before this save, a
    # crash would repeat the save with the later weights.
    context.background_writer.submit(
        context.recovery.make_writer(write, {**run, **saved}), on_written, model_id=model_id, blocks=True
    )


def _save_ephemeral(context: EngineContext, queued: QueuedRequest, model_id: ModelId, request: SaveWeights) -> None:
    """Make a sampler of a model's weights, commit the result, and start to write the files."""
    name = request.sampling_session_id
    assert name is not None
    if context.store.read(lambda tx: sampling_sessions.get(tx, name)) is not None:
        raise UserError(f"sampling_session_seq_id: {name} exists already")
    context.ephemeral_samplers.check_capacity()

    # Copy the weights from the device, and load them for sampling.
    context.models.ensure_resident([model_id])
    sampler = make_sampler_id(queued.request_id)
    snapshot = context.backend.capture(model_id, {StatePart.WEIGHTS})
    context.samplers.preload(sampler, snapshot, queued.session_id)

    # Commit before the files are written. After a crash the save is replayed.
    model = context.models.get(model_id)
    effect_order, step = model.assign_effect_order(), model.num_steps
    now = time.time()

    def rows(tx: Session) -> None:
        session = SamplingSessionRow(
            sampling_session_id=name,
            session_id=queued.session_id,
            base_model=context.settings.base_models[0],
            sampler_id=sampler,
            model_id=model_id,
            created_at=now,
            last_used_at=now,
            request_id=queued.request_id,
            is_inflight=request.is_inflight,
            step=step,
        )

        sampling_sessions.create_session(tx, session)
        if request.is_inflight:
            sampling_sessions.update_inflight(tx, model_id, sampler, step)

    result = results.SaveWeightsOutput(kind=request.kind, sampling_session_id=name)
    context.request_log.commit(queued, result, rows, effect_order=effect_order)
    context.observers.note_sampler(sampler, model)
    context.ephemeral_samplers.add(sampler, model_id, effect_order, snapshot)


def _replay_save_weights(recovery: Recovery, logged: LoggedRequest, request: SaveWeights) -> None:
    """Make the sampler of an ephemeral save again if its files are missing.

    Named saves are not in the log.
    """
    name, sampler = request.sampling_session_id, make_sampler_id(logged.queued.request_id)
    assert request.name is None
    if name is not None and recovery.ephemeral_samplers.is_missing(name, sampler):
        snapshot = recovery.backend.capture(logged.model_id, {StatePart.WEIGHTS})
        recovery.ephemeral_samplers.add(sampler, logged.model_id, logged.effect_order, snapshot)


def _write_external(snapshot: Snapshot, base_model: str, age_recipients: Collection[str], directory: Path) -> None:
    """Write a snapshot for use outside this server.

    It has the public name of the base model, and is encrypted if there are `age_recipients`.
    """
    snapshot.write(directory)
    path = directory / CONFIG_FILE
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    config["base_model_name_or_path"] = base_model  # the backend wrote a local path
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    if age_recipients:
        encrypt_files(directory, age_recipients)


def _record_checkpoint(
    context: EngineContext,
    queued: QueuedRequest,
    request: SaveWeights,
    path: CheckpointPath,
    artifact: Artifact,
    step: int,
) -> None:
    now = time.time()

    def rows(tx: Session) -> None:
        # Make a new row on each call: if the disk was full, the transaction runs again.
        checkpoint = CheckpointRow(
            model_id=path.model_id,
            kind=path.kind,
            name=path.name,
            artifact_id=artifact.artifact_id,
            created_at=now,
            expires_at=None if request.ttl_s is None else now + request.ttl_s,
            size_bytes=artifact.size_bytes,
            user_metadata=request.user_metadata,
            step=step,
        )
        checkpoints.put(tx, checkpoint, request.overwrite)
        actor = audit.get_actor(tx, queued.session_id, queued.owner)
        audit.record(tx, "checkpoint_create", actor, now, path=path, size_bytes=artifact.size_bytes)
        tx.flush()

        # Older checkpoints go to the trash.
        keep = checkpoints.find_keep_last(tx, path.model_id, context.settings.keep_last)
        for old in checkpoints.trim(tx, path.model_id, path.kind, keep, now):
            audit.record(tx, "checkpoint_delete", audit.SERVER, now, path=old, purpose="keep_last")

    result = results.SaveWeightsOutput(kind=request.kind, path=str(path), size_bytes=artifact.size_bytes)
    observed = context.observers.collect_rows(lambda observer: observer.observe_save(queued, path.model_id))
    context.request_log.commit_and_wait(queued, result, rows, observed)


def _fail_rejected(context: EngineContext, queued: QueuedRequest, model_id: ModelId, request: Rejected) -> None:
    if request.kind in ("create_model", "load_weights"):

        def mark_failed(tx: Session) -> None:
            row = models.get(tx, model_id)
            if row is not None and row.status == "creating":
                models.set_status(tx, model_id, "failed")

        context.store.write(mark_failed)
    raise (ServerError if queued.is_damaged else UserError)(request.message)


def _replay_rejected(recovery: Recovery, logged: LoggedRequest, request: Rejected) -> None:
    raise ServerError(f"cannot replay request {logged.queued.request_id}: {request.message}")


@dataclass(frozen=True, slots=True)
class RequestKind:
    """How the engine executes and replays the requests of one kind."""

    execute: Callable[[EngineContext, QueuedRequest, ModelId, Any], None] | None
    """Checks a request, changes the model and commits the result.

    None for passes, which `training` executes.
    """
    replay: Callable[[Recovery, LoggedRequest, Any], None] | None
    """Repeats the change on a restored model.

    None if the model is never restored after such a request.
    """


KINDS: dict[type, RequestKind] = {
    CreateModel: RequestKind(_create_model, _replay_create_model),
    LoadWeights: RequestKind(_load_weights, _replay_load_weights),
    ModelPass: RequestKind(None, _replay_pass),
    OptimStep: RequestKind(_run_optim_step, _replay_optim_step),
    SaveWeights: RequestKind(_save_weights, _replay_save_weights),
    UnloadModel: RequestKind(_unload_model, None),
    Rejected: RequestKind(_fail_rejected, _replay_rejected),
}
