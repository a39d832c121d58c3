"""Plans: every example once, few shapes, little padding, and nothing but the request's own lengths decides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.backends.jax import packing
from skyrl_tx.backends.jax.buckets import bucket, next_power
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.losses import LossOutput, Mean

BUDGET = 1024


def example(length: int, num_targets: int | None = None, *, start: int = 1) -> PassExample:
    shape = (length,) if num_targets is None else (length, num_targets)
    count = int(np.prod(shape))
    return PassExample(
        request_id=RequestId("r"),
        model_id=ModelId("m"),
        tokens=np.arange(start, start + length, dtype=np.int32),
        loss="cross_entropy",
        loss_inputs={
            "target_tokens": np.arange(count, dtype=np.int32).reshape(shape),
            "weights": np.full(shape, 0.5, np.float32),
        },
        loss_config={},
    )


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 32), (32, 32), (33, 48), (48, 48), (49, 64), (65, 96), (97, 128), (1500, 1536)]
)
def test_lengths_are_powers_of_two_and_midpoints(size, expected):
    assert bucket(size, 32) == expected


def test_powers():
    assert [next_power(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 32), (49, 64), (65, 96), (128, 128), (129, 160), (161, 192), (256, 256), (257, 320), (700, 768), (1025, 1280)],
)
def test_rows_have_four_lengths_an_octave_from_128_on(size, expected):
    assert packing.row_length(size) == expected


@given(st.integers(1, 100_000))
def test_a_row_is_a_quarter_longer_than_need_be_at_most(size):
    length = packing.row_length(size)
    assert size <= length == packing.row_length(length)
    assert length <= 1.25 * size + 1 or length <= 128


def test_rows_are_all_that_fit_or_a_power_of_two():
    assert packing.row_counts(320, 2048) == [6, 4, 2, 1]
    assert packing.row_counts(256, 2048) == [8, 4, 2, 1]
    assert packing.row_counts(4096, 2048) == [1]


@given(st.lists(st.tuples(st.integers(1, 1500), st.sampled_from([None, 1, 2, 3])), min_size=1, max_size=40))
def test_a_plan_holds_every_example_once_within_bounds(sizes):
    examples = [example(length, num_targets) for length, num_targets in sizes]
    slabs = packing.plan(examples, BUDGET)
    assert sorted(index for slab in slabs for index in slab.rows) == list(range(len(examples)))
    for slab in slabs:
        lengths = [examples[index].tokens.size for index in slab.rows]
        assert max(lengths) <= slab.length == packing.row_length(max(lengths))
        assert all(2 * packing.row_length(length) >= slab.length for length in lengths)
        assert slab.num_rows in packing.row_counts(slab.length, BUDGET)
        assert slab.num_rows < 2 * len(slab.rows)
        assert slab.num_rows == 1 or slab.num_rows * slab.length <= BUDGET


def test_equal_lengths_fill_the_budget():
    slabs = packing.plan([example(100) for _ in range(20)], BUDGET)
    assert [(slab.num_rows, slab.length, len(slab.rows)) for slab in slabs] == [(8, 128, 8), (8, 128, 8), (4, 128, 4)]


def test_padding_is_weightless():
    examples = [example(40), example(33), example(35)]
    [slab] = packing.plan(examples, BUDGET)
    batch = packing.fill(slab, examples)
    assert batch.tokens_BT.shape == batch.targets.shape == (4, 48)
    assert slab.rows == (0, 2, 1)
    np.testing.assert_array_equal(batch.tokens_BT[1, :35], examples[2].tokens)
    assert batch.inputs["weights"].sum() == 0.5 * (40 + 33 + 35)
    assert not batch.tokens_BT[1, 35:].any() and not batch.inputs["weights"][3].any()
    assert not batch.inputs["advantages"].any()


@pytest.mark.parametrize("num_targets", [None, 1, 3])
def test_results_come_back_in_the_shape_of_the_targets(num_targets):
    examples = [example(5, num_targets), example(9, num_targets)]
    [slab] = packing.plan(examples, BUDGET)
    batch = packing.fill(slab, examples)
    unrelated = Mean(total_B=np.array([1.0, 2.0]), count_B=np.array([3.0, 4.0]))
    output = LossOutput(loss_B=np.array([7.0, 8.0]), means={"ratio": unrelated})
    results = dict(packing.read_results(slab, examples, batch.targets.astype(np.float32), output))
    for index, one in enumerate(examples):
        np.testing.assert_array_equal(results[index].logprobs, one.loss_inputs["target_tokens"])
    assert results[1].sums == {"loss": 7.0} and results[1].means == {}
