"""Continuous batching on the host: admit, prefill, insert, decode a slice, retire.

A step computes some prefill chunks, then decodes one slice; requests join and leave in between. Programs depend on
shapes alone, and the numbers of a sample on its own request alone: a slice has a row count at which rows have the same
bits as at any other.

A sample that needs a longer KV cache slot than there is waits until the running samples fit into fewer and longer
slots, or until the starvation bound is reached; then running samples are preempted and recomputed later.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.jax_programs import JaxPrograms
from skyrl_tx.backends.jax.sample.kv_slots import KVCache
from skyrl_tx.backends.jax.sample.prefill import Prefill, Prefiller
from skyrl_tx.backends.jax.sample.running import RunningSample, max_kv_length, max_tokens
from skyrl_tx.backends.jax.shapes import KVLayout, PrefillShapes, SampleMemory
from skyrl_tx.contract.batches import STARVATION_BOUND, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.results import PromptResult, SampleDelta

log = logging.getLogger(__name__)

FIT_SLICES = 4
"""Slices that all running samples must fit into shorter slots before these are allocated."""


@dataclass(slots=True)
class PrefillQueue:
    """Preempted samples, then new requests, each in order of arrival; at most one prompt is partly computed."""

    preempted: dict[tuple[RequestId, int], Prefill] = field(default_factory=dict[tuple[RequestId, int], Prefill])
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
        if before is not None:
            earlier = before.request
            assert request.first_index == earlier.first_index + earlier.num_samples
            request = replace(earlier, num_samples=earlier.num_samples + request.num_samples)
        self.new[request.request_id] = Prefill(request=request)

    def preempt(self, sample: RunningSample) -> None:
        """Append a preempted sample."""
        sample.preempt()
        self.preempted[sample.request.request_id, sample.index] = Prefill.of_preempted(sample)

    def remove(self, waiting: Prefill) -> None:
        """Remove a waiting prompt."""
        if waiting.preempted is None:
            del self.new[waiting.request.request_id]
        else:
            del self.preempted[waiting.request.request_id, waiting.request.first_index]

    def take_current(self) -> Prefill:
        """Remove and return the prompt that is partly computed. Its buffer lives for as long as the caller has it."""
        assert self.current is not None
        current, self.current = self.current, None
        return current

    def cancel(self, request_id: RequestId) -> None:
        """Remove a request with all its samples. Does nothing when the request is unknown."""
        self.new.pop(request_id, None)
        for key in [key for key in self.preempted if key[0] == request_id]:
            del self.preempted[key]
        if self.current is not None and self.current.request.request_id == request_id:
            self.current = None

    def cancel_sample(self, request_id: RequestId, index: int) -> None:
        """Remove a preempted sample. Does nothing when the sample is unknown."""
        self.preempted.pop((request_id, index), None)
        sample = None if self.current is None else self.current.preempted
        if sample is not None and (sample.request.request_id, sample.index) == (request_id, index):
            self.current = None


class SampleScheduler:
    """Schedules all samples of the backend over the KV cache slots."""

    def __init__(
        self, programs: JaxPrograms, config: JaxConfig, memory: SampleMemory, eos_token_ids: Collection[int]
    ) -> None:
        self._programs = programs
        self._config = config
        self._memory = memory
        self._slice = config.decode_slice_tokens
        self._eos = frozenset(eos_token_ids)
        self._prefiller = Prefiller(programs, PrefillShapes.of(config, memory.max_length), memory)
        self._cache = KVCache(programs, memory.layout_for(1))
        self._num_passed = 0  # samples that got a slot before one that waits for longer slots
        self._blocked: PrefillQueue | None = None  # its next prompt's buffer did not fit, in this or the last step
        self._score_queue = PrefillQueue()  # requests for one token: they need no slot and do not wait for one
        self._sample_queue = PrefillQueue()
        self._prefilled: deque[Prefill] = deque()

    def load(self, sampler: SamplerId, adapter: Any) -> None:
        """Copy an adapter of any padded rank to the device. Does nothing when it is loaded. Raises CapacityError."""
        self._programs.pool.load(sampler, adapter)

    def drop(self, sampler: SamplerId) -> None:
        """Free an adapter's slot. Idempotent."""
        assert not any(request.sampler == sampler for request in self._requests()), f"{sampler} is in use"
        self._prefiller.prefixes.drop(sampler)
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
            self._score_queue.cancel(request_id)
            self._sample_queue.cancel(request_id)
        self._prefilled = deque(prompt for prompt in self._prefilled if prompt.request.request_id not in gone)
        for slot, sample in self._cache.slots.live.items():
            if sample.request.request_id in gone:
                self._cache.slots.release(slot)

    def end(self, request_id: RequestId, index: int) -> None:
        """Remove one sample, running or waiting for a slot. An unknown sample is ignored."""
        for prompt in self._prefilled:
            if prompt.request.request_id == request_id:
                prompt.samples = deque(sample for sample in prompt.samples if sample.index != index)
        self._prefilled = deque(prompt for prompt in self._prefilled if prompt.samples)
        self._sample_queue.cancel_sample(request_id, index)
        for slot, sample in self._cache.slots.live.items():
            if (sample.request.request_id, sample.index) == (request_id, index):
                self._cache.slots.release(slot)

    def step(self) -> list[SampleDelta]:
        """Compute prefill chunks within a budget, then decode one slice. Returns no delta when nothing is left to do.

        If nothing was running, the step ends when the first prompts are computed: requests that arrive during their
        prefill join their first slice, which takes as long for one sample as for all. A delta without tokens reports a
        step in which no prompt was completed and nothing was decoded.

        Raises BackendLost when a failure destroyed the KV cache.
        """
        was_idle = not self._cache.slots.live
        deltas = self._admit()
        if not (was_idle and deltas):
            deltas += self._decode()
        partial = [queue.current for queue in self._queues() if queue.current is not None]
        if not deltas and partial:
            return [_empty_delta(partial[0].request, index=partial[0].request.first_index)]
        return deltas

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
        for sample in self._cache.slots.live.values():
            yield sample.request

    def _admit(self) -> list[SampleDelta]:
        """Compute prompts in order of arrival, within a token budget that limits how long running samples wait.

        A prompt that takes several steps leaves half of the budget to later prompts that fit into the rest.
        """
        deltas: list[SampleDelta] = []
        self._make_space_for_next_slice()
        self._fill_slots()
        first, self._blocked = self._blocked, None
        for queue in sorted(self._queues(), key=lambda queue: queue is not first):
            budget = self._config.prefill_tokens
            if queue.current is not None:
                share = budget // 2 if queue.new or queue.preempted else budget
                budget -= self._compute(queue.take_current(), share, queue, deltas)
            while budget > 0 and (waiting := self._next(queue, budget)) is not None:
                queue.remove(waiting)
                budget -= self._compute(waiting, budget, queue, deltas)
        return deltas

    def _next(self, queue: PrefillQueue, budget: int) -> Prefill | None:
        """Return the next prompt to compute: the oldest, or the oldest short one while another is partly computed.

        Prompts that fit into the present slots pass one that needs longer slots, up to the starvation bound.
        """
        is_passing = False
        for waiting in queue.waiting():
            if queue.current is not None and waiting.request.prompt.size > budget:
                continue
            if queue is self._score_queue:
                return waiting if self._buffer_fits(queue, waiting) else None
            if self._prefilled:
                return None
            needed = waiting.kv_length(self._slice)
            self._choose_layout(needed)
            if needed <= self._cache.layout.length:
                if not self._cache.slots.free or not self._buffer_fits(queue, waiting):
                    return None
                self._num_passed += waiting.request.num_samples if is_passing else 0
                return waiting
            if self._num_passed >= STARVATION_BOUND:
                return None
            is_passing = True
        return None

    def _buffer_fits(self, queue: PrefillQueue, waiting: Prefill) -> bool:
        """Return whether a prompt's buffer fits. If not, its queue is first in the next step and blocks the other."""
        num_tokens = waiting.request.prompt.size
        if self._blocked is None and not self._prefiller.fits(num_tokens, in_use=self._prompt_tokens()):
            self._blocked = queue
        return self._blocked is None

    def _prompt_tokens(self) -> int:
        """Return what prompts in use count as: partly computed, or with samples that wait for slots."""
        partial = [queue.current for queue in self._queues() if queue.current is not None]
        return sum(map(self._prefiller.in_use, (*partial, *self._prefilled)))

    def _choose_layout(self, needed: int) -> None:
        """Reallocate the KV cache for one more sample of that KV length, if that is possible now."""
        cache, live = self._cache, self._cache.slots.live
        wanted = self._memory.layout_for(needed)
        if wanted.length > cache.layout.length:
            if len(live) < wanted.num_slots or self._num_passed >= STARVATION_BOUND:
                longest_first = sorted(live, key=lambda slot: live[slot].num_drawn, reverse=True)
                self._reallocate(wanted, longest_first[: wanted.num_slots - 1])
        elif not live or not cache.slots.free:  # prefer more slots, unless they would soon be too short
            partial = self._sample_queue.current
            lengths = [needed, *(sample.kv_length(FIT_SLICES * self._slice) for sample in live.values())]
            if partial is not None:
                lengths.append(partial.kv_length(self._slice))
            wanted = self._memory.layout_for(max(lengths))
            if wanted.length < cache.layout.length:
                self._reallocate(wanted, live)

    def _make_space_for_next_slice(self) -> None:
        """Reallocate the cache for samples whose next slice exceeds their slot, or preempt them."""
        cache, live = self._cache, self._cache.slots.live
        full = [slot for slot, sample in live.items() if sample.kv_length(self._slice) > cache.layout.length]
        if not full:
            return
        others = [slot for slot in live if slot not in full]
        wanted = self._memory.layout_for(max(live[slot].kv_length(self._slice) for slot in full))
        if self._num_passed >= STARVATION_BOUND:
            self._reallocate(wanted, [*full, *others][: wanted.num_slots])
        elif len(others) < wanted.num_slots:
            self._reallocate(wanted, [*others, *full][: wanted.num_slots])
        else:
            for slot in full:
                self._preempt(slot)

    def _reallocate(self, layout: KVLayout, keep: Collection[int]) -> None:
        """Change the cache's layout and preempt the samples of all slots that are not in `keep`."""
        for slot in self._cache.slots.live:
            if slot not in keep:
                self._preempt(slot)
        if layout.length > self._cache.layout.length:
            self._num_passed = 0
        self._cache.reallocate(layout, keep)

    def _preempt(self, slot: int) -> None:
        self._sample_queue.preempt(self._cache.slots.live[slot])
        self._cache.slots.release(slot)

    def _compute(self, prefill: Prefill, budget: int, queue: PrefillQueue, deltas: list[SampleDelta]) -> int:
        """Compute at least a chunk of a prompt, up to the budget, and return the number of tokens computed.

        A failure ends this request alone: other requests use none of the changed state.
        """
        num_tokens = 0
        request = prefill.request
        try:
            if prefill.kv.length == 0:
                self._prefiller.begin(prefill, in_use=self._prompt_tokens())
            while not prefill.is_done and num_tokens < budget:
                num_tokens += self._prefiller.advance(prefill)
            if not prefill.is_done:
                queue.current = prefill
            elif prefill.preempted is not None:
                prefill.samples.append(prefill.preempted)
            else:
                deltas += self._draw_first(prefill)
            if prefill.samples:
                self._prefilled.append(prefill)
        except Exception:
            log.exception("prefill of request %s failed", request.request_id)
            error = f"the prompt could not be computed; the server's log has it under request {request.request_id}"
            deltas.append(_empty_delta(request, error=error))
        self._fill_slots()
        return num_tokens

    def _draw_first(self, prefill: Prefill) -> list[SampleDelta]:
        """Draw the first token of every sample; samples that have not ended wait for slots."""
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
            delta = sample.take_drawn(drawn.row(row, 1), prompt_result if sample.index == 0 else None)
            assert delta is not None, "the first token is new"
            deltas.append(delta)
        prefill.samples.extend(sample for sample in samples if sample.stop_reason is None)
        prefill.scores = None  # which may be large, and the samples may wait for slots
        return deltas

    def _fill_slots(self) -> None:
        """Insert computed prompts for as many of their samples as there are free slots."""
        while self._prefilled:
            prompt = self._prefilled[0]
            self._cache.insert(prompt.kv, prompt.samples)
            if prompt.samples:
                return
            self._prefilled.popleft()

    def _decode(self) -> list[SampleDelta]:
        """Decode one slice and free the slots of samples that have ended."""
        slots = self._cache.slots
        live = slots.live
        if not live:
            return []
        num_steps = min(self._slice, max(sample.num_steps_left for sample in live.values()))
        drawn = self._programs.decode(live, slots.adapters, num_steps)
        deltas: list[SampleDelta] = []
        for slot, sample in live.items():
            delta = sample.take_drawn(drawn.row(slot, num_steps))
            if delta is not None:
                deltas.append(delta)
            if sample.stop_reason is not None:
                slots.release(slot)
        sample = next(iter(live.values()))
        return deltas or [_empty_delta(sample.request, index=sample.index)]

    def meters(self) -> Meters:
        """Return the use of the KV cache and of the prefix cache."""
        layout, live = self._cache.layout, self._cache.slots.live
        return Meters(
            decode_slots=layout.num_slots,
            decode_slots_used=len(live),
            kv_cache_tokens=layout.num_slots * layout.length,
            kv_cache_tokens_used=sum(sample.position for sample in live.values()),
            prefix_cache_tokens=self._prefiller.prefixes.num_tokens,
        )

    def compile_all(self, sampler: SamplerId) -> None:
        """Run every sampling program once, so that none is compiled later.

        `sampler` must be loaded, and nothing may be running.
        """
        assert not any(self._requests())
        self._programs.compile_all(sampler)
        self._cache.reallocate(self._memory.layout_for(1))


def _empty_delta(request: SampleRequest, *, index: int = 0, error: str | None = None) -> SampleDelta:
    return SampleDelta(
        request_id=request.request_id,
        index=index,
        tokens=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        error=error,
    )
