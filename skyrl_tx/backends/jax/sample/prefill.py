"""Chunked prefill: a running sample waits for one chunk, not for a whole prompt."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.sample.kv_cache import ComputedPrompt, KVCache, PromptSource
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner, PromptChunk
from skyrl_tx.backends.jax.sample.prompt_scores import PromptScores, are_reusable
from skyrl_tx.backends.jax.sample.running_sample import BlockTableRow, RunningSample, SampleKey, get_max_tokens
from skyrl_tx.backends.jax.shapes import PrefillShapes
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import PromptOptions


@dataclass(slots=True, kw_only=True)
class Prefill:
    """One prompt, from its arrival until all its samples run.

    The KV cache holds the keys and values of the first `num_done` tokens. The first `num_cached` of
    them came from the prefix cache.
    """

    request: SampleRequest
    preempted: RunningSample | None = None
    """The preempted sample whose prompt is computed again."""
    table: BlockTableRow | None = None
    """Its pages, and its recurrent state in models with delta nets or Mamba layers.

    None before the prefill starts and after it was dropped.
    """
    num_done: int = 0
    num_cached: int = 0
    last_hidden: Any = None
    scores: PromptScores | None = None
    states: dict[int, int] = field(default_factory=dict[int, int])
    """The ids of the recurrent states that are saved for later prompts, by chunk end.

    The id is 0 until the state is copied.
    """
    samples: deque[RunningSample] = field(default_factory=deque[RunningSample])
    """After the prefill, the samples that wait until they can run."""

    @classmethod
    def from_preempted(cls, sample: RunningSample) -> "Prefill":
        """Return the prefill that recomputes the prompt of a preempted sample."""
        request = replace(sample.request, first_index=sample.index, num_samples=1, options=PromptOptions())
        return cls(request=request, preempted=sample)

    def restart(self) -> "Prefill":
        """Return the same prefill with nothing computed."""
        return Prefill(request=self.request, preempted=self.preempted)

    def split(self, num_samples: int) -> "Prefill | None":
        """Keep the first `num_samples` samples.

        Returns a prefill of the other samples, or None if there are none.
        """
        whole = self.request
        if whole.num_samples <= num_samples:
            return None
        self.request = replace(whole, num_samples=num_samples)
        rest, first = whole.num_samples - num_samples, whole.first_index + num_samples
        options = PromptOptions(sample_topk=whole.options.sample_topk)  # only the first part asks for prompt scores
        return Prefill(request=replace(whole, num_samples=rest, first_index=first, options=options))

    @property
    def is_done(self) -> bool:
        """Whether every token of the prompt is in the KV cache."""
        return self.num_done == self.request.prompt.size

    def kv_length(self, slice_tokens: int) -> int:
        """Return how many KV positions the prompt and the first `slice_tokens` new tokens need."""
        if self.preempted is not None:
            return self.preempted.kv_length(slice_tokens)
        size, num_tokens = self.request.prompt.size, get_max_tokens(self.request)
        return size if num_tokens == 1 else size + min(slice_tokens, num_tokens - 1)


class Prefiller:
    """Computes prompts and adds them to the prefix cache."""

    def __init__(self, programs: ModelRunner, shapes: PrefillShapes, cache: KVCache) -> None:
        self._programs = programs
        self._shapes = shapes
        self._cache = cache
        self._memory = cache.memory

    def fits(self, prefill: Prefill, num_tokens: int, *, spare: int, num_others: int = 0) -> bool:
        """Return whether `num_tokens` tokens, of a prompt and its first sample, fit into the KV cache.

        `spare` further pages must stay free. `num_others` counts the prompts that will start before
        this one and have no states yet. Each prompt takes two states, one for itself and one for
        its first sample.
        """
        size, page = prefill.request.prompt.size, self._memory.page
        of_sample = self._memory.count_pages(num_tokens) - size // page if num_tokens > size else 0
        num_states = 2 * (1 + num_others)
        cached = self._find_cached(prefill)
        if cached is None:
            return self._cache.fits(self._memory.count_pages(size) + of_sample + spare, num_states)
        hit, num_done = cached
        own = 0 if num_done == size else self._memory.count_pages(size) - num_done // page
        used = hit.table.pages[: self._memory.count_pages(num_done)]
        return self._cache.fits(own + of_sample + spare, num_states, keep=used)

    def _find_cached(self, prefill: Prefill) -> tuple[ComputedPrompt, int] | None:
        """Return the cached prompt with the longest usable prefix, and the length of the prefix."""
        request = prefill.request
        if not are_reusable(request.options):
            return None
        return self._cache.prefixes.find(PromptSource.from_request(request), request.prompt)

    def can_share(self, prefill: Prefill, other: Prefill) -> bool:
        """Return whether computing `other` first would let this prompt reuse more cached tokens."""
        request, before = prefill.request, other.request
        if not are_reusable(request.options) or not self._memory.prefix_tokens:
            return False
        if PromptSource.from_request(request) != PromptSource.from_request(before):
            return False
        size = min(request.prompt.size, before.prompt.size)
        different = np.flatnonzero(request.prompt[:size] != before.prompt[:size])
        num_equal = int(different[0]) if different.size else size
        return self._shapes.count_full_chunk_tokens(num_equal) > self.count_cached(prefill)

    def count_cached(self, prefill: Prefill) -> int:
        """Return how many tokens of a prompt are cached."""
        cached = self._find_cached(prefill)
        return 0 if cached is None else cached[1]

    def begin(self, prefill: Prefill) -> None:
        """Allocate the pages of a prompt, or take them from the prefix cache. They must fit."""
        request, cached = prefill.request, self._find_cached(prefill)
        size = request.prompt.size

        if request.options.wants_prompt:
            prefill.scores = self._programs.make_scores(request)
            if cached is not None:
                prefill.scores.reuse(cached[0].scores, cached[1])

        if cached is not None and cached[1] == size:  # the whole prompt is cached
            hit, prefill.num_done = cached
            prefill.table, prefill.last_hidden = self._cache.share(hit.table), hit.last_hidden
        else:
            if _is_cacheable(prefill):
                prefill.states = dict.fromkeys(self._choose_state_ends(request, cached), 0)

            if cached is None:
                prefill.table = self._cache.allocate_table(size)
            else:
                hit, prefill.num_done = cached
                state = hit.states.get(prefill.num_done)
                if state is not None and prefill.num_done in prefill.states:
                    self._cache.states.add_references([state])
                    prefill.states[prefill.num_done] = state
                (prefill.table,) = self._cache.fork(hit.table, prefill.num_done, [size], state)
        prefill.num_cached = prefill.num_done

    def _choose_state_ends(self, request: SampleRequest, cached: tuple[ComputedPrompt, int] | None) -> list[int]:
        """Return the chunk ends at which to save states, as many as fit into the prefix cache.

        A state is saved at up to three ends:

        - the last full chunk, where the next turn of a conversation continues;
        - the last full chunk in common with a cached prompt, for example the end of a shared system
          prompt, because later prompts probably diverge there too;
        - the end of the cached prefix: if this prompt extends a cached prompt, it replaces that prompt,
          whose state would be lost.

        Models without a state of fixed size save none.
        """
        if not self._memory.state_tokens:
            return []
        tokens = request.prompt
        divergence = self._cache.prefixes.find_divergence(PromptSource.from_request(request), tokens)
        ends = {self._shapes.count_full_chunk_tokens(tokens.size), divergence, cached[1] if cached else 0} - {0}
        own = self._memory.count_pages(tokens.size) * self._memory.page + self._memory.state_tokens
        rest = self._memory.prefix_tokens - own
        return sorted(ends, reverse=True)[: max(rest // self._memory.state_tokens, 0)]

    def make_next_chunk(self, prefill: Prefill) -> PromptChunk:
        """Return the next chunk to compute."""
        assert prefill.table is not None
        request, start = prefill.request, prefill.num_done
        tokens, adapter = request.prompt[start : self._shapes.chunk_end(start)], request.sampler
        return PromptChunk(prefill.table, tokens, start, self._programs.pool.get_slot(adapter), prefill.scores)

    def record_chunk(self, prefill: Prefill, num_tokens: int, last_hidden: Any) -> None:
        """Record that the next chunk, of `num_tokens` tokens, was computed."""
        assert prefill.table is not None
        request = prefill.request
        prefill.last_hidden = last_hidden
        prefill.num_done += num_tokens

        # Save the state at this chunk end. One more state must stay free for the first sample.
        if prefill.num_done in prefill.states and self._cache.fits(0, 2):
            prefill.states[prefill.num_done] = self._cache.copy_state(prefill.table.state)

        if prefill.is_done and _is_cacheable(prefill):
            states = {end: state for end, state in prefill.states.items() if state}
            table = replace(prefill.table, pages=[*prefill.table.pages])
            scores = prefill.scores.fetch() if prefill.scores else {}
            computed = ComputedPrompt(request.prompt, table, prefill.last_hidden, states, scores)
            self._cache.prefixes.add(PromptSource.from_request(request), computed)

    def drop(self, prefill: Prefill) -> None:
        """Release the pages and states of a prompt.

        The prefix cache may still hold them. Idempotent.
        """
        if prefill.table is not None:
            self._cache.release(prefill.table)
            self._cache.states.release(prefill.states.values())
            prefill.table, prefill.states, prefill.scores, prefill.last_hidden = None, {}, None, None


def _is_cacheable(prefill: Prefill) -> bool:
    """Return whether later prompts may reuse this one.

    A prompt that is computed again after a preemption is used by one sample only, so it is not
    cached.
    """
    return prefill.preempted is None and are_reusable(prefill.request.options)


@dataclass(slots=True)
class PrefillQueue:
    """Preempted samples, then new requests, each in order of arrival.

    One prompt at a time is partly computed.
    """

    preempted: dict[SampleKey, Prefill] = field(default_factory=dict[SampleKey, Prefill])
    new: dict[RequestId, Prefill] = field(default_factory=dict[RequestId, Prefill])
    current: Prefill | None = None
    """The prompt that is partly computed."""

    def iter_waiting(self) -> Iterator[Prefill]:
        """Yield the prompts that have not started, in order."""
        yield from self.preempted.values()
        yield from self.new.values()

    def add(self, request: SampleRequest) -> None:
        """Append a request.

        The samples of a request may arrive in parts. If an earlier part waits, both are joined and
        share one prefill.
        """
        before = self.new.get(request.request_id)
        self.new[request.request_id] = Prefill(
            request=request if before is None else _join_parts(before.request, request)
        )

    def preempt(self, sample: RunningSample) -> None:
        """Append a preempted sample."""
        sample.preempt()
        self.preempted[sample.key] = Prefill.from_preempted(sample)

    def requeue_current(self) -> Prefill:
        """Put the partly computed prompt back at the front of the queue.

        Returns the abandoned prefill, whose pages the caller frees.
        """
        current = self.take_current()
        again, request = current.restart(), current.request
        if again.preempted is not None:
            self.preempted = {(request.request_id, request.first_index): again, **self.preempted}
        else:
            later = self.new.pop(request.request_id, None)
            if later is not None:
                again.request = _join_parts(request, later.request)
            self.new = {request.request_id: again, **self.new}
        return current

    def requeue_first(self, waiting: Prefill) -> None:
        """Put the remaining samples of a request at the front of the new requests."""
        self.new = {waiting.request.request_id: waiting, **self.new}

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
        """Remove a request with all its samples; return its partly computed prompt.

        The id may be unknown.
        """
        self.new.pop(request_id, None)
        for key in [key for key in self.preempted if key[0] == request_id]:
            del self.preempted[key]
        is_current = self.current is not None and self.current.request.request_id == request_id
        return [self.take_current()] if is_current else []

    def cancel_sample(self, request_id: RequestId, index: int) -> list[Prefill]:
        """Remove a preempted sample; return its partly computed prompt. The sample may be unknown."""
        self.preempted.pop((request_id, index), None)
        sample = None if self.current is None else self.current.preempted
        is_current = sample is not None and (sample.request.request_id, sample.index) == (request_id, index)
        return [self.take_current()] if is_current else []


def _join_parts(earlier: SampleRequest, later: SampleRequest) -> SampleRequest:
    """Join two consecutive parts of a request."""
    assert later.first_index == earlier.first_index + earlier.num_samples
    return replace(earlier, num_samples=earlier.num_samples + later.num_samples)
