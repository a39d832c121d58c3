"""Pack the examples of one request into micro-batches of a few shapes, and unpack the results.

A micro-batch has one row on a single device, and one row per shard of the batch on a mesh. A row
holds examples one after another, for example three examples of 300, 200 and 500 tokens in a row of
1024. The start positions of the examples are an input array, so one compiled program serves all
rows of the same length. Only the last row of a request has much padding.

A micro-batch never mixes requests, and its shape depends only on the lengths of the request's
examples. So a request runs the same programs regardless of other requests, and results are
batch-invariant.

Legend: B rows, T positions, K targets per position, C config columns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flax import struct

from skyrl_tx.backends.jax.shapes import next_power_of_two
from skyrl_tx.backends.jax.train.loss_selection import LOSS_INPUTS, NUM_COLUMNS, get_loss_number
from skyrl_tx.contract.arrays import MAX_CELLS, Float32Array, NumberArray
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.contract.results import MeanTerm, PassResult
from skyrl_tx.losses import LOSSES, MEANS, LossOutput

MIN_ROW_LENGTH = 64
"""The shortest row. For fewer tokens, padding takes less time than another compilation."""
_LENGTHS_PER_OCTAVE, _MIN_LENGTH_INCREMENT = 8, 128
"""Between two powers of two there are 8 row lengths, at least 128 tokens apart.

For example 2048, 2304, 2560 and so on up to 4096. So at most an eighth of a long row is padding.
Up to 1024 tokens, lengths that are closer together would not pay off: each length is one more
compilation, and only dozens of requests would save the time that it takes.
"""
NUM_REMAINDER_LENGTHS = 4
"""How many different lengths the last row can have, if a request has more than one micro-batch.

The number of tokens in the last row is arbitrary. If the last row could have every length that
other rows can have, nearly every early request of a training run would compile a new program.
"""


@struct.dataclass
class MicroBatch:
    """The input of one compiled call, as host arrays.

    Padding is zero in all arrays except `start_BT`, so it has no weight in the loss.
    """

    loss: Any
    """int32 scalar: the number of the loss, see `loss_selection`."""
    tokens_BT: Any
    """int32."""
    start_BT: Any
    """int32: `start_BT[b, t]` is the position at which the example at position t of row b starts.

    The padding at the end of a row counts as one more example.
    """
    uses_BT: Any
    """int32: how many examples have the token at a position; 0 for padding."""
    targets: Any
    """int32 [B, T], or [B, T, K] if examples have multiple targets per position."""
    inputs: dict[str, Any]
    """The inputs of all losses by name: float32 in the shape of `targets`."""
    config_BC: Any
    """float32: the numbers of the loss's config, one column for each."""
    is_local: bool = struct.field(pytree_node=False)
    """Whether the loss of a position depends only on the arrays at that position."""


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """The shape of one micro-batch, and where its examples are."""

    members: tuple[int, ...]
    """The index in the request of each example."""
    rows: tuple[int, ...]
    """The row of each example."""
    starts: tuple[int, ...]
    """The position in the row at which each example starts."""
    num_rows: int
    length: int
    num_targets: int

    def __post_init__(self) -> None:
        assert 0 < len(self.members) == len(self.starts) == len(self.rows)

    @property
    def num_tokens(self) -> int:
        """The number of positions in all rows, padding included."""
        return self.num_rows * self.length


def round_up_row_length(size: int) -> int:
    """Return the padded length of a row that holds `size` tokens."""
    if size <= MIN_ROW_LENGTH:
        return MIN_ROW_LENGTH
    step = max(next_power_of_two(size) // 2 // _LENGTHS_PER_OCTAVE, _MIN_LENGTH_INCREMENT)
    return -(-size // step) * step


def choose_row_budget(budget: int, num_targets: int, num_rows: int) -> int:
    """Return the largest row length up to `budget` at which a micro-batch has at most MAX_CELLS cells.

    A cell is one target of one position: 4 rows of 100 positions with 8 targets have 3200 cells.
    """
    return max(1, min(budget, MAX_CELLS // (num_targets * num_rows)))


def choose_micro_batch_length(size: int, budget: int) -> int:
    """Return the padded length of a row that holds `size` tokens, within a budget.

    This is `round_up_row_length(size)`, but not more than `budget` if `size` fits into the budget.
    If `size` does not fit, it is not more than the next power of two after `size`. That matters if
    the budget is below MIN_ROW_LENGTH, which happens if examples have many targets: with budget 8,
    a size of 12 gives 16 and not 64.
    """
    return min(round_up_row_length(size), budget if size <= budget else next_power_of_two(size))


def choose_remainder_length(size: int, budget: int) -> int:
    """Return the padded length of the last row of a request with more than one micro-batch."""
    part = -(-budget // NUM_REMAINDER_LENGTHS)
    return choose_micro_batch_length(min(-(-size // part) * part, budget) if size <= budget else size, budget)


def plan_micro_batches(
    examples: Sequence[PassExample], budget: int, num_rows: int = 1, multiple: int = 1
) -> list[MicroBatchPlan]:
    """Plan the micro-batches of one request.

    All examples of a micro-batch have the same loss config, and the same number of targets after
    rounding up to a power of two.

    Args:
        examples: The examples of the request.
        budget: Maximum tokens of a micro-batch. A longer example gets its own micro-batch.
            Examples with many targets per position get smaller micro-batches (see MAX_CELLS),
            because the inputs and results of the loss take memory for each target.
        num_rows: Rows of a micro-batch: the number of shards of the batch.
        multiple: Row lengths are rounded up to a multiple of this number, even above the budget.
            It is the number of shards of a row's tokens.
    """
    # Group the examples by number of targets and loss config, longest first.
    sizes = [example.tokens.size for example in examples]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index in sorted(range(len(examples)), key=lambda i: (-sizes[i], i)):
        example = examples[index]
        group = (next_power_of_two(_count_targets(example)), *sorted(example.loss_config.items()))
        groups.setdefault(group, []).append(index)

    # Pack each group into rows, and rows into micro-batches.
    plans: list[MicroBatchPlan] = []
    for (num_targets, *_), order in groups.items():
        row_budget = choose_row_budget(budget // num_rows, num_targets, num_rows)
        rows = _balance(_first_fit(order, sizes, row_budget), order, sizes, row_budget, num_rows)
        for first in range(0, len(rows), num_rows):
            is_remainder = num_rows == 1 and 0 < first == len(rows) - 1
            choose_length = choose_remainder_length if is_remainder else choose_micro_batch_length
            members = rows[first : first + num_rows]
            plans.append(_make_plan(members, sizes, row_budget, num_rows, num_targets, multiple, choose_length))
    return plans


def _first_fit(order: list[int], sizes: list[int], budget: int) -> list[list[int]]:
    """Return rows of example indices.

    Each example is added to the first row in which it fits, longest first. This is "first fit
    decreasing" (Johnson 1974), which needs at most 11/9 of the minimum number of rows.
    """
    rows: list[list[int]] = []
    totals: list[int] = []
    for index in order:
        row = next((row for row, total in enumerate(totals) if total + sizes[index] <= budget), len(rows))
        if row == len(rows):
            rows.append([])
            totals.append(0)
        rows[row].append(index)
        totals[row] += sizes[index]
    return rows


def _balance(rows: list[list[int]], order: list[int], sizes: list[int], budget: int, num_rows: int) -> list[list[int]]:
    """Distribute the examples evenly over a multiple of `num_rows` rows.

    Returns `rows` unchanged if a balanced row would exceed the budget. The rows of a micro-batch
    are computed at the same time, so the fullest row determines the time. Each example is added to
    the emptiest row, longest first ("longest processing time", Graham 1969).
    """
    if num_rows == 1:
        return rows
    totals = [0] * (-(-len(rows) // num_rows) * num_rows)
    balanced: list[list[int]] = [[] for _ in totals]
    for index in order:
        row = totals.index(min(totals))
        balanced[row].append(index)
        totals[row] += sizes[index]
    return balanced if max(totals) <= max(budget, sizes[order[0]]) else rows


def _make_plan(
    rows: list[list[int]],
    sizes: list[int],
    budget: int,
    num_rows: int,
    num_targets: int,
    multiple: int,
    choose_length: Callable[[int, int], int],
) -> MicroBatchPlan:
    """Return the plan of a micro-batch with the given rows of example indices."""
    members = [(index, row) for row, indices in enumerate(rows) for index in indices]
    starts = [sum(sizes[before] for before in indices[:i]) for indices in rows for i in range(len(indices))]
    fullest = max(sum(sizes[index] for index in indices) for indices in rows)
    return MicroBatchPlan(
        members=tuple(index for index, _ in members),
        rows=tuple(row for _, row in members),
        starts=tuple(starts),
        num_rows=num_rows,
        length=-(-choose_length(fullest, budget) // multiple) * multiple,
        num_targets=num_targets,
    )


def make_empty_micro_batch(num_rows: int, length: int, num_targets: int, *, is_local: bool) -> MicroBatch:
    """Return a micro-batch of the given shape without examples: all zeros, and loss number 0."""
    B, T, K = num_rows, length, num_targets
    shape = (B, T) if K == 1 else (B, T, K)
    return MicroBatch(
        loss=np.int32(0),
        tokens_BT=np.zeros((B, T), np.int32),
        start_BT=np.zeros((B, T), np.int32),
        uses_BT=np.zeros((B, T), np.int32),
        targets=np.zeros(shape, np.int32),
        inputs={name: np.zeros(shape, np.float32) for name in LOSS_INPUTS},
        config_BC=np.zeros((B, NUM_COLUMNS), np.float32),
        is_local=is_local,
    )


def fill_micro_batch(plan: MicroBatchPlan, examples: Sequence[PassExample]) -> MicroBatch:
    """Return a micro-batch with the planned examples of a request."""
    first = examples[plan.members[0]]
    loss = LOSSES[first.loss]
    batch = make_empty_micro_batch(plan.num_rows, plan.length, plan.num_targets, is_local=loss.is_local)

    # Copy each example to its place.
    for index, row, start in zip(plan.members, plan.rows, plan.starts, strict=True):
        example = examples[index]
        assert example.loss == loss.spec.name, "the examples of a request share its loss"
        end = start + example.tokens.size
        batch.tokens_BT[row, start:end] = example.tokens
        batch.start_BT[row, start:end] = start
        batch.uses_BT[row, start:end] = 1
        batch.start_BT[row, end:] = end  # the next example overwrites this, if there is one
        _copy_array(batch.targets[row, start:end], example.loss_inputs[TARGET_TOKENS])
        for name in loss.spec.inputs.keys() - {TARGET_TOKENS}:
            _copy_array(batch.inputs[name][row, start:end], example.loss_inputs[name])
    batch.config_BC[:, : len(loss.columns)] = [first.loss_config[column] for column in loss.columns]
    return replace(batch, loss=get_loss_number(loss.spec.name, batch.targets.ndim))


def read_results(
    plan: MicroBatchPlan, examples: Sequence[PassExample], logprobs: Float32Array, loss: LossOutput
) -> Iterator[tuple[int, PassResult]]:
    """Yield index and result of each planned example, from the outputs on the host."""
    is_policy_gradient = LOSSES[examples[plan.members[0]].loss].spec.is_policy_gradient
    for index, row, start in zip(plan.members, plan.rows, plan.starts, strict=True):
        shape = examples[index].loss_inputs[TARGET_TOKENS].shape
        span = slice(start, start + shape[0])

        example_logprobs = logprobs[row, span, : 1 if len(shape) == 1 else shape[1]]
        count = _sum(loss.count_BT[row, span])
        means = {name: MeanTerm(_sum(loss.totals[name][row, span]), count) for name in MEANS}
        result = PassResult(
            logprobs=example_logprobs.reshape(shape).copy(),  # a view would keep the whole micro-batch in memory
            sums={"loss": _sum(loss.loss_BT[row, span])},
            means=means if is_policy_gradient else {},
        )
        yield index, result


def _sum(x: Any) -> float:
    return float(np.sum(x, dtype=np.float64))


def _count_targets(example: PassExample) -> int:
    targets = example.loss_inputs[TARGET_TOKENS]
    return 1 if targets.ndim == 1 else targets.shape[1]


def _copy_array(destination: NumberArray, array: NumberArray) -> None:
    """Copy an array [T] or [T, K] into a destination [T], or the first K columns of [T, K']."""
    if destination.ndim == 1:
        destination[:] = array.reshape(array.shape[0])
    else:
        destination[:, : array.shape[1]] = array
