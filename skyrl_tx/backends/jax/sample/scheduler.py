"""Continuous batching on the host: admit, prefill, insert, decode a slice, retire.

A step computes some prefill chunks, then decodes one slice; requests join and leave in between. Programs depend on
shapes alone, and the numbers of a sample on its own request alone: a slice has a row count at which rows have the same
bits as at any other.

On accelerators a slice is dispatched before the tokens of the last one are read, as long as no prompt waits: a prompt
needs to know which samples have ended. Otherwise the last slice is read first.

A sample takes pages of the cache for the next slice when it needs them. If there are none, cached prefixes are evicted,
then the sample with the fewest tokens is preempted and recomputed later. Prompts begin in order of arrival, when there
are pages for them and for some slices of all running samples.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.exhaustion import check_alone
from skyrl_tx.backends.jax.sample.cache import KVCache
from skyrl_tx.backends.jax.sample.jax_programs import JaxPrograms
from skyrl_tx.backends.jax.sample.pages import KVTable
from skyrl_tx.backends.jax.sample.prefill import Prefill, Prefiller
from skyrl_tx.backends.jax.sample.running import RunningSample, SampleKey, max_kv_length, max_tokens
from skyrl_tx.backends.jax.sample.slices import DispatchedSlice
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import BackendLost, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.results import PromptResult, SampleDelta

log = logging.getLogger(__name__)

SPARE_SLICES = 4
"""Slices of all running samples for which there must be pages before another sample begins.

With fewer, samples would be preempted soon after their start."""


@dataclass(slots=True)
class PrefillQueue:
    """Preempted samples, then new requests, each in order of arrival; at most one prompt is partly computed."""

    preempted: dict[SampleKey, Prefill] = field(default_factory=dict[SampleKey, Prefill])
    new: dict[RequestId, Prefill] = field(default_factory=dict[RequestId, Prefill])
    current: Prefill | None = None
    """The prompt that is partly computed."""

    def waiting(self) -> Iterator[Prefill]:
        """Yield the prompts of which nothing is computed, in order."""
        yield from self.preempted.values()
        yield from self.new.values()

    def add(self, request: SampleRequest) -> None:
        """Append a request. A later part of a waiting request joins the earlier part, so that both share a prompt."""
        before = self.new.get(request.request_id)
        self.new[request.request_id] = Prefill(request=request if before is None else _joined(before.request, request))

    def preempt(self, sample: RunningSample) -> None:
        """Append a preempted sample."""
        sample.preempt()
        self.preempted[sample.key] = Prefill.of_preempted(sample)

    def put_back(self) -> Prefill:
        """Let the prompt that is partly computed wait again, before all others, and return what was computed."""
        current = self.take_current()
        again, request = current.again(), current.request
        if again.preempted is not None:
            self.preempted = {(request.request_id, request.first_index): again, **self.preempted}
        else:
            later = self.new.pop(request.request_id, None)
            if later is not None:
                again.request = _joined(request, later.request)
            self.new = {request.request_id: again, **self.new}
        return current

    def remove(self, waiting: Prefill) -> None:
        """Remove a waiting prompt."""
        if waiting.preempted is None:
            del self.new[waiting.request.request_id]
        else:
            del self.preempted[waiting.request.request_id, waiting.request.first_index]

    def take_current(self) -> Prefill:
        """Remove and return the prompt that is partly computed."""
        assert self.current is not None
        current, self.current = self.current, None
        return current

    def cancel(self, request_id: RequestId) -> list[Prefill]:
        """Remove a request with all its samples, and return what was partly computed. It may be unknown."""
        self.new.pop(request_id, None)
        for key in [key for key in self.preempted if key[0] == request_id]:
            del self.preempted[key]
        is_current = self.current is not None and self.current.request.request_id == request_id
        return [self.take_current()] if is_current else []

    def cancel_sample(self, request_id: RequestId, index: int) -> list[Prefill]:
        """Remove a preempted sample, and return what was partly computed. It may be unknown."""
        self.preempted.pop((request_id, index), None)
        sample = None if self.current is None else self.current.preempted
        is_current = sample is not None and (sample.request.request_id, sample.index) == (request_id, index)
        return [self.take_current()] if is_current else []


class SampleScheduler:
    """Schedules all samples of the backend over the pages of the cache."""

    def __init__(
        self, programs: JaxPrograms, config: JaxConfig, memory: SampleMemory, eos_token_ids: Collection[int]
    ) -> None:
        self._programs = programs
        assert config.prefill_tokens is not None
        self._prefill_tokens = config.prefill_tokens
        self._memory = memory
        self._slice = config.decode_slice_tokens
        self._eos = frozenset(eos_token_ids)
        shapes = PrefillShapes.of(config, memory.max_length)
        self._cache = KVCache(programs, memory, shapes)
        self._prefiller = Prefiller(programs, shapes, self._cache)
        self._blocked: PrefillQueue | None = None  # its next prompt did not fit, in this or the last step
        self._score_queue = PrefillQueue()  # requests for one token: they are done after their prefill
        self._sample_queue = PrefillQueue()
        self._prefilled: deque[Prefill] = deque()
        self._running: dict[SampleKey, RunningSample] = {}
        self._dispatched: DispatchedSlice | None = None  # a slice that is not read

    def load(self, sampler: SamplerId, adapter: Any) -> None:
        """Copy an adapter of any padded rank to the device. Does nothing when it is loaded. Raises CapacityError."""
        self._programs.pool.load(sampler, adapter)

    def drop(self, sampler: SamplerId) -> None:
        """Free an adapter's slot. Idempotent."""
        assert not any(request.sampler == sampler for request in self._requests()), f"{sampler} is in use"
        self._cache.prefixes.drop(sampler)
        self._programs.pool.drop(sampler)

    def begin(self, batch: PreparedSampleBatch) -> None:
        """Queue requests. Raises UserError, and queues none, when one can never fit."""
        for request in batch.requests:
            if max_kv_length(request) > self._memory.max_length:
                raise UserError(
                    f"prompt of {request.prompt.size} tokens and max_tokens {max_tokens(request)} make "
                    f"{max_kv_length(request)}, more than the {self._memory.max_length} that one sample may have here"
                )
        for request in batch.requests:
            queue = self._score_queue if max_tokens(request) == 1 else self._sample_queue
            queue.add(request)

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Remove requests in any state. Unknown ids are ignored."""
        gone = frozenset(request_ids)
        for request_id in sorted(gone):  # the order of a set differs between hosts
            for queue in self._queues():
                for prompt in queue.cancel(request_id):
                    self._prefiller.drop(prompt)
        for prompt in self._prefilled:
            if prompt.request.request_id in gone:
                prompt.samples.clear()
        self._drop_inserted()
        for key in [key for key in self._running if key[0] in gone]:
            self._remove(key)

    def end(self, request_id: RequestId, index: int) -> None:
        """Remove one sample, running or waiting. An unknown sample is ignored."""
        for prompt in self._prefilled:
            if prompt.request.request_id == request_id:
                prompt.samples = deque(sample for sample in prompt.samples if sample.index != index)
        self._drop_inserted()
        for prompt in self._sample_queue.cancel_sample(request_id, index):
            self._prefiller.drop(prompt)
        if (request_id, index) in self._running:
            self._remove((request_id, index))

    def step(self) -> list[SampleDelta]:
        """Compute prefill chunks within a budget, then decode one slice. Returns no delta when nothing is left to do.

        If nothing was running, the step ends when the first prompts are computed: requests that arrive during their
        prefill join their first slice, which takes as long for one sample as for all. A delta without tokens reports a
        step in which no prompt was completed and nothing was decoded.

        Raises BackendLost when a failure destroyed the KV cache.
        """
        was_idle, deltas = not self._running, list[SampleDelta]()
        if not self._may_run_ahead():
            deltas += self._read()
        deltas += self._admit()
        if not (was_idle and deltas):
            deltas += self._decode()
        partial = [queue.current for queue in self._queues() if queue.current is not None]
        if not deltas and partial:
            return [_empty_delta(partial[0].request, index=partial[0].request.first_index)]
        if not deltas and self._running:
            sample = next(iter(self._running.values()))
            return [_empty_delta(sample.request, index=sample.index)]
        return deltas

    def _may_run_ahead(self) -> bool:
        """Return whether the next slice needs nothing that only the tokens of the last one tell."""
        if any(queue.current or any(queue.waiting()) for queue in self._queues()) or self._prefilled:
            return False
        most = len(self._running) * (self._slice // self._memory.page + 2)
        return self._cache.pages.num_free >= most or self._cache.fits(self._num_missing(self._wanted()))

    def _queues(self) -> tuple[PrefillQueue, PrefillQueue]:
        return self._score_queue, self._sample_queue

    def _requests(self) -> Iterator[SampleRequest]:
        """Yield all requests that have not ended."""
        for queue in self._queues():
            yield from (waiting.request for waiting in queue.waiting())
            if queue.current is not None:
                yield queue.current.request
        for prompt in self._prefilled:
            yield prompt.request
        for sample in self._running.values():
            yield sample.request

    def _admit(self) -> list[SampleDelta]:
        """Compute prompts in order of arrival, within a token budget that limits how long running samples wait.

        A prompt that takes several steps leaves half of the budget to later prompts that fit into the rest.
        """
        deltas: list[SampleDelta] = []
        self._take_pages_for_next_slice()
        self._insert()
        first, self._blocked = self._blocked, None
        for queue in sorted(self._queues(), key=lambda queue: queue is not first):
            budget = self._prefill_tokens
            if queue.current is not None:
                share = budget // 2 if queue.new or queue.preempted else budget
                budget -= self._compute(queue.take_current(), share, queue, deltas)
            while budget > 0 and (waiting := self._next(queue, budget)) is not None:
                queue.remove(waiting)
                budget -= self._compute(waiting, budget, queue, deltas)
        return deltas

    def _next(self, queue: PrefillQueue, budget: int) -> Prefill | None:
        """Return the next prompt to compute: the oldest, or the oldest short one while another is partly computed."""
        for waiting in queue.waiting():
            if queue.current is not None and waiting.request.prompt.size > budget:
                continue
            if queue is self._sample_queue and (self._prefilled or len(self._running) == self._memory.num_slots):
                return None
            return waiting if self._fits(queue, waiting) else None
        return None

    def _fits(self, queue: PrefillQueue, waiting: Prefill) -> bool:
        """Return whether a prompt and its first sample fit. If not, its queue is first in the next step.

        Until then it blocks the other queue, so that neither waits permanently.
        """
        length = waiting.kv_length(self._slice)
        if self._blocked is None and not self._prefiller.fits(waiting, length, spare=self._pages_soon()):
            self._blocked = queue
        return self._blocked is None

    def _pages_soon(self) -> int:
        """Return how many pages the running samples take within some slices."""
        return self._num_missing(self._wanted(SPARE_SLICES))

    def _wanted(self, num_slices: int = 1) -> list[tuple[KVTable, int]]:
        """Return the tables of running samples that lack pages for their next slices, with the positions for these."""
        num_steps, page = num_slices * self._slice, self._memory.page
        return [
            (sample.table, min(position, sample.end))
            for sample in self._running.values()
            if (position := sample.position + num_steps) > (size := len(sample.table.pages) * page)
            and sample.end > size
        ]

    def _num_missing(self, wanted: Iterable[tuple[KVTable, int]]) -> int:
        return sum(self._cache.missing(*each) for each in wanted)

    def _take_pages_for_next_slice(self) -> None:
        """Take the pages of running samples, of which the one with the fewest tokens is preempted until they fit."""
        while True:
            wanted = self._wanted()
            if self._cache.fits(self._num_missing(wanted)):
                return self._cache.grow(wanted)
            self._preempt()

    def _preempt(self, keep: Prefill | None = None) -> None:
        """Let what has the fewest tokens wait and free what it has of the cache: a partly computed prompt first.

        The last running sample, or the prompt `keep`, goes on when all others have been preempted.
        """
        samples, others = self._running.values(), [each for each in self._prefilled if each is not keep]
        if self._sample_queue.current is not None:
            self._prefiller.drop(self._sample_queue.put_back())
        elif len(samples) > 1:
            sample = min(samples, key=lambda sample: sample.num_drawn)
            self._remove(sample.key)
            self._sample_queue.preempt(sample)
        elif others:
            for sample in others[-1].samples:
                self._sample_queue.preempt(sample)
            others[-1].samples.clear()
            self._drop_inserted()
        else:
            self._prefiller.drop(self._score_queue.put_back())

    def _remove(self, key: SampleKey) -> None:
        """Remove a running sample and free what it has of the cache."""
        self._cache.release(self._running.pop(key).table)

    def _compute(self, prefill: Prefill, budget: int, queue: PrefillQueue, deltas: list[SampleDelta]) -> int:
        """Compute at least a chunk of a prompt, up to the budget, and return the number of tokens computed.

        A failure ends this request alone: other requests use none of the changed state.
        """
        num_tokens = 0
        request = prefill.request
        try:
            if prefill.table is None:
                self._prefiller.begin(prefill)
            while not prefill.is_done and num_tokens < budget:
                num_tokens += self._prefiller.advance(prefill)
            if not prefill.is_done:
                queue.current = prefill
            elif prefill.preempted is not None:
                prefill.samples.append(prefill.preempted)
            else:
                deltas += self._draw_first(prefill)
            if prefill.is_done:
                self._prefilled.append(prefill)
        except BackendLost:
            raise
        except Exception as failure:
            check_alone(failure)
            log.exception("prefill of request %s failed", request.request_id)
            error = f"the prompt could not be computed; the server's log has it under request {request.request_id}"
            deltas.append(_empty_delta(request, error=error))
            self._prefiller.drop(prefill)
        self._drop_inserted()
        self._insert()
        return num_tokens

    def _draw_first(self, prefill: Prefill) -> list[SampleDelta]:
        """Draw the first token of every sample; samples that have not ended wait until they can run."""
        request, adapter = prefill.request, self._programs.pool.slot_of(prefill.request.sampler)
        prompt_result = prefill.scores.result() if prefill.scores else None
        if prefill.num_cached:
            prompt_result = PromptResult(cache_hit_tokens=prefill.num_cached)
        stops = frozenset(request.params.stop_token_ids) | (self._eos if request.params.eos_stops else frozenset())
        samples = [
            RunningSample(request=request, index=index, adapter=adapter, stops=stops)
            for index in range(request.first_index, request.first_index + request.num_samples)
        ]
        deltas: list[SampleDelta] = []
        drawn = self._programs.draw_first(prefill.last_hidden, samples)
        for row, sample in enumerate(samples):
            deltas.append(sample.take_first(drawn.row(row, 1), prompt_result if sample.index == 0 else None))
        prefill.samples.extend(sample for sample in samples if sample.stop_reason is None)
        prefill.scores = None  # which may be large, and the samples may wait
        return deltas

    def _insert(self) -> None:
        """Let as many samples of computed prompts run as there are rows and pages."""
        while self._prefilled and (num_rows := self._memory.num_slots - len(self._running)):
            prompt = self._prefilled[0]
            size, needed = prompt.request.prompt.size, self._pages_soon()
            lengths: list[int] = []
            for sample in islice(prompt.samples, num_rows):
                length = sample.length_after(self._slice)
                needed += self._memory.pages_for(length) - size // self._memory.page
                if not self._cache.fits(needed, len(lengths) + 1):
                    break
                lengths.append(length)
            if not lengths and self._running:
                return
            if not lengths:
                self._preempt(keep=prompt)
                continue
            assert prompt.table is not None
            for table in self._cache.fork(prompt.table, size, lengths):
                sample = prompt.samples.popleft()
                sample.table = table
                self._running[sample.key] = sample
            self._drop_inserted()

    def _drop_inserted(self) -> None:
        """Free what computed prompts have whose samples all run."""
        for prompt in self._prefilled:
            if not prompt.samples:
                self._prefiller.drop(prompt)
        self._prefilled = deque(prompt for prompt in self._prefilled if prompt.samples)

    def _decode(self) -> list[SampleDelta]:
        """Dispatch a slice of the running samples, and read the one before it; without running ahead, the same one."""
        before, self._dispatched = self._dispatched, None
        samples = [sample for sample in self._running.values() if sample.position < sample.end]
        if samples:
            num_steps = min(self._slice, max(sample.end - sample.position for sample in samples))
            after = self._programs.dispatch(samples, num_steps)
            for sample in samples:
                sample.position = sample.length_after(num_steps)
            self._dispatched = after
        deltas = [] if before is None else self._deltas(before)
        return deltas if self._programs.runs_ahead else deltas + self._read()

    def _read(self) -> list[SampleDelta]:
        """Read the slice that is not read, if there is one."""
        dispatched, self._dispatched = self._dispatched, None
        return [] if dispatched is None else self._deltas(dispatched)

    def _deltas(self, dispatched: DispatchedSlice) -> list[SampleDelta]:
        """Wait for a slice, and remove the samples that have ended."""
        deltas: list[SampleDelta] = []
        for sample, start, tokens, logprobs, is_stopped, topk in dispatched.read():
            if self._running.get(sample.key) is not sample:
                continue  # it has ended, or was cancelled
            delta = sample.take_slice(start, tokens, logprobs, is_stopped, topk)
            if delta is not None:
                deltas.append(delta)
                if delta.stop_reason is not None:
                    self._remove(sample.key)
        return deltas

    def meters(self) -> Meters:
        """Return the use of the KV cache and of the prefix cache."""
        return Meters(
            decode_slots=self._memory.num_slots,
            decode_slots_used=len(self._running),
            kv_cache_tokens=self._cache.num_tokens,
            kv_cache_tokens_used=self._cache.num_tokens_used,
            prefix_cache_tokens=self._cache.prefixes.num_tokens,
        )

    def compile_all(self, sampler: SamplerId) -> None:
        """Run every sampling program once, so that none is compiled later.

        `sampler` must be loaded, and nothing may be running.
        """
        assert not any(self._requests())
        self._programs.compile_all(sampler)


def _joined(earlier: SampleRequest, later: SampleRequest) -> SampleRequest:
    """Return two neighbouring parts of a request as one."""
    assert later.first_index == earlier.first_index + earlier.num_samples
    return replace(earlier, num_samples=earlier.num_samples + later.num_samples)


def _empty_delta(request: SampleRequest, *, index: int = 0, error: str | None = None) -> SampleDelta:
    return SampleDelta(
        request_id=request.request_id,
        index=index,
        tokens=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        error=error,
    )
