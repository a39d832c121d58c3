"""Evaluate custom losses, and turn their gradients into a cross-entropy loss.

A custom loss is not part of the compiled training program, because then the model would be compiled
for each loss. Instead, a forward-backward pass has three phases:

1. Compute the log-probabilities with the model.
2. Compute the loss of each example, and the gradient of the loss with respect to the
   log-probabilities (this module).
3. Run a cross-entropy loss with this gradient as weights. Its gradient is the gradient of the
   custom loss.

The SDK does the same with two requests, in `forward_backward_custom`.

Legend: T positions, K targets per position.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import msgspec
import numpy as np

from skyrl_tx.backends.jax.compiler import CompiledProgram, Compiler, Program
from skyrl_tx.backends.jax.shapes import next_power_of_two
from skyrl_tx.contract.arrays import Float32Array, NumberArray
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.custom_loss import CustomLoss
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.contract.results import PassResult
from skyrl_tx.losses import custom

_MIN_LENGTH = 32
_CHUNK_CELLS = 2**15
"""Number of cells (examples x positions x targets) in one array of a chunk.
A single long example may have more."""
_CHUNK_ELEMENTS = 2**24
"""Number of elements of all values of a loss in a chunk: 64 MiB.

A loss whose values are not larger than [T, K] reaches _CHUNK_CELLS first.
"""
MAX_SHAPES = 16
"""How many programs one request may need. Each takes seconds to compile."""
_MAX_PROGRAMS = 128
"""How many compiled programs are kept that no pass needs."""


def as_cross_entropy(example: PassExample, gradient: Float32Array | None = None) -> PassExample:
    """Return an example with a cross-entropy loss whose d loss / d logprob is `gradient`.

    None means zeros.
    """
    targets = example.loss_inputs[TARGET_TOKENS]
    weights = np.zeros(targets.shape, np.float32) if gradient is None else -gradient
    return replace(example, loss="cross_entropy", loss_inputs={TARGET_TOKENS: targets, "weights": weights}, custom=None)


@dataclass(frozen=True, slots=True)
class LossShape:
    """Everything that the program of a custom loss is compiled for."""

    structure: bytes
    """The loss without its name and constants.

    Constants are arguments, so a client may change them in each step without a compilation.
    """
    length: int
    """The padded number of positions."""
    num_targets: int
    """The padded number of targets per position."""
    chunk_size: int
    """The number of examples in one call."""

    def make_program(self) -> Program:
        """Return the program, with the shapes of its arguments."""
        loss = msgspec.msgpack.decode(self.structure, type=CustomLoss)
        sizes = self.chunk_size, self.length, self.num_targets
        inputs = [jax.ShapeDtypeStruct(sizes[: 1 + declared.rank], np.float32) for declared in loss.inputs]
        counts = jax.ShapeDtypeStruct(sizes[:1], np.int32)
        arguments = inputs, np.zeros(len(loss.constants), np.float32), {"T": counts, "K": counts}
        function = jax.jit(jax.vmap(partial(custom.value_and_gradient, loss), in_axes=(0, None, 0)))
        return Program(function, arguments, {})


def list_shapes(examples: Sequence[PassExample]) -> list[LossShape]:
    """Return the shape of each example of a request.

    The shape of an example does not depend on other examples. Raises UserError if the request needs
    more than MAX_SHAPES programs.
    """
    loss = examples[0].custom
    assert loss is not None
    structure = msgspec.msgpack.encode(replace(loss, name="", constants=(0.0,) * len(loss.constants)))
    needs = loss.needs()

    def make_shape(length: int, num_targets: int) -> LossShape:
        num_examples = _CHUNK_CELLS // (length * num_targets)
        num_examples = min(num_examples, _CHUNK_ELEMENTS // needs.num_elements(length, num_targets))
        return LossShape(structure, length, num_targets, max(1, num_examples))

    shapes = [
        make_shape(max(next_power_of_two(example.tokens.size), _MIN_LENGTH), next_power_of_two(_count_targets(example)))
        for example in examples
    ]

    if (num_shapes := len(set(shapes))) > MAX_SHAPES:
        raise UserError(
            f"data: its lengths and numbers of targets need {num_shapes} programs of loss {loss.name!r}, which is "
            f"compiled for each power of two; at most {MAX_SHAPES} are allowed in one request. Split data into several "
            "requests, with similar sizes in each"
        )
    return shapes


class CustomLossPrograms:
    """The programs of custom losses, compiled in the background while their passes wait.

    A program is kept while a pass needs it. Of the programs that no pass needs, the newest
    _MAX_PROGRAMS are kept.
    """

    def __init__(self, compiler: Compiler[LossShape] | None = None) -> None:
        """Without a compiler, programs are compiled when they are first called."""
        self.ready: dict[LossShape, CompiledProgram] = {} if compiler is None else compiler.ready
        """The compiled programs."""

        self._compiler = compiler
        self._num_passes: Counter[LossShape] = Counter()

    def acquire(self, shapes: Collection[LossShape], requester: Hashable) -> None:
        """Compile the programs that a pass needs, and keep them until the pass calls `release`.

        `requester` identifies the pass.
        """
        self._num_passes.update(shapes)
        for shape in shapes:
            if self._compiler is not None:
                self._compiler.queue_needed(shape, shape.make_program, requester)
            elif shape not in self.ready:
                self.ready[shape] = CompiledProgram(shape.make_program().compile_lazily())

    def release(self, shapes: Collection[LossShape]) -> None:
        """Undo `acquire`: a pass no longer needs these programs. Removes old programs."""
        self._num_passes -= Counter(shapes)
        idle = [shape for shape in list(self.ready) if shape not in self._num_passes]
        for shape in idle[: max(len(idle) - _MAX_PROGRAMS, 0)]:
            del self.ready[shape]

    def wait(self, shape: LossShape, timeout_s: float) -> bool:
        """Wait until a program is ready, at most `timeout_s` seconds. Returns whether it is ready."""
        return self._compiler is None or self._compiler.wait(shape, timeout_s)

    def close(self) -> None:
        """Stop compiling. Idempotent."""
        if self._compiler is not None:
            self._compiler.close()

    def evaluate(
        self, shapes: Sequence[LossShape], examples: Sequence[PassExample], logprobs: Sequence[Float32Array]
    ) -> list[tuple[PassResult, Float32Array]]:
        """Compute the custom loss of examples of a request from log-probabilities [T] or [T, K].

        Returns the result of each example, and d loss / d logprob in the shape of its
        log-probabilities. `shapes` is the result of `list_shapes`, and the programs must be ready. The padded shape of
        an example depends only on the example itself, so results are batch-invariant.
        """
        loss = examples[0].custom
        assert loss is not None
        constants = np.array(loss.constants, np.float32)
        by_shape: defaultdict[LossShape, list[int]] = defaultdict(list)
        for index, shape in enumerate(shapes):
            by_shape[shape].append(index)

        # Evaluate the examples of each shape in chunks of a fixed size.
        values: dict[int, tuple[PassResult, Float32Array]] = {}
        for shape, members in by_shape.items():
            program = self.ready[shape]
            for first in range(0, len(members), shape.chunk_size):
                chunk = members[first : first + shape.chunk_size]
                sizes = {"T": np.ones(shape.chunk_size, np.int32), "K": np.ones(shape.chunk_size, np.int32)}
                sizes["T"][: len(chunk)] = [examples[index].tokens.size for index in chunk]
                sizes["K"][: len(chunk)] = [_count_targets(examples[index]) for index in chunk]
                inputs = [
                    _stack([_get_input(spec.name, examples[index], logprobs[index]) for index in chunk], shape)
                    for spec in loss.inputs
                ]
                program.num_calls += 1
                losses, metrics, gradients = jax.device_get(program.call(inputs, constants, sizes))

                # Read the results without padding.
                for row, index in enumerate(chunk):
                    region = tuple(slice(size) for size in logprobs[index].shape)
                    own_metrics = {name: float(metric[row]) for name, metric in metrics.items()}
                    result = PassResult(
                        logprobs=logprobs[index], sums={"loss": float(losses[row])}, metrics=own_metrics
                    )
                    values[index] = result, gradients[row][region].copy()
        return [values[index] for index in range(len(examples))]


def _get_input(name: str, example: PassExample, logprobs: Float32Array) -> NumberArray:
    return logprobs if name == "logprobs" else example.loss_inputs[name]


def _stack(arrays: Sequence[NumberArray], shape: LossShape) -> Float32Array:
    """Stack arrays [T, ...] to one array [size, length, ...].

    Along positions and targets, each array is padded with its last element. Missing arrays are
    zeros. Arrays without dims become [size].
    """
    padded = (shape.length, shape.num_targets)[: arrays[0].ndim]
    stacked = np.zeros((shape.chunk_size, *padded), np.float32)
    for row, array in enumerate(arrays):
        example = stacked[row, ...]  # a view, also without dims
        example[tuple(map(slice, array.shape))] = array
        if array.ndim > 0:
            example[array.shape[0] :] = example[array.shape[0] - 1]
        if array.ndim > 1:
            example[:, array.shape[1] :] = example[:, array.shape[1] - 1 : array.shape[1]]
    return stacked


def _count_targets(example: PassExample) -> int:
    """Return the number of targets per position, from the example's input with the most columns."""
    return max(array.shape[1] if array.ndim == 2 else 1 for array in example.loss_inputs.values())
