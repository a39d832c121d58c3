"""A slice has the fewest rows that hold its samples, at row counts that keep the bits of rows."""

from collections.abc import Sequence

import numpy as np
import pytest

from skyrl_tx.backends.jax.sample.running_sample import RunningSample
from skyrl_tx.backends.jax.sample.slice_rows import RowCounts, SliceRows
from tests.support.sample_requests import make_prompt, make_request


def samples(*adapters: int, sizes: Sequence[int] = (4,)) -> list[RunningSample]:
    """Return samples with these adapters, at these positions."""
    found = list[RunningSample]()
    for index, adapter in enumerate(adapters):
        request = make_request("a", make_prompt(sizes[index % len(sizes)]))
        found.append(RunningSample(request=request, index=index, stops=frozenset(), adapter=adapter))
    return found


def equal_bits(count: int, any_adapter: bool, is_adjusted: bool) -> np.ndarray:
    return np.arange(count)


@pytest.mark.parametrize(
    ("num_slots", "counts"), [(1, [8]), (8, [8]), (9, [2, 8, 16]), (32, [2, 8, 16, 32]), (40, [2, 8, 16, 32, 64])]
)
def test_row_counts_reach_the_number_of_slots(num_slots, counts):
    assert RowCounts.for_single_cpu(num_slots, equal_bits).all == counts


@pytest.mark.parametrize(
    ("num_slots", "num_shards", "counts"),
    [(8, 1, [8]), (32, 1, [16, 32]), (256, 1, [16, 64, 256]), (256, 32, [64, 256]), (100, 4, [16, 64, 100])],
)
def test_there_are_few_row_counts_on_accelerators(num_slots, num_shards, counts):
    found = RowCounts.for_accelerators(num_slots, num_shards)
    assert found.all == counts
    assert [found.choose(number, rank=8) for number in counts] == counts
    copies = RowCounts.for_accelerators(8 * num_slots, 8 * num_shards, 8)
    assert copies.all == [8 * count for count in counts], "each copy of the weights has as many rows"


def test_the_least_count_that_holds_the_samples_is_used():
    counts = RowCounts.for_single_cpu(32, equal_bits)
    found = {num: counts.choose(num, rank=0) for num in (1, 2, 3, 8, 9, 17, 32)}
    assert found == {1: 2, 2: 2, 3: 8, 8: 8, 9: 16, 17: 32, 32: 32}


def test_a_count_with_other_bits_is_not_used_and_each_is_tried_once(caplog):
    tried = list[tuple[int, int]]()

    def bits(count: int, rank: int, is_adjusted: bool) -> list[np.ndarray]:
        tried.append((count, rank))
        return [np.arange(count), np.zeros(count) + (count == 8 and rank > 0)]

    counts = RowCounts.for_single_cpu(16, bits)
    assert [counts.choose(5, rank=8) for _ in range(3)] == [16] * 3
    assert counts.choose(5, rank=0) == 8
    assert tried == [(8, 8), (16, 8), (8, 0), (16, 0)]
    assert "decode slices of 8 rows are disabled" in caplog.text


def test_a_count_knows_whether_it_was_compared():
    counts = RowCounts.for_single_cpu(16, lambda count, *_: np.zeros(count))
    assert counts.is_compared(16, 0) and not counts.is_compared(2, 0)
    assert counts.is_used(2, 0)
    assert counts.is_compared(2, 0)
    assert not counts.is_compared(2, 8) and not counts.is_compared(2, 0, True)


def test_tiles_share_an_adapter_if_there_are_rows_enough():
    first, second, third = samples(2, 1, 2)
    rows = SliceRows.arrange([first, second, third], 8, merges=False)
    assert rows.samples == (second, None, None, None, first, third, None, None) and rows.adapters == (1, 2)
    assert rows.get_samples_by_row() == {0: second, 4: first, 5: third} and rows.any_adapter
    assert not SliceRows.arrange(samples(0, 0), 8, merges=False).any_adapter


def test_merged_rows_have_the_adapters_in_use():
    running = samples(2, 2)
    rows = SliceRows.arrange(running, 8, merges=True)
    assert rows.samples == (*running, *[None] * 6) and rows.adapters == (2,) and rows.any_adapter
    assert rows.groups is None
    mixed = samples(2, 0, 1, 2)
    rows = SliceRows.arrange(mixed, 8, merges=True)
    assert rows.samples == (*mixed, *[None] * 4), "rows need no order"
    assert rows.adapters == (0, 1, 2, 0) and rows.groups == (2, 0, 1, 2, 0, 0, 0, 0)
    assert SliceRows.arrange(mixed, 8, merges=True, max_adapters=3).adapters == (0, 1, 2)
    assert len(SliceRows.arrange(samples(*range(5)), 64, merges=True).adapters) == 16


@pytest.mark.parametrize("merges", [True, False])
def test_every_shape_of_rows_is_known_before(merges):
    settings = {"merges": merges, "max_adapters": 9}
    known = {shape(rows) for adapter in (0, 1) for rows in SliceRows.iter_shapes(16, adapter, **settings)}
    found = {shape(SliceRows.arrange(samples(*adapters), 16, **settings)) for adapters in ([0] * 4, [1] * 4)}
    for number in range(1, 10):
        for mixed in (samples(*range(number)), samples(*range(number), *[0] * 7)):
            found.add(shape(SliceRows.arrange(mixed, 16, **settings)))
    assert found == known


def shape(rows: SliceRows) -> tuple[int, bool, bool]:
    return len(rows.adapters), rows.groups is not None, rows.any_adapter


def test_rows_have_adapters_of_their_own_otherwise():
    running = samples(1, 2, 3)
    rows = SliceRows.arrange(running, 8, merges=False)
    assert rows.samples == (*running, *[None] * 5) and rows.adapters == (1, 2, 3, *[0] * 5)


def test_the_rows_of_each_shard_have_its_samples():
    mixed = samples(2, 1, 1, 2, 1, 1)
    for sample, shard in zip(mixed, (0, 0, 1, 1, 1, 0), strict=True):
        sample.table.shard = shard
    in_tiles = SliceRows.arrange(mixed, 16, merges=False, num_shards=2)

    assert [sample and sample.index for sample in in_tiles.samples] == [
        1,
        5,
        None,
        None,
        0,
        *[None] * 3,
        2,
        4,
        None,
        None,
        3,
        *[None] * 3,
    ]
    assert in_tiles.adapters == (1, 2, 1, 2)

    in_rows = SliceRows.arrange(mixed, 6, merges=False, num_shards=2)
    assert [sample and sample.index for sample in in_rows.samples] == [1, 5, 0, 2, 4, 3]
    assert in_rows.adapters == (1, 1, 2, 1, 1, 2)

    merged = SliceRows.arrange(mixed, 8, merges=True, num_shards=2)
    assert [sample and sample.index for sample in merged.samples] == [1, 5, 0, None, 2, 4, 3, None]
    assert merged.adapters == (1, 2, 0, 0) and merged.groups == (0, 0, 1, 0, 0, 0, 1, 0)

    same = SliceRows.arrange(samples(3, 3), 8, merges=True, num_shards=2)
    assert same.adapters == (3,) and [sample and sample.index for sample in same.samples] == [0, 1, *[None] * 6]
