"""One turn of the engine's loop, and the intake, which reads new requests from the database."""

import logging
import time
from collections.abc import Mapping, Sequence

from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract import codec
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.requests import Sample
from skyrl_tx.engine import membership
from skyrl_tx.engine.activity import LoopActivity
from skyrl_tx.engine.context import EngineContext
from skyrl_tx.engine.extension import Retention
from skyrl_tx.engine.fair_share import FairShare
from skyrl_tx.engine.housekeeping import ApiUptime, Housekeeping
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.engine.schedule import Schedule, SequenceCursor
from skyrl_tx.engine.training import TrainingExecutor
from skyrl_tx.store import engine_state, futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause

_log = logging.getLogger(__name__)
_MAX_WAIT_S = 1.0
_MIN_WAIT_S = 0.05
_PRUNE_PERIOD_S = 0.2
_MICRO_BATCHES_PER_BATCH = 4
"""The token budget of a batch of passes, as a multiple of the tokens of one micro-batch.

A pass is a `forward` or `forward_backward` request. The budget is large enough to keep the device
busy, and small enough that other requests wait only briefly.
"""
_PAGE_REQUESTS = 256
_MAX_READ_TIME_S = 0.1
_DEFERRED_BODY_BYTES = 65_536
"""Bodies of passes that are larger than this are read later, when the pass is about to run.

That takes an additional database statement, which is much shorter than the pass itself.
"""


class Loop:
    """The components of the engine that the loop calls, and one turn of the loop."""

    def __init__(
        self, context: EngineContext, artifacts: ArtifactStore, retention: Retention, last_active_at: float | None
    ) -> None:
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
        self._housekeeping = Housekeeping(context, artifacts, retention, self.sampling, self._api_uptime)
        self._membership = membership.Membership(context, self._schedule, self.sampling)
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
                training.list_running(),
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


class Intake:
    """Adds stored requests to the schedule and to the sampling queue.

    If the memory for waiting requests is full, an owner that uses more than its share falls behind:
    its training requests stay in the database until there is memory for them. The requests of
    other owners are read. Samples are always read, because back-pressure bounds their memory.
    """

    def __init__(self, context: EngineContext, schedule: Schedule, sampling: SamplingExecutor) -> None:
        self._context = context
        self._schedule = schedule
        self._sampling = sampling
        self._engine = context.store.engine_number
        self.position = 0
        """Position of the last request that was read or skipped because its owner is behind."""
        self._behind: dict[str, int] = {}  # owners that are behind, and the position of the last request that was read

    @property
    def complete_position(self) -> int:
        """All requests up to this position were read, for every owner."""
        return min(self._behind.values(), default=self.position)

    def read(self, is_busy: bool) -> bool:
        """Read new requests, for a limited time if the device is busy.

        Returns True if there were any.
        """
        end = time.monotonic() + _MAX_READ_TIME_S
        worked = False
        while self._read_page(is_busy):
            worked = True
            if not is_busy or time.monotonic() >= end:
                break
        return worked

    def _has_memory(self, owner: str, is_busy: bool) -> bool:
        """Whether requests of an owner may be read.

        True if the device is idle, because all requests in memory may be waiting for requests that
        are not read yet.
        """
        limit, by_owner = self._context.settings.max_backlog_bytes, self._schedule.num_bytes_by_owner
        if not is_busy or self._schedule.num_bytes + self._sampling.num_bytes < limit:
            return True
        num_owners = len({owner, *(other for other, num_bytes in by_owner.items() if num_bytes)})
        return by_owner[owner] < (limit - self._sampling.num_bytes) // num_owners

    def _read_page(self, is_busy: bool) -> bool:
        """Read a page of requests. Returns True if there were any.

        Large passes are queued without their bodies, so that the backlog of one client does not
        fill the memory and keep the requests of other clients from being read.
        """
        is_full = self._schedule.num_bytes >= self._context.settings.max_backlog_bytes // 2
        max_body_bytes = 0 if is_full else _DEFERRED_BODY_BYTES

        # Owners that are behind come first.
        for owner in list(self._behind):
            if self._has_memory(owner, is_busy) and self._catch_up(owner, max_body_bytes):
                return True

        # Read the next page of all owners.
        position = self.position

        def read_next(tx: Session) -> tuple[int, list[futures.PendingRequest]]:
            last = futures.get_last_position(tx)  # before the page, so that no new request is skipped
            return last, futures.list_pending(tx, position, _PAGE_REQUESTS, max_body_bytes, engine=self._engine)

        last, page = self._context.store.read(read_next)

        # Add the requests of the page. An owner without memory falls behind.
        for pending in page:
            self.position = pending.position
            if pending.model_id is None:
                self._add(pending)
            elif pending.owner in self._behind:
                continue
            elif self._has_memory(pending.owner, is_busy):
                self._add(pending)
            else:
                self._behind[pending.owner] = pending.position - 1
        if len(page) < _PAGE_REQUESTS:  # requests between the page and `last` were cancelled before they were read
            self.position = max(self.position, last)
        return bool(page)

    def _catch_up(self, owner: str, max_body_bytes: int) -> bool:
        """Read a page of requests of an owner that is behind. Returns True if there were any."""
        after, up_to = self._behind[owner], self.position
        page = self._context.store.read(
            lambda tx: futures.list_pending_by_owner(
                tx, owner, after, up_to, _PAGE_REQUESTS, max_body_bytes, engine=self._engine
            )
        )
        for pending in page:
            self._behind[owner] = pending.position
            self._add(pending)
        if len(page) < _PAGE_REQUESTS:
            del self._behind[owner]
        return bool(page)

    def _add(self, pending: futures.PendingRequest) -> None:
        queued = QueuedRequest.from_row(pending)
        if queued.model_id is None or isinstance(queued.request, Sample):
            self._sampling.add(queued)
            return
        if queued.model_id not in self._schedule:
            self._context.request_log.wait_for_commits()  # the cursor depends on committed results
            self._schedule.add_model(queued.model_id, read_sequence_cursor(self._context.store, queued.model_id))
        self._schedule.add(queued)

    def read_bodies(self, requests: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """Return the same requests with their bodies, which `_read_page` did not read."""
        request_ids = [queued.request_id for queued in requests]
        rows = self._context.store.read(lambda tx: futures.list_by_id(tx, request_ids))
        row_by_id = {row.request_id: row for row in rows}
        return [QueuedRequest.from_row(row_by_id[request_id]) for request_id in request_ids]


def read_sequence_cursor(store: Store, model_id: ModelId) -> SequenceCursor:
    """Return the position of a model in its sequence, from the requests that have results."""
    last = store.read(lambda tx: futures.get_last_answered_seq(tx, model_id))
    barrier = store.read(lambda tx: futures.get_last_answered_seq(tx, model_id, codec.BARRIER_KINDS))
    return SequenceCursor(last + 1, barrier)
