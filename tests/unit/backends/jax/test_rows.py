"""A slice has the fewest rows that hold its samples, and only row counts at which rows keep their bits."""

import numpy as np
import pytest

from skyrl_tx.backends.jax.sample.rows import RowCounts, Rows
from skyrl_tx.backends.jax.sample.running import RunningSample
from tests.support.sample_requests import ask, prompt_of


def samples(**adapters: int) -> dict[int, RunningSample]:
    """Return samples by slot, given as `s3=1`: adapter 1 in slot 3."""
    request = ask("a", prompt_of(4))
    return {
        int(slot[1:]): RunningSample(request=request, index=0, stops=frozenset(), adapter=adapter)
        for slot, adapter in adapters.items()
    }


def equal_bits(count: int, any_adapter: bool) -> np.ndarray:
    return np.arange(count)


@pytest.mark.parametrize(
    ("num_slots", "counts"), [(1, [8]), (8, [8]), (9, [2, 8, 16]), (32, [2, 8, 16, 32]), (40, [2, 8, 16, 32, 64])]
)
def test_row_counts_reach_the_number_of_slots(num_slots, counts):
    assert RowCounts(num_slots, equal_bits).all == counts


def test_the_least_count_that_holds_the_samples_is_used():
    counts = RowCounts(32, equal_bits)
    found = {num: counts.least(num, any_adapter=False) for num in (1, 2, 3, 8, 9, 17, 32)}
    assert found == {1: 2, 2: 2, 3: 8, 8: 8, 9: 16, 17: 32, 32: 32}


def test_a_count_with_other_bits_is_not_used_and_each_is_tried_once(caplog):
    tried = list[tuple[int, bool]]()

    def bits(count: int, any_adapter: bool) -> list[np.ndarray]:
        tried.append((count, any_adapter))
        return [np.arange(count), np.zeros(count) + (count == 8 and any_adapter)]

    counts = RowCounts(16, bits)
    assert [counts.least(5, any_adapter=True) for _ in range(3)] == [16] * 3
    assert counts.least(5, any_adapter=False) == 8
    assert tried == [(8, True), (16, True), (8, False), (16, False)]
    assert "never computes 8 rows" in caplog.text


def test_tiles_share_an_adapter_if_there_are_rows_enough():
    live = samples(s3=2, s5=1, s6=2)
    rows = Rows.arrange(live, 8)
    assert rows.slots == (5, None, None, None, 3, 6, None, None) and rows.adapters == (1, 2)
    assert {row: sample.adapter for row, sample in rows.by_row(live).items()} == {0: 1, 4: 2, 5: 2}
    assert rows.index(9).tolist() == [5, 9, 9, 9, 3, 6, 9, 9]
    assert rows.of_slots(9)[[3, 5, 6]].tolist() == [4, 0, 5]


def test_rows_have_adapters_of_their_own_otherwise():
    rows = Rows.arrange(samples(s0=1, s1=2, s2=3), 8)
    assert rows.slots == (0, 1, 2, *[None] * 5) and rows.adapters == (1, 2, 3, *[0] * 5)
