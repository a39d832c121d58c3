"""The engine's loop. One turn reads new requests, then runs some training steps and some decode slices."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.meters import Meters
from skyrl_tx.engine import handlers, membership
from skyrl_tx.engine.activity import HOST_WORK, LoopActivity, Watchdog, monitor_backend
from skyrl_tx.engine.admission import Admission
from skyrl_tx.engine.background_writer import BackgroundWriter
from skyrl_tx.engine.context import EngineContext
from skyrl_tx.engine.device_cache import ModelCache, SamplerCache
from skyrl_tx.engine.ephemeral_samplers import EphemeralSamplers
from skyrl_tx.engine.extension import EngineExtension
from skyrl_tx.engine.housekeeping import ApiUptime, Housekeeping
from skyrl_tx.engine.intake import Intake
from skyrl_tx.engine.metrics import EngineMetrics, StatusPublisher
from skyrl_tx.engine.observers import ResultObservers
from skyrl_tx.engine.recovery import Recovery, make_artifact_metadata
from skyrl_tx.engine.request_log import DeliveryAttempts, RequestLog
from skyrl_tx.engine.retention import Retention
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.engine.schedule import FairShare, Schedule
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.engine.startup import recreate_lost_samplers, replay_quarantined
from skyrl_tx.engine.training import TrainingExecutor
from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.store import completions, engine_state, futures, identity, leases
from skyrl_tx.store.database import Store
from skyrl_tx.store.pauses import Pause

_log = logging.getLogger(__name__)
_MAX_WAIT_S = 1.0
_MIN_WAIT_S = 0.05
_PRUNE_PERIOD_S = 0.2
_MEASURE_PERIOD_S = 1.0
_BATCH_MICRO_BATCHES = 4  # per batch of passes: enough to keep a device busy, few to wait for


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
    """The parts of optional features."""

    def run(
        self,
        stop: threading.Event,
        on_ready: Callable[[Capabilities], None] = lambda _: None,
        on_stuck: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Run until `stop` is set (call `store.wake` then). Running passes end; samples are left to the next engine.

        Args:
            stop: Set by another thread.
            on_ready: Called once the device is ready.
            on_stuck: Called on another thread, with the reason, while a call of the backend exceeds its time limit.

        Raises:
            BackendLost: The device is lost. Requests without a result run in the next engine.
            StoreError: The database is lost.
        """
        # Watch what the engine does, and publish it, before the backend starts.
        activity = LoopActivity()
        activity.start(HOST_WORK)
        backend = monitor_backend(self.backend, activity)
        watchdog = Watchdog(activity, self.backend, self.settings, on_stuck)
        watchdog.start()
        self.store.observe_commits(self.meters.store_write_s.observe)
        status = StatusPublisher(self.store, self.boot_id, self.settings.base_models, watchdog)
        membership.reassign_last_run(self.store)
        status.start()

        # Start the threads that write files, and that forget running requests on a stop.
        background_writer = BackgroundWriter(self.store.wake, activity)
        attempts = DeliveryAttempts(self.store)
        undoing = ServiceThread("undo-attempts", lambda: attempts.undo_all_on_stop(stop))
        undoing.start()

        def is_stopping() -> bool:
            status.check()
            return stop.is_set()

        try:
            capabilities = self._start_backend(backend)
            context = self._make_context(backend, capabilities, background_writer, attempts)
            self._claim_artifacts()
            self._close_last_run()
            loop = _Loop(context, self.artifacts)

            # Recover: what ran when the last engine crashed runs alone.
            attempts.is_alone = True
            status.sample_load = loop.get_sample_load()
            status.set_status("recovering", capabilities)
            recreate_lost_samplers(context)
            on_ready(capabilities)
            replay_quarantined(context, loop.training, loop.sampling, is_stopping)
            attempts.is_alone = False

            # Execute requests until the stop.
            status.set_status("ready", capabilities)
            self._run_turns(loop, status, activity, is_stopping)

            # Finish what runs, and take snapshots.
            activity.start(HOST_WORK)
            status.set_status("stopping", capabilities)
            loop.finish()
            _log.info("engine stopped cleanly")
        finally:
            if stop.is_set():
                undoing.join()  # a stop counts no attempt, also if the engine fails at the same time
            attempts.close()
            status.close()
            background_writer.close()
            try:
                backend.close()
            finally:
                watchdog.close()

    def _start_backend(self, backend: AbstractBackend) -> Capabilities:
        started = time.monotonic()
        capabilities = backend.start()
        _log.info("backend ready on %s after %.1f s", ", ".join(capabilities.devices), time.monotonic() - started)
        return capabilities

    def _close_last_run(self) -> None:
        """Close the records of the last engine of this number, so that this one can count from here."""
        number = self.store.engine_number
        # Cancelled requests have results, so they will not be read.
        self.store.write(lambda tx: completions.forget_cancellations(tx, engine=number))
        # A supervisor has counted a crash.
        self.store.write(lambda tx: futures.record_engine_end(tx, is_crash=False, engine=number))
        self.store.write(lambda tx: completions.skip_seen_positions(tx, time.time()))

    def _run_turns(
        self, loop: "_Loop", status: StatusPublisher, activity: LoopActivity, is_stopping: Callable[[], bool]
    ) -> None:
        """Run turns until the engine stops, and wait for requests while there is nothing to do."""
        measured_at = 0.0
        while not is_stopping():
            # Update what the status publishes.
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
        """Compare the database with the artifacts before anything is removed; warn about unclaimed ones.

        Raises UserError if they are not the artifacts of the database.
        """
        identity.check_artifacts(self.store, self.artifacts)
        if not self.store.write(leases.become_keeper):
            return
        try:
            unclaimed = identity.claim(self.store, self.artifacts).unclaimed
        except OSError as error:  # repeated before each garbage collection
            _log.error("the identity of the data directory cannot be written: %s", error)
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
        """Make the components that depend on the started backend."""
        settings, store = self.settings, self.store
        metadata = make_artifact_metadata(capabilities)
        request_log = RequestLog(store, attempts, self.meters)
        ephemeral_samplers = EphemeralSamplers(
            background_writer, store, self.artifacts, metadata, settings.max_pending_sampler_writes
        )
        recovery = Recovery(backend, capabilities, store, self.artifacts, metadata, ephemeral_samplers, handlers.replay)
        recovery.check_base_model(settings.base_models[0])
        membership.check_same_base(store, capabilities.base_model_hash)
        models = ModelCache(
            backend, capabilities.max_models, store, request_log, background_writer, recovery, ephemeral_samplers
        )
        observers = [made.observer(store, settings) for made in self.extensions if made.observer is not None]
        make_admission = next((made.admission for made in self.extensions if made.admission is not None), None)
        return EngineContext(
            settings=settings,
            backend=backend,
            capabilities=capabilities,
            store=store,
            attempts=attempts,
            request_log=request_log,
            background_writer=background_writer,
            recovery=recovery,
            models=models,
            samplers=SamplerCache(backend, capabilities.max_samplers, recovery, ephemeral_samplers, models),
            ephemeral_samplers=ephemeral_samplers,
            observers=ResultObservers(store, observers),
            retention=Retention.collect(self.extensions),
            admission=make_admission(store, request_log.wait_for_commits) if make_admission else Admission(),
        )


class _Loop:
    """The waiting and running requests of a started engine."""

    def __init__(self, context: EngineContext, artifacts: ArtifactStore) -> None:
        self._make_context, capabilities = context, context.capabilities
        self.refresh_admission()
        few_tokens = _BATCH_MICRO_BATCHES * capabilities.micro_batch_tokens  # 0 if the backend does not report the size
        self.training = TrainingExecutor(context)
        self._schedule = Schedule(
            gap_timeout_s=context.settings.gap_timeout_s,
            max_pass_tokens=min(few_tokens or capabilities.max_pass_tokens, capabilities.max_pass_tokens),
            max_models=capabilities.max_models,
            max_read_bytes=context.settings.max_backlog_bytes // 2,
            read_bodies=lambda requests: self._intake.read_bodies(requests),
            admission=context.admission,
            fair_share=FairShare(lambda: context.admission.weights),
            on_arrival=self.training.record_arrival,
        )
        self.sampling = SamplingExecutor(context)
        self._intake = Intake(context, self._schedule, self.sampling)
        self._api_uptime = ApiUptime(context.store)
        self._housekeeping = Housekeeping(context, artifacts, self.sampling, self._api_uptime)
        spreading = membership.SampleBalancer(context, self.sampling)
        self._membership = membership.Membership(context, self._schedule, spreading)
        self._is_busy = self._is_turn_of_passes = self._has_warned = False
        self._housekeeping_at = self._pruning_at = time.monotonic()

    def run_turn(self) -> bool:
        """Run one turn. Returns whether there was anything to do."""
        context = self._make_context

        # Read what has arrived, and take over what the background thread has finished.
        self._membership.check()
        worked = self._intake.read(self._is_busy)
        worked |= context.background_writer.run_callbacks()

        # Work on the device.
        self._is_busy = self._run_device()
        worked |= self._is_busy

        # Secure the results.
        context.request_log.check_commits()
        context.models.start_due_snapshots(context.settings)

        # Free what is not needed any more, from time to time.
        if time.monotonic() >= self._housekeeping_at:
            worked |= self._run_housekeeping()
        if time.monotonic() >= self._pruning_at:
            self._prune()
        return worked

    def _run_housekeeping(self) -> bool:
        """Free what idle models and closed sessions hold, and what has expired. Returns whether requests were read."""
        context, housekeeping, now = self._make_context, self._housekeeping, time.time()
        self._housekeeping_at = time.monotonic() + context.settings.housekeeping_interval_s

        # Idle models and closed sessions.
        housekeeping.evict_idle_models(self._schedule.is_waiting, now)
        housekeeping.forget_idle_models(self._schedule)
        housekeeping.fail_orphaned_samples(now)

        # Rows past their retention, which one of several engines removes for all.
        if self._membership.is_keeper():
            housekeeping.expire(now)
        else:
            self._membership.discard_ended_models()

        # Artifacts. Those of requests in memory are kept, so new requests are read first.
        has_read = self._intake.read(self._is_busy)
        position = self._intake.complete_position
        housekeeping.collect_garbage(position, now, is_keeper=self._membership.is_keeper())
        context.ephemeral_samplers.retry_failed_writes()

        housekeeping.trim_tables()
        return has_read

    def _prune(self) -> None:
        """Remove some old rows, and continue soon if more are left."""
        pause_s = self._make_context.settings.housekeeping_interval_s
        if self._membership.is_keeper() and self._housekeeping.prune(time.time()):
            pause_s = min(pause_s, _PRUNE_PERIOD_S)
        self._pruning_at = time.monotonic() + pause_s

    def get_sample_load(self) -> engine_state.SampleLoad:
        """Return the memory of the samples in this engine. The API adds what it stores later."""
        return engine_state.SampleLoad(
            position=self._intake.position,
            num_bytes=self.sampling.num_open_bytes_by_owner.total(),
            max_bytes=self._make_context.settings.max_queued_sample_bytes,
            by_owner=engine_state.take_largest_owners(self.sampling.num_open_bytes_by_owner),
            num_requests=self.sampling.num_waiting + self.sampling.num_running,
        )

    def measure(self, backend: AbstractBackend, activity: LoopActivity) -> Mapping[str, object]:
        """Set the gauges of the metrics; return what is published of them."""
        context, schedule, sampling = self._make_context, self._schedule, self.sampling
        try:
            held = backend.meters()
        except Exception as error:  # what people see is no reason to end an engine
            self._warn_about_meters(error)
            held = Meters()
        resident = context.models.list_resident()
        return context.request_log.meters.update_gauges(
            held,
            activity.call_seconds,
            queues={
                "training": {
                    "waiting": schedule.num_waiting,
                    "paused": schedule.num_paused,
                    "running": self.training.num_running_requests,
                    "backlog_bytes": schedule.num_bytes,
                    "backlog_limit_bytes": context.settings.max_backlog_bytes,
                },
                "sampling": {
                    "waiting": sampling.num_waiting,
                    "paused": sampling.num_paused,
                    "running": sampling.num_running,
                    "backlog_bytes": sampling.num_open_bytes_by_owner.total(),
                    "backlog_limit_bytes": context.settings.max_queued_sample_bytes,
                },
            },
            places={
                "models_resident": len(resident),
                "models_places": context.capabilities.max_models,
                "samplers_resident": context.samplers.num_resident,
                "samplers_places": context.capabilities.max_samplers,
                "effects_since_snapshot": max(
                    (each.effect_order - each.snapshot_order for each in resident), default=0
                ),
            },
        )

    def refresh_admission(self) -> None:
        """Look for changed quotas."""
        admission = self._make_context.admission
        admission.refresh()
        self._make_context.request_log.on_result = admission.record_end if admission.is_counting else None

    def list_pauses(self) -> Sequence[Pause]:
        """Return whose requests wait because of a quota."""
        admission = self._make_context.admission
        return admission.list_pauses() if admission.is_counting else ()

    def _warn_about_meters(self, error: Exception) -> None:
        if not self._has_warned:
            _log.warning("the backend cannot tell its meters", exc_info=error)
        self._has_warned = True

    def compute_max_wait_s(self) -> float:
        """Return how long the loop may wait for a wake-up: until the next gap timeout, a second at most."""
        deadline = self._schedule.get_next_deadline()
        longest_s = _MAX_WAIT_S if not self._make_context.store.is_shared else membership.PERIOD_S
        if deadline is None:
            return longest_s
        return min(longest_s, max(_MIN_WAIT_S, deadline - self._api_uptime.get_total_s()))

    def finish(self) -> None:
        """Stop cleanly: finish running passes, snapshot the models, leave samples to the next engine."""
        while self.training.run_micro_batch():
            pass
        self.sampling.stop()
        self._make_context.background_writer.drain()
        for model in self._make_context.models.list_resident():
            self._make_context.models.snapshot_and_wait(model)
        self._make_context.background_writer.drain()  # the last snapshots may have replaced others
        self._make_context.request_log.wait_for_commits()

    def _run_device(self) -> bool:
        """Run one training step, then one decode slice, so that each side waits for one step of the other only."""
        has_trained = self._train()
        return self.sampling.run_slice() or has_trained

    def _train(self) -> bool:
        """Execute one request that is no pass, or one micro-batch: in turns if there are both."""
        training, step = self.training, None
        training.set_shared(self._schedule.is_shared)
        if not self._is_turn_of_passes:
            step = self._schedule.take(
                self._api_uptime.get_total_s(),
                self._make_context.background_writer.blocked_models,
                busy=self._make_context.models.busy,
                num_running=training.num_running,
                sessions_with_long=training.sessions_with_long,
                owners_with_long=training.owners_with_long,
            )
        if step is not None:
            training.start_scheduled(step)
        if step is not None and step.requests[0].model_pass is None:
            self._is_turn_of_passes = training.has_turn_before(step.requests[0].owner)
            return True
        self._is_turn_of_passes = False
        if training.is_waiting and self.sampling.num_running:
            return step is not None  # samples need not wait for the compiler
        return training.run_micro_batch() or step is not None
