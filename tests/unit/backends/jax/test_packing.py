"""Micro-batch plans: every example once, few shapes, little padding.

A plan depends only on the lengths within a request.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.backends.jax.shapes import next_power_of_two, round_up_to_bucket
from skyrl_tx.backends.jax.train import packing
from skyrl_tx.contract.arrays import MAX_CELLS, max_targets
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.losses import MEANS, LossOutput

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
def test_buckets_are_powers_of_two_and_their_midpoints(size, expected):
    assert round_up_to_bucket(size, 32) == expected


def test_next_power_of_two():
    assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 64),
        (64, 64),
        (65, 128),
        (128, 128),
        (129, 256),
        (257, 384),
        (512, 512),
        (700, 768),
        (1025, 1152),
        (1900, 1920),
        (2049, 2304),
        (4000, 4096),
    ],
)
def test_long_rows_have_eight_lengths_an_octave_and_short_ones_multiples_of_128(size, expected):
    assert packing.round_up_row_length(size) == expected


@given(st.integers(1, 100_000))
def test_padding_of_a_row_is_at_most_127_tokens_or_an_eighth(size):
    length = packing.round_up_row_length(size)
    assert size <= length == packing.round_up_row_length(length)
    assert length < size + 128 or length <= 1.125 * size


SIZES = st.lists(st.tuples(st.integers(1, 1500), st.sampled_from([None, 1, 2, 3])), min_size=1, max_size=40)


@given(SIZES)
def test_plans_hold_every_example_once_within_the_budget(sizes):
    examples = [example(length, num_targets) for length, num_targets in sizes]
    plans = packing.plan_micro_batches(examples, BUDGET)
    assert sorted(index for plan in plans for index in plan.members) == list(range(len(examples)))
    for plan in plans:
        lengths = [examples[index].tokens.size for index in plan.members]
        assert [spans.own.start for spans in plan.examples] == np.cumsum([0, *lengths[:-1]]).tolist()
        allowed = {
            choose(sum(lengths), BUDGET)
            for choose in (packing.choose_micro_batch_length, packing.choose_remainder_length)
        }
        assert plan.length in allowed and plan.length >= sum(lengths)
        assert len(lengths) == 1 or plan.length <= BUDGET


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_last_of_several_rows_has_one_of_four_lengths(size, budget):
    """Other rows have these lengths too, so a warm server already has their programs."""
    length = packing.choose_remainder_length(size, budget)
    assert length >= size
    if size <= budget:
        parts = {packing.choose_remainder_length(max(1, part * budget // 4), budget) for part in range(1, 5)}
        assert length in parts and length <= budget
        assert length == packing.choose_micro_batch_length(length, budget)
    else:
        assert length == packing.choose_micro_batch_length(size, budget)


def test_requests_of_several_micro_batches_have_few_shapes():
    """As in a training run, the steps have different totals."""
    draw, found = np.random.default_rng(0), set[int]()
    for _ in range(64):
        lengths = draw.integers(60, 150, draw.integers(20, 64)).tolist()
        found |= {plan.length for plan in packing.plan_micro_batches([example(length) for length in lengths], BUDGET)}
    assert found == {256, 512, 768, 1024}


@given(SIZES)
def test_no_two_micro_batches_of_a_kind_fit_in_one(sizes):
    examples = [example(length) for length, _ in sizes]
    sums = sorted(
        sum(examples[index].tokens.size for index in plan.members)
        for plan in packing.plan_micro_batches(examples, BUDGET)
    )
    assert len(sums) == 1 or sums[0] + sums[1] > BUDGET


def test_random_lengths_fill_the_budget():
    lengths = np.random.default_rng(0).integers(20, 700, 256, endpoint=True)
    plans = packing.plan_micro_batches([example(length) for length in lengths.tolist()], 2048)
    assert lengths.sum() / sum(plan.length for plan in plans) > 0.97


def test_examples_with_different_configs_have_separate_micro_batches():
    given = [example(10), replace(example(10), loss_config={"x": 1.0}), example(12)]
    assert [plan.members for plan in packing.plan_micro_batches(given, BUDGET)] == [(2, 0), (1,)]


def test_examples_are_consecutive_in_a_row_and_padding_has_no_weight():
    examples = [example(40), example(33), example(35)]
    [plan] = packing.plan_micro_batches(examples, BUDGET)
    batch = packing.fill_micro_batch(plan, examples)
    assert batch.tokens_BT.shape == batch.targets.shape == (1, 128)
    assert [(spans.index, spans.own.start) for spans in plan.examples] == [(0, 0), (2, 40), (1, 75)]
    np.testing.assert_array_equal(batch.tokens_BT[0, 40:75], examples[2].tokens)
    np.testing.assert_array_equal(batch.start_BT[0], [0] * 40 + [40] * 35 + [75] * 33 + [108] * 20)
    assert batch.inputs["weights"].sum() == 0.5 * (40 + 33 + 35)
    assert not batch.tokens_BT[0, 108:].any() and not batch.inputs["weights"][0, 108:].any()
    assert not batch.inputs["advantages"].any()


@pytest.mark.parametrize("num_targets", [None, 1, 3])
def test_results_have_the_shape_of_the_targets(num_targets):
    examples = [example(5, num_targets), example(9, num_targets)]
    [plan] = packing.plan_micro_batches(examples, BUDGET)
    batch = packing.fill_micro_batch(plan, examples)
    loss_BT = np.zeros(batch.tokens_BT.shape, np.float32)
    loss_BT[0, [0, 8, 9, 13]] = [3.0, 4.0, 6.0, 2.0]
    output = LossOutput(loss_BT=loss_BT, totals=dict.fromkeys(MEANS, loss_BT), count_BT=loss_BT)
    logprobs = batch.targets.reshape(*loss_BT.shape, -1).astype(np.float32)
    results = dict(packing.read_results(plan, examples, logprobs, output))
    for index, one in enumerate(examples):
        np.testing.assert_array_equal(results[index].logprobs, one.loss_inputs["target_tokens"])
    assert (results[1].sums, results[0].sums) == ({"loss": 7.0}, {"loss": 8.0}) and results[1].means == {}


@given(SIZES, st.sampled_from([2, 3, 8]))
def test_on_a_mesh_a_micro_batch_has_a_row_per_shard(sizes, num_rows):
    examples = [example(length, num_targets) for length, num_targets in sizes]
    plans = packing.plan_micro_batches(examples, BUDGET * num_rows, num_rows)
    assert sorted(index for plan in plans for index in plan.members) == list(range(len(examples)))
    for plan in plans:
        batch = packing.fill_micro_batch(plan, examples)
        assert batch.tokens_BT.shape == (num_rows, plan.length)
        for spans in plan.examples:
            np.testing.assert_array_equal(batch.tokens_BT[spans.row, spans.own], examples[spans.index].tokens)
            assert (batch.start_BT[spans.row, spans.own] == spans.own.start).all()
        assert plan.length <= BUDGET or plan.length < 2 * max(length for length, _ in sizes)


def test_rows_of_a_mesh_are_balanced():
    [plan] = packing.plan_micro_batches([example(100) for _ in range(8)], 4096, 4)
    assert plan.length == 256 and sorted(spans.row for spans in plan.examples) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("num_targets", "together"), [(4096, 8), (2**15, 4), (2**17, 1)])
def test_many_targets_reduce_the_tokens_of_a_micro_batch(num_targets, together):
    few = replace(example(128), loss_inputs={"target_tokens": np.broadcast_to(np.int32(0), (128, num_targets))})
    plans = packing.plan_micro_batches([few] * 8, BUDGET)
    assert [len(plan.members) for plan in plans] == [together] * (8 // together)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20)), min_size=1, max_size=8), st.integers(1, 3))
def test_cells_of_a_micro_batch_are_bounded_by_those_of_a_padded_example(shapes, num_rows):
    examples = [
        replace(example(1), tokens=np.zeros(length, np.int32), loss_inputs={"target_tokens": np.broadcast_to(0, shape)})
        for length, width in shapes
        for shape in [(length, max_targets(length) >> width or 1)]
    ]
    for plan in packing.plan_micro_batches(examples, 16384, num_rows):
        assert plan.num_tokens * plan.num_targets <= 1.5 * MAX_CELLS * num_rows


def test_rows_are_a_multiple_of_the_shards_of_their_tokens():
    examples = [example(length) for length in (30, 45, 7)]
    [plan] = packing.plan_micro_batches(examples, 100, 1, 64)
    assert (plan.num_rows, plan.length) == (1, 128)
    assert [plan.length for plan in packing.plan_micro_batches(examples, 40, 1, 3)] == [66, 42]
