"""The engine: its start, the recovery from a crash, its loop and its stop.

One turn of the loop reads new requests, runs one training micro-batch (or one request of another
kind) and one decode slice (a few decode steps), and delivers results whose transaction is committed.

The engine counts a delivery attempt before it starts a request, and removes the count on a clean
stop. If an engine ends in another way, the requests that were running keep their counts. One of
these requests may have caused the end, so they are quarantined: each runs alone, while no file is
being written. If the engine crashes again, the supervisor of the engine counts the crash for this
request (`futures.record_engine_end`). After `max_attempts` crashes the request fails. A kill from
outside, a power loss or a lost database is not counted, because the request did not cause it.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import RequestError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import Sample
from skyrl_tx.engine import handlers, membership
from skyrl_tx.engine.activity import HOST_WORK, LoopActivity, Watchdog, monitor_backend
from skyrl_tx.engine.background_writer import BackgroundWriter, EphemeralSamplers
from skyrl_tx.engine.context import FATAL_ERRORS, EngineContext, report_internal_error
from skyrl_tx.engine.device_cache import ModelCache, SamplerCache
from skyrl_tx.engine.extension import Admission, EngineExtension, ResultObservers, Retention
from skyrl_tx.engine.loop import Loop, read_sequence_cursor
from skyrl_tx.engine.metrics import EngineMetrics, StatusPublisher
from skyrl_tx.engine.prepare import start_backend
from skyrl_tx.engine.recovery import Recovery, make_artifact_metadata, warn_of_changes
from skyrl_tx.engine.request_log import DeliveryAttempts, QueuedRequest, RequestLog
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.engine.schedule import Schedule
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.engine.training import TrainingExecutor
from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.store import completions, engine_state, futures, identity, placement
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)
_MEASURE_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Engine:
    """Runs the requests of a store on a backend, on the thread that calls `run`."""

    settings: EngineSettings
    backend: AbstractBackend
    store: Store
    artifacts: ArtifactStore
    meters: EngineMetrics = field(default_factory=EngineMetrics)
    boot_id: str = field(default_factory=engine_state.make_boot_id)
    extensions: Sequence[EngineExtension] = ()
    """Optional features, for example quotas."""

    def run(
        self,
        stop: threading.Event,
        on_ready: Callable[[Capabilities], None] = lambda _: None,
        on_stuck: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Execute requests until another thread sets `stop` and then calls `store.wake()`.

        Before it returns, the engine finishes the running passes and takes a snapshot of each
        model. It does not finish running samples: the next engine starts them again with the same
        seeds.

        Args:
            stop: Event that ends the engine.
            on_ready: Called when the backend has started and the files of all samplers exist.
                Files that the previous engine did not write come from a replay.
            on_stuck: Called on another thread with the reason when a backend call exceeds its time
                limit, for example `--step-timeout-s`.

        Raises:
            BackendLost: The device failed. The next engine runs the requests that have no result yet.
            StoreError: The database failed or cannot be reached.
            UserError: The artifacts or the base model do not match the database.
        """
        # Start the watchdog and the status publisher. They must cover the start of the backend.
        activity = LoopActivity()
        activity.start(HOST_WORK)
        backend = monitor_backend(self.backend, activity)
        watchdog = Watchdog(activity, self.backend, self.settings, on_stuck)
        watchdog.start()
        self.store.observe_commits(self.meters.store_write_s.observe)
        engines = self.store.read(engine_state.list_engines)
        last_active_at = max((row.updated_at for row in engines), default=None)
        previous = {row.number: row.capabilities.get("fingerprint") for row in engines}.get(self.store.engine_number)
        status = StatusPublisher(self.store, self.boot_id, self.settings.base_models, watchdog)
        membership.reassign_previous_work(self.store)
        status.start()

        # Start the thread that writes files, and a thread that acts if the engine is stopped on purpose: it
        # decrements the attempt count of the running requests. A high count marks a request that may cause crashes.
        background_writer = BackgroundWriter(self.store.wake, activity)
        attempts = DeliveryAttempts(self.store)
        attempts_thread = ServiceThread("undo-attempts", lambda: attempts.undo_all_on_stop(stop))
        attempts_thread.start()

        def is_stopping() -> bool:
            status.check()
            return stop.is_set()

        try:
            capabilities = self._start_backend(backend)
            warn_of_changes(cast(Mapping[str, str], previous or {}), capabilities.fingerprint)
            context = self._make_context(backend, capabilities, background_writer, attempts)
            self._claim_artifacts()
            self._close_previous_engine()
            loop = Loop(context, self.artifacts, Retention.collect(self.extensions), last_active_at)

            # Recover. Requests that were running when the last engine crashed run one at a time.
            attempts.runs_one_at_a_time = True
            status.sample_load = loop.get_sample_load()
            status.set_status("recovering", capabilities)
            _recreate_lost_samplers(context)
            on_ready(capabilities)
            _replay_quarantined(context, loop.training, loop.sampling, is_stopping)
            attempts.runs_one_at_a_time = False

            # Execute requests until the stop.
            status.set_status("ready", capabilities)
            self._run_turns(loop, status, activity, is_stopping)

            # Finish running passes and take snapshots.
            activity.start(HOST_WORK)
            status.set_status("stopping", capabilities)
            loop.finish()
            _log.info("engine stopped cleanly")
        finally:
            if stop.is_set():
                # Wait until the attempt counts of running requests are decremented: an exception during a
                # stop does not count as a crash.
                attempts_thread.join()
            attempts.close()
            status.close()
            background_writer.close()
            try:
                backend.close()
            finally:
                watchdog.close()

    def _start_backend(self, backend: AbstractBackend) -> Capabilities:
        started = time.monotonic()
        capabilities = start_backend(backend)
        _log.info("backend ready on %s after %.1f s", ", ".join(capabilities.devices), time.monotonic() - started)
        return capabilities

    def _close_previous_engine(self) -> None:
        """Clean up what the previous engine with this number left in the database."""
        number = self.store.engine_number
        # Delete old cancellations. The requests that clients cancelled already have results.
        self.store.write(lambda tx: completions.forget_cancellations(tx, engine=number))
        # `is_crash` is False even after a crash, because the supervisor has already counted it.
        self.store.write(lambda tx: futures.record_engine_end(tx, is_crash=False, engine=number))
        # Clients poll for completions above the last number that they have seen. A restored backup has
        # smaller numbers, so continue above every number that a client may have seen.
        self.store.write(lambda tx: completions.skip_seen_positions(tx, time.time()))

    def _run_turns(
        self, loop: "Loop", status: StatusPublisher, activity: LoopActivity, is_stopping: Callable[[], bool]
    ) -> None:
        """Run turns until the engine stops. Wait for requests while there is nothing to do."""
        measured_at = 0.0
        while not is_stopping():
            # Refresh what the status row and the metrics show.
            status.sample_load = loop.get_sample_load()
            if time.monotonic() - measured_at >= _MEASURE_PERIOD_S:
                measured_at = time.monotonic()
                loop.refresh_admission()
                status.meters = loop.measure(self.backend, activity)
                status.pauses = loop.list_pauses()

            activity.start(HOST_WORK)
            if not loop.run_turn():
                activity.mark_idle()
                self.store.wait(loop.compute_max_wait_s())

    def _claim_artifacts(self) -> None:
        """Check that database and artifacts belong together.

        The engine that collects garbage (the keeper) also writes the database's identity to the
        artifacts, and logs a warning about artifacts that this database does not know.

        Raises UserError if the artifacts belong to another database.
        """
        identity.check_artifacts(self.store, self.artifacts)
        if not self.store.write(placement.become_keeper):
            return

        # Write the identity, and report artifacts that the database does not know.
        try:
            unclaimed = identity.claim(self.store, self.artifacts).unclaimed
        except OSError as error:  # the next garbage collection tries again
            _log.error(
                "cannot write the identity of the data directory: %s; no artifact is removed until it is written", error
            )
            return
        if unclaimed:
            _log.warning(
                "%s: %s",
                self.artifacts.location if self.artifacts.is_remote else self.settings.data_dir,
                identity.describe_unclaimed(unclaimed),
            )

    def _make_context(
        self,
        backend: AbstractBackend,
        capabilities: Capabilities,
        background_writer: BackgroundWriter,
        attempts: DeliveryAttempts,
    ) -> EngineContext:
        """Connect the components that need the started backend."""
        settings, store = self.settings, self.store

        # Recovery of models.
        metadata = make_artifact_metadata(capabilities)
        request_log = RequestLog(store, attempts, self.meters)
        ephemeral_samplers = EphemeralSamplers(
            background_writer, store, self.artifacts, metadata, settings.max_pending_sampler_writes
        )
        recovery = Recovery(backend, capabilities, store, self.artifacts, metadata, ephemeral_samplers, handlers.replay)
        recovery.check_base_model(settings.base_models[0])
        membership.check_same_base(store, capabilities.base_model_hash)

        # Models on the device, and the optional features.
        models = ModelCache(
            backend, capabilities.max_models, store, request_log, background_writer, recovery, ephemeral_samplers
        )
        observers = [extension.observer(store, settings) for extension in self.extensions if extension.observer]
        make_admission = next((extension.admission for extension in self.extensions if extension.admission), None)

        return EngineContext(
            settings=settings,
            backend=backend,
            capabilities=capabilities,
            store=store,
            attempts=attempts,
            request_log=request_log,
            # Components that save, restore and evict models and samplers.
            background_writer=background_writer,
            recovery=recovery,
            models=models,
            samplers=SamplerCache(backend, capabilities.max_samplers, recovery, ephemeral_samplers, models),
            ephemeral_samplers=ephemeral_samplers,
            # From optional features.
            observers=ResultObservers(store, observers),
            admission=make_admission(store, request_log.wait_for_commits) if make_admission else Admission(),
        )


def _recreate_lost_samplers(context: EngineContext) -> None:
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


def _replay_quarantined(
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
    schedule.add_model(model_id, read_sequence_cursor(context.store, model_id))
    for queued in (*map(QueuedRequest.from_row, preceding), *requests):
        schedule.add(queued)
    return schedule


def _wait_for_writes(context: EngineContext) -> None:
    """Wait until files and results are on disk.

    If the engine crashes during such a write, the crash then counts for one request only.
    """
    context.background_writer.drain()
    context.request_log.wait_for_commits()
