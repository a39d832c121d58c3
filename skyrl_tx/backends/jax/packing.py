"""Examples of one request to micro-batches of few fixed shapes, and arrays back to results.

Legend: B rows, T positions, K targets per position, C config columns.

A micro-batch is one row in which examples lie one behind the other, so that lengths cost next to nothing: they are
data, and only the last row of a request is padded by more than a few positions. On a mesh it is a row for each group of
devices that rows are cut over. It never holds two requests, and its
shape follows from the request's own lengths: so whatever else is on the device, the same request is computed by the
same programs on the same shapes, and gives the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import struct

from skyrl_tx.backends.jax.any_loss import INPUTS, NUM_COLUMNS, TARGETS, mean_names, number_of
from skyrl_tx.backends.jax.buckets import bucket, next_power
from skyrl_tx.contract.arrays import Float32Array, NumberArray
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.limits import MAX_CELLS
from skyrl_tx.contract.results import MeanTerm, PassResult
from skyrl_tx.losses import LOSSES, LossOutput

SHORTEST = 32  # below this, padding costs less than another compilation
_STEPS = ((1024, 8), (128, 4))
"""Above so many tokens an octave of lengths has so many steps; else two. Full micro-batches are nearly all of a large
request, so that an eighth lost there is an eighth lost."""


@struct.dataclass
class MicroBatch:
    """What one call computes, as host arrays; B is 1 on one device. Padding is zero everywhere: weightless."""

    loss: Any  # int32 scalar: its number, see any_loss
    tokens_BT: Any  # int32
    start_BT: Any  # int32: where the example of each position begins; padding is one more of its own
    targets: Any  # int32 [B, T], or [B, T, K] where examples have several targets per position
    inputs: dict[str, Any]  # float32, in the shape of `targets`: all that any loss reads
    config_BC: Any  # float32


@dataclass(frozen=True, slots=True)
class Slab:
    """One micro-batch of a plan: which examples, in which row and where in it each begins, in which shape."""

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
        """Positions in all rows, padding included."""
        return self.num_rows * self.length


def row_length(size: int) -> int:
    """Return how long a row is made that holds `size` tokens."""
    octave = next_power(size) // 2  # it ends at twice that
    for above, num_steps in _STEPS:
        if size > above:
            step = octave // num_steps
            return -(-size // step) * step
    return bucket(size, SHORTEST)


def micro_batch_length(size: int, budget: int) -> int:
    """Return how long the row of a micro-batch is that holds `size` tokens."""
    return min(row_length(size), budget) if size <= budget else row_length(size)


def plan(examples: Sequence[PassExample], budget: int, num_rows: int = 1) -> list[Slab]:
    """Return the micro-batches of one request, of `num_rows` rows and `budget` tokens, or more for a long example.

    Those in one micro-batch share their config and their number of targets, or nearly. Many targets take more than the
    model does, so that fewer tokens go together where there are.
    """
    sizes = [example.tokens.size for example in examples]
    row_budget = max(1, budget // num_rows)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index in sorted(range(len(examples)), key=lambda i: (-sizes[i], i)):
        example = examples[index]
        kind = (next_power(_num_targets(example)), *sorted(example.loss_config.items()))
        kinds.setdefault(kind, []).append(index)
    return [
        _slab(rows[first : first + num_rows], sizes, own_budget, num_rows, kind[0])
        for kind, order in kinds.items()
        for own_budget in [max(1, min(row_budget, MAX_CELLS // (kind[0] * num_rows)))]
        for rows in [_even(_first_fit(order, sizes, own_budget), order, sizes, own_budget, num_rows)]
        for first in range(0, len(rows), num_rows)
    ]


def _first_fit(order: list[int], sizes: list[int], budget: int) -> list[list[int]]:
    """Return rows: every example, the longest first, goes where it is the first to fit.

    Johnson 1974, "first fit decreasing": within 11/9 of the fewest rows.
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


def _even(rows: list[list[int]], order: list[int], sizes: list[int], budget: int, num_rows: int) -> list[list[int]]:
    """Return the rows, or as evenly filled ones as fill whole micro-batches where there are several in each.

    The rows of a micro-batch are computed side by side, so that the fullest decides. Every example, the longest first,
    goes to the emptiest row (Graham 1969, "longest processing time"), unless that overfills one.
    """
    if num_rows == 1:
        return rows
    totals = [0] * (-(-len(rows) // num_rows) * num_rows)
    evened: list[list[int]] = [[] for _ in totals]
    for index in order:
        row = totals.index(min(totals))
        evened[row].append(index)
        totals[row] += sizes[index]
    return evened if max(totals) <= max(budget, sizes[order[0]]) else rows


def _slab(rows: list[list[int]], sizes: list[int], budget: int, num_rows: int, num_targets: int) -> Slab:
    members = [(index, row) for row, own in enumerate(rows) for index in own]
    starts = [sum(sizes[each] for each in own[:place]) for own in rows for place in range(len(own))]
    fullest = max(sum(sizes[index] for index in own) for own in rows)
    return Slab(
        members=tuple(index for index, _ in members),
        rows=tuple(row for _, row in members),
        starts=tuple(starts),
        num_rows=num_rows,
        length=micro_batch_length(fullest, budget),
        num_targets=num_targets,
    )


def fill(slab: Slab, examples: Sequence[PassExample]) -> MicroBatch:
    """Copy a slab's examples into arrays of its shape."""
    B, T, K = slab.num_rows, slab.length, slab.num_targets
    shape = (B, T) if K == 1 else (B, T, K)
    first = examples[slab.members[0]]
    loss = LOSSES[first.loss]
    batch = MicroBatch(
        loss=number_of(loss.spec.name, len(shape)),
        tokens_BT=np.zeros((B, T), np.int32),
        start_BT=np.zeros((B, T), np.int32),
        targets=np.zeros(shape, np.int32),
        inputs={name: np.zeros(shape, np.float32) for name in INPUTS},
        config_BC=np.zeros((B, NUM_COLUMNS), np.float32),
    )
    for index, row, start in zip(slab.members, slab.rows, slab.starts, strict=True):
        example = examples[index]
        assert example.loss == loss.spec.name, "the examples of a request share its loss"
        end = start + example.tokens.size
        batch.tokens_BT[row, start:end] = example.tokens
        batch.start_BT[row, start:end] = start
        batch.start_BT[row, end:] = end  # until the next one says otherwise
        _put(batch.targets[row, start:end], example.loss_inputs[TARGETS])
        for name in loss.spec.inputs.keys() - {TARGETS}:
            _put(batch.inputs[name][row, start:end], example.loss_inputs[name])
    batch.config_BC[:, : len(loss.columns)] = [first.loss_config[column] for column in loss.columns]
    return batch


def read_results(
    slab: Slab, examples: Sequence[PassExample], logprobs: Float32Array, loss: LossOutput
) -> Iterator[tuple[int, PassResult]]:
    """Yield (index of the example, its result) from what the slab's micro-batch gave, on the host."""
    names = mean_names(examples[slab.members[0]].loss)
    for index, row, start in zip(slab.members, slab.rows, slab.starts, strict=True):
        shape = examples[index].loss_inputs[TARGETS].shape
        here = slice(start, start + shape[0])
        own = logprobs[row, here] if logprobs.ndim == 2 else logprobs[row, here, : 1 if len(shape) == 1 else shape[1]]
        means = {
            name: MeanTerm(_total(loss.means[name].total_BT[row, here]), _total(loss.means[name].count_BT[row, here]))
            for name in names
        }
        # A copy: a view would keep the whole micro-batch alive, padding and all.
        yield (
            index,
            PassResult(logprobs=own.reshape(shape).copy(), sums={"loss": _total(loss.loss_BT[row, here])}, means=means),
        )


def _total(x: Any) -> float:
    return float(np.sum(x, dtype=np.float64))


def _num_targets(example: PassExample) -> int:
    targets = example.loss_inputs[TARGETS]
    return 1 if targets.ndim == 1 else targets.shape[1]


def _put(into: NumberArray, array: NumberArray) -> None:
    """Write [T] or [T, K] into [T] or the beginning of each position of [T, K']."""
    if into.ndim == 1:
        into[:] = array.reshape(array.shape[0])
    else:
        into[:, : array.shape[1]] = array
