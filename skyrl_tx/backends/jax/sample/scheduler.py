"""Continuous batching on the host: admit, prefill, insert, decode a slice, retire.

Each round of the scheduler computes some prefill chunks and then decodes one slice (a few decode
steps for all running samples). Requests can join and leave between two rounds. A program depends on
shapes only. In float32, the numbers of a sample depend on its own request only, because slices only
use row counts that give a row the same bits.

On accelerators the scheduler dispatches a slice before it has read the tokens of the previous
slice, unless a prompt is waiting. To admit a prompt it has to know which samples have ended, so it
reads the previous slice first.

Prompts start in order of arrival, as soon as there are enough pages for them and for a few slices
of all running samples. On a mesh that shards rows, a prompt and its samples live on one shard,
whose devices hold their pages. The scheduler picks the shard with the longest cached prefix, unless
that shard has many more samples than the emptiest one. Preempted samples may move to another shard.
"""

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.devices import check_single_host
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner, PromptChunk
from skyrl_tx.backends.jax.sample.prefill import Prefill, PrefillQueue
from skyrl_tx.backends.jax.sample.running_sample import RunningSample, get_max_kv_length, get_max_tokens
from skyrl_tx.backends.jax.sample.shard import PromptChooser, SampleShard, ShardPrefill
from skyrl_tx.backends.jax.sample.slice_rows import DispatchedSlice
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import BackendLost, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.logit_adjuster import LogitAdjuster
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.results import PromptResult, SampleDelta
from skyrl_tx.contract.samples import MASK_WAIT_S, select_ready

log = logging.getLogger(__name__)


class SampleScheduler:
    """Schedules all samples of the backend over the shards of the KV cache."""

    def __init__(
        self, programs: ModelRunner, config: JaxConfig, memory: SampleMemory, eos_token_ids: Collection[int]
    ) -> None:
        self._programs = programs
        assert config.prefill_tokens is not None
        self._prefill_tokens = config.prefill_tokens
        self._memory = memory
        self._slice_tokens = config.decode_slice_tokens
        self._eos = frozenset(eos_token_ids)
        self._score_queue = PrefillQueue()  # requests for a single token: they end with their prefill
        self._sample_queue = PrefillQueue()
        programs.allocate_cache(memory)
        self._shapes = PrefillShapes.from_config(config, memory.max_length)

        self._shards = [
            SampleShard(
                n, programs, memory.per_shard, self._shapes, self._slice_tokens, self._score_queue, self._sample_queue
            )
            for n in range(memory.shards)
        ]
        self._chooser = PromptChooser(self._shards, self._sample_queue, programs.prompts_of_shard)
        # The slices that were dispatched and not read yet
        self._dispatched: DispatchedSlice | None = None
        self._adjusted: DispatchedSlice | None = None  # one step of adjusted samples
        self._are_others_waiting = False  # for a slice of short samples alone

    def load(self, sampler: SamplerId, adapter: Any) -> None:
        """Copy an adapter of any padded rank to the device, unless it is loaded.

        Raises CapacityError.
        """
        self._programs.pool.load(sampler, adapter)

    def drop(self, sampler: SamplerId) -> None:
        """Free the adapter slot of a sampler. Idempotent."""
        assert not any(request.sampler == sampler for request in self._iter_requests()), f"{sampler} is in use"
        for shard in self._shards:
            shard.cache.prefixes.drop(sampler)
        self._programs.pool.drop(sampler)

    def begin(self, batch: PreparedSampleBatch) -> None:
        """Queue requests. Raises UserError and queues nothing if a request can never fit."""
        for request in batch.requests:
            if get_max_kv_length(request) > self._memory.max_length:
                raise UserError(
                    f"the prompt ({request.prompt.size} tokens) and max_tokens ({get_max_tokens(request)}) need "
                    f"{get_max_kv_length(request)} positions, more than the {self._memory.max_length} that this server "
                    "allows for one sample: shorten the prompt or lower max_tokens"
                )
        for request in batch.requests:
            queue = self._score_queue if get_max_tokens(request) == 1 else self._sample_queue
            queue.add(request)
        self._programs.precompile(batch.requests)

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Remove requests in any state. Unknown ids are ignored."""
        gone = frozenset(request_ids)
        for request_id in sorted(gone):  # a set iterates in a different order on each host
            for queue in self._get_queues():
                for prompt in queue.cancel(request_id):
                    self._get_shard(prompt).prefiller.drop(prompt)
        for shard in self._shards:
            shard.cancel(gone)

    def end(self, request_id: RequestId, index: int) -> None:
        """Remove one running or waiting sample. Unknown samples are ignored."""
        for prompt in self._sample_queue.cancel_sample(request_id, index):
            self._get_shard(prompt).prefiller.drop(prompt)
        for shard in self._shards:
            shard.end(request_id, index)

    def step(self) -> list[SampleDelta]:
        """Run one round: compute prefill chunks within a token budget, then decode one slice.

        Returns an empty list when there is no work left. A delta without tokens reports progress in
        a round that completed no prompt and decoded nothing.

        If nothing was running, the round ends as soon as the first prompts are computed. Requests
        that arrive during this prefill can then join the first slice, which takes as long for one
        sample as for all.

        Raises BackendLost when a failure destroyed the KV cache.
        """
        was_idle, deltas = not any(self._iter_running()), list[SampleDelta]()
        with self._programs.computing():
            if not self._can_run_ahead():
                deltas += self._read_slice()
            deltas += self._admit()
            if not (was_idle and deltas):
                deltas += self._decode()

        # Report progress even if this round drew no token.
        partial = [queue.current for queue in self._get_queues() if queue.current is not None]
        if not deltas and partial:
            return [SampleDelta.make_empty(partial[0].request.request_id, partial[0].request.first_index)]
        if not deltas and (sample := next(self._iter_running(), None)):
            return [SampleDelta.make_empty(*sample.key)]
        return deltas

    def _can_run_ahead(self) -> bool:
        """Return whether the next slice can be dispatched before the last slice is read."""
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
        """Compute prompts in order of arrival, within a token budget per queue.

        The budget limits how long running samples wait.

        A prompt that takes multiple rounds uses half of the budget while later prompts wait. The
        other half is for later prompts that fit into it completely.
        """
        deltas: list[SampleDelta] = []
        for shard in self._shards:
            shard.take_pages_for_next_slice()
            shard.insert()

        for queue in self._chooser.order_queues(self._get_queues()):
            budget = self._prefill_tokens
            if queue.current is not None:
                share = budget // 2 if queue.new or queue.preempted else budget
                current = queue.take_current()
                budget -= self._prefill([(current, self._get_shard(current))], share, queue, deltas)

            while budget > 0 and (prompts := self._chooser.take_next(queue, budget)):
                budget -= self._prefill(prompts, budget, queue, deltas)
        return deltas

    def _prefill(self, prompts: list[ShardPrefill], budget: int, queue: PrefillQueue, deltas: list[SampleDelta]) -> int:
        """Compute at least one chunk of each prompt, up to the budget.

        Returns the number of tokens computed. Tokens that shards compute at the same time count
        once. A failure ends only its own request, because other requests use none of the state that
        it changed. If the prefill of multiple prompts fails, each of them is computed again alone.
        """
        num_tokens = 0
        try:
            for prefill, shard in prompts:
                if prefill.table is None:
                    shard.prefiller.begin(prefill)
            while num_tokens < budget and (rest := [pair for pair in prompts if not pair[0].is_done]):
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
                log.warning("prefill of %d requests failed; retrying them one by one", len(prompts), exc_info=True)
                retries = ([(prefill.restart(), shard)] for prefill, shard in prompts)
                return num_tokens + sum(self._prefill(retry, budget, queue, deltas) for retry in retries)

            request = prompts[0][0].request
            log.exception("prefill of request %s failed", request.request_id)
            error = f"the server could not compute the prompt; its log has the error under request {request.request_id}"
            deltas.append(SampleDelta.make_empty(request.request_id, error=error))
        else:
            if len(prompts) > 1:  # finish each prompt alone; chunks of different sizes may still be missing
                num_tokens += sum(self._prefill([pair], budget, queue, deltas) for pair in prompts)

        for _, shard in prompts:
            shard.drop_inserted()
            shard.insert()
        return num_tokens

    def _prefill_next_chunks(self, prompts: Sequence[ShardPrefill]) -> int:
        """Compute the next chunk of each prompt.

        Returns the number of tokens computed, with padding. Chunks of the same padded size are
        computed together.
        """
        num_tokens = 0
        by_size: dict[int, list[tuple[Prefill, SampleShard, PromptChunk]]] = {}
        for prefill, shard in prompts:
            chunk = shard.prefiller.make_next_chunk(prefill)
            by_size.setdefault(self._shapes.pad_size(chunk.tokens.size), []).append((prefill, shard, chunk))

        for padded, group in by_size.items():
            hidden_states = self._programs.prefill([chunk for *_, chunk in group], padded)
            for (prefill, shard, chunk), last_hidden in zip(group, hidden_states, strict=True):
                shard.prefiller.record_chunk(prefill, chunk.tokens.size, last_hidden)
            num_tokens += padded * -(-len(group) // len(self._shards))
        return num_tokens

    def _finish_prefill(
        self, prefill: Prefill, shard: SampleShard, queue: PrefillQueue, deltas: list[SampleDelta]
    ) -> None:
        """Draw the first tokens of a computed prompt.

        A partly computed prompt continues in the next round.
        """
        if not prefill.is_done:
            queue.current = prefill
            return
        if prefill.preempted is not None:
            prefill.samples.append(prefill.preempted)
        else:
            deltas += self._draw_first(prefill)
        shard.prefilled.append(prefill)

    def _draw_first(self, prefill: Prefill) -> list[SampleDelta]:
        """Draw the first token of every sample.

        Samples that have not ended wait until they can run.
        """
        request, adapter = prefill.request, self._programs.pool.get_slot(prefill.request.sampler)
        prompt_result = prefill.scores.make_result() if prefill.scores else None
        if prefill.num_cached:
            prompt_result = replace(prompt_result or PromptResult(), cache_hit_tokens=prefill.num_cached)
        stops = frozenset(request.params.stop_token_ids) | (self._eos if request.params.eos_stops else frozenset())

        vocab_size = self._programs.vocab_size
        samples = [
            RunningSample(
                request=request,
                index=index,
                adapter=adapter,
                stops=stops,
                adjuster=LogitAdjuster.make(request, stops, vocab_size),
            )
            for index in range(request.first_index, request.first_index + request.num_samples)
        ]

        deltas: list[SampleDelta] = []
        drawn = self._programs.draw_first(prefill.last_hidden, samples)
        for row, sample in enumerate(samples):
            deltas.append(sample.take_first(drawn.row(row, 1), prompt_result if sample.index == 0 else None))

        prefill.samples.extend(sample for sample in samples if sample.stop_reason is None)
        prefill.scores = None  # free the scores, which may be large, while the samples wait
        return deltas

    def _decode(self) -> list[SampleDelta]:
        """Dispatch a slice of the running samples and read the previous slice.

        Without async decoding, the new slice is read at once. Adjusted samples, whose next logits
        depend on the last token, take one step in a separate slice. It is read before the next
        round, and the host prepares it while the devices decode the other samples.
        """
        deltas, before = self._read_adjusted(), self._dispatched
        self._dispatched = None
        samples = [sample for sample in self._iter_running() if sample.position < sample.end]
        adjusted = [sample for sample in samples if sample.is_adjusted]
        if adjusted:
            samples = [sample for sample in samples if not sample.is_adjusted]
        if samples:
            samples = self._select_for_slice(samples)
            num_steps = min(self._slice_tokens, max(sample.end - sample.position for sample in samples))
            self._dispatched = self._dispatch(samples, num_steps)
        deltas += [] if before is None else self._make_deltas(before)
        if adjusted:
            deltas += self._decode_adjusted(adjusted, is_alone=not samples)
        return deltas if self._programs.runs_ahead else deltas + self._read_slice()

    def _select_for_slice(self, samples: list[RunningSample]) -> list[RunningSample]:
        """Return all samples, or only the new samples that one slice completes.

        A short sample then does not wait until long samples have decoded a slice. Long samples are in
        at least every second slice.
        """
        short = [sample for sample in samples if sample.takes_one_slice(self._slice_tokens)]
        can_wait = self._programs.prefers_few_rows and not self._are_others_waiting
        self._are_others_waiting = can_wait and 0 < len(short) < len(samples)
        return short if self._are_others_waiting else samples

    def _decode_adjusted(self, samples: list[RunningSample], *, is_alone: bool) -> list[SampleDelta]:
        """Dispatch a step of adjusted samples. If no other sample decodes, take the steps of a slice.

        Samples whose mask is not computed in time wait for a later round. The remaining samples need a
        program for fewer rows then, and do not wait for its compilation.
        """
        deltas: list[SampleDelta] = []
        deadline = time.monotonic() + MASK_WAIT_S
        for step in range(self._slice_tokens if is_alone else 1):
            deltas += self._read_adjusted()
            samples = [sample for sample in samples if sample.stop_reason is None and sample.is_adjusted]
            ready = select_ready(samples, deadline, others_decode=not is_alone)
            if not ready or (step and len(ready) < len(samples)):
                break

            # Only if there is nothing else to do, the step waits for the compilation of its program.
            can_wait = is_alone and len(ready) == len(samples)
            if not can_wait and not self._programs.is_compiled(ready):
                if is_alone:
                    select_ready([sample for sample in samples if sample.is_late], deadline)
                break
            self._adjusted = self._dispatch(ready, 1)
            samples = ready
        return deltas

    def _dispatch(self, samples: Sequence[RunningSample], num_steps: int) -> DispatchedSlice:
        dispatched = self._programs.dispatch(samples, num_steps)
        for sample in samples:
            sample.position = sample.length_after(num_steps)
        return dispatched

    def _read_slice(self) -> list[SampleDelta]:
        """Read the dispatched slices, if there are any."""
        dispatched, self._dispatched = self._dispatched, None
        deltas = [] if dispatched is None else self._make_deltas(dispatched)
        return deltas + self._read_adjusted()

    def _read_adjusted(self) -> list[SampleDelta]:
        """Read the dispatched step of adjusted samples, if there is one."""
        adjusted, self._adjusted = self._adjusted, None
        return [] if adjusted is None else self._make_deltas(adjusted)

    def _make_deltas(self, dispatched: DispatchedSlice) -> list[SampleDelta]:
        """Wait for a slice and remove the samples that have ended."""
        deltas: list[SampleDelta] = []
        for sample, start, tokens, logprobs, is_stopped, topk in dispatched.read():
            if not sample.table.pages:
                continue  # the sample has ended or was cancelled
            delta = sample.take_slice(start, tokens, logprobs, is_stopped, topk)
            if delta is not None:
                deltas.append(delta)
                if delta.stop_reason is not None:
                    self._shards[sample.table.shard].remove(sample.key)
        return deltas

    def meters(self) -> Meters:
        """Return how much of the KV cache and of the prefix cache is in use."""
        caches = [shard.cache for shard in self._shards]
        return Meters(
            decode_slots=self._memory.num_slots,
            decode_slots_used=sum(1 for _ in self._iter_running()),
            kv_cache_tokens=sum(cache.num_tokens for cache in caches),
            kv_cache_tokens_used=sum(cache.num_tokens_used for cache in caches),
            prefix_cache_tokens=sum(cache.prefixes.num_tokens for cache in caches),
        )

    def compile_all(self, sampler: SamplerId, *, usual_only: bool = False) -> None:
        """Run every sampling program once, or the usual ones, so that none is compiled later.

        `sampler` must be loaded, and nothing may be running.
        """
        assert not any(self._iter_requests())
        self._programs.compile_all(sampler, usual_only=usual_only)
