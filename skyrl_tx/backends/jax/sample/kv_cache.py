"""The host's view of the KV cache: which pages and states prompts, samples and cached prefixes use.

A prompt is written into pages, and its samples share these pages. Two things are copied for each
sample, because the sample writes to them: a partly filled last page, and the state of fixed size
(of linear attention). Pages are cleared when they are allocated. If pages or states run out, cached
prefixes are evicted.

The prefix cache remembers the pages of recent prompts, so that equal prefixes are computed once.
Prompts of different cache scopes never share pages, so neither a hit nor its latency reveals
anything about another scope.

A prompt that equals a cached prompt reuses all of it. Any other prompt reuses whole prefill chunks
only. The keys of a position therefore come from the same program whether they are cached or not,
which makes cache hits batch-invariant. A model with a state of fixed size also needs the state at
the end of the reused chunks. The cache keeps states at a few chunk ends only, which `Prefiller`
chooses.

Prompts with scores are cached with them, and only prompts that ask for the same kind of scores
reuse them (see `prompt_scores`).
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from skyrl_tx.backends.jax.sample.model_runner import ModelRunner
from skyrl_tx.backends.jax.sample.prompt_scores import ScoredChunk, ScoredChunks, ScoreKind
from skyrl_tx.backends.jax.sample.running_sample import BlockTableRow
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import SamplerId

EMPTY = 0
"""The page, and the state slot, that stays zero. It is copied over another one to clear it."""


class FreeList:
    """A pool of the numbers 1 to `size` - 1, with reference counts.

    Number 0, the empty page, is never allocated.
    """

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, 0, -1))
        self._references = [0] * size

    @property
    def num_free(self) -> int:
        """How many numbers have no holder."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """How many numbers have a holder."""
        return len(self._references) - 1 - len(self._free)

    def count_references(self, number: int) -> int:
        """Return how many holders a number has."""
        return self._references[number]

    def allocate(self, count: int) -> list[int]:
        """Return `count` free numbers, each with one holder. There must be enough."""
        assert count <= len(self._free), f"{count} of {len(self._free)} free ones"
        first = len(self._free) - count
        taken = self._free[first:][::-1]
        del self._free[first:]
        for number in taken:
            self._references[number] = 1
        return taken

    def add_references(self, numbers: Iterable[int]) -> None:
        """Add a holder to each number."""
        for number in numbers:
            self._references[number] += number > 0

    def release(self, numbers: Iterable[int]) -> None:
        """Remove a holder from each number. A number without a holder is free."""
        for number in numbers:
            if number > 0:
                assert self._references[number] > 0, f"{number} is free already"
                self._references[number] -= 1
                if not self._references[number]:
                    self._free.append(number)


class KVCache:
    """The pages and states of one shard. `ModelRunner` owns the arrays."""

    def __init__(self, programs: ModelRunner, memory: SampleMemory, shapes: PrefillShapes, shard: int = 0) -> None:
        """`memory` is the memory of this shard."""
        self._programs = programs
        self._shard = shard
        self.memory = memory
        self.pages = FreeList(memory.num_pages)
        self.states = FreeList(memory.num_states)
        self.prefixes = PrefixCache(self.pages, self.states, memory, shapes)

    @property
    def num_tokens(self) -> int:
        """The number of KV positions."""
        return (self.memory.num_pages - 1) * self.memory.page

    @property
    def num_tokens_used(self) -> int:
        """KV positions in pages of prompts and samples.

        Pages that only cached prefixes use count as free.
        """
        return (self.pages.num_used - len(self.prefixes.find_evictable_pages())) * self.memory.page

    def fits(self, num_pages: int, num_states: int = 0, *, keep: Collection[int] = ()) -> bool:
        """Return whether that many pages and states are free or held only by cached prefixes.

        Pages in `keep` do not count, as they must not be evicted.
        """
        if num_pages > self.pages.num_free:
            spare = self.prefixes.find_evictable_pages().difference(keep)
            if num_pages > self.pages.num_free + len(spare):
                return False
        has_states = self.memory.state_tokens == 0 or num_states <= self.states.num_free
        return has_states or num_states <= self.states.num_free + len(self.prefixes.find_evictable_states())

    def grow(self, missing: Sequence[tuple[BlockTableRow, int]]) -> None:
        """Add the given number of pages to each table. They must fit."""
        taken = self._allocate_pages(sum(num_pages for _, num_pages in missing))
        first = 0
        for table, num_pages in missing:
            table.pages += taken[first : first + num_pages]
            first += num_pages
        self._programs.copy([(EMPTY, page) for page in taken], (), self._shard)

    def allocate_table(self, num_tokens: int) -> BlockTableRow:
        """Return a table for a prompt that is not computed at all yet. It must fit."""
        return self.fork(BlockTableRow([], EMPTY, self._shard), 0, [num_tokens])[0]

    def fork(
        self, source: BlockTableRow, num_tokens: int, lengths: Sequence[int], state: int | None = None
    ) -> list[BlockTableRow]:
        """Return a table per length in `lengths`, each with the first `num_tokens` of `source`.

        Full pages are shared, and a partly filled page is copied. Each table gets a copy of the
        state in slot `state` (default: the state of `source`). The pages must fit.
        """
        used, num_whole = source.pages[: self.memory.count_pages(num_tokens)], num_tokens // self.memory.page
        whole, partial = used[:num_whole], used[num_whole:]
        tables: list[BlockTableRow] = []
        pages: list[tuple[int, int]] = []
        states: list[tuple[int, int]] = []
        self.pages.add_references(used)  # if only the prefix cache holds them, the allocations below could evict them

        # Share the full pages, copy the partly filled page, and clear the new pages.
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
        """Return another table with the same pages and state, which are not written any more."""
        self.pages.add_references(source.pages)
        self.states.add_references([source.state])
        return BlockTableRow(list(source.pages), source.state, self._shard)

    def release(self, table: BlockTableRow) -> None:
        """Release the pages and the state of a table. Those without another holder are then free."""
        self.pages.release(table.pages)
        self.states.release([table.state])
        table.pages, table.state = [], EMPTY

    def allocate_state(self) -> int:
        """Return a free state slot (0 for models without state). One must fit."""
        if not self.memory.state_tokens:
            return EMPTY
        self.prefixes.evict_until_free(0, 1)
        return self.states.allocate(1)[0]

    def copy_state(self, source: int) -> int:
        """Copy a state and return the slot of the copy. It must fit."""
        kept = self.allocate_state()
        self._programs.copy((), [(source, kept)], self._shard)
        return kept

    def _allocate_pages(self, count: int) -> list[int]:
        self.prefixes.evict_until_free(count, 0)
        return self.pages.allocate(count)


class PromptSource(NamedTuple):
    """The sampler that computed a prompt, the cache scope in which it may be reused, and its scores."""

    sampler: SamplerId | None
    cache_scope: str = ""
    scores: ScoreKind | None = None

    @classmethod
    def from_request(cls, request: SampleRequest) -> "PromptSource":
        """Return the source of a request's prompt."""
        return cls(request.sampler, request.cache_scope, ScoreKind.from_request(request))


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A computed prompt with its pages, its state, and the hidden state of its last token."""

    tokens: Int32Array
    table: BlockTableRow
    last_hidden: Any
    states: Mapping[int, int] = field(default_factory=dict[int, int])
    """The saved states, by the number of tokens that they include (always full chunks)."""
    scores: ScoredChunks = field(default_factory=dict[int, ScoredChunk])
    """The scores, if the prompt has any. Prompts with common chunks share their scores."""

    @property
    def all_states(self) -> set[int]:
        """The saved states and the last state."""
        return {self.table.state, *self.states.values()}


class PrefixCache:
    """Computed prompts by sampler and cache scope.

    The least recently used prompts are evicted first.

    The cache holds the pages and states of its prompts, even while samples read them.
    """

    def __init__(self, pages: FreeList, states: FreeList, memory: SampleMemory, shapes: PrefillShapes) -> None:
        self._pages = pages
        self._states = states
        self._memory = memory
        self._shapes = shapes
        self._prompts: OrderedDict[tuple[PromptSource, bytes], ComputedPrompt] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """The size of the cached prompts in KV positions.

        States count as the positions of the same number of bytes.
        """
        return self._count_tokens(self._prompts.values())

    def _count_tokens(self, prompts: Collection[ComputedPrompt]) -> int:
        """Return the size of prompts in KV positions. Pages and states that they share count once."""
        pages = {page for prompt in prompts for page in prompt.table.pages}
        states = {state for prompt in prompts for state in prompt.all_states} - {0}
        return len(pages) * self._memory.page + len(states) * self._memory.state_tokens

    def find(self, source: PromptSource, tokens: Int32Array) -> tuple[ComputedPrompt, int] | None:
        """Return the cached prompt with the longest usable prefix, and the prefix length in tokens."""
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
        """Return how many tokens, in full chunks, `tokens` has in common with a cached prompt.

        The cached prompt need not have a state there.
        """
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
        """Return the length of the common prefix in full chunks, without the last of `tokens`."""
        size = min(prompt.tokens.size, tokens.size)
        unequal = np.flatnonzero(prompt.tokens[:size] != tokens[:size])
        common = int(unequal[0]) if unequal.size else size
        return self._shapes.count_full_chunk_tokens(min(common, tokens.size - 1))

    def add(self, source: PromptSource, prompt: ComputedPrompt) -> None:
        """Cache a prompt.

        It replaces its own prefixes, and the least recently used prompts are evicted.

        A prompt that is larger than the whole prefix cache is not cached.
        """
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
        """Return the pages that evictions would free, because no prompt or sample uses them."""
        return _find_unshared(self._pages, (prompt.table.pages for prompt in self._prompts.values()))

    def find_evictable_states(self) -> set[int]:
        """Return the states that evictions would free."""
        return _find_unshared(self._states, (prompt.all_states for prompt in self._prompts.values()))

    def evict_until_free(self, num_pages: int, num_states: int) -> None:
        """Evict the least recently used prompts until enough pages and states are free."""
        while self._pages.num_free < num_pages:
            spare = self.find_evictable_pages()
            self._remove(next(key for key, prompt in self._prompts.items() if not spare.isdisjoint(prompt.table.pages)))
        while self._states.num_free < num_states:
            spare = self.find_evictable_states()
            self._remove(next(key for key, prompt in self._prompts.items() if not spare.isdisjoint(prompt.all_states)))

    def drop(self, sampler: SamplerId | None) -> None:
        """Evict all prompts of a sampler."""
        for key in [key for key in self._prompts if key[0].sampler == sampler]:
            self._remove(key)

    def _remove(self, key: tuple[PromptSource, bytes]) -> None:
        prompt = self._prompts.pop(key)
        self._pages.release(prompt.table.pages)
        self._states.release(prompt.all_states)


def _find_unshared(free_list: FreeList, numbers: Iterable[Collection[int]]) -> set[int]:
    own = Counter(number for group in numbers for number in group)
    return {number for number, holders in own.items() if number and free_list.count_references(number) == holders}
