"""Continuous batching on the host: admit, prefill, insert, decode a slice, retire.

A step computes some prefill chunks, then decodes one slice; requests join and leave in between. Programs depend on
shapes alone, and the numbers of a sample on its own request alone: a slice has a row count at which rows have the same
bits as at any other.

On accelerators a slice is dispatched before the tokens of the last one are read, as long as no prompt waits: a prompt
needs to know which samples have ended. Otherwise the last slice is read first.

Prompts begin in order of arrival, when there are pages for them and for some slices of all running samples. On a mesh
that shards rows, a prompt and its samples are on one shard, whose devices have their pages: that with the longest
cached beginning, unless it has many more samples than the emptiest. Preempted samples go to any shard.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.devices import check_single_host
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner, PromptChunk
from skyrl_tx.backends.jax.sample.prefill import Prefill, PrefillQueue
from skyrl_tx.backends.jax.sample.running_sample import RunningSample, get_max_kv_length, get_max_tokens
from skyrl_tx.backends.jax.sample.shard import SampleShard
from skyrl_tx.backends.jax.sample.slice_rows import DispatchedSlice
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import BackendLost, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.results import PromptResult, SampleDelta

log = logging.getLogger(__name__)

ShardPrefill = tuple[Prefill, SampleShard]
"""A prompt, and the shard that computes it."""

SHARD_LEAD = 8
"""Samples that a shard with a cached beginning of a prompt may have more than the emptiest shard."""


class SampleScheduler:
    """Schedules all samples of the backend over the shards of the cache."""

    def __init__(
        self, programs: ModelRunner, config: JaxConfig, memory: SampleMemory, eos_token_ids: Collection[int]
    ) -> None:
        self._programs = programs
        assert config.prefill_tokens is not None
        self._prefill_tokens = config.prefill_tokens
        self._memory = memory
        self._slice_tokens = config.decode_slice_tokens
        self._eos = frozenset(eos_token_ids)
        self._blocked: PrefillQueue | None = None  # its next prompt did not fit, in this or the last step
        self._score_queue = PrefillQueue()  # requests for one token: they are done after their prefill
        self._sample_queue = PrefillQueue()
        programs.allocate_cache(memory)
        self._shapes = PrefillShapes.from_config(config, memory.max_length)
        self._shards = [
            SampleShard(
                n, programs, memory.per_shard, self._shapes, self._slice_tokens, self._score_queue, self._sample_queue
            )
            for n in range(memory.shards)
        ]
        self._dispatched: DispatchedSlice | None = None  # a slice that is not read

    def load(self, sampler: SamplerId, adapter: Any) -> None:
        """Copy an adapter of any padded rank to the device. Does nothing when it is loaded. Raises CapacityError."""
        self._programs.pool.load(sampler, adapter)

    def drop(self, sampler: SamplerId) -> None:
        """Free an adapter's slot. Idempotent."""
        assert not any(request.sampler == sampler for request in self._iter_requests()), f"{sampler} is in use"
        for shard in self._shards:
            shard.cache.prefixes.drop(sampler)
        self._programs.pool.drop(sampler)

    def begin(self, batch: PreparedSampleBatch) -> None:
        """Queue requests. Raises UserError, and queues none, when one can never fit."""
        for request in batch.requests:
            if get_max_kv_length(request) > self._memory.max_length:
                raise UserError(
                    f"prompt of {request.prompt.size} tokens and max_tokens {get_max_tokens(request)} make "
                    f"{get_max_kv_length(request)}, more than the {self._memory.max_length} that one sample may have here"
                )
        for request in batch.requests:
            queue = self._score_queue if get_max_tokens(request) == 1 else self._sample_queue
            queue.add(request)
        self._programs.precompile(batch.requests)

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Remove requests in any state. Unknown ids are ignored."""
        gone = frozenset(request_ids)
        for request_id in sorted(gone):  # the order of a set differs between hosts
            for queue in self._get_queues():
                for prompt in queue.cancel(request_id):
                    self._get_shard(prompt).prefiller.drop(prompt)
        for shard in self._shards:
            shard.cancel(gone)

    def end(self, request_id: RequestId, index: int) -> None:
        """Remove one sample, running or waiting. An unknown sample is ignored."""
        for prompt in self._sample_queue.cancel_sample(request_id, index):
            self._get_shard(prompt).prefiller.drop(prompt)
        for shard in self._shards:
            shard.end(request_id, index)

    def step(self) -> list[SampleDelta]:
        """Compute prefill chunks within a budget, then decode one slice. Returns no delta when nothing is left to do.

        If nothing was running, the step ends when the first prompts are computed: requests that arrive during their
        prefill join their first slice, which takes as long for one sample as for all. A delta without tokens reports a
        step in which no prompt was completed and nothing was decoded.

        Raises BackendLost when a failure destroyed the KV cache.
        """
        was_idle, deltas = not any(self._iter_running()), list[SampleDelta]()
        if not self._can_run_ahead():
            deltas += self._read_slice()
        deltas += self._admit()
        if not (was_idle and deltas):
            deltas += self._decode()
        partial = [queue.current for queue in self._get_queues() if queue.current is not None]
        if not deltas and partial:
            return [_make_empty_delta(partial[0].request, index=partial[0].request.first_index)]
        if not deltas and (sample := next(self._iter_running(), None)):
            return [_make_empty_delta(sample.request, index=sample.index)]
        return deltas

    def _can_run_ahead(self) -> bool:
        """Return whether the next slice needs nothing that only the tokens of the last one tell."""
        if any(queue.current or any(queue.iter_waiting()) for queue in self._get_queues()):
            return False
        return all(shard.can_run_ahead() for shard in self._shards)

    def _get_queues(self) -> tuple[PrefillQueue, PrefillQueue]:
        return self._score_queue, self._sample_queue

    def _get_shard(self, prefill: Prefill) -> SampleShard:
        assert prefill.table is not None
        return self._shards[prefill.table.shard]

    def _iter_running(self) -> Iterator[RunningSample]:
        return chain.from_iterable(shard.running.values() for shard in self._shards)

    def _iter_requests(self) -> Iterator[SampleRequest]:
        """Yield all requests that have not ended."""
        for queue in self._get_queues():
            yield from (waiting.request for waiting in queue.iter_waiting())
            if queue.current is not None:
                yield queue.current.request
        for shard in self._shards:
            yield from (prompt.request for prompt in shard.prefilled)
            yield from (sample.request for sample in shard.running.values())

    def _admit(self) -> list[SampleDelta]:
        """Compute prompts in order of arrival, within a token budget that limits how long running samples wait.

        A prompt that takes several steps leaves half of the budget to later prompts that fit into the rest.
        """
        deltas: list[SampleDelta] = []
        for shard in self._shards:
            shard.take_pages_for_next_slice()
            shard.insert()
        first, self._blocked = self._blocked, None
        for queue in sorted(self._get_queues(), key=lambda queue: queue is not first):
            budget = self._prefill_tokens
            if queue.current is not None:
                share = budget // 2 if queue.new or queue.preempted else budget
                current = queue.take_current()
                budget -= self._prefill([(current, self._get_shard(current))], share, queue, deltas)
            while budget > 0 and (found := self._find_next(queue, budget)) is not None:
                prompts = [self._take_from_queue(queue, *found)]
                # They are computed at the same time. Only one that is alone may be computed partly.
                most = len(self._shards) * self._programs.prompts_of_shard
                while len(prompts) < most and prompts[0][0].request.prompt.size <= budget:
                    found = self._find_next(queue, budget, besides=prompts)
                    if found is None:
                        break
                    prompts.append(self._take_from_queue(queue, *found))
                budget -= self._prefill(prompts, budget, queue, deltas)
        return deltas

    def _find_next(self, queue: PrefillQueue, budget: int, besides: Sequence[ShardPrefill] = ()) -> ShardPrefill | None:
        """Return the next prompt to compute: the oldest, or the oldest short one while another is partly computed.

        Prompts that will be computed `besides` it leave it a part of the budget on their shard, and it would not profit
        there from one whose beginning is its own. None if there is no such prompt or it does not fit.
        """
        for waiting in queue.iter_waiting():
            size = waiting.request.prompt.size
            if queue.current is not None and size > budget:
                continue
            shards = [shard for shard in self._shards if not besides or self._can_join(shard, waiting, budget, besides)]
            if queue is self._sample_queue:
                shards = [shard for shard in shards if shard.is_open]
            fitting = (
                []
                if self._blocked
                else [shard for shard in shards if shard.fits(waiting, _filter_by_shard(shard, besides))]
            )
            if fitting:
                return waiting, self._choose_shard(fitting, waiting)
            if shards and not besides:  # its queue is first in the next step, and blocks the other until then
                self._blocked = self._blocked or queue
            return None
        return None

    def _can_join(self, shard: SampleShard, waiting: Prefill, budget: int, besides: Sequence[ShardPrefill]) -> bool:
        """Return whether a shard can compute a whole prompt at the same time as others."""
        own = _filter_by_shard(shard, besides)
        num_tokens = sum(each.request.prompt.size for each in [waiting, *own])
        is_free = len(own) < self._programs.prompts_of_shard and num_tokens <= budget
        return is_free and not any(shard.prefiller.can_share(waiting, each) for each in own)

    def _take_from_queue(self, queue: PrefillQueue, waiting: Prefill, shard: SampleShard) -> ShardPrefill:
        """Take a prompt from its queue, with as many samples as the shard has rows.

        More would wait for each other while other shards are free. With one shard all stay together.
        """
        queue.remove(waiting)
        if queue is self._sample_queue and len(self._shards) > 1 and (rest := waiting.split(shard.num_rows)):
            queue.requeue_first(rest)
        return waiting, shard

    def _choose_shard(self, fitting: Sequence[SampleShard], waiting: Prefill) -> SampleShard:
        """Return the shard for a prompt among those on which it fits."""
        if len(fitting) == 1:
            return fitting[0]
        fewest = min(shard.num_samples for shard in fitting)
        near = (shard for shard in fitting if shard.num_samples <= fewest + SHARD_LEAD)
        return max(
            near,
            key=lambda each: (each.prefiller.count_cached(waiting), -each.num_samples, each.cache.pages.num_free),
        )

    def _prefill(self, prompts: list[ShardPrefill], budget: int, queue: PrefillQueue, deltas: list[SampleDelta]) -> int:
        """Compute at least a chunk of each prompt, up to the budget, and return the number of tokens computed.

        Tokens that shards compute at the same time count once. A failure ends its request alone: other
        requests use none of the changed state. Of several prompts each is computed again, alone.
        """
        num_tokens = 0
        try:
            for prefill, shard in prompts:
                if prefill.table is None:
                    shard.prefiller.begin(prefill)
            while num_tokens < budget and (rest := [each for each in prompts if not each[0].is_done]):
                num_tokens += self._prefill_next_chunks(rest)
            if len(prompts) == 1:
                self._finish_prefill(*prompts[0], queue, deltas)
        except BackendLost:
            raise
        except Exception as failure:
            check_single_host(failure)
            for prefill, shard in prompts:
                shard.prefiller.drop(prefill)
            if len(prompts) > 1:
                log.warning("prefill of %d requests failed, which are computed one by one", len(prompts), exc_info=True)
                again = ([(prefill.restart(), shard)] for prefill, shard in prompts)
                return num_tokens + sum(self._prefill(each, budget, queue, deltas) for each in again)
            request = prompts[0][0].request
            log.exception("prefill of request %s failed", request.request_id)
            error = f"the prompt could not be computed; the server's log has it under request {request.request_id}"
            deltas.append(_make_empty_delta(request, error=error))
        else:
            if len(prompts) > 1:  # each ends alone, with what is left of it if their chunks had many sizes
                num_tokens += sum(self._prefill([each], budget, queue, deltas) for each in prompts)
        for _, shard in prompts:
            shard.drop_inserted()
            shard.insert()
        return num_tokens

    def _prefill_next_chunks(self, prompts: Sequence[ShardPrefill]) -> int:
        """Compute the next chunk of each prompt, those of one padded size together; return the tokens, with padding."""
        num_tokens = 0
        by_size: dict[int, list[tuple[Prefill, SampleShard, PromptChunk]]] = {}
        for prefill, shard in prompts:
            chunk = shard.prefiller.make_next_chunk(prefill)
            by_size.setdefault(self._shapes.pad_size(chunk.tokens.size), []).append((prefill, shard, chunk))
        for padded, group in by_size.items():
            found = self._programs.prefill([chunk for *_, chunk in group], padded)
            for (prefill, shard, chunk), last_hidden in zip(group, found, strict=True):
                shard.prefiller.record_chunk(prefill, chunk.tokens.size, last_hidden)
            num_tokens += padded * -(-len(group) // len(self._shards))
        return num_tokens

    def _finish_prefill(
        self, prefill: Prefill, shard: SampleShard, queue: PrefillQueue, deltas: list[SampleDelta]
    ) -> None:
        """Draw the first tokens of a computed prompt; one that is partly computed goes on in the next step."""
        if not prefill.is_done:
            queue.current = prefill
            return
        if prefill.preempted is not None:
            prefill.samples.append(prefill.preempted)
        else:
            deltas += self._draw_first(prefill)
        shard.prefilled.append(prefill)

    def _draw_first(self, prefill: Prefill) -> list[SampleDelta]:
        """Draw the first token of every sample; samples that have not ended wait until they can run."""
        request, adapter = prefill.request, self._programs.pool.get_slot(prefill.request.sampler)
        prompt_result = prefill.scores.make_result() if prefill.scores else None
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

    def _decode(self) -> list[SampleDelta]:
        """Dispatch a slice of the running samples, and read the one before it; without running ahead, the same one."""
        before, self._dispatched = self._dispatched, None
        samples = [sample for sample in self._iter_running() if sample.position < sample.end]
        if samples:
            num_steps = min(self._slice_tokens, max(sample.end - sample.position for sample in samples))
            after = self._programs.dispatch(samples, num_steps)
            for sample in samples:
                sample.position = sample.length_after(num_steps)
            self._dispatched = after
        deltas = [] if before is None else self._make_deltas(before)
        return deltas if self._programs.runs_ahead else deltas + self._read_slice()

    def _read_slice(self) -> list[SampleDelta]:
        """Read the slice that is not read, if there is one."""
        dispatched, self._dispatched = self._dispatched, None
        return [] if dispatched is None else self._make_deltas(dispatched)

    def _make_deltas(self, dispatched: DispatchedSlice) -> list[SampleDelta]:
        """Wait for a slice, and remove the samples that have ended."""
        deltas: list[SampleDelta] = []
        for sample, start, tokens, logprobs, is_stopped, topk in dispatched.read():
            if not sample.table.pages:
                continue  # it has ended, or was cancelled
            delta = sample.take_slice(start, tokens, logprobs, is_stopped, topk)
            if delta is not None:
                deltas.append(delta)
                if delta.stop_reason is not None:
                    self._shards[sample.table.shard].remove(sample.key)
        return deltas

    def meters(self) -> Meters:
        """Return the use of the KV cache and of the prefix cache."""
        caches = [shard.cache for shard in self._shards]
        return Meters(
            decode_slots=self._memory.num_slots,
            decode_slots_used=sum(1 for _ in self._iter_running()),
            kv_cache_tokens=sum(cache.num_tokens for cache in caches),
            kv_cache_tokens_used=sum(cache.num_tokens_used for cache in caches),
            prefix_cache_tokens=sum(cache.prefixes.num_tokens for cache in caches),
        )

    def compile_all(self, sampler: SamplerId) -> None:
        """Run every sampling program once, so that none is compiled later.

        `sampler` must be loaded, and nothing may be running.
        """
        assert not any(self._iter_requests())
        self._programs.compile_all(sampler)


def _make_empty_delta(request: SampleRequest, *, index: int = 0, error: str | None = None) -> SampleDelta:
    return SampleDelta(
        request_id=request.request_id,
        index=index,
        tokens=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        error=error,
    )


def _filter_by_shard(shard: SampleShard, placed: Sequence[ShardPrefill]) -> list[Prefill]:
    """Return the prompts that a shard computes."""
    return [prefill for prefill, each in placed if each is shard]
