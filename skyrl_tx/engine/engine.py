"""The engine and its loop.

One turn of the loop reads new requests, runs one training micro-batch (or one request of another
kind) and one decode slice (a few decode steps), and delivers results whose transaction is committed.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.meters import Meters
from skyrl_tx.engine import handlers, membership
from skyrl_tx.engine.activity import HOST_WORK, LoopActivity, Watchdog, monitor_backend
from skyrl_tx.engine.admission import Admission
from skyrl_tx.engine.backend_checks import start_backend
from skyrl_tx.engine.background_writer import BackgroundWriter
from skyrl_tx.engine.context import EngineContext
from skyrl_tx.engine.device_cache import ModelCache, SamplerCache
from skyrl_tx.engine.ephemeral_samplers import EphemeralSamplers
from skyrl_tx.engine.extension import EngineExtension
from skyrl_tx.engine.fair_share import FairShare
from skyrl_tx.engine.housekeeping import ApiUptime, Housekeeping
from skyrl_tx.engine.intake import Intake
from skyrl_tx.engine.metrics import EngineMetrics, StatusPublisher
from skyrl_tx.engine.observers import ResultObservers
from skyrl_tx.engine.recovery import Recovery, make_artifact_metadata, warn_of_changes
from skyrl_tx.engine.request_log import DeliveryAttempts, RequestLog
from skyrl_tx.engine.retention import Retention
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.engine.schedule import Schedule
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.engine.startup import recreate_lost_samplers, replay_quarantined
from skyrl_tx.engine.training import TrainingExecutor
from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.store import completions, engine_state, futures, identity, placement
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause

_log = logging.getLogger(__name__)
_MAX_WAIT_S = 1.0
_MIN_WAIT_S = 0.05
_PRUNE_PERIOD_S = 0.2
_MEASURE_PERIOD_S = 1.0
_MICRO_BATCHES_PER_BATCH = 4
"""The token budget of a batch of passes, as a multiple of the tokens of one micro-batch.

A pass is a `forward` or `forward_backward` request. The budget is large enough to keep the device
busy, and small enough that other requests wait only briefly.
"""


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
            loop = _Loop(context, self.artifacts, last_active_at)

            # Recover. Requests that were running when the last engine crashed run one at a time.
            attempts.runs_one_at_a_time = True
            status.sample_load = loop.get_sample_load()
            status.set_status("recovering", capabilities)
            recreate_lost_samplers(context)
            on_ready(capabilities)
            replay_quarantined(context, loop.training, loop.sampling, is_stopping)
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
        self, loop: "_Loop", status: StatusPublisher, activity: LoopActivity, is_stopping: Callable[[], bool]
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
            retention=Retention.collect(self.extensions),
            admission=make_admission(store, request_log.wait_for_commits) if make_admission else Admission(),
        )


class _Loop:
    """The components of the engine that the loop calls, and one turn of the loop."""

    def __init__(self, context: EngineContext, artifacts: ArtifactStore, last_active_at: float | None) -> None:
        self._context, capabilities = context, context.capabilities
        self.refresh_admission()

        # Training. `micro_batch_tokens` is 0 if the backend does not report the size.
        batch_tokens = _MICRO_BATCHES_PER_BATCH * capabilities.micro_batch_tokens
        self.training = TrainingExecutor(context)
        self._schedule = Schedule(
            gap_timeout_s=context.settings.gap_timeout_s,
            max_pass_tokens=min(batch_tokens or capabilities.max_pass_tokens, capabilities.max_pass_tokens),
            max_models=capabilities.max_models,
            max_read_bytes=context.settings.max_backlog_bytes // 2,
            read_bodies=lambda requests: self._intake.read_bodies(requests),
            admission=context.admission,
            fair_share=FairShare(lambda: context.admission.weights),
            on_credit_dropped=self.training.drop_credit,  # unused device time of an owner, see `FairShare`
        )

        # Sampling, and the intake that feeds both.
        self.sampling = SamplingExecutor(context)
        self._intake = Intake(context, self._schedule, self.sampling)
        self._api_uptime = ApiUptime(context.store, last_active_at)

        # Maintenance.
        self._housekeeping = Housekeeping(context, artifacts, self.sampling, self._api_uptime)
        balancer = membership.SampleBalancer(context, self.sampling)
        self._membership = membership.Membership(context, self._schedule, balancer)
        self._is_busy = self._passes_are_next = self._has_warned = False
        self._num_slices_left = 0  # decode slices to run before the next micro-batch
        self._housekeeping_at = self._pruning_at = time.monotonic()

    def run_turn(self) -> bool:
        """Run one turn. Returns True if there was work to do."""
        context = self._context

        # Read new requests and the results of background writes.
        self._membership.check()
        worked = self._intake.read(self._is_busy)
        worked |= context.background_writer.run_callbacks()

        # Give the device its next micro-batch and decode slice.
        self._is_busy = self._run_device()
        worked |= self._is_busy

        # Deliver committed results, and start snapshots that are due.
        context.request_log.check_commits()
        context.models.start_due_snapshots(context.settings)

        # Maintenance, each with its own interval.
        if time.monotonic() >= self._housekeeping_at:
            worked |= self._run_housekeeping()
        if time.monotonic() >= self._pruning_at:
            self._prune()
        return worked

    def _run_housekeeping(self) -> bool:
        """Release resources that are no longer needed. Returns True if new requests were read."""
        context, housekeeping, now = self._context, self._housekeeping, time.time()
        self._housekeeping_at = time.monotonic() + context.settings.housekeeping_interval_s

        # Evict idle models from the device, for example models of closed sessions. Forget their
        # queues, and fail samples that nobody waits for.
        housekeeping.evict_idle_models(self._schedule.is_waiting, now)
        housekeeping.forget_idle_models(self._schedule)
        housekeeping.fail_orphaned_samples(now)

        # Remove models past their retention. If several engines share the database, the keeper does this.
        if self._membership.is_keeper():
            housekeeping.expire(now)
        else:
            self._membership.discard_ended_models()

        # Artifacts. Read new requests first, because garbage collection must keep the weight files
        # that they refer to.
        has_read = self._intake.read(self._is_busy)
        position = self._intake.complete_position  # all requests up to here have been read
        housekeeping.collect_garbage(position, now, is_keeper=self._membership.is_keeper())
        context.ephemeral_samplers.retry_failed_writes()

        # Delete rows beyond the size limits of tables, for example old points of the curves of long runs.
        housekeeping.trim_tables()
        return has_read

    def _prune(self) -> None:
        """Remove some rows of old requests. If more are left, prune again after `_PRUNE_PERIOD_S`."""
        pause_s = self._context.settings.housekeeping_interval_s
        if self._membership.is_keeper() and self._housekeeping.prune(time.time()):
            pause_s = min(pause_s, _PRUNE_PERIOD_S)
        self._pruning_at = time.monotonic() + pause_s

    def get_sample_load(self) -> engine_state.SampleLoad:
        """Return the number and bytes of the unfinished samples that this engine has read.

        `position` is the position of the last request that was read. The API process adds the
        sample requests that it has stored after `position`.
        """
        return engine_state.SampleLoad(
            position=self._intake.position,
            num_bytes=self.sampling.num_open_bytes_by_owner.total(),
            max_bytes=self._context.settings.max_queued_sample_bytes,
            by_owner=engine_state.take_largest_owners(self.sampling.num_open_bytes_by_owner),
            num_requests=self.sampling.num_waiting + self.sampling.num_running,
        )

    def measure(self, backend: AbstractBackend, activity: LoopActivity) -> Mapping[str, object]:
        """Update the gauges of the metrics. Returns the values for the status row."""
        context, schedule, sampling = self._context, self._schedule, self.sampling
        try:
            backend_meters = backend.meters()
        except Exception as error:  # a broken meter must not stop the engine
            self._warn_about_meters(error)
            backend_meters = Meters()

        resident = context.models.list_resident()
        return context.request_log.meters.update_gauges(
            backend_meters,
            activity.call_seconds,
            # Requests and their memory.
            queues={
                "training": {
                    "waiting": schedule.num_waiting,
                    "paused": schedule.num_paused,
                    "running": self.training.num_running_requests,
                    "backlog_bytes": schedule.num_bytes,
                    "backlog_limit_bytes": context.settings.max_backlog_bytes,
                },
                # The memory of a sample request counts until the request has a result.
                "sampling": {
                    "waiting": sampling.num_waiting,
                    "paused": sampling.num_paused,
                    "running": sampling.num_running,
                    "backlog_bytes": sampling.num_open_bytes_by_owner.total(),
                    "backlog_limit_bytes": context.settings.max_queued_sample_bytes,
                },
            },
            # Models and samplers on the device, and how many the device can hold (`…_places`).
            # `effects_since_snapshot`: how many requests have changed a model since its snapshot.
            places={
                "models_resident": len(resident),
                "models_places": context.capabilities.max_models,
                "samplers_resident": context.samplers.num_resident,
                "samplers_places": context.capabilities.max_samplers,
                "effects_since_snapshot": max(
                    (model.effect_order - model.snapshot_order for model in resident), default=0
                ),
            },
        )

    def refresh_admission(self) -> None:
        """Read quotas again if they have changed."""
        admission = self._context.admission
        admission.refresh()
        self._context.request_log.on_result = admission.record_end if admission.is_counting_usage else None

    def list_pauses(self) -> Sequence[Pause]:
        """Return the pauses of owners whose requests wait because of a quota."""
        admission = self._context.admission
        return admission.list_pauses() if admission.is_counting_usage else ()

    def _warn_about_meters(self, error: Exception) -> None:
        if not self._has_warned:
            _log.warning("the backend's meters() failed: metrics of the backend are missing", exc_info=error)
        self._has_warned = True

    def compute_max_wait_s(self) -> float:
        """Return how many seconds the loop may wait for a wake-up.

        The loop wakes up when a request stops waiting for a missing sequence number (see
        `gap_timeout_s`), and at least once a second. An engine that shares its database wakes up
        more often, to check the other engines. Deadlines count only the time in which the API was
        up, because a client cannot send the missing request while the API is down.
        """
        deadline = self._schedule.get_next_deadline()
        longest_s = _MAX_WAIT_S if not self._context.store.is_shared else membership.PERIOD_S
        if deadline is None:
            return longest_s
        return min(longest_s, max(_MIN_WAIT_S, deadline - self._api_uptime.get_total_s()))

    def finish(self) -> None:
        """Stop cleanly: finish running passes and take snapshots. Samples are left unfinished."""
        while self.training.run_micro_batch():
            pass
        self.sampling.stop()
        self._context.background_writer.drain()
        for model in self._context.models.list_resident():
            self._context.models.snapshot_and_wait(model)
        self._context.background_writer.drain()  # delete the old snapshots that the new ones replaced
        self._context.request_log.wait_for_commits()

    def _run_device(self) -> bool:
        """Run a decode slice, and before it a micro-batch if enough slices have run since the last one."""
        self._num_slices_left -= 1
        has_trained = (self._num_slices_left < 1 or not self.sampling.num_running) and self._train()
        return self.sampling.run_slice() or has_trained

    def _train(self) -> bool:
        """Execute one request that is no pass, or one micro-batch of the running passes.

        If both are waiting, they alternate. Returns True if there was work to do.
        """
        training, batch = self.training, None
        training.set_has_multiple_owners(self._schedule.has_multiple_owners)

        # Take the next batch, unless it is the turn of the running passes.
        if not self._passes_are_next:
            batch = self._schedule.take(
                self._api_uptime.get_total_s(),
                self._context.background_writer.blocked_models,
                busy=self._context.models.busy,
                num_running=training.num_running,
                sessions_with_long_pass=training.sessions_with_long_pass,
                owners_with_long_pass=training.owners_with_long_pass,
                compiling_owners=training.compiling_owners,
            )
        if batch is not None:
            training.start_scheduled(batch)  # starts passes, but runs a request of another kind to its end

        # After a request that is no pass, the running passes may be next.
        if batch is not None and batch.requests[0].model_pass is None:
            self._passes_are_next = training.should_run_before(batch.requests[0].owner)
            return True
        self._passes_are_next = False

        # While passes wait for the compiler, let the samples run.
        if training.is_waiting and self.sampling.num_running:
            return batch is not None
        if has_trained := training.run_micro_batch():
            self._num_slices_left = self._context.device_clock.count_slices_per_micro_batch()
        return has_trained or batch is not None
