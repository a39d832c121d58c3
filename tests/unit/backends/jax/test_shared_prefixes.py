"""Examples that begin alike: finding their prefixes, packing them, and training on them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tx.backends.jax.train import packing
from skyrl_tx.backends.jax.train.shared_prefixes import PrefixGroup, find_prefix_groups, make_records, pack_rows
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.ids import ModelId, RequestId

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=7)


def make_example(tokens, loss="cross_entropy", config=None, **inputs):
    tokens = np.asarray(tokens, np.int32)
    return PassExample(
        request_id=RequestId("r"),
        model_id=ModelId("m"),
        tokens=tokens[:-1],
        loss=loss,
        loss_inputs={"target_tokens": tokens[1:], **{name: np.float32(x) for name, x in inputs.items()}},
        loss_config=config or {},
    )


def list_records(sequences):
    return [np.asarray(sequence, np.int32)[:, None] for sequence in sequences]


def count_saved(groups):
    return sum(group.length * (len(group.members) - 1) for group in groups)


@given(SEQUENCES)
@settings(max_examples=60, deadline=None)
def test_groups_are_disjoint_share_their_prefix_and_save_at_least_as_much_as_any_single_prefix(sequences):
    groups = find_prefix_groups(list_records(sequences), min_length=1)
    members = [index for group in groups for index in group.members]
    assert len(set(members)) == len(members)
    for group in groups:
        assert len(group.members) >= 2 and group.length >= 1
        assert len({tuple(sequences[index][: group.length]) for index in group.members}) == 1
        assert all(len(sequences[index]) >= group.length for index in group.members)
    for sequence in sequences:
        for length in range(1, len(sequence) + 1):
            sharers = [other for other in sequences if other[:length] == sequence[:length]]
            assert count_saved(groups) >= length * (len(sharers) - 1)


def test_sequences_without_a_longer_prefix_share_a_shorter_one():
    records = list_records([[0], [0], [0, 0], [0, 0], [0, 0]])
    assert find_prefix_groups(records, min_length=1) == [PrefixGroup((2, 3, 4), 2), PrefixGroup((0, 1), 1)]


def test_short_prefixes_are_not_shared():
    records = list_records([[1] * 31 + [2], [1] * 31 + [3]])
    assert find_prefix_groups(records) == []
    assert find_prefix_groups(records, min_length=31) == [PrefixGroup((0, 1), 31)]


def test_a_deep_tree_of_prefixes_needs_no_recursion():
    records = list_records([[1] * length for length in range(1, 3000)])
    assert count_saved(find_prefix_groups(records, min_length=1)) >= 1500 * 1499


def test_sequences_with_other_numbers_of_targets_share_nothing():
    records = [np.zeros((50, 3), np.int32), np.zeros((50, 4), np.int32)]
    assert find_prefix_groups(records) == []


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(0, 60))
def test_rows_hold_every_example_once_within_the_budget(suffixes, prefix_length):
    sizes, groups = [], []
    for lengths in suffixes:
        length = prefix_length if len(lengths) > 1 else 0
        groups.append(PrefixGroup(tuple(range(len(sizes), len(sizes) + len(lengths))), length))
        sizes += [max(1, length + suffix) for suffix in lengths]
    rows = pack_rows(groups, sizes, 100)
    assert sorted(index for row in rows for group in row.groups for index in group.members) == list(range(len(sizes)))
    for row in rows:
        own = [group.length + sum(sizes[i] - group.length for i in group.members) for group in row.groups]
        assert row.size == sum(own) <= 100
        assert all(group.length == 0 or len(group.members) > 1 for group in row.groups)


def make_group(prompt, num_examples, length, draw, loss="importance_sampling"):
    for _ in range(num_examples):
        tokens = np.concatenate([prompt, draw.integers(0, 50, length)])
        is_answer = np.arange(len(tokens) - 1) >= len(prompt) - 1
        inputs = {"logprobs": -draw.random(len(tokens) - 1), "advantages": np.full(len(tokens) - 1, draw.normal())}
        inputs = {name: np.where(is_answer, x, 0) for name, x in inputs.items()}
        yield make_example(tokens, loss, weights=np.ones(len(tokens) - 1), **inputs)


def test_samples_of_a_prompt_share_all_but_its_last_token():
    draw = np.random.default_rng(0)
    examples = list(make_group(draw.integers(0, 50, 100), 4, 30, draw))
    plans = packing.plan_micro_batches(examples, 1024, shares_prefixes=True)
    assert len(plans) == 1
    assert [spans.shared for spans in plans[0].examples] == [slice(0, 99)] * 4
    assert plans[0].num_shared_tokens == 3 * 99

    batch = packing.fill_micro_batch(plans[0], examples)
    assert batch.prefix is not None
    for spans in plans[0].examples:
        example = examples[spans.index]
        np.testing.assert_array_equal(spans.read(batch.tokens_BT), example.tokens)
        np.testing.assert_array_equal(spans.read(batch.targets), example.loss_inputs["target_tokens"])
        np.testing.assert_array_equal(spans.read(batch.inputs["advantages"]), example.loss_inputs["advantages"])
        assert set(batch.start_BT[0, spans.own]) == {spans.own.start}
        assert set(batch.prefix.start_BT[0, spans.own]) == {0} and set(batch.prefix.end_BT[0, spans.own]) == {99}
    assert (np.diff(batch.start_BT[0]) >= 0).all()
    # The weights of all examples count at the shared positions.
    assert set(batch.inputs["weights"][0, :99]) == {4.0}


def test_an_example_that_extends_another_has_it_as_its_prefix():
    tokens = np.arange(200)
    examples = [make_example(tokens[:size], weights=np.zeros(size - 1)) for size in (101, 151, 200)]
    (plan,) = packing.plan_micro_batches(examples, 1024, shares_prefixes=True)
    assert plan.num_shared_tokens == 200
    batch = packing.fill_micro_batch(plan, examples)
    for spans in plan.examples:
        np.testing.assert_array_equal(spans.read(batch.tokens_BT), examples[spans.index].tokens)


def test_other_loss_inputs_end_the_prefix():
    tokens = np.arange(101)
    weights = np.zeros(100)
    other = np.where(np.arange(100) < 60, 0, 1.0)
    first, second = make_example(tokens, weights=weights), make_example(tokens, weights=other)
    groups = find_prefix_groups([make_records(first), make_records(second)])
    assert groups == [PrefixGroup((0, 1), 60)]


def test_zero_and_negative_zero_are_equal_inputs():
    tokens = np.arange(101)
    examples = [make_example(tokens, weights=weights) for weights in (np.zeros(100), -np.zeros(100))]
    assert find_prefix_groups([make_records(example) for example in examples]) == [PrefixGroup((0, 1), 100)]


def test_a_loss_over_sequences_shares_only_positions_that_add_nothing():
    mask = np.where(np.arange(100) < 70, 0, 1.0)
    example = make_example(
        np.arange(101),
        "gspo",
        weights=np.ones(100),
        logprobs=np.zeros(100),
        advantages=mask,
        sequence_ratio_mask=mask,
    )
    assert len(make_records(example)) == 70
    inputs = {**example.loss_inputs, "advantages": np.zeros(100, np.float32), "sequence_ratio_mask": np.zeros(100)}
    assert len(make_records(replace(example, loss_inputs=inputs))) == 100


@pytest.mark.parametrize("budget", [256, 512, 1024])
def test_requests_that_share_nothing_have_the_plans_of_plain_packing(budget):
    draw = np.random.default_rng(1)
    examples = [
        make_example(draw.integers(0, 50, size), weights=np.ones(size - 1)) for size in draw.integers(2, 300, 9)
    ]
    assert packing.plan_micro_batches(examples, budget, shares_prefixes=True) == packing.plan_micro_batches(
        examples, budget
    )


def test_small_savings_are_not_worth_other_programs():
    draw = np.random.default_rng(2)
    examples = list(make_group(draw.integers(0, 50, 41), 3, 300, draw))
    assert not any(plan.has_prefixes for plan in packing.plan_micro_batches(examples, 4096, shares_prefixes=True))


def test_a_group_that_exceeds_the_budget_repeats_its_prefix_in_each_row():
    draw = np.random.default_rng(3)
    examples = list(make_group(draw.integers(0, 50, 200), 8, 100, draw))
    plans = packing.plan_micro_batches(examples, 640, shares_prefixes=True)
    assert [len(plan.members) for plan in plans] == [4, 4]
    assert all(spans.shared == slice(0, 199) for plan in plans for spans in plan.examples)
    assert all(plan.length <= 640 for plan in plans)


def test_rows_are_shorter_if_layers_keep_states_for_prefixes():
    draw = np.random.default_rng(3)
    examples = list(make_group(draw.integers(0, 50, 200), 8, 105, draw))
    plans = packing.plan_micro_batches(examples, 640, shares_prefixes=True, keeps_states=True)
    assert sorted(len(plan.members) for plan in plans) == [2, 3, 3]
    assert all(plan.has_prefixes and plan.length <= 600 for plan in plans)
