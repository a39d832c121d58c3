"""Run sample requests on the backend, one decode slice at a time."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future

from sqlmodel import Session

from skyrl_tx.contract.batches import PreparedSampleBatch
from skyrl_tx.contract.errors import ServerError, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId, SessionId
from skyrl_tx.contract.requests import Rejected, Sample
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.engine import prepare, request_checks
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.context import FATAL_ERRORS, EngineContext
from skyrl_tx.engine.device_cache import SlotsBusy
from skyrl_tx.engine.request_log import QueuedRequest, WriteRows
from skyrl_tx.engine.sample_queue import OwnerKey, SampleQueue, get_owner_key, get_sample
from skyrl_tx.engine.sample_requests import Constraints, RunningRequest, SampleAssembler
from skyrl_tx.process.failpoints import failpoint
from skyrl_tx.store import completions, recorded_logprobs, sampling_sessions
from skyrl_tx.store.engine_state import REQUEST_BYTES

_log = logging.getLogger(__name__)
_SLOTS_PER_QUEUED = 8
"""The backend may hold one waiting sample for this many KV cache slots.

So a free slot is filled at once.
"""


class SamplingExecutor:
    """The waiting and running sample requests of this engine."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._queue = SampleQueue(context.admission)
        self._constraints = Constraints(context.backend, context.capabilities, context.store)
        self._running: dict[RequestId, RunningRequest] = {}
        self._isolated: set[RequestId] = set()  # requests of a failed decode slice: each runs alone
        self._num_running_tokens = 0

        # With KV cache slots: limits for samples in the backend, and for samples that one turn of a
        # request starts.
        slots = context.capabilities.sample_slots
        self._max_open = slots + -(-slots // _SLOTS_PER_QUEUED) if slots else sys.maxsize
        self._max_per_turn = 1 if slots else sys.maxsize

        self._last_cancellation = 0
        self._clock_s, self._num_live = 0.0, 0  # device seconds per sample that always runs, and samples in the backend
        self.newest = 0
        """Position of the newest request that was added."""
        self.num_bytes = 0
        """Memory of the waiting requests."""
        self.num_open_bytes_by_owner: Counter[str] = Counter()
        """Estimated memory of each owner's requests without a result. Used for back-pressure."""

    def add(self, queued: QueuedRequest) -> None:
        """Add a request. An invalid request fails at once."""
        try:
            queued.check_crashes(self._context.settings.max_attempts)
            if isinstance(queued.request, Rejected):
                raise (ServerError if queued.is_damaged else UserError)(queued.request.message)
            if not isinstance(queued.request, Sample):
                raise UserError(f"{queued.kind}: model_id is missing")
            request_checks.check_sample(queued.request, self._context.capabilities)

            # The request must fit into the memory for samples: otherwise the API could never admit
            # it.
            size, limit = queued.num_bytes + REQUEST_BYTES, self._context.settings.max_queued_sample_bytes
            if size > limit:
                raise UserError(
                    f"prompt: the request takes {size} bytes, but all waiting samples together may take {limit}: "
                    "shorten the prompt"
                )
            if queued.request.params.stop_strings:
                self._context.backend.text_of([])  # raises if the backend has no tokenizer
        except Exception as error:
            self._context.fail(queued, error)
            return

        self._queue.add(queued)
        self.newest = max(self.newest, queued.position)
        self.num_bytes += queued.num_bytes
        self.num_open_bytes_by_owner[queued.owner] += queued.num_bytes + REQUEST_BYTES

    @property
    def num_waiting(self) -> int:
        """Number of requests with samples that have not started."""
        return len(self._queue)

    @property
    def num_paused(self) -> int:
        """Number of requests whose samples have not started because of a quota."""
        return sum(len(queue) for queue in self._queue.iterate_queues() if self._is_paused(queue[0]))

    @property
    def num_running(self) -> int:
        """Number of requests with at least one started sample."""
        return len(self._running)

    def find_movable(self, position: int) -> list[QueuedRequest]:
        """Return requests up to a position that another engine could start, oldest first.

        None of their samples has started, no quota pauses them, and their weights are on disk.
        """
        movable: list[QueuedRequest] = []
        for queue in self._queue.iterate_queues():
            if not self._is_paused(queue[0]):
                movable += [queued for queued in queue if queued.position <= position and self._is_movable(queued)]
        return sorted(movable, key=lambda queued: queued.position)

    def _is_movable(self, queued: QueuedRequest) -> bool:
        sampler = get_sample(queued).sampler
        if queued.attempts or queued.request_id in self._running or queued.request_id in self._isolated:
            return False
        return sampler is None or self._context.ephemeral_samplers.is_written(sampler)

    def list_sessions(self) -> set[SessionId]:
        """Return the sessions with waiting or running samples."""
        return {queued.session_id for queued in self._list_requests()}

    def end_session(self, session_id: SessionId, reason: str) -> None:
        """Fail all samples of a session."""
        request_ids = {queued.request_id for queued in self._list_requests() if queued.session_id == session_id}
        for queued in self.remove(request_ids):
            self._context.fail(queued, UserError(reason))

    def list_samplers_in_use(self) -> set[SamplerId]:
        """Return the samplers of all waiting and running requests."""
        return {sampler for queued in self._list_requests() if (sampler := get_sample(queued).sampler) is not None}

    def run_slice(self) -> bool:
        """Start samples if there is capacity, and decode one slice.

        Returns True if any sample was running.
        """
        self._remove_cancelled()
        self._admit()
        if not self._running:
            return False

        # Decode.
        clock, taken = self._context.device_clock, DeviceTime("slice")
        try:
            with clock.measure_call(taken):
                deltas = self._context.backend.step_sample()
            prepare.check_deltas(len(deltas), self._num_live)
        except FATAL_ERRORS:
            raise
        except Exception as error:
            self._on_slice_failure(error)
            return True

        # All samples in the backend have run for the same time.
        if self._num_live:
            self._clock_s += taken.device_s / self._num_live
        failpoint("sample.slice")

        self._process_deltas(deltas)
        return True

    def stop(self) -> None:
        """Drop running requests without a result.

        The next engine runs them, and no attempt is counted.
        """
        running_requests = list(self._running.values())
        for running in running_requests:
            self._drop(running)
        self._constraints.close()
        self._context.attempts.undo([running.queued.request_id for running in running_requests])

    def _list_requests(self) -> list[QueuedRequest]:
        """Return all requests. A request with started and waiting samples occurs twice."""
        return [*self._queue, *(running.queued for running in self._running.values())]

    def _remove_cancelled(self) -> None:
        """Drop cancelled requests. The API has stored their results."""
        if not self._running and not self._queue:
            return
        store, engine = self._context.store, self._context.store.engine_number
        cancelled = store.read(lambda tx: completions.list_cancelled(tx, self._last_cancellation, engine))
        if not cancelled:
            return
        self._last_cancellation = position = cancelled[-1][0]
        store.write_soon(lambda tx: completions.forget_cancellations(tx, position, engine=engine))
        for queued in self.remove({request_id for _, request_id in cancelled}):
            self._context.request_log.meters.count_cancelled(get_sample(queued).num_samples)

    def remove(self, request_ids: Collection[RequestId]) -> list[QueuedRequest]:
        """Drop requests, waiting or running, without a result. Returns the dropped ones.

        The tokens that running requests have drawn are counted.
        """
        stopped = [running for request_id, running in self._running.items() if request_id in request_ids]
        for running in stopped:
            self._drop(running)
            if (rows := self._count_drawn(running)) is not None:
                self._context.request_log.write_rows(rows)
        self._context.attempts.forget(request_ids)
        waiting = self._queue.remove(request_ids)
        self.num_bytes -= sum(queued.num_bytes for queued in waiting)
        self._isolated.difference_update(request_ids)
        removed = [running.queued for running in stopped] + waiting
        for queued in removed:
            self._forget(queued)
        return removed

    def _admit(self) -> None:
        """Start samples while there is capacity.

        With KV cache slots, each turn starts one sample of a queue. Without, it starts all samples
        of a request.
        """
        # Count the samples in the backend.
        started: list[QueuedRequest] = []
        first_samples: dict[RequestId, int] = {}  # for each request, the first sample that starts in this call
        num_open: Counter[OwnerKey] = Counter()
        num_open_of_kind: Counter[bool] = Counter()
        for running in self._running.values():
            num_open[get_owner_key(running.queued)] += running.num_open
            num_open_of_kind[get_owner_key(running.queued).decodes] += running.num_open

        def has_capacity(decodes: bool) -> bool:
            return num_open_of_kind[decodes] < self._max_open

        # Take turns until no request can start.
        self._queue.start_round()
        while True:
            turn = self._queue.choose_next(
                self._running, num_open=num_open, has_capacity=has_capacity, may_join=self._can_join
            )
            if turn is None:
                break
            queued = turn.queued
            if turn.failure is not None:
                self.remove({queued.request_id})
                self._context.fail(queued, UserError(turn.failure))
                continue
            # The first sample of a request needs its sampler on the device.
            running = self._running.get(queued.request_id)
            if running is None:
                if not self._is_constraint_ready(queued):
                    continue
                sampler = get_sample(queued).sampler
                if sampler is not None and not self._context.samplers.acquire(sampler, queued.session_id):
                    self._queue.block(queued)
                    continue
                running = self._start_request(queued)
                started.append(queued)
            # Start one sample, or all.
            first_samples.setdefault(queued.request_id, running.num_started)
            count = min(running.num_left, self._max_per_turn)
            running.num_started += count
            num_open[get_owner_key(queued)] += count
            num_open_of_kind[get_owner_key(queued).decodes] += count
            num_tokens = count * (running.num_tokens // running.assembler.request.num_samples)
            self._queue.end_turn(queued, has_more=running.num_left > 0, num_tokens=num_tokens)

        self._submit_samples(started, first_samples)

    def _is_paused(self, queued: QueuedRequest) -> bool:
        """Whether a request waits because of a quota. A running request never does."""
        return queued.request_id not in self._running and self._queue.is_paused(queued)

    def _can_join(self, queued: QueuedRequest) -> bool:
        """Whether a request may start while other requests are running."""
        if not self._running:
            return True
        if queued.request_id in self._isolated or not self._isolated.isdisjoint(self._running):
            return False
        capabilities = self._context.capabilities
        return capabilities.sample_slots > 0 or self._num_running_tokens < capabilities.max_sample_tokens

    def _is_constraint_ready(self, queued: QueuedRequest) -> bool:
        """Whether the constraint of a head is compiled. If not, block its queue, or fail the request."""
        try:
            if self._constraints.prepare(queued.request_id, queued.owner, get_sample(queued).params):
                return True
        except UserError as error:
            self.remove({queued.request_id})
            self._context.fail(queued, error)
        else:
            self._queue.block(queued)
        return False

    def _start_request(self, queued: QueuedRequest) -> RunningRequest:
        """Make the head of a queue a running request. None of its samples is in the backend yet."""
        self._queue.record_start(queued)
        cache_scope = "" if self._context.settings.share_prefix_cache else queued.owner
        request = prepare.make_sample_request(
            queued.request_id,
            get_sample(queued),
            self._context.capabilities,
            cache_scope,
            self._constraints.get(queued.request_id),
        )

        # Count its tokens and memory.
        if self._context.admission.is_counting_usage:
            num_tokens = request.prompt.size + request.num_samples * (request.params.max_tokens or 0)
            self._context.admission.record_start(queued, num_tokens)
        running = RunningRequest(queued, SampleAssembler(request, self._context.backend.text_of))
        self._running[queued.request_id] = running
        self.num_bytes -= queued.num_bytes
        self._num_running_tokens += running.num_tokens
        return running

    def _submit_samples(self, started: list[QueuedRequest], first_samples: Mapping[RequestId, int]) -> None:
        """Count the attempts of `started`, and submit the new samples to the backend."""
        if started:
            self._context.attempts.count([queued.request_id for queued in started])
        for request_id, first in first_samples.items():
            running = self._running[request_id]
            self._count_live(running, running.num_started - first)
            request = running.assembler.request
            part = prepare.slice_sample_request(request, first, running.num_started)

            try:
                if request.sampler is not None:
                    self._context.samplers.load(request.sampler)
                self._context.backend.begin_sample(PreparedSampleBatch(requests=(part,)))
            except FATAL_ERRORS:
                raise
            except SlotsBusy:  # the model of the sampler must be restored first, and all adapter slots are busy
                self._put_back([running])
            except Exception as error:
                self._finish(running, error)

    def _count_live(self, running: RunningRequest, num_new: int) -> None:
        """Count samples that start in the backend, or that end if the number is negative."""
        self._num_live += num_new
        running.clock_s -= num_new * self._clock_s

    def _on_slice_failure(self, error: Exception) -> None:
        """Run each request again alone, with its recorded seed, so that only one fails."""
        failed = list(self._running.values())
        if len(failed) == 1:
            self._finish(failed[0], error)
            return
        _log.warning("a decode slice of %d requests failed; running each request alone: %s", len(failed), error)
        self._put_back(failed)
        self._isolated.update(running.queued.request_id for running in failed)

    def _put_back(self, stopped: list[RunningRequest]) -> None:
        """Let running requests wait again, at the heads of their queues."""
        for running in stopped:
            self._drop(running)
        self._context.attempts.undo([running.queued.request_id for running in stopped])
        for running in reversed(stopped):
            self._queue.add_first(running.queued)
            self.num_bytes += running.queued.num_bytes

    def _process_deltas(self, deltas: Sequence[SampleDelta]) -> None:
        """Add the tokens of a decode slice to their requests, and finish complete requests."""
        streamed: list[completions.Partial] = []
        for delta in deltas:
            running = self._running.get(delta.request_id)
            if running is None:
                continue
            if delta.error is not None:
                self._context.backend.check_devices()  # if the device is lost, every sample would fail
                self._finish(running, ServerError(delta.error))
                continue

            try:
                if not running.first_token_at and delta.tokens.size:
                    running.first_token_at = time.time()
                is_stopped = running.assembler.add(delta)
                if is_stopped or delta.stop_reason is not None:
                    self._count_live(running, -1)
                if is_stopped:  # by a stop string: free its slot
                    self._context.backend.end_sample(delta.request_id, delta.index)
                elif running.queued.is_streamed and delta.tokens.size:  # after a stop string, the result has the tokens
                    streamed.append(running.take_partial(delta))
            except FATAL_ERRORS:
                raise
            except Exception as error:
                self._finish(running, error)

        if streamed:
            self._context.store.write_soon(lambda tx: completions.add_partials(tx, streamed)).add_done_callback(
                _log_failure
            )
        for running in [running for running in self._running.values() if not running.assembler.num_open]:
            self._finish(running)

    def _finish(self, running: RunningRequest, error: Exception | None = None) -> None:
        """Commit a request's output or its failure."""
        queued, request = running.queued, get_sample(running.queued)
        constraint = self._constraints.get(queued.request_id)
        self._drop(running)
        self._forget(queued)
        try:
            if error is not None:
                raise error
            if constraint is not None:
                constraint.raise_error()
            output = running.assembler.build_output()
        except Exception as failure:
            self._context.fail(queued, failure)
            return

        self._context.request_log.meters.observe_sample_latency(
            created_at=queued.created_at,
            first_token_at=running.first_token_at,
            num_steps=max(sequence.tokens.size for sequence in output.sequences),
        )
        recorded = zip(request.sequence_ids, output.sequences, strict=request.is_recorded)
        logprobs = {sequence_id: sequence.logprobs for sequence_id, sequence in recorded}

        drawn_rows = self._count_drawn(running)

        def rows(tx: Session) -> None:
            name, now = queued.sampling_session_id, time.time()
            if drawn_rows is not None:
                drawn_rows(tx, now)
            if name is not None:
                sampling_sessions.record_use(tx, name, now)
            if queued.is_streamed:
                completions.delete_partials(tx, queued.request_id)
            if request.is_recorded:
                recorded_logprobs.record(tx, queued.session_id, request.prompt.size, logprobs, now)

        observers, now = self._context.observers, time.time()
        origin = observers.find_origin(queued.sampling_session_id, request.sampler)
        observed = observers.collect_rows(
            lambda observer: observer.observe_sample(queued, request, output, origin, now, running.clock_s)
        )
        self._context.request_log.commit(queued, output, rows, observed=observed)

    def _count_drawn(self, running: RunningRequest) -> WriteRows | None:
        """Count the tokens of a request that ends, and return the rows about them."""
        queued, drawn = running.queued, running.assembler.count_tokens()
        self._context.request_log.meters.count_drawn(queued.owner, drawn)
        if self._context.admission.is_counting_usage:
            self._context.admission.record_drawn(queued, drawn)
        observers = self._context.observers
        origin = observers.find_origin(queued.sampling_session_id, get_sample(queued).sampler)
        return observers.collect_rows(lambda observer: observer.observe_drawn(queued, drawn, origin, running.clock_s))

    def _forget(self, queued: QueuedRequest) -> None:
        """Free the constraint of a request and stop counting its memory, because it has a result."""
        self._constraints.forget(queued.request_id)
        self.num_open_bytes_by_owner[queued.owner] -= queued.num_bytes + REQUEST_BYTES
        if not self.num_open_bytes_by_owner[queued.owner]:
            del self.num_open_bytes_by_owner[queued.owner]

    def _drop(self, running: RunningRequest) -> None:
        """Remove a running request from the backend and from its queue, and release its sampler."""
        request = running.assembler.request
        self._count_live(running, -running.num_open)
        del self._running[request.request_id]
        self._isolated.discard(request.request_id)
        if running.num_left:
            self._queue.remove({request.request_id})
        self._num_running_tokens -= running.num_tokens
        self._context.backend.cancel_sample([request.request_id])  # no effect on samples that have ended
        if request.sampler is not None:
            self._context.samplers.release(request.sampler)


def _log_failure(written: Future[None]) -> None:
    if (error := written.exception()) is not None:  # no harm: the result has these tokens too
        _log.warning("cannot write new tokens of streamed samples: %s", error)
