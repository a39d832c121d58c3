"""Evaluate a custom loss for one datum in JAX, with its gradient.

The gradient is the derivative of the loss with respect to the log-probabilities.

Legend: T positions, K targets per position.

Arrays are padded along T and K, so that one compiled program serves datums of many lengths. The
padding of an input repeats its last element, and every operation on padded arrays returns an array
that is padded in the same way. Padding therefore contains a NaN only if the datum itself does.
Reductions such as sums and means skip padding.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from skyrl_tx.contract.custom_loss import CustomLoss, Dim, Operation, Shape

_FUNCTIONS: Mapping[str, Callable[..., jax.Array]] = {
    "neg": jnp.negative,
    # The derivative at 0 is 0, as in torch. In JAX it would be 1.
    "abs": lambda x: x * jax.lax.stop_gradient(jnp.sign(x)),
    "sign": jnp.sign,
    "floor": jnp.floor,
    "square": jnp.square,
    "reciprocal": lambda x: 1.0 / x,
    "sqrt": jnp.sqrt,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "stop_gradient": lambda x: jax.lax.stop_gradient(x),
    "to_float": lambda x: x.astype(jnp.float32),
    "is_nan": jnp.isnan,
    "logical_not": jnp.logical_not,
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "pow": jnp.power,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "logaddexp": jnp.logaddexp,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "where": jnp.where,
}
"""Elementwise operations."""
_REDUCTIONS: Mapping[str, tuple[Callable[..., jax.Array], float]] = {
    "sum": (jnp.sum, 0.0),
    "mean": (jnp.sum, 0.0),
    "amax": (jnp.max, -jnp.inf),
    "amin": (jnp.min, jnp.inf),
    "logsumexp": (jax.nn.logsumexp, -jnp.inf),
}
"""Reductions, each with the value that replaces padding.

A mean is computed as a sum, which `_reduce` divides by the number of elements without padding.
"""


Sizes = Mapping[str, jax.Array]
"""How many positions ("T") and targets ("K") the datum has without padding, int32."""


def evaluate(
    loss: CustomLoss, inputs: Sequence[jax.Array], constants: jax.Array, sizes: Sizes
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of one datum and its metrics, float32 scalars.

    Args:
        loss: the custom loss. Its own constants are ignored.
        inputs: one float32 array per entry of `loss.inputs`, padded with its last elements.
        constants: float32 [number of constants], used instead of the constants of `loss`. Losses
            that differ only in constants can then share a compiled program.
        sizes: the numbers of positions and of targets without padding.
    """
    values = [*inputs, *constants]
    shapes = loss.shapes()
    for operation, shape in zip(loss.operations, shapes[loss.num_leaves :], strict=True):
        operands = [values[number] for number in operation.values]
        values.append(_compute(operation, operands, [shapes[number] for number in operation.values], shape, sizes))
    return values[loss.loss], {name: values[number] for name, number in loss.metrics.items()}


def value_and_gradient(
    loss: CustomLoss, inputs: Sequence[jax.Array], constants: jax.Array, sizes: Sizes
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """Return the loss and metrics of `evaluate`, and d loss / d logprob.

    The gradient has the shape of the first input and is 0 in padding.
    """

    def evaluate_logprobs(logprobs: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return evaluate(loss, [logprobs, *inputs[1:]], constants, sizes)

    (value, metrics), gradient = jax.value_and_grad(evaluate_logprobs, has_aux=True)(inputs[0])
    return value, metrics, gradient


def _compute(
    operation: Operation, operands: Sequence[jax.Array], shapes: Sequence[Shape], shape: Shape, sizes: Sizes
) -> jax.Array:
    """Return the result of an operation, which has `shape`. `shapes` are the shapes of `operands`."""
    name, options, x = operation.name, operation.options, operands[0]

    # Operations on any number of axes
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](*operands)
    if name in _REDUCTIONS:
        return _reduce(name, x, shapes[0], options, sizes)
    if name == "cumsum":
        return jnp.cumsum(_mask_padding(x, shapes[0], options, 0.0, sizes), axis=options[0])
    if name == "broadcast":
        return jnp.broadcast_arrays(*operands)[0]
    if name == "unsqueeze":
        return jnp.expand_dims(x, options[0])

    # Operations on one axis, which is the first option
    axis = options[0]
    if name == "squeeze":
        return jnp.squeeze(x, axis)
    if name == "concat":
        return _concat(operands, shapes, shape, axis, sizes)
    if name in ("topk", "argtopk"):
        return _select_largest(_mask_padding(x, shapes[0], [axis], -jnp.inf, sizes), axis, options[1], name)

    # Operations on one axis that need its size without padding
    size = _count_elements(shapes[0][axis], sizes)
    if name == "size":
        return size.astype(jnp.float32)
    if name == "select":
        index = options[1]
        return jnp.take(x, jnp.asarray(index) if index >= 0 else size + index, axis=axis, mode="clip")
    if name == "window":
        first = options[1] if options[1] >= 0 else size + options[1]
        return jnp.take(x, first + jnp.arange(options[2]), axis=axis, mode="clip")

    # Slices. The padding of the result repeats its last element.
    assert name == "slice", name
    last = _count_elements(shape[axis], sizes) - 1
    length = _pad_length(shape[axis], shapes[0][axis], x.shape[axis])
    return jnp.take(x, options[1] + jnp.minimum(jnp.arange(length), last), axis=axis, mode="clip")


def _concat(operands: Sequence[jax.Array], shapes: Sequence[Shape], shape: Shape, axis: int, sizes: Sizes) -> jax.Array:
    """Concatenate arrays along an axis, without the padding between them."""
    # For each array, the position in the result where it ends, and the length of its padding
    end, ends = jnp.asarray(0, jnp.int32), list[tuple[jax.Array, jax.Array]]()
    for x, dims in zip(operands, shapes, strict=True):
        size = _count_elements(dims[axis], sizes)
        end = end + size
        ends.append((end, x.shape[axis] - size))

    # The padded length follows from an operand with the symbol of the result, for example T
    same = max(range(len(shapes)), key=lambda index: shapes[index][axis].symbol == shape[axis].symbol)
    length = _pad_length(shape[axis], shapes[same][axis], operands[same].shape[axis])

    # Take the elements of all arrays, skipping their padding. The result's padding repeats its last element.
    position = jnp.minimum(jnp.arange(length), end - 1)
    skipped = sum((jnp.where(position >= stop, padding, 0) for stop, padding in ends[:-1]), jnp.zeros_like(position))
    return jnp.take(jnp.concatenate(operands, axis), position + skipped, axis=axis, mode="clip")


def _select_largest(x: jax.Array, axis: int, count: int, name: str) -> jax.Array:
    """Return the `count` largest elements along an axis, or their indices as float32."""
    values, indices = jax.lax.top_k(jnp.moveaxis(x, axis, -1), count)
    return jnp.moveaxis(values if name == "topk" else indices.astype(jnp.float32), -1, axis)


def _pad_length(dim: Dim, other: Dim, length: int) -> int:
    """Return the padded length of `dim`, given that `other` has the same symbol and is padded to `length`.

    Slices (a positive `cut`) do not shorten the padded length, and concatenations (a negative `cut`)
    extend it.
    """
    if dim.symbol == "1":
        return 1 - dim.cut
    return length + max(-dim.cut, 0) - max(-other.cut, 0)


def _count_elements(dim: Dim, sizes: Sizes) -> jax.Array:
    """Return the number of elements of a dim without padding."""
    return jnp.asarray(1, jnp.int32) - dim.cut if dim.symbol == "1" else sizes[dim.symbol] - dim.cut


def _mask_padding(x: jax.Array, shape: Shape, axes: Sequence[int], neutral: float, sizes: Sizes) -> jax.Array:
    """Replace the padding of `x` along `axes` by a value that is neutral, for example 0 in a sum."""
    for axis in axes:
        if shape[axis].symbol != "1":
            mask = jnp.arange(x.shape[axis]) < _count_elements(shape[axis], sizes)
            x = jnp.where(jnp.expand_dims(mask, [other for other in range(x.ndim) if other != axis]), x, neutral)
    return x


def _reduce(name: str, x: jax.Array, shape: Shape, options: Sequence[int], sizes: Sizes) -> jax.Array:
    """Reduce `x` over the axes in `options[1:]`. `options[0]` tells whether to keep them as dims of size 1."""
    keepdims, axes = bool(options[0]), tuple(options[1:])
    function, neutral = _REDUCTIONS[name]
    total = function(_mask_padding(x, shape, axes, neutral, sizes), axis=axes, keepdims=keepdims)
    if name != "mean":
        return total
    count = jnp.asarray(1, jnp.int32)
    for axis in axes:
        count = count * _count_elements(shape[axis], sizes)
    return total / count
