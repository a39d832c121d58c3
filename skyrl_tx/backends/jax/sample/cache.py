"""The host's view of the cache: what prompts and samples have of it, and what is taken, shared, copied and freed.

A prompt writes into pages, and its samples begin with them. The last page, if it is partly filled, and the state are
copied for each sample, which writes to them. What is taken is cleared. Cached prefixes give way to prompts and samples.
"""

from collections.abc import Collection, Sequence

from skyrl_tx.backends.jax.sample.jax_programs import JaxPrograms
from skyrl_tx.backends.jax.sample.pages import FreeList, KVTable
from skyrl_tx.backends.jax.sample.prefix_cache import PrefixCache
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory

EMPTY = 0
"""The page, and the state, that is copied to clear another."""


class KVCache:
    """The pages and states of prompts, samples and cached prefixes, of one shard. The arrays belong to the programs."""

    def __init__(self, programs: JaxPrograms, memory: SampleMemory, shapes: PrefillShapes, shard: int = 0) -> None:
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
        return (self.pages.num_held - len(self.prefixes.spare_pages())) * self.memory.page

    def fits(self, num_pages: int, num_states: int = 0, *, keep: Collection[int] = ()) -> bool:
        """Return whether so much is free, or would be without cached prefixes, of which the pages in `keep` stay."""
        if num_pages > self.pages.num_free:
            spare = self.prefixes.spare_pages().difference(keep)
            if num_pages > self.pages.num_free + len(spare):
                return False
        has_states = self.memory.state_tokens == 0 or num_states <= self.states.num_free
        return has_states or num_states <= self.states.num_free + len(self.prefixes.spare_states())

    def grow(self, missing: Sequence[tuple[KVTable, int]]) -> None:
        """Take pages for tables, each with the number that it lacks. They must fit."""
        taken = self._take_pages(sum(num_pages for _, num_pages in missing))
        first = 0
        for table, num_pages in missing:
            table.pages += taken[first : first + num_pages]
            first += num_pages
        self._programs.copy([(EMPTY, page) for page in taken], (), self._shard)

    def begin(self, num_tokens: int) -> KVTable:
        """Return a table for a prompt of which nothing is computed. It must fit."""
        return self.fork(KVTable([], EMPTY, self._shard), 0, [num_tokens])[0]

    def fork(self, source: KVTable, num_tokens: int, lengths: Sequence[int], state: int | None = None) -> list[KVTable]:
        """Return tables that go on after the first `num_tokens` of another, with pages for `lengths`. They must fit.

        Their state is a copy of the source's, or of `state`.
        """
        used, num_whole = source.pages[: self.memory.pages_for(num_tokens)], num_tokens // self.memory.page
        whole, partial = used[:num_whole], used[num_whole:]
        tables: list[KVTable] = []
        pages: list[tuple[int, int]] = []
        states: list[tuple[int, int]] = []
        self.pages.hold(used)  # they may be cached only, and must not be taken here
        for length in lengths:
            self.pages.hold(whole)
            taken = self._take_pages(self.memory.pages_for(length) - len(whole))
            sources = [*partial, *[EMPTY] * (len(taken) - len(partial))]
            pages += zip(sources, taken, strict=True)
            table = KVTable([*whole, *taken], self.take_state(), self._shard)
            states.append((source.state if state is None else state, table.state))
            tables.append(table)
        self.pages.release(used)
        self._programs.copy(pages, states if self.memory.state_tokens else (), self._shard)
        return tables

    def share(self, source: KVTable) -> KVTable:
        """Return another table of the same pages and state, which is not written any more."""
        self.pages.hold(source.pages)
        self.states.hold([source.state])
        return KVTable(list(source.pages), source.state, self._shard)

    def release(self, table: KVTable) -> None:
        """Free what a table has, as far as it is not shared."""
        self.pages.release(table.pages)
        self.states.release([table.state])
        table.pages, table.state = [], EMPTY

    def take_state(self) -> int:
        """Return a state slot, which must fit; 0 for models without."""
        if not self.memory.state_tokens:
            return EMPTY
        self.prefixes.make_free(0, 1)
        return self.states.take(1)[0]

    def copy_state(self, source: int) -> int:
        """Return a slot with a copy of a state. It must fit."""
        kept = self.take_state()
        self._programs.copy((), [(source, kept)], self._shard)
        return kept

    def _take_pages(self, count: int) -> list[int]:
        self.prefixes.make_free(count, 0)
        return self.pages.take(count)
