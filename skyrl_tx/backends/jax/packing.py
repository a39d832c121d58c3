"""Examples of one request to micro-batches of few fixed shapes, and arrays back to results.

Legend: B rows, T positions, K targets per position, C config columns.

A micro-batch never holds two requests, and its shape follows from the request's own lengths: so whatever else is on
the device, the same request is computed by the same programs on the same shapes, and gives the same bits.
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
from skyrl_tx.contract.results import MeanTerm, PassResult
from skyrl_tx.losses import LOSSES, LossOutput

SHORTEST = 32  # below this, padding costs less than another compilation
_FINE_FROM = 128
"""From here on an octave of lengths has four steps and not two: of random lengths from 20 to 700 a ninth is padding
then, and was a fifth. Twice the programs for long rows is the price."""


@struct.dataclass
class MicroBatch:
    """What one call computes, as host arrays. Padding, in rows and positions, is zero everywhere: weightless."""

    loss: Any  # int32 scalar: its number, see any_loss
    tokens_BT: Any  # int32
    targets: Any  # int32 [B, T], or [B, T, K] where examples have several targets per position
    inputs: dict[str, Any]  # float32, in the shape of `targets`: all that any loss reads
    config_BC: Any  # float32


@dataclass(frozen=True, slots=True)
class Slab:
    """One micro-batch of a plan: which examples, in which rows of which shape."""

    rows: tuple[int, ...]
    num_rows: int
    length: int
    num_targets: int

    def __post_init__(self) -> None:
        assert 0 < len(self.rows) <= self.num_rows


def row_length(size: int) -> int:
    """Return how long a row is made that holds `size` tokens."""
    coarse = bucket(size, SHORTEST)
    if coarse <= _FINE_FROM:
        return coarse
    step = _FINE_FROM // 4
    while 8 * step < size:  # an octave ends at eight of its steps
        step *= 2
    return -(-size // step) * step


def row_counts(length: int, budget: int) -> list[int]:
    """Return how many rows a micro-batch of that row length may have: all that fit, or a power of two below."""
    limit = max(1, budget // length)
    return sorted({limit, *(1 << power for power in range(limit.bit_length()))}, reverse=True)


def plan(examples: Sequence[PassExample], budget: int) -> list[Slab]:
    """Return the micro-batches of one request, `budget` tokens each, or one row where a row is longer.

    Longest rows first, neighbours in length together, and none in a slab over twice its bucket: at most about half
    of a slab is padding in length.
    """
    order = sorted(range(len(examples)), key=lambda i: (-_num_targets(examples[i]), -examples[i].tokens.size, i))
    slabs: list[Slab] = []
    while order:
        first = examples[order[0]]
        num_targets = next_power(_num_targets(first))
        length = row_length(first.tokens.size)
        limit = max(1, budget // length)
        rows: list[int] = []
        for index in order[:limit]:
            example = examples[index]
            if next_power(_num_targets(example)) != num_targets or 2 * row_length(example.tokens.size) < length:
                break
            rows.append(index)
        slabs.append(Slab(tuple(rows), min(next_power(len(rows)), limit), length, num_targets))
        order = order[len(rows) :]
    return slabs


def fill(slab: Slab, examples: Sequence[PassExample]) -> MicroBatch:
    """Copy a slab's examples into arrays of its shape."""
    B, T, K = slab.num_rows, slab.length, slab.num_targets
    shape = (B, T) if K == 1 else (B, T, K)
    loss = LOSSES[examples[slab.rows[0]].loss]
    batch = MicroBatch(
        loss=number_of(loss.spec.name, len(shape)),
        tokens_BT=np.zeros((B, T), np.int32),
        targets=np.zeros(shape, np.int32),
        inputs={name: np.zeros(shape, np.float32) for name in INPUTS},
        config_BC=np.zeros((B, NUM_COLUMNS), np.float32),
    )
    for row, index in enumerate(slab.rows):
        example = examples[index]
        assert example.loss == loss.spec.name, "the examples of a request share its loss"
        batch.tokens_BT[row, : example.tokens.size] = example.tokens
        _put(batch.targets[row], example.loss_inputs[TARGETS])
        for name in loss.spec.inputs.keys() - {TARGETS}:
            _put(batch.inputs[name][row], example.loss_inputs[name])
        batch.config_BC[row, : len(loss.columns)] = [example.loss_config[column] for column in loss.columns]
    # A loss may divide by its config: 0 / 0 of an empty row would be NaN in the sum, so it gets a valid config.
    batch.config_BC[len(slab.rows) :] = batch.config_BC[0]
    return batch


def read_results(
    slab: Slab, examples: Sequence[PassExample], logprobs: Float32Array, loss: LossOutput
) -> Iterator[tuple[int, PassResult]]:
    """Yield (index of the example, its result) from what the slab's micro-batch gave, on the host."""
    for row, index in enumerate(slab.rows):
        shape = examples[index].loss_inputs[TARGETS].shape
        own = logprobs[row, : shape[0]] if logprobs.ndim == 2 else logprobs[row, : shape[0], : shape[1]]
        named = {name: loss.means[name] for name in mean_names(examples[index].loss)}
        means = {name: MeanTerm(float(mean.total_B[row]), float(mean.count_B[row])) for name, mean in named.items()}
        # A copy: a view would keep the whole micro-batch alive, padding and all.
        yield index, PassResult(logprobs=own.reshape(shape).copy(), sums={"loss": float(loss.loss_B[row])}, means=means)


def _num_targets(example: PassExample) -> int:
    targets = example.loss_inputs[TARGETS]
    return 1 if targets.ndim == 1 else targets.shape[1]


def _put(into: NumberArray, array: NumberArray) -> None:
    """Write [T] or [T, K] into the beginning of a row [T'] or [T', K']."""
    if into.ndim == 1:
        into[: array.shape[0]] = array.reshape(array.shape[0])
    else:
        into[: array.shape[0], : array.shape[1]] = array
