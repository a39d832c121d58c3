"""The host's view of the KV cache: which pages prompts, samples and the prefix cache use, share, copy and free.

A prompt writes into pages, and its samples begin with them. The last page, if it is partly filled, and the
state are copied for each sample, which writes to them. Pages are cleared when they are taken. Cached prefixes
are evicted for prompts and samples.

The prefix cache remembers the pages of recent prompts, so that equal beginnings are computed once. Prompts of
different cache scopes never meet, so that neither a hit nor its latency tells anything about another scope. A
prompt that is equal to a cached one uses all of it; any other prompt uses whole prefill chunks only. The keys
of a position are therefore computed by the same program whether they come from the cache or not: hits are
batch-invariant. A model with state of fixed size also needs the state at the end of these chunks, which is
kept at few ends: `Prefiller` chooses them.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from skyrl_tx.backends.jax.sample.block_table import BlockTableRow, FreeList
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import SamplerId

EMPTY = 0
"""The page, and the state, that is copied to clear another."""


class KVCache:
    """The pages and states of prompts, samples and cached prefixes, of one shard. The arrays belong to the programs."""

    def __init__(self, programs: ModelRunner, memory: SampleMemory, shapes: PrefillShapes, shard: int = 0) -> None:
        """`memory` is that of the shard."""
        self._programs = programs
        self._shard = shard
        self.memory = memory
        self.pages = FreeList(memory.num_pages)
        self.states = FreeList(memory.num_states)
        self.prefixes = PrefixCache(self.pages, self.states, memory, shapes)

    @property
    def num_tokens(self) -> int:
        """All positions."""
        return (self.memory.num_pages - 1) * self.memory.page

    @property
    def num_tokens_used(self) -> int:
        """The positions of the pages that prompts and samples have; those that only cached prefixes have are free."""
        return (self.pages.num_used - len(self.prefixes.find_evictable_pages())) * self.memory.page

    def fits(self, num_pages: int, num_states: int = 0, *, keep: Collection[int] = ()) -> bool:
        """Return whether so much is free, or would be without cached prefixes, of which the pages in `keep` stay."""
        if num_pages > self.pages.num_free:
            spare = self.prefixes.find_evictable_pages().difference(keep)
            if num_pages > self.pages.num_free + len(spare):
                return False
        has_states = self.memory.state_tokens == 0 or num_states <= self.states.num_free
        return has_states or num_states <= self.states.num_free + len(self.prefixes.find_evictable_states())

    def grow(self, missing: Sequence[tuple[BlockTableRow, int]]) -> None:
        """Take pages for tables, each with the number that it lacks. They must fit."""
        taken = self._allocate_pages(sum(num_pages for _, num_pages in missing))
        first = 0
        for table, num_pages in missing:
            table.pages += taken[first : first + num_pages]
            first += num_pages
        self._programs.copy([(EMPTY, page) for page in taken], (), self._shard)

    def allocate_table(self, num_tokens: int) -> BlockTableRow:
        """Return a table for a prompt of which nothing is computed. It must fit."""
        return self.fork(BlockTableRow([], EMPTY, self._shard), 0, [num_tokens])[0]

    def fork(
        self, source: BlockTableRow, num_tokens: int, lengths: Sequence[int], state: int | None = None
    ) -> list[BlockTableRow]:
        """Return tables that go on after the first `num_tokens` of another, with pages for `lengths`. They must fit.

        Their state is a copy of the source's, or of `state`.
        """
        used, num_whole = source.pages[: self.memory.count_pages(num_tokens)], num_tokens // self.memory.page
        whole, partial = used[:num_whole], used[num_whole:]
        tables: list[BlockTableRow] = []
        pages: list[tuple[int, int]] = []
        states: list[tuple[int, int]] = []
        self.pages.add_references(used)  # they may be cached only, and must not be taken here
        for length in lengths:
            self.pages.add_references(whole)
            taken = self._allocate_pages(self.memory.count_pages(length) - len(whole))
            sources = [*partial, *[EMPTY] * (len(taken) - len(partial))]
            pages += zip(sources, taken, strict=True)
            table = BlockTableRow([*whole, *taken], self.allocate_state(), self._shard)
            states.append((source.state if state is None else state, table.state))
            tables.append(table)
        self.pages.release(used)
        self._programs.copy(pages, states if self.memory.state_tokens else (), self._shard)
        return tables

    def share(self, source: BlockTableRow) -> BlockTableRow:
        """Return another table of the same pages and state, which is not written any more."""
        self.pages.add_references(source.pages)
        self.states.add_references([source.state])
        return BlockTableRow(list(source.pages), source.state, self._shard)

    def release(self, table: BlockTableRow) -> None:
        """Free what a table has, as far as it is not shared."""
        self.pages.release(table.pages)
        self.states.release([table.state])
        table.pages, table.state = [], EMPTY

    def allocate_state(self) -> int:
        """Return a state slot, which must fit; 0 for models without."""
        if not self.memory.state_tokens:
            return EMPTY
        self.prefixes.evict_until_free(0, 1)
        return self.states.allocate(1)[0]

    def copy_state(self, source: int) -> int:
        """Return a slot with a copy of a state. It must fit."""
        kept = self.allocate_state()
        self._programs.copy((), [(source, kept)], self._shard)
        return kept

    def _allocate_pages(self, count: int) -> list[int]:
        self.prefixes.evict_until_free(count, 0)
        return self.pages.allocate(count)


class PromptSource(NamedTuple):
    """The sampler that computed a prompt, and the scope within which it may be used."""

    sampler: SamplerId | None
    cache_scope: str = ""

    @classmethod
    def from_request(cls, request: SampleRequest) -> "PromptSource":
        """Return the source of a request's prompt."""
        return cls(request.sampler, request.cache_scope)


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A prompt, its pages and its state, and the hidden state of its last token."""

    tokens: Int32Array
    table: BlockTableRow
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
        return self._count_tokens(self._prompts.values())

    def _count_tokens(self, prompts: Collection[ComputedPrompt]) -> int:
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
        usable = {key: self._count_usable(prompt, tokens) for key, prompt in self._prompts.items() if key[0] == source}
        best = max(usable, key=usable.__getitem__, default=None)
        if best is None or usable[best] == 0:
            return None
        self._prompts.move_to_end(best)
        return self._prompts[best], usable[best]

    def find_divergence(self, source: PromptSource, tokens: Int32Array) -> int:
        """Return how many tokens, in whole chunks, a cached prompt begins with, whether or not it has a state there."""
        return max(
            (self._count_common(prompt, tokens) for key, prompt in self._prompts.items() if key[0] == source), default=0
        )

    def _count_usable(self, prompt: ComputedPrompt, tokens: Int32Array) -> int:
        """Return how many of the first tokens need not be computed."""
        common = self._count_common(prompt, tokens)
        if self._memory.state_tokens:
            return max((end for end in prompt.states if end <= common), default=0)
        return common

    def _count_common(self, prompt: ComputedPrompt, tokens: Int32Array) -> int:
        """Return the length of the common prefix in whole chunks, without the last of `tokens`."""
        size = min(prompt.tokens.size, tokens.size)
        unequal = np.flatnonzero(prompt.tokens[:size] != tokens[:size])
        common = int(unequal[0]) if unequal.size else size
        return self._shapes.count_full_chunk_tokens(min(common, tokens.size - 1))

    def add(self, source: PromptSource, prompt: ComputedPrompt) -> None:
        """Cache a prompt in place of those that it serves as well, its prefixes, and evict others until all fit."""
        if self._count_tokens([prompt]) > self._memory.prefix_tokens:
            return
        self._pages.add_references(prompt.table.pages)
        self._states.add_references(prompt.all_states)
        for key, other in list(self._prompts.items()):
            if key[0] == source and np.array_equal(other.tokens, prompt.tokens[: other.tokens.size]):
                self._remove(key)
        self._prompts[source, prompt.tokens.tobytes()] = prompt
        while self.num_tokens > self._memory.prefix_tokens:
            self._remove(next(iter(self._prompts)))

    def find_evictable_pages(self) -> set[int]:
        """Return the pages that evictions would free: those that no prompt or sample reads."""
        return _find_unshared(self._pages, (prompt.table.pages for prompt in self._prompts.values()))

    def find_evictable_states(self) -> set[int]:
        """Return the states that evictions would free."""
        return _find_unshared(self._states, (prompt.all_states for prompt in self._prompts.values()))

    def evict_until_free(self, num_pages: int, num_states: int) -> None:
        """Evict the least recently used of the prompts whose pages, or states, are wanted, until as many are free."""
        while self._pages.num_free < num_pages:
            spare = self.find_evictable_pages()
            self._remove(next(key for key, each in self._prompts.items() if not spare.isdisjoint(each.table.pages)))
        while self._states.num_free < num_states:
            spare = self.find_evictable_states()
            self._remove(next(key for key, each in self._prompts.items() if not spare.isdisjoint(each.all_states)))

    def drop(self, sampler: SamplerId | None) -> None:
        """Evict all prompts of a sampler."""
        for key in [key for key in self._prompts if key[0].sampler == sampler]:
            self._remove(key)

    def _remove(self, key: tuple[PromptSource, bytes]) -> None:
        prompt = self._prompts.pop(key)
        self._pages.release(prompt.table.pages)
        self._states.release(prompt.all_states)


def _find_unshared(free_list: FreeList, numbers: Iterable[Collection[int]]) -> set[int]:
    own = Counter(number for each in numbers for number in each)
    return {number for number, holders in own.items() if number and free_list.count_references(number) == holders}
