"""Packs the examples of one request into micro-batches of a few fixed shapes, and unpacks the results.

Legend: B rows, T positions, K targets per position, C config columns.

A micro-batch is one row on one device, and on a mesh one row per shard of the batch axis. A row holds examples one
after another, so that their lengths are data and only the last row of a request has much padding: if there are others,
its length is one of a few. A micro-batch never holds examples of two requests, and its shape follows from the lengths
of the request's own examples. So the same programs compute a request on the same shapes, whatever other requests there
are: results are batch-invariant.
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
"""The shortest row. Below it, padding takes less time than another compilation."""
_LENGTHS_PER_OCTAVE, _MIN_LENGTH_INCREMENT = 8, 128
"""An octave of longer rows has this number of lengths, at least this number of tokens apart.

Coarser steps of long rows would cost a request of one micro-batch up to an eighth of its time. Finer steps of short
rows save less than another compilation takes, until dozens of requests have used it.
"""
REMAINDERS = 4
"""The number of lengths that the last row of a request of several micro-batches may have.

The totals of large requests are all different. With the lengths of other rows nearly every step of a run would compile
a program of its own at first.
"""


@struct.dataclass
class MicroBatch:
    """The input of one compiled call, as host arrays. Padding is zero everywhere, so that it has no weight."""

    loss: Any  # int32 scalar: the loss's number, see loss_selection
    tokens_BT: Any  # int32
    start_BT: Any  # int32: the position in the row at which the example of each position starts; padding is one more
    targets: Any  # int32 [B, T], or [B, T, K] if examples have several targets per position
    inputs: dict[str, Any]  # float32 in the shape of `targets`: the inputs of all losses
    config_BC: Any  # float32
    is_local: bool = struct.field(pytree_node=False)  # whether the loss is local, see losses.base.Loss


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """The shape of one micro-batch, and for each of its examples: index in the request, row, start in the row."""

    members: tuple[int, ...]
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    num_rows: int
    length: int
    num_targets: int

    def __post_init__(self) -> None:
        assert 0 < len(self.members) == len(self.starts) == len(self.rows)

    @property
    def num_tokens(self) -> int:
        """The number of positions in all rows, with padding."""
        return self.num_rows * self.length


def round_up_row_length(size: int) -> int:
    """Return the length of a row that holds `size` tokens."""
    if size <= MIN_ROW_LENGTH:
        return MIN_ROW_LENGTH
    step = max(next_power_of_two(size) // 2 // _LENGTHS_PER_OCTAVE, _MIN_LENGTH_INCREMENT)
    return -(-size // step) * step


def choose_row_budget(budget: int, num_targets: int, num_rows: int) -> int:
    """Return the tokens of a row, at most `budget`, so that targets of as many rows have at most MAX_CELLS cells."""
    return max(1, min(budget, MAX_CELLS // (num_targets * num_rows)))


def choose_micro_batch_length(size: int, budget: int) -> int:
    """Return the length of a micro-batch's row that holds `size` tokens, at most `budget` unless `size` is larger.

    A row that is larger than a budget below MIN_ROW_LENGTH, which many targets have, is a power of two.
    """
    return min(round_up_row_length(size), budget if size <= budget else next_power_of_two(size))


def choose_remainder_length(size: int, budget: int) -> int:
    """Return the length of the last of several micro-batches, if they are rows of at most `budget` tokens."""
    part = -(-budget // REMAINDERS)
    return choose_micro_batch_length(min(-(-size // part) * part, budget) if size <= budget else size, budget)


def plan_micro_batches(
    examples: Sequence[PassExample], budget: int, num_rows: int = 1, multiple: int = 1
) -> list[MicroBatchPlan]:
    """Return the micro-batches of one request, each with `num_rows` rows and at most `budget` tokens.

    An example that is longer than the budget has a micro-batch of its own. The length of rows is a multiple of
    `multiple`, the shards of a row's tokens, for which a row may exceed the budget by less than `multiple`. Examples in
    a micro-batch have the same config and the same number of targets, rounded up to a power of two. Many targets take
    more memory than the model, so MAX_CELLS bounds the number of tokens too.
    """
    sizes = [example.tokens.size for example in examples]
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index in sorted(range(len(examples)), key=lambda i: (-sizes[i], i)):
        example = examples[index]
        kind = (next_power_of_two(_count_targets(example)), *sorted(example.loss_config.items()))
        kinds.setdefault(kind, []).append(index)
    return [
        _make_plan(
            rows[first : first + num_rows],
            sizes,
            own_budget,
            num_rows,
            kind[0],
            multiple,
            choose_remainder_length if num_rows == 1 and 0 < first == len(rows) - 1 else choose_micro_batch_length,
        )
        for kind, order in kinds.items()
        for own_budget in [choose_row_budget(budget // num_rows, kind[0], num_rows)]
        for rows in [_balance(_first_fit(order, sizes, own_budget), order, sizes, own_budget, num_rows)]
        for first in range(0, len(rows), num_rows)
    ]


def _first_fit(order: list[int], sizes: list[int], budget: int) -> list[list[int]]:
    """Return rows of example indices: each example, longest first, is added to the first row in which it fits.

    Johnson 1974, "first fit decreasing": at most 11/9 of the fewest rows possible.
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
    """Return as many rows as fill whole micro-batches, with similar totals; `rows` if one would exceed the budget.

    The rows of a micro-batch are computed at the same time, so the fullest determines the time. Each example, longest
    first, is added to the emptiest row (Graham 1969, "longest processing time").
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
    members = [(index, row) for row, own in enumerate(rows) for index in own]
    starts = [sum(sizes[each] for each in own[:position]) for own in rows for position in range(len(own))]
    fullest = max(sum(sizes[index] for index in own) for own in rows)
    return MicroBatchPlan(
        members=tuple(index for index, _ in members),
        rows=tuple(row for _, row in members),
        starts=tuple(starts),
        num_rows=num_rows,
        length=-(-choose_length(fullest, budget) // multiple) * multiple,
        num_targets=num_targets,
    )


def make_empty_micro_batch(num_rows: int, length: int, num_targets: int, *, is_local: bool) -> MicroBatch:
    """Return the arrays of a micro-batch that holds nothing, with the first loss."""
    B, T, K = num_rows, length, num_targets
    shape = (B, T) if K == 1 else (B, T, K)
    return MicroBatch(
        loss=np.int32(0),
        tokens_BT=np.zeros((B, T), np.int32),
        start_BT=np.zeros((B, T), np.int32),
        targets=np.zeros(shape, np.int32),
        inputs={name: np.zeros(shape, np.float32) for name in LOSS_INPUTS},
        config_BC=np.zeros((B, NUM_COLUMNS), np.float32),
        is_local=is_local,
    )


def fill_micro_batch(plan: MicroBatchPlan, examples: Sequence[PassExample]) -> MicroBatch:
    """Copy the planned examples of a request into the arrays of a micro-batch."""
    first = examples[plan.members[0]]
    loss = LOSSES[first.loss]
    batch = make_empty_micro_batch(plan.num_rows, plan.length, plan.num_targets, is_local=loss.is_local)
    for index, row, start in zip(plan.members, plan.rows, plan.starts, strict=True):
        example = examples[index]
        assert example.loss == loss.spec.name, "the examples of a request share its loss"
        end = start + example.tokens.size
        batch.tokens_BT[row, start:end] = example.tokens
        batch.start_BT[row, start:end] = start
        batch.start_BT[row, end:] = end  # the next example overwrites it; what remains is padding
        _copy_array(batch.targets[row, start:end], example.loss_inputs[TARGET_TOKENS])
        for name in loss.spec.inputs.keys() - {TARGET_TOKENS}:
            _copy_array(batch.inputs[name][row, start:end], example.loss_inputs[name])
    batch.config_BC[:, : len(loss.columns)] = [first.loss_config[column] for column in loss.columns]
    return replace(batch, loss=get_loss_number(loss.spec.name, batch.targets.ndim))


def read_results(
    plan: MicroBatchPlan, examples: Sequence[PassExample], logprobs: Float32Array, loss: LossOutput
) -> Iterator[tuple[int, PassResult]]:
    """Yield index and result of each planned example, from the micro-batch's outputs on the host."""
    is_policy_gradient = LOSSES[examples[plan.members[0]].loss].spec.is_policy_gradient
    for index, row, start in zip(plan.members, plan.rows, plan.starts, strict=True):
        shape = examples[index].loss_inputs[TARGET_TOKENS].shape
        here = slice(start, start + shape[0])
        own = logprobs[row, here, : 1 if len(shape) == 1 else shape[1]]
        count = _sum(loss.count_BT[row, here])
        means = {name: MeanTerm(_sum(loss.totals[name][row, here]), count) for name in MEANS}
        # A copy, because a view would keep the whole micro-batch in memory.
        yield (
            index,
            PassResult(
                logprobs=own.reshape(shape).copy(),
                sums={"loss": _sum(loss.loss_BT[row, here])},
                means=means if is_policy_gradient else {},
            ),
        )


def _sum(x: Any) -> float:
    return float(np.sum(x, dtype=np.float64))


def _count_targets(example: PassExample) -> int:
    targets = example.loss_inputs[TARGET_TOKENS]
    return 1 if targets.ndim == 1 else targets.shape[1]


def _copy_array(destination: NumberArray, array: NumberArray) -> None:
    """Copy [T] or [T, K] into [T], or into the first K of [T, K']."""
    if destination.ndim == 1:
        destination[:] = array.reshape(array.shape[0])
    else:
        destination[:, : array.shape[1]] = array
