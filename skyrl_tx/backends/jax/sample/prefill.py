"""Prefill in chunks, so that running samples wait for a chunk and not for a whole prompt."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_tx.backends.jax.sample.jax_programs import JaxPrograms
from skyrl_tx.backends.jax.sample.prefix_cache import ComputedPrompt, PrefixCache, PromptSource
from skyrl_tx.backends.jax.sample.prompt_scores import PromptScores
from skyrl_tx.backends.jax.sample.running import PromptKV, RunningSample, max_tokens
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory, padded_chunk
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.requests import PromptOptions


@dataclass(slots=True, kw_only=True)
class Prefill:
    """One prompt, from its arrival until all its samples have KV cache slots.

    The first `num_done` tokens have keys; the first `num_cached` of these came from the prefix cache.
    """

    request: SampleRequest
    preempted: RunningSample | None = None
    """The sample whose prompt is recomputed."""
    kv: PromptKV = field(default_factory=lambda: PromptKV(None, 0))
    """Empty before the prefill begins."""
    num_done: int = 0
    num_cached: int = 0
    last_hidden: Any = None
    scores: PromptScores | None = None
    states: dict[int, Any] = field(default_factory=dict[int, Any])
    """The states to keep for later prompts, by the chunk ends at which they are taken; None before that."""
    samples: deque[RunningSample] = field(default_factory=deque[RunningSample])
    """After the prefill, the samples that wait for a slot."""

    @classmethod
    def of_preempted(cls, sample: RunningSample) -> "Prefill":
        """Return the prefill that recomputes the prompt of a preempted sample."""
        request = replace(sample.request, first_index=sample.index, num_samples=1, options=PromptOptions())
        return cls(request=request, preempted=sample)

    @property
    def is_done(self) -> bool:
        """Whether every token of the prompt has keys."""
        return self.num_done == self.request.prompt.size

    def kv_length(self, slice_tokens: int) -> int:
        """Return how many KV positions each sample needs to the end of its first slice of new tokens."""
        if self.preempted is not None:
            return self.preempted.kv_length(slice_tokens)
        return self.request.prompt.size + min(slice_tokens, max_tokens(self.request))


class Prefiller:
    """Computes prompts and caches their keys in the prefix cache."""

    def __init__(self, programs: JaxPrograms, shapes: PrefillShapes, memory: SampleMemory) -> None:
        self._programs = programs
        self._shapes = shapes
        self._memory = memory
        self.prefixes = PrefixCache(memory.prefix_tokens, shapes, state_tokens=memory.state_tokens)

    def fits(self, num_tokens: int, *, in_use: int) -> bool:
        """Return whether a prompt's buffer fits when `in_use` positions cannot be evicted."""
        needed = self._memory.positions(self._shapes.buffer_length(num_tokens))
        return in_use + needed <= self._memory.prompt_tokens

    def in_use(self, prefill: Prefill) -> int:
        """Return what a prompt with a buffer counts as, in positions."""
        return self._memory.positions(prefill.kv.length, num_kept=len(prefill.states))

    def begin(self, prefill: Prefill, *, in_use: int) -> None:
        """Allocate a prompt's buffer, evicting cached prompts for it, and fill it from the prefix cache.

        Scores of a prompt need the hidden states of all its tokens, so they use no cached prefix.
        """
        request, wants_scores = prefill.request, prefill.request.options.wants_prompt
        length = self._shapes.buffer_length(request.prompt.size)
        found = None if wants_scores else self.prefixes.find(PromptSource.of(request), request.prompt)
        if found is not None and found[1] == request.prompt.size:
            hit, prefill.num_done = found
            prefill.kv, prefill.last_hidden = hit.kv, hit.last_hidden
        else:
            free = self._memory.prompt_tokens - in_use
            if _is_cached(prefill):
                prefill.states = dict.fromkeys(self._ends_to_keep(request, found, free))
            self.prefixes.shrink(free - self._memory.positions(length, num_kept=len(prefill.states)))
            if found is not None and found[0] in self.prefixes:
                hit, prefill.num_done = found
                state = hit.states.get(prefill.num_done)
                if prefill.num_done in prefill.states:
                    prefill.states[prefill.num_done] = state
                prefill.kv = self._programs.copy_prompt(hit.kv, length, state)
            else:
                found = None  # an evicted prompt's buffer is freed before the next is allocated
                prefill.scores = self._programs.scores(request) if wants_scores else None
                prefill.kv = self._programs.allocate_prompt(length)
        prefill.num_cached = prefill.num_done

    def _ends_to_keep(self, request: SampleRequest, found: tuple[ComputedPrompt, int] | None, free: int) -> list[int]:
        """Return the chunk ends at which a prompt's states are kept, as far as they fit; none for a model without.

        The last end is where the next turn of a conversation continues. At the end before the parting from a cached
        prompt others are likely to part as well, as after a system prompt. The end of the hit is kept because the
        cached prompt may be a prefix of this one, which then replaces it.
        """
        if not self._memory.state_tokens:
            return []
        tokens = request.prompt
        parting = self.prefixes.find_parting(PromptSource.of(request), tokens)
        ends = {self._shapes.full_chunks(tokens.size), parting, found[1] if found else 0} - {0}
        length = self._shapes.buffer_length(tokens.size)
        rest = min(free, self._memory.prefix_tokens) - self._memory.positions(length)
        return sorted(ends, reverse=True)[: max(rest // self._memory.state_tokens, 0)]

    def advance(self, prefill: Prefill) -> int:
        """Compute the next chunk and return its number of tokens, padding included."""
        request, start = prefill.request, prefill.num_done
        tokens = request.prompt[start : self._shapes.chunk_end(start)]
        padded = padded_chunk(tokens.size)
        prefill.last_hidden = self._programs.extend(
            prefill.kv,
            tokens,
            start,
            padded=padded,
            adapter=self._programs.pool.slot_of(request.sampler),
            scores=prefill.scores,
        )
        prefill.num_done += tokens.size
        if prefill.num_done in prefill.states:
            prefill.states[prefill.num_done] = self._programs.copy_state(prefill.kv)
        if prefill.is_done and _is_cached(prefill):
            computed = ComputedPrompt(request.prompt, prefill.kv, prefill.last_hidden, prefill.states)
            self.prefixes.add(PromptSource.of(request), computed)
            prefill.states = {}  # they belong to the cache now
        return padded


def _is_cached(prefill: Prefill) -> bool:
    """Return whether later prompts may use this one. A preempted sample alone needs its prompt again."""
    return prefill.preempted is None and not prefill.request.options.wants_prompt
