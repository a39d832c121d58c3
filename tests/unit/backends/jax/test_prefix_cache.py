"""Hits and evictions of the prefix cache."""

import numpy as np

from skyrl_tx.backends.jax.sample.kv_cache import ComputedPrompt, FreeList, PrefixCache, PromptSource
from skyrl_tx.backends.jax.sample.running_sample import BlockTableRow
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory
from skyrl_tx.contract.ids import SamplerId

RED, BLUE, BASE = PromptSource(SamplerId("red")), PromptSource(SamplerId("blue")), PromptSource(None)
SHAPES = PrefillShapes(chunk_size=4)
PAGE = 8


class Cache(PrefixCache):
    """A prefix cache with pages and states for all prompts of a test. No sample reads it."""

    def __init__(self, max_tokens: int, *, state_tokens: int = 0) -> None:
        self.pages, self.states = FreeList(100), FreeList(100)
        memory = SampleMemory(1, 0, max_tokens, 0, state_tokens=state_tokens, page=PAGE)
        super().__init__(self.pages, self.states, memory, SHAPES)
        self._has_state = state_tokens > 0

    def prompt(self, *tokens: int, pages: int = 1, states: dict[int, int] | None = None) -> ComputedPrompt:
        """Return a prompt whose pages, state and kept states only the cache will reference."""
        table = BlockTableRow(self.pages.allocate(pages), self.state() if self._has_state else 0)
        return ComputedPrompt(np.array(tokens, np.int32), table, None, states or {})

    def state(self) -> int:
        return self.states.allocate(1)[0]

    def put(self, source: PromptSource, prompt: ComputedPrompt) -> ComputedPrompt:
        """Cache a prompt whose computation has ended."""
        self.add(source, prompt)
        self.pages.release(prompt.table.pages)
        self.states.release(prompt.all_states)
        return prompt


def ask(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_a_hit_uses_whole_chunks_of_another_prompt_or_all_of_an_equal_prompt():
    cache = Cache(64)
    kept = cache.put(RED, cache.prompt(1, 2, 3, 4, 5, 6, 7, 8, 9, pages=2))
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8, 9)) == (kept, 9)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 0)) == (kept, 4)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8, 0)) == (kept, 8)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8)) == (kept, 4), "its last token has to be computed"
    assert cache.find(RED, ask(1, 2, 3, 0, 5)) is None
    assert cache.find(RED, ask(7)) is None
    assert cache.find(BLUE, kept.tokens) is None and cache.find(BASE, kept.tokens) is None


def test_the_longest_prefix_is_used():
    cache = Cache(64)
    cache.put(BASE, cache.prompt(1, 1, 1, 1, 2, 2))
    second = cache.put(BASE, cache.prompt(1, 1, 1, 1, 3, 3, 3, 3))
    assert cache.find(BASE, ask(1, 1, 1, 1, 3, 3, 3, 3, 3)) == (second, 8)


def test_the_least_recently_used_prompt_is_evicted_at_the_limit():
    cache = Cache(16)
    first, second = (cache.put(source, cache.prompt(n, 1, 1, 1, 1)) for n, source in enumerate((RED, BLUE)))
    assert cache.find(RED, first.tokens)
    cache.put(RED, cache.prompt(2, 1, 1, 1, 1))
    assert cache.num_tokens == 16
    assert cache.find(BLUE, second.tokens) is None and cache.find(RED, first.tokens)
    cache.put(RED, cache.prompt(*range(20), pages=3))
    assert cache.num_tokens == 16, "a prompt that can never fit evicts no other"
    assert cache.pages.num_used == 2


def test_a_prompt_replaces_its_own_prefixes():
    cache = Cache(64)
    first, _, last = (cache.put(RED, cache.prompt(*range(1, end))) for end in (6, 8, 9))
    cache.put(BLUE, cache.prompt(*first.tokens))
    assert cache.num_tokens == 16
    assert cache.find(RED, ask(1, 2, 3, 4, 5)) == (last, 4)


def test_scopes_do_not_meet():
    cache, ann, bob = Cache(64), RED._replace(cache_scope="ann"), RED._replace(cache_scope="bob")
    cache.put(ann, cache.prompt(1, 2, 3, 4, 5))
    for source in (bob, RED):
        assert cache.find(source, ask(1, 2, 3, 4, 5)) is None and cache.find(source, ask(1, 2, 3, 4, 6)) is None
    cache.put(bob, cache.prompt(1, 2, 3, 4, 5, 6))
    assert cache.find(ann, ask(1, 2, 3, 4, 5)) is not None, "a longer prompt of another scope does not replace it"
    cache.drop(RED.sampler)
    assert cache.num_tokens == cache.pages.num_used == 0


def test_dropping_a_sampler_evicts_its_prompts():
    cache = Cache(64)
    for source in (RED, BLUE, BASE):
        cache.put(source, cache.prompt(1, 2, 3, 4, 5))
    cache.drop(RED.sampler)
    assert cache.num_tokens == 16 and cache.find(RED, ask(1, 2, 3, 4, 5)) is None
    assert cache.pages.num_used == 2


def test_a_cache_of_size_zero_stores_nothing():
    cache = Cache(0)
    cache.put(BASE, cache.prompt(1, 2, 3, 4, 5))
    assert cache.find(BASE, ask(1, 2, 3, 4, 5)) is None and cache.pages.num_used == 0


def test_common_pages_count_once():
    cache = Cache(64)
    first = cache.put(RED, cache.prompt(*[1] * 8, 2, pages=2))
    second = cache.prompt(*[1] * 8, 3)
    second.table.pages.insert(0, first.table.pages[0])
    cache.pages.add_references(first.table.pages[:1])
    cache.put(RED, second)
    assert cache.num_tokens == 24 and cache.pages.num_used == 3


def test_pages_that_a_sample_reads_are_not_evicted_for_others():
    cache = Cache(64)
    read, least, other = (cache.put(RED, cache.prompt(n, 1, 1, 1, 1, pages=2)) for n in range(3))
    cache.pages.add_references(read.table.pages)
    assert cache.find_evictable_pages() == {*least.table.pages, *other.table.pages}
    cache.evict_until_free(cache.pages.num_free + 1, 0)
    assert cache.find(RED, least.tokens) is None
    assert cache.find(RED, read.tokens) and cache.find(RED, other.tokens)
    cache.pages.release(read.table.pages)
    cache.evict_until_free(99, 0)
    assert cache.num_tokens == 0


def test_a_page_of_two_cached_prompts_is_free_when_both_are_evicted():
    cache = Cache(64)
    first = cache.put(RED, cache.prompt(*[1] * 8, 2, pages=2))
    second = cache.prompt(*[1] * 8, 3)
    second.table.pages.insert(0, first.table.pages[0])
    cache.pages.add_references(first.table.pages[:1])
    cache.put(RED, second)
    cache.evict_until_free(97, 0)
    assert cache.num_tokens == 16 and cache.find(RED, second.tokens)
    cache.evict_until_free(98, 0)
    assert cache.num_tokens == 0


def test_with_state_a_hit_ends_where_a_state_is_kept():
    cache = Cache(64, state_tokens=10)
    kept = cache.put(RED, cache.prompt(1, 2, 3, 4, 5, 6, 7, 8, 9, pages=2, states={8: cache.state()}))
    assert cache.find(RED, kept.tokens) == (kept, 9)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8, 0)) == (kept, 8)
    other = ask(1, 2, 3, 4, 5, 6, 7, 0)
    assert cache.find(RED, other) is None and cache.find_divergence(RED, other) == 4
    assert cache.find(BLUE, ask(1, 2, 3, 4, 5, 6, 7, 8, 0)) is None and cache.find_divergence(BLUE, other) == 0


def test_with_state_the_longest_kept_prefix_is_used():
    cache = Cache(64, state_tokens=1)
    first = cache.put(BASE, cache.prompt(1, 1, 1, 1, 2, 2, 2, 2, 2, states={4: cache.state()}))
    cache.put(BASE, cache.prompt(1, 1, 1, 1, 2, 2, 2, 2, 3))
    assert cache.find(BASE, ask(1, 1, 1, 1, 2, 2, 2, 2, 4)) == (first, 4)
    assert cache.find_divergence(BASE, ask(1, 1, 1, 1, 2, 2, 2, 2, 4)) == 8


def test_states_count_at_their_size_and_leave_with_their_prompts():
    cache = Cache(64, state_tokens=10)
    state = cache.state()
    cache.put(RED, cache.prompt(1, 1, 1, 1, 2, states={4: state}))
    assert cache.num_tokens == 28, "a page with its own state, and one more"

    cache.states.add_references([state])
    cache.put(RED, cache.prompt(1, 1, 1, 1, 3, states={4: state}))
    assert cache.num_tokens == 46, "the state is the same for both"

    cache.put(RED, cache.prompt(2, 1, 1, 1, 3, states={4: cache.state()}))
    assert cache.num_tokens == 56 and cache.states.num_used == 4
    assert cache.find(RED, ask(2, 1, 1, 1, 2)) is not None and cache.find(RED, ask(1, 1, 1, 1, 2)) is not None

    cache.put(BLUE, cache.prompt(1, 1, 1, 1, 2, states={4: cache.state()}))
    assert cache.num_tokens == 56 and cache.find(RED, ask(2, 1, 1, 1, 2)) is None

    cache.put(RED, cache.prompt(3, 1, 1, 1, 3, pages=7))
    assert cache.num_tokens == 56 and cache.find(RED, ask(3, 1, 1, 1, 3)) is None, "too large with its state"
    assert cache.find_evictable_states() and cache.states.num_used == 4

    cache.evict_until_free(0, 96)
    assert cache.states.num_used == 2 and cache.num_tokens == 28


def test_with_state_a_prompt_replaces_its_own_prefixes():
    cache = Cache(64, state_tokens=1)
    _, last = (cache.put(RED, cache.prompt(1, 2, 3, 4, *range(end))) for end in (2, 4))
    assert cache.num_tokens == 9 and cache.find(RED, last.tokens) == (last, 8)
