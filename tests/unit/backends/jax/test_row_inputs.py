"""The inputs of a slice match its samples, also when they are kept from the previous slice."""

import jax
import numpy as np

from skyrl_tx.backends.jax.sample.draw import DrawnTokens
from skyrl_tx.backends.jax.sample.row_inputs import RowInputs, make_block_table
from skyrl_tx.backends.jax.sample.running_sample import BlockTableRow, RunningSample
from skyrl_tx.backends.jax.sample.slice_rows import SliceRows
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.results import SampleDelta
from tests.support.sample_requests import make_prompt, make_request

STEPS = 4


def make_running_sample(index: int, *, temperature: float, adapter: int = 0) -> RunningSample:
    request = make_request("a", make_prompt(5), temperature=temperature, max_tokens=50)
    sample = RunningSample(request=request, index=index, stops=frozenset({30 + index, 3}), adapter=adapter)
    sample.take_first(make_drawn_tokens(9), None)
    return sample


def make_slice_results(*tokens: int) -> tuple[Int32Array, Float32Array]:
    """Return tokens and log-probabilities of a slice."""
    return np.array(tokens, np.int32), -np.arange(len(tokens), dtype=np.float32)


def take(sample: RunningSample, *tokens: int) -> SampleDelta | None:
    start, sample.position = sample.position, sample.length_after(len(tokens))
    return sample.take_slice(start, *make_slice_results(*tokens), False)


def make_drawn_tokens(*tokens: int) -> DrawnTokens:
    no_topk = np.zeros((len(tokens), 0))
    return DrawnTokens(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), no_topk, no_topk)


def test_rows_in_groups_have_the_adapters_in_use_and_the_number_of_their_own():
    first, second = (make_running_sample(adapter, temperature=1.0) for adapter in range(2))
    rows = SliceRows((first, None, second, None), (0, 2, 0, 0), (1, 0, 0, 0))
    slots = RowInputs(STEPS).make_batch(rows).slots
    assert slots.slot_G.tolist() == [0, 2, 0, 0] and slots.group_M.tolist() == [1, 0, 0, 0]
    assert slots.expand_to_rows(4).tolist() == [2, 0, 0, 0]


def check(inputs: RowInputs, rows: SliceRows) -> None:
    """Check that the inputs match the current state of their samples."""
    jax.tree.map(np.testing.assert_array_equal, inputs.make_batch(rows), RowInputs(STEPS).make_batch(rows))


def test_inputs_follow_the_samples_from_slice_to_slice():
    first, second = make_running_sample(0, temperature=0.5), make_running_sample(1, temperature=1.0, adapter=2)
    inputs, rows = RowInputs(STEPS), SliceRows((first, None, second, None), (0, 0, 2, 0))
    batch = inputs.make_batch(rows)

    assert batch.token_S.tolist() == [9, 0, 9, 0] and batch.position_S.tolist() == [5, 0, 5, 0]
    assert batch.num_drawn_S.tolist() == [1, 0, 1, 0] and (batch.given_SN == -1).all()
    assert batch.draws.temperature_S.tolist() == [0.5, 0, 1, 0] and batch.slots.slot_G.tolist() == [0, 0, 2, 0]
    assert batch.num_left_S.tolist() == [49, 0, 49, 0] and (batch.source_S == -1).all()
    assert batch.stop_SX[:, :3].tolist() == [[3, 30, -1], [-1] * 3, [3, 31, -1], [-1] * 3]

    take(first, 3, 4, 5)
    assert inputs.make_batch(rows).token_S.tolist() == [5, 0, 9, 0]

    first.row, first.position = 2, first.position + 4
    batch = inputs.make_batch(rows, from_last=True)
    assert batch.source_S.tolist() == [2, -1, -1, -1] and batch.position_S.tolist() == [12, 0, 5, 0]
    assert first.take_slice(8, *make_slice_results(6, 7, 8, 9), False) is not None
    assert inputs.make_batch(rows).token_S.tolist() == [9, 0, 9, 0]
    check(inputs, rows)
    check(inputs, SliceRows((second, None, first, None), (2, 0, 0, 0)))
    check(inputs, SliceRows((second, make_running_sample(0, temperature=0.5)), (2, 0)))


def test_a_preempted_sample_is_given_its_tokens_until_it_has_them_again():
    sample = make_running_sample(0, temperature=1.0)
    inputs, rows = RowInputs(STEPS), SliceRows((sample, None), (0, 0))
    take(sample, 1, 2, 3, 4, 5)
    check(inputs, rows)
    sample.preempt()
    batch = inputs.make_batch(rows)
    assert batch.given_SN[0].tolist() == [1, 2, 3, 4] and batch.token_S[0] == 9
    assert take(sample, 1, 2, 3, 4) is None
    assert inputs.make_batch(rows).given_SN[0].tolist() == [5, -1, -1, -1]
    take(sample, 5, 6, 7, 8)
    assert (inputs.make_batch(rows).given_SN == -1).all()
    check(inputs, rows)


def test_a_row_without_pages_has_the_empty_one():
    table = make_block_table([BlockTableRow([3, 1], 2), None], 4)
    assert table.page_BM.tolist() == [[3, 1, 0, 0], [0] * 4] and table.state_B.tolist() == [2, 0]
