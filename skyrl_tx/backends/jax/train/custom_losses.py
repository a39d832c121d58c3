"""Custom losses of a batch of examples, in few compiled programs.

A custom loss is no part of the compiled step, because that would compile the model for each loss. A pass computes the
log-probabilities first; here they become the loss of each example and its gradient by them; and the gradient becomes
the weights of a cross-entropy, whose gradient is the loss's own. This is what the SDK does between two requests
(`forward_backward_custom` of a function).

Legend: N examples, T positions, K targets per position.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import msgspec
import numpy as np

from skyrl_tx.backends.jax.shapes import next_power_of_two
from skyrl_tx.contract.arrays import Float32Array, NumberArray
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.custom_loss import CustomLoss
from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.contract.results import PassResult
from skyrl_tx.losses import custom

_SHORTEST = 32
_CHUNK_CELLS = 2**15
"""The cells of one array of a chunk. A chunk of one long example has more, see `MAX_ELEMENTS`."""
_MAX_PROGRAMS = 128
"""The compiled programs that are kept: one for each structure of a loss and each power of two of lengths."""


@dataclass(frozen=True, slots=True)
class CustomLossValue:
    """The loss of one example, its metrics, and its gradient by the log-probabilities, in their shape."""

    loss: float
    metrics: dict[str, float]
    gradient: Float32Array

    def to_result(self, logprobs: Float32Array) -> PassResult:
        """Return the result of the example."""
        return PassResult(logprobs=logprobs, sums={"loss": self.loss}, metrics=self.metrics)


def as_cross_entropy(example: PassExample, gradient: Float32Array | None = None) -> PassExample:
    """Return an example whose cross-entropy has this gradient by the log-probabilities; without one it is 0."""
    targets = example.loss_inputs[TARGET_TOKENS]
    weights = np.zeros(targets.shape, np.float32) if gradient is None else -gradient
    return replace(example, loss="cross_entropy", loss_inputs={TARGET_TOKENS: targets, "weights": weights}, custom=None)


def evaluate(examples: Sequence[PassExample], logprobs: Sequence[Float32Array]) -> list[CustomLossValue]:
    """Return the custom loss of each example of one request, from its log-probabilities [T] or [T, K].

    The shapes of an example's arrays follow from its own length, so that results are batch-invariant.
    """
    loss = examples[0].custom
    assert loss is not None
    structure = msgspec.msgpack.encode(replace(loss, name="", constants=(0.0,) * len(loss.constants)))
    constants = np.array(loss.constants, np.float32)
    by_shape: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        by_shape[max(next_power_of_two(example.tokens.size), _SHORTEST), _count_targets(example)].append(index)
    found: dict[int, CustomLossValue] = {}
    for (length, num_targets), members in by_shape.items():
        size = max(1, _CHUNK_CELLS // (length * num_targets))
        for first in range(0, len(members), size):
            chunk = members[first : first + size]
            lengths = np.ones(size, np.int32)
            lengths[: len(chunk)] = [examples[index].tokens.size for index in chunk]
            inputs = [
                _stack([_get_input(each.name, examples[index], logprobs[index]) for index in chunk], length, size)
                for each in loss.inputs
            ]
            program = _get_program(structure, length, num_targets)
            losses, metrics, gradients = jax.device_get(program(inputs, constants, lengths))
            for row, index in enumerate(chunk):
                found[index] = CustomLossValue(
                    float(losses[row]),
                    {name: float(values[row]) for name, values in metrics.items()},
                    gradients[row, : lengths[row]].copy(),
                )
    return [found[index] for index in range(len(examples))]


@lru_cache(_MAX_PROGRAMS)
def _get_program(structure: bytes, length: int, num_targets: int) -> Any:
    """Return the function of one structure and shape. Constants are data, so that a loop may change them."""
    loss = msgspec.msgpack.decode(structure, type=CustomLoss)
    return jax.jit(jax.vmap(partial(custom.value_and_gradient, loss), in_axes=(0, None, 0)))


def _get_input(name: str, example: PassExample, logprobs: Float32Array) -> NumberArray:
    return logprobs if name == "logprobs" else example.loss_inputs[name]


def _stack(arrays: Sequence[NumberArray], length: int, size: int) -> Float32Array:
    """Return arrays [T, ...] as one [N, length, ...], padded with the last element; missing rows are zeros."""
    first = arrays[0]
    stacked = np.zeros((size, *((length, *first.shape[1:]) if first.ndim else ())), np.float32)
    for row, array in enumerate(arrays):
        if array.ndim == 0:
            stacked[row] = array
        else:
            stacked[row, : len(array)] = array
            stacked[row, len(array) :] = array[-1]
    return stacked


def _count_targets(example: PassExample) -> int:
    """Return the number of targets per position of any of the example's arrays."""
    return max(array.shape[1] if array.ndim == 2 else 1 for array in example.loss_inputs.values())
