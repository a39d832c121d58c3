"""Recover from the crash of the previous engine, before new requests run.

The engine counts a delivery attempt before it starts a request, and removes the count on a clean
stop. If an engine ends in another way, the requests that were running keep their counts. One of
these requests may have caused the end, so they are quarantined: each runs alone, while no file is
being written. If the engine crashes again, the supervisor of the engine counts the crash for this
request (`futures.record_engine_end`). After `max_attempts` crashes the request fails. A kill from
outside, a power loss or a lost database is not counted, because the request did not cause it.
"""

import logging
from collections.abc import Callable, Collection

from skyrl_tx.contract.errors import RequestError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import Sample
from skyrl_tx.engine.context import FATAL_ERRORS, EngineContext, report_internal_error
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.engine.schedule import Schedule
from skyrl_tx.engine.training import TrainingExecutor
from skyrl_tx.store import futures

_log = logging.getLogger(__name__)


def recreate_lost_samplers(context: EngineContext) -> None:
    """Create the ephemeral samplers again whose files were not written because of a crash.

    To get their weights, the engine replays the log of each model. The replay counts as a delivery
    attempt of the saves in it. So the engine gives up a save whose replay crashes the engine again
    and again.
    """
    for model_id, saves in sorted(context.ephemeral_samplers.find_lost().items()):
        if (reason := _replay_saves(context, model_id, saves)) is not None:
            lost = "%d ephemeral samplers of model %s are lost: %s"
            _log.error(lost, len(saves), model_id, reason, extra={"model_id": model_id})
            message = f"its unsaved weights are lost: {reason}; save them again to sample"
            context.ephemeral_samplers.mark_lost(saves.values(), message)


def _replay_saves(context: EngineContext, model_id: ModelId, saves: Collection[RequestId]) -> str | None:
    """Replay a model with its ephemeral saves. Returns why the replay failed, or None."""
    crashes, reason = context.store.read(lambda tx: futures.get_max_crashes(tx, saves)), None
    if crashes >= context.settings.max_attempts:
        return f"the engine crashed or hung {crashes} times while it restored them"
    context.attempts.count(saves)
    try:
        context.models.ensure_resident([model_id])
    except FATAL_ERRORS:
        raise
    except RequestError as error:
        reason = error.message
    except Exception as error:  # the error affects only this model
        reason = report_internal_error(f"restoring model {model_id}", error).message
    context.attempts.undo(saves)
    return reason


def replay_quarantined(
    context: EngineContext, training: TrainingExecutor, sampling: SamplingExecutor, is_stopping: Callable[[], bool]
) -> None:
    """Execute the quarantined requests one at a time.

    Samples come first, then the requests of each model in `seq_id` order.

    Returns early if the engine must stop.
    """
    store = context.store
    quarantined = [
        QueuedRequest.from_row(row) for row in store.read(lambda tx: futures.list_in_flight(tx, store.engine_number))
    ]
    if not quarantined:
        return
    _log.warning("%d requests were running at the last crash; running each request alone", len(quarantined))
    _wait_for_writes(context)

    # Samples.
    by_model: dict[ModelId, list[QueuedRequest]] = {}
    for queued in quarantined:
        if queued.model_id is not None and not isinstance(queued.request, Sample):
            by_model.setdefault(queued.model_id, []).append(queued)
            continue
        if is_stopping():
            return
        sampling.add(queued)
        while sampling.run_slice():
            if is_stopping():
                return
        _wait_for_writes(context)

    # Requests to models.
    for model_id, requests in by_model.items():
        schedule = _make_schedule(context, model_id, requests)
        while not is_stopping() and (batch := schedule.take(0.0)) is not None:
            training.start_scheduled(batch)
            while training.run_micro_batch():
                pass
            _wait_for_writes(context)


def _make_schedule(context: EngineContext, model_id: ModelId, requests: list[QueuedRequest]) -> Schedule:
    """Make a schedule of a model's quarantined requests, and of earlier requests not started yet.

    The schedule runs one request at a time. A missing sequence number does not delay a request,
    because the engine that crashed has already waited for the missing request.
    """
    last_seq = max(queued.seq_id or 0 for queued in requests)
    preceding = context.store.read(lambda tx: futures.list_not_started(tx, model_id, last_seq))
    schedule = Schedule(gap_timeout_s=0.0, max_pass_tokens=1, max_models=1, max_batch_requests=1)
    schedule.add_model(model_id, context.recovery.read_sequence_cursor(model_id))
    for queued in (*map(QueuedRequest.from_row, preceding), *requests):
        schedule.add(queued)
    return schedule


def _wait_for_writes(context: EngineContext) -> None:
    """Wait until files and results are on disk.

    If the engine crashes during such a write, the crash then counts for one request only.
    """
    context.background_writer.drain()
    context.request_log.wait_for_commits()
