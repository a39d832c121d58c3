"""The prefix cache: which pages have recent prompts, so that equal beginnings are computed once.

Prompts of different cache scopes never meet, so that neither a hit nor its latency tells anything about another scope.

A prompt that is equal to a cached one uses all of it; any other prompt uses whole prefill chunks only. The keys of a
position are therefore computed by the same program whether they come from the cache or not: hits are batch-invariant.
A model with state of fixed size also needs the state at the end of these chunks, which is kept at few ends: `Prefiller`
chooses them.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from skyrl_tx.backends.jax.sample.pages import FreeList, KVTable
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import SamplerId


class PromptSource(NamedTuple):
    """The sampler that computed a prompt, and the scope within which it may be used."""

    sampler: SamplerId | None
    cache_scope: str = ""

    @classmethod
    def of(cls, request: SampleRequest) -> "PromptSource":
        """Return the source of a request's prompt."""
        return cls(request.sampler, request.cache_scope)


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A prompt, its pages and its state, and the hidden state of its last token."""

    tokens: Int32Array
    table: KVTable
    last_hidden: Any
    states: Mapping[int, int] = field(default_factory=dict[int, int])
    """The kept states by the number of tokens that they have seen, which are whole chunks."""

    @property
    def all_states(self) -> set[int]:
        """The kept states and the last one."""
        return {self.table.state, *self.states.values()}


class PrefixCache:
    """Computed prompts by sampler and cache scope. The least recently used are evicted first.

    It holds the pages and states of its prompts, also while samples read them.
    """

    def __init__(self, pages: FreeList, states: FreeList, memory: SampleMemory, shapes: PrefillShapes) -> None:
        self._pages = pages
        self._states = states
        self._memory = memory
        self._shapes = shapes
        self._prompts: OrderedDict[tuple[PromptSource, bytes], ComputedPrompt] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """The positions of the pages of cached prompts, and of as many bytes as their states have."""
        return self._size(self._prompts.values())

    def _size(self, prompts: Collection[ComputedPrompt]) -> int:
        """Return what prompts count as; they may have pages and states in common."""
        pages = {page for prompt in prompts for page in prompt.table.pages}
        states = {state for prompt in prompts for state in prompt.all_states} - {0}
        return len(pages) * self._memory.page + len(states) * self._memory.state_tokens

    def find(self, source: PromptSource, tokens: Int32Array) -> tuple[ComputedPrompt, int] | None:
        """Return the cached prompt with the longest usable prefix, and that prefix's length in tokens."""
        equal = (source, tokens.tobytes())
        if equal in self._prompts:
            self._prompts.move_to_end(equal)
            return self._prompts[equal], tokens.size
        usable = {key: self._usable(prompt, tokens) for key, prompt in self._prompts.items() if key[0] == source}
        best = max(usable, key=usable.__getitem__, default=None)
        if best is None or usable[best] == 0:
            return None
        self._prompts.move_to_end(best)
        return self._prompts[best], usable[best]

    def find_parting(self, source: PromptSource, tokens: Int32Array) -> int:
        """Return how many tokens, in whole chunks, a cached prompt begins with, whether or not it has a state there."""
        return max(
            (self._common(prompt, tokens) for key, prompt in self._prompts.items() if key[0] == source), default=0
        )

    def _usable(self, prompt: ComputedPrompt, tokens: Int32Array) -> int:
        """Return how many of the first tokens need not be computed."""
        common = self._common(prompt, tokens)
        if self._memory.state_tokens:
            return max((end for end in prompt.states if end <= common), default=0)
        return common

    def _common(self, prompt: ComputedPrompt, tokens: Int32Array) -> int:
        """Return the length of the common prefix in whole chunks, without the last of `tokens`."""
        size = min(prompt.tokens.size, tokens.size)
        unequal = np.flatnonzero(prompt.tokens[:size] != tokens[:size])
        common = int(unequal[0]) if unequal.size else size
        return self._shapes.full_chunks(min(common, tokens.size - 1))

    def add(self, source: PromptSource, prompt: ComputedPrompt) -> None:
        """Cache a prompt in place of those that it serves as well, its prefixes, and evict others until all fit."""
        if self._size([prompt]) > self._memory.prefix_tokens:
            return
        self._pages.hold(prompt.table.pages)
        self._states.hold(prompt.all_states)
        for key, other in list(self._prompts.items()):
            if key[0] == source and np.array_equal(other.tokens, prompt.tokens[: other.tokens.size]):
                self._remove(key)
        self._prompts[source, prompt.tokens.tobytes()] = prompt
        while self.num_tokens > self._memory.prefix_tokens:
            self._remove(next(iter(self._prompts)))

    def spare_pages(self) -> set[int]:
        """Return the pages that evictions would free: those that no prompt or sample reads."""
        return _held_alone(self._pages, (prompt.table.pages for prompt in self._prompts.values()))

    def spare_states(self) -> set[int]:
        """Return the states that evictions would free."""
        return _held_alone(self._states, (prompt.all_states for prompt in self._prompts.values()))

    def make_free(self, num_pages: int, num_states: int) -> None:
        """Evict the least recently used of the prompts whose pages, or states, are wanted, until as many are free."""
        while self._pages.num_free < num_pages:
            spare = self.spare_pages()
            self._remove(next(key for key, each in self._prompts.items() if not spare.isdisjoint(each.table.pages)))
        while self._states.num_free < num_states:
            spare = self.spare_states()
            self._remove(next(key for key, each in self._prompts.items() if not spare.isdisjoint(each.all_states)))

    def drop(self, sampler: SamplerId | None) -> None:
        """Evict all prompts of a sampler."""
        for key in [key for key in self._prompts if key[0].sampler == sampler]:
            self._remove(key)

    def _remove(self, key: tuple[PromptSource, bytes]) -> None:
        prompt = self._prompts.pop(key)
        self._pages.release(prompt.table.pages)
        self._states.release(prompt.all_states)


def _held_alone(free_list: FreeList, numbers: Iterable[Collection[int]]) -> set[int]:
    own = Counter(number for each in numbers for number in each)
    return {number for number, holders in own.items() if number and free_list.holders(number) == holders}
