"""Block tables of the KV cache, without a device: free pages and states, references and copies."""

import pytest

from skyrl_tx.backends.jax.sample.kv_cache import FreeList, KVCache
from skyrl_tx.backends.jax.sample.prefill import PrefillQueue
from skyrl_tx.backends.jax.sample.running_sample import BlockTableRow, RunningSample
from skyrl_tx.backends.jax.sample.shard import SampleShard
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory
from tests.support.fake_model_runner import FakeModelRunner
from tests.support.sample_requests import make_prompt, make_request

MEMORY = SampleMemory(num_slots=2, tokens=40, prefix_tokens=0, max_length=40, state_tokens=5, page=8)
"""There are seven pages and six states, not counting the empty ones."""


@pytest.fixture
def programs() -> FakeModelRunner:
    return FakeModelRunner()


@pytest.fixture
def cache(programs: FakeModelRunner) -> KVCache:
    programs.allocate_cache(MEMORY)
    return KVCache(programs, MEMORY, PrefillShapes(8))


def test_a_number_is_free_when_all_its_holders_have_released_it():
    numbers = FreeList(4)
    first, second = numbers.allocate(2)
    assert {first, second} < {1, 2, 3} and (numbers.num_free, numbers.num_used) == (1, 2)
    numbers.add_references([first])
    numbers.release([first, second])
    assert (numbers.num_free, numbers.count_references(first), numbers.count_references(second)) == (2, 1, 0)
    numbers.release([first])
    assert numbers.num_free == 3 and sorted(numbers.allocate(3)) == [1, 2, 3]
    with pytest.raises(AssertionError, match="1 of 0 free"):
        numbers.allocate(1)


def test_number_zero_has_no_holders_and_what_is_free_is_not_released():
    numbers = FreeList(3)
    numbers.add_references([0])
    numbers.release([0, 0])
    assert numbers.count_references(0) == 0 and numbers.num_free == 2
    with pytest.raises(AssertionError, match="1 is free already"):
        numbers.release([1])


def test_what_a_prompt_takes_is_cleared(cache, programs):
    table = cache.allocate_table(17)
    assert len(table.pages) == 3 and table.state > 0
    assert programs.copied == [(0, page) for page in table.pages]
    cache.release(table)
    assert (cache.pages.num_used, cache.states.num_used) == (0, 0) and not table.pages


def test_samples_share_full_pages_and_have_copies_of_the_last(cache, programs):
    prompt = cache.allocate_table(17)
    programs.copied.clear()
    first, second = cache.fork(prompt, 17, [18, 25])
    assert first.pages[:2] == second.pages[:2] == prompt.pages[:2]
    last = prompt.pages[2]
    assert programs.copied == [(last, first.pages[2]), (last, second.pages[2]), (0, second.pages[3])]
    assert len({prompt.state, first.state, second.state}) == 3
    assert cache.pages.num_used == 6
    cache.release(prompt)
    assert cache.pages.num_used == 5, "its last page"
    cache.release(first)
    cache.release(second)
    assert (cache.pages.num_used, cache.states.num_used) == (0, 0)


def test_a_full_last_page_is_not_copied(cache, programs):
    prompt = cache.allocate_table(16)
    programs.copied.clear()
    (sample,) = cache.fork(prompt, 16, [20])
    assert sample.pages[:2] == prompt.pages and programs.copied == [(0, sample.pages[2])]


def test_a_fork_within_a_prompt_has_the_pages_before_it(cache, programs):
    prompt, kept = cache.allocate_table(40), cache.allocate_state()
    programs.copied.clear()
    (longer,) = cache.fork(prompt, 12, [20], kept)
    assert longer.pages[0] == prompt.pages[0] and longer.pages[1] not in prompt.pages
    assert programs.copied == [(prompt.pages[1], longer.pages[1]), (0, longer.pages[2])]


def test_a_table_grows_by_what_it_lacks(cache, programs):
    table = cache.allocate_table(8)
    programs.copied.clear()
    cache.grow([(table, 0), (table, 2)])
    assert len(table.pages) == 3 and programs.copied == [(0, page) for page in table.pages[1:]]


def test_a_running_sample_lacks_the_pages_of_its_next_slice_up_to_its_end(programs):
    queues = PrefillQueue(), PrefillQueue()
    shard = SampleShard(0, programs, MEMORY, PrefillShapes(8), 1, *queues)
    programs.allocate_cache(MEMORY)
    sample = RunningSample(
        request=make_request("s", make_prompt(4), max_tokens=34), index=0, adapter=0, stops=frozenset()
    )
    sample.table = shard.cache.allocate_table(8)
    shard.running[sample.key] = sample

    def missing(num_tokens: int) -> list[tuple[BlockTableRow, int]]:
        sample.position = num_tokens - 1
        return shard._find_missing_pages()

    assert sample.end == 37 and [missing(size) for size in (5, 8)] == [[], []]
    assert [missing(size) for size in (9, 16, 33)] == [[(sample.table, number)] for number in (1, 1, 4)]
    assert shard._find_missing_pages(num_slices=20) == [(sample.table, 4)], "it ends within the fifth page"
    shard.take_pages_for_next_slice()
    assert len(sample.table.pages) == 5 and shard._find_missing_pages(num_slices=20) == []


def test_a_shared_table_is_free_when_both_are_released(cache):
    prompt = cache.allocate_table(17)
    other = cache.share(prompt)
    cache.release(prompt)
    assert cache.pages.num_used == 3 and cache.states.num_used == 1
    cache.release(other)
    assert cache.pages.num_used == cache.states.num_used == 0


def test_what_fits_is_free(cache):
    assert cache.fits(7, 6) and not cache.fits(8) and not cache.fits(0, 7)
    table = cache.allocate_table(30)
    assert cache.fits(3, 5) and not cache.fits(4) and not cache.fits(0, 6)
    assert cache.num_tokens == 56 and cache.num_tokens_used == 32
    cache.release(table)
    assert cache.fits(7, 6)


def test_a_model_without_state_takes_none(programs):
    memory = SampleMemory(2, 40, 0, 40, page=8)
    programs.allocate_cache(memory)
    cache = KVCache(programs, memory, PrefillShapes(8))
    table = cache.allocate_table(8)
    assert table.state == 0 and cache.states.num_used == 0 and cache.fits(0, 100)
    assert cache.fork(table, 8, [9])[0].state == 0
    assert cache.share(BlockTableRow([], 0)).state == 0


def test_the_memory_has_pages_for_all_tokens_and_a_partly_filled_one_for_each_sample():
    assert MEMORY.num_pages == 1 + 5 + 2 and MEMORY.num_states == 1 + 2 + 4
    assert MEMORY.count_pages(8) == 1 and MEMORY.count_pages(9) == 2 and MEMORY.count_pages(0) == 0
    sharded = SampleMemory(6, 80, 64, 40, page=8, shards=4)
    assert sharded.per_shard == SampleMemory(2, 40, 16, 40, page=8), "with room for the longest sample"
    assert sharded.num_rows == 8 and sharded.num_pages == 4 * (1 + 5 + 2 + 2) and sharded.num_states == 4 * (1 + 2 + 4)
    with_prefixes = SampleMemory(2, 40, 80, 40, state_tokens=5, page=8)
    assert with_prefixes.num_states == 1 + 2 + 4 + 12 and with_prefixes.num_pages == 1 + 2 + 5 + 3
