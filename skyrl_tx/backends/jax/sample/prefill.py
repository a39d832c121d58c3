"""Prefill in chunks, so that running samples wait for a chunk and not for a whole prompt."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.sample.block_table import BlockTableRow
from skyrl_tx.backends.jax.sample.kv_cache import ComputedPrompt, KVCache, PromptSource
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner, PromptChunk
from skyrl_tx.backends.jax.sample.prompt_scores import PromptScores
from skyrl_tx.backends.jax.sample.running_sample import RunningSample, SampleKey, get_max_tokens
from skyrl_tx.backends.jax.shapes import PrefillShapes
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import PromptOptions


@dataclass(slots=True, kw_only=True)
class Prefill:
    """One prompt, from its arrival until all its samples run.

    The first `num_done` tokens have keys; the first `num_cached` of these came from the prefix cache.
    """

    request: SampleRequest
    preempted: RunningSample | None = None
    """The sample whose prompt is recomputed."""
    table: BlockTableRow | None = None
    """Its pages and its state; None before the prefill begins and after its end."""
    num_done: int = 0
    num_cached: int = 0
    last_hidden: Any = None
    scores: PromptScores | None = None
    states: dict[int, int] = field(default_factory=dict[int, int])
    """The states to keep for later prompts, by the chunk ends at which they are taken; 0 before that."""
    samples: deque[RunningSample] = field(default_factory=deque[RunningSample])
    """After the prefill, the samples that wait until they can run."""

    @classmethod
    def from_preempted(cls, sample: RunningSample) -> "Prefill":
        """Return the prefill that recomputes the prompt of a preempted sample."""
        request = replace(sample.request, first_index=sample.index, num_samples=1, options=PromptOptions())
        return cls(request=request, preempted=sample)

    def restart(self) -> "Prefill":
        """Return the same prefill before its beginning."""
        return Prefill(request=self.request, preempted=self.preempted)

    def split(self, num_samples: int) -> "Prefill | None":
        """Keep the first samples of the request; return the prefill of the others, None if there are none."""
        whole = self.request
        if whole.num_samples <= num_samples:
            return None
        self.request = replace(whole, num_samples=num_samples)
        rest, first = whole.num_samples - num_samples, whole.first_index + num_samples
        options = PromptOptions(sample_topk=whole.options.sample_topk)  # the first samples ask about the prompt
        return Prefill(request=replace(whole, num_samples=rest, first_index=first, options=options))

    @property
    def is_done(self) -> bool:
        """Whether every token of the prompt has keys."""
        return self.num_done == self.request.prompt.size

    def kv_length(self, slice_tokens: int) -> int:
        """Return how many KV positions its first sample needs to the end of a slice of new tokens."""
        if self.preempted is not None:
            return self.preempted.kv_length(slice_tokens)
        size, num_tokens = self.request.prompt.size, get_max_tokens(self.request)
        return size if num_tokens == 1 else size + min(slice_tokens, num_tokens - 1)


class Prefiller:
    """Computes prompts and caches them in the prefix cache."""

    def __init__(self, programs: ModelRunner, shapes: PrefillShapes, cache: KVCache) -> None:
        self._programs = programs
        self._shapes = shapes
        self._cache = cache
        self._memory = cache.memory

    def fits(self, prefill: Prefill, num_tokens: int, *, spare: int, besides: int = 0) -> bool:
        """Return whether a prompt and `num_tokens` positions of its first sample fit, with `spare` more pages.

        `besides` is the number of prompts that were taken before it and have no states yet.
        """
        size, page = prefill.request.prompt.size, self._memory.page
        of_sample = self._memory.count_pages(num_tokens) - size // page if num_tokens > size else 0
        found = self._find_cached(prefill)
        num_states = 2 * (1 + besides)
        if found is None:
            return self._cache.fits(self._memory.count_pages(size) + of_sample + spare, num_states)
        hit, num_done = found
        own = 0 if num_done == size else self._memory.count_pages(size) - num_done // page
        used = hit.table.pages[: self._memory.count_pages(num_done)]
        return self._cache.fits(own + of_sample + spare, num_states, keep=used)

    def _find_cached(self, prefill: Prefill) -> tuple[ComputedPrompt, int] | None:
        """Scores of a prompt need the hidden states of all its tokens, so they use no cached prefix."""
        request = prefill.request
        if request.options.wants_prompt:
            return None
        return self._cache.prefixes.find(PromptSource.from_request(request), request.prompt)

    def can_share(self, prefill: Prefill, other: Prefill) -> bool:
        """Return whether more of a prompt would be cached if another one were computed before it."""
        request, before = prefill.request, other.request
        if request.options.wants_prompt or not self._memory.prefix_tokens:
            return False
        if PromptSource.from_request(request) != PromptSource.from_request(before):
            return False
        size = min(request.prompt.size, before.prompt.size)
        different = np.flatnonzero(request.prompt[:size] != before.prompt[:size])
        num_equal = int(different[0]) if different.size else size
        return self._shapes.count_full_chunk_tokens(num_equal) > self.count_cached(prefill)

    def count_cached(self, prefill: Prefill) -> int:
        """Return how many tokens of a prompt are cached."""
        found = self._find_cached(prefill)
        return 0 if found is None else found[1]

    def begin(self, prefill: Prefill) -> None:
        """Take a prompt's pages, of which the first may come from the prefix cache. They must fit."""
        request, found = prefill.request, self._find_cached(prefill)
        size = request.prompt.size
        if found is not None and found[1] == size:
            hit, prefill.num_done = found
            prefill.table, prefill.last_hidden = self._cache.share(hit.table), hit.last_hidden
        else:
            if _is_cacheable(prefill):
                prefill.states = dict.fromkeys(self._choose_state_ends(request, found), 0)
            if found is None:
                prefill.scores = self._programs.make_scores(request) if request.options.wants_prompt else None
                prefill.table = self._cache.allocate_table(size)
            else:
                hit, prefill.num_done = found
                state = hit.states.get(prefill.num_done)
                if state is not None and prefill.num_done in prefill.states:
                    self._cache.states.add_references([state])
                    prefill.states[prefill.num_done] = state
                (prefill.table,) = self._cache.fork(hit.table, prefill.num_done, [size], state)
        prefill.num_cached = prefill.num_done

    def _choose_state_ends(self, request: SampleRequest, found: tuple[ComputedPrompt, int] | None) -> list[int]:
        """Return the chunk ends at which a prompt's states are kept, as far as they fit; none for a model without.

        The last end is where the next turn of a conversation continues. At the end before the parting from a cached
        prompt others are likely to part as well, as after a system prompt. The end of the hit is kept because the
        cached prompt may be a prefix of this one, which then replaces it.
        """
        if not self._memory.state_tokens:
            return []
        tokens = request.prompt
        parting = self._cache.prefixes.find_divergence(PromptSource.from_request(request), tokens)
        ends = {self._shapes.count_full_chunk_tokens(tokens.size), parting, found[1] if found else 0} - {0}
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
        """Note that the next chunk is computed, which has `num_tokens`."""
        assert prefill.table is not None
        request = prefill.request
        prefill.last_hidden = last_hidden
        prefill.num_done += num_tokens
        if prefill.num_done in prefill.states and self._cache.fits(0, 2):  # one for the sample that waits for this
            prefill.states[prefill.num_done] = self._cache.copy_state(prefill.table.state)
        if prefill.is_done and _is_cacheable(prefill):
            states = {end: state for end, state in prefill.states.items() if state}
            table = replace(prefill.table, pages=[*prefill.table.pages])
            computed = ComputedPrompt(request.prompt, table, prefill.last_hidden, states)
            self._cache.prefixes.add(PromptSource.from_request(request), computed)

    def drop(self, prefill: Prefill) -> None:
        """Free what a prompt has; of what is cached, the prefix cache is another holder. Idempotent."""
        if prefill.table is not None:
            self._cache.release(prefill.table)
            self._cache.states.release(prefill.states.values())
            prefill.table, prefill.states, prefill.scores, prefill.last_hidden = None, {}, None, None


def _is_cacheable(prefill: Prefill) -> bool:
    """Return whether later prompts may use this one. A preempted sample alone needs its prompt again."""
    return prefill.preempted is None and not prefill.request.options.wants_prompt


@dataclass(slots=True)
class PrefillQueue:
    """Preempted samples, then new requests, each in order of arrival; at most one prompt is partly computed."""

    preempted: dict[SampleKey, Prefill] = field(default_factory=dict[SampleKey, Prefill])
    new: dict[RequestId, Prefill] = field(default_factory=dict[RequestId, Prefill])
    current: Prefill | None = None
    """The prompt that is partly computed."""

    def iter_waiting(self) -> Iterator[Prefill]:
        """Yield the prompts of which nothing is computed, in order."""
        yield from self.preempted.values()
        yield from self.new.values()

    def add(self, request: SampleRequest) -> None:
        """Append a request. A later part of a waiting request joins the earlier part, so that both share a prompt."""
        before = self.new.get(request.request_id)
        self.new[request.request_id] = Prefill(
            request=request if before is None else _join_parts(before.request, request)
        )

    def preempt(self, sample: RunningSample) -> None:
        """Append a preempted sample."""
        sample.preempt()
        self.preempted[sample.key] = Prefill.from_preempted(sample)

    def requeue_current(self) -> Prefill:
        """Let the prompt that is partly computed wait again, before all others, and return what was computed."""
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
        """Let the later samples of a request wait before all others."""
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


def _join_parts(earlier: SampleRequest, later: SampleRequest) -> SampleRequest:
    """Return two neighbouring parts of a request as one."""
    assert later.first_index == earlier.first_index + earlier.num_samples
    return replace(earlier, num_samples=earlier.num_samples + later.num_samples)
