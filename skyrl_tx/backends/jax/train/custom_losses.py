"""Evaluate custom losses, and turn their gradients into a cross-entropy loss.

A custom loss is not part of the compiled training program, because then the model would be compiled
for each loss. Instead a pass has three phases:

1. Compute the log-probabilities with the model.
2. Compute the loss of each example, and the gradient of the loss with respect to the
   log-probabilities (this module).
3. Run a cross-entropy loss with this gradient as weights. Its gradient is the gradient of the
   custom loss.

The SDK does the same with two requests, in `forward_backward_custom`.

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

_MIN_LENGTH = 32
_CHUNK_CELLS = 2**15
"""Number of cells (examples x positions x targets) in one array of a chunk.
A single long example may have more."""
_MAX_PROGRAMS = 128
"""How many compiled programs are kept.
There is one for each structure of a loss and each padded length."""


@dataclass(frozen=True, slots=True)
class CustomLossValue:
    """The custom loss of one example."""

    loss: float
    metrics: dict[str, float]
    gradient: Float32Array
    """d loss / d logprob, in the shape of the log-probabilities: [T] or [T, K]."""

    def to_result(self, logprobs: Float32Array) -> PassResult:
        """Return the result of the example."""
        return PassResult(logprobs=logprobs, sums={"loss": self.loss}, metrics=self.metrics)


def as_cross_entropy(example: PassExample, gradient: Float32Array | None = None) -> PassExample:
    """Return an example with a cross-entropy loss whose d loss / d logprob is `gradient`.

    None means zeros.
    """
    targets = example.loss_inputs[TARGET_TOKENS]
    weights = np.zeros(targets.shape, np.float32) if gradient is None else -gradient
    return replace(example, loss="cross_entropy", loss_inputs={TARGET_TOKENS: targets, "weights": weights}, custom=None)


def evaluate(examples: Sequence[PassExample], logprobs: Sequence[Float32Array]) -> list[CustomLossValue]:
    """Compute the custom loss of each example of a request from log-probabilities [T] or [T, K].

    The padded shapes of an example depend only on the example itself, so results are
    batch-invariant.
    """
    # Programs are cached by the structure of the loss, without its constants.
    loss = examples[0].custom
    assert loss is not None
    structure = msgspec.msgpack.encode(replace(loss, name="", constants=(0.0,) * len(loss.constants)))
    constants = np.array(loss.constants, np.float32)

    # Group the examples by padded shape.
    by_shape: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        by_shape[max(next_power_of_two(example.tokens.size), _MIN_LENGTH), _count_targets(example)].append(index)

    # Evaluate each group in chunks of a fixed number of examples.
    values: dict[int, CustomLossValue] = {}
    for (length, num_targets), members in by_shape.items():
        size = max(1, _CHUNK_CELLS // (length * num_targets))
        for first in range(0, len(members), size):
            chunk = members[first : first + size]
            lengths = np.ones(size, np.int32)
            lengths[: len(chunk)] = [examples[index].tokens.size for index in chunk]
            inputs = [
                _stack([_get_input(spec.name, examples[index], logprobs[index]) for index in chunk], length, size)
                for spec in loss.inputs
            ]
            program = _get_program(structure, length, num_targets)
            losses, metrics, gradients = jax.device_get(program(inputs, constants, lengths))

            for row, index in enumerate(chunk):
                values[index] = CustomLossValue(
                    float(losses[row]),
                    {name: float(metric[row]) for name, metric in metrics.items()},
                    gradients[row, : lengths[row]].copy(),
                )
    return [values[index] for index in range(len(examples))]


@lru_cache(_MAX_PROGRAMS)
def _get_program(structure: bytes, length: int, num_targets: int) -> Any:
    """Return the compiled function for a structure and a shape.

    The constants of the loss are arguments, so a client may change them in each step without a
    compilation.
    """
    loss = msgspec.msgpack.decode(structure, type=CustomLoss)
    return jax.jit(jax.vmap(partial(custom.value_and_gradient, loss), in_axes=(0, None, 0)))


def _get_input(name: str, example: PassExample, logprobs: Float32Array) -> NumberArray:
    return logprobs if name == "logprobs" else example.loss_inputs[name]


def _stack(arrays: Sequence[NumberArray], length: int, size: int) -> Float32Array:
    """Stack arrays [T, ...] to one array [size, length, ...].

    Positions are padded with the last element of the array, and missing rows with zeros. Arrays
    without dims become [size].
    """
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
    """Return the number of targets per position, from the example's input with the most columns."""
    return max(array.shape[1] if array.ndim == 2 else 1 for array in example.loss_inputs.values())
