"""Losses that a client defines, as data: a list of array operations from a fixed vocabulary.

The API compiles the client's loss to this form, requests carry it, and backends evaluate it. A loss
is evaluated once per datum, and the values are summed. All numbers are float32 or bool.

Every dimension of a value has one of three symbols: "T" is the number of positions of the datum,
"K" is the number of targets per position, and "1" is one. Slices shorten a dimension, and
concatenations lengthen it, by a number of elements that does not depend on the datum. So a dimension
of the symbol "1" has a fixed size. A value has "T" and "K" at most once each, and `MAX_FIXED` limits
the other sizes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

CUSTOM = "custom"
"""The name of a custom loss in requests."""
LOGPROBS = "logprobs"
"""The first input of every custom loss: the model's log-probabilities of the targets."""

MAX_OPERATIONS = 256
"""Maximum number of operations.

Compiling 256 takes 3 to 10 s on a CPU; 1,024 take 40 s.
"""
MAX_ELEMENTS = 2**26
"""Maximum number of elements of all values of a loss on one datum: 256 MiB."""
MAX_EXACT = 2**24
"""Whole numbers up to this one are exact in float32."""
MAX_FIXED = 64
"""Maximum product of the fixed sizes of a value, and of the elements that concatenations add to "T" or "K"."""

Symbol = Literal["T", "K", "1"]


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension: its symbol, and how many elements slices have removed from it.

    A negative number says how many elements concatenations have added.
    """

    symbol: Symbol
    cut: int = 0

    def __str__(self) -> str:
        if self.symbol == "1":
            return str(1 - self.cut)
        return f"{self.symbol}{-self.cut:+}" if self.cut else self.symbol


ONE = Dim("1")
Shape = tuple[Dim, ...]


class ShapeError(ValueError):
    """The shapes of the values do not fit an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLossInput:
    """An input of a loss: a scalar (rank 0), or an array [T] (rank 1) or [T, K] (rank 2)."""

    name: str
    rank: int

    @property
    def shape(self) -> Shape:
        """The shape of the input."""
        return (Dim("T"), Dim("K"))[: self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation: its name, the numbers of its input values, and its options."""

    name: str
    values: tuple[int, ...]
    options: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    """A loss of one datum.

    Values are numbered in this order: the inputs, the constants (which are scalars), and the result
    of each operation. An operation reads earlier values only. `loss` is the number of the scalar to
    minimise. `metrics` maps names to numbers of scalars. A name ends in `:sum` or `:mean`, which
    says how the metric is combined over datums.
    """

    name: str
    inputs: tuple[CustomLossInput, ...]
    constants: tuple[float, ...]
    operations: tuple[Operation, ...]
    loss: int
    metrics: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def num_leaves(self) -> int:
        """Number of values that are not computed by an operation."""
        return len(self.inputs) + len(self.constants)

    def shapes(self) -> list[Shape]:
        """Return the shape of every value.

        Raises ShapeError if the operations do not fit together.
        """
        shapes: list[Shape] = [*(source.shape for source in self.inputs), *((),) * len(self.constants)]
        for operation in self.operations:
            shapes.append(result_shape(operation, [shapes[value] for value in operation.values]))
        return shapes

    def needs(self) -> "Needs":
        """Return what a datum needs for this loss.

        Call it once per request, because it visits every operation.
        """
        # A slice must leave at least one element.
        minimum: dict[Symbol, int] = {"T": 1, "K": 1, "1": 1}
        shapes = self.shapes()
        for dim in (dim for shape in shapes for dim in shape):
            minimum[dim.symbol] = max(minimum[dim.symbol], dim.cut + 1)

        # The elements that an operation reads must exist.
        for operation in self.operations:
            if operation.name in _READS_ELEMENTS:
                dim = shapes[operation.values[0]][operation.options[0]]
                minimum[dim.symbol] = max(minimum[dim.symbol], dim.cut + _count_read(operation))

        # The number of elements of each value is a polynomial of the sizes.
        counts = Counter[str]()
        for shape in shapes:
            counts.update(_count_elements(shape))
        return Needs(
            positions=minimum["T"],
            targets=minimum["K"],
            elements=tuple(counts[symbols] for symbols in ("", "T", "K", "TK")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The requirements of a loss: minimum positions and targets of a datum, and memory.

    A smaller datum would leave a value of the loss empty, or lack an element. All values together
    have a number of elements that is the sum of `elements` times 1, T, K and T K, in this order.
    """

    positions: int
    targets: int
    elements: tuple[int, ...]

    def num_elements(self, num_positions: int, num_targets: int) -> int:
        """Return the maximum number of elements of all values on one datum."""
        sizes = (1, num_positions, num_targets, num_positions * num_targets)
        return sum(count * size for count, size in zip(self.elements, sizes, strict=True))


UNARY = frozenset(
    {
        *("neg", "abs", "sign", "floor", "square", "reciprocal", "sqrt", "exp", "expm1", "log", "log1p"),
        *("sin", "cos", "tanh", "sigmoid", "softplus", "stop_gradient"),
        *("to_float", "is_nan", "logical_not"),
    }
)
BINARY = frozenset(
    {
        *("add", "sub", "mul", "div", "pow", "maximum", "minimum", "logaddexp"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"),
    }
)
REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "logsumexp"})
"""Options: 1 to keep the reduced axes with size 1 or 0 to drop them, then the axes."""
ALONG_AXIS = frozenset({"cumsum"})
"""Options: the axis."""
OTHERS = frozenset(
    {
        "where",  # values: condition, value where it holds, value elsewhere
        "unsqueeze",  # options: the axis of size 1 in the result
        "squeeze",  # options: the axis of size 1 to remove
        "slice",  # options: axis, number of elements removed at its start, number removed at its end
        "select",  # options: axis, index; a negative index counts from the end
        "size",  # options: an axis; the result is its size, a scalar
        "broadcast",  # the first value, broadcast to the common shape of both
        "window",  # options: axis, index of the first element, number of elements; as in "select"
        "concat",  # options: axis; only one value may have the symbol "T" or "K" there
        "topk",  # options: axis, k; the k largest elements, which are sorted from the largest
        "argtopk",  # options: axis, k; the indices of the elements of "topk"
    }
)
OPERATIONS = UNARY | BINARY | REDUCTIONS | ALONG_AXIS | OTHERS
"""The vocabulary. The functions behave as in numpy, and their derivatives as in torch."""
GIVES_BOOL = frozenset(
    {*("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"), "logical_not", "is_nan"}
)
"""Operations with a bool result.

All other operations return float32, or the type of the values that they read.
"""
_READS_ELEMENTS = frozenset({"select", "window", "topk", "argtopk"})
"""Operations that need a number of elements on an axis, see `_count_read`."""


def _count_read(operation: Operation) -> int:
    """Return how many elements an axis needs for one of `_READS_ELEMENTS`."""
    if operation.name in ("topk", "argtopk"):
        return operation.options[1]
    first, *count = operation.options[1:]
    return -first if first < 0 else first + sum(count or [1])


def result_shape(operation: Operation, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of an operation's result.

    Raises ShapeError if the shapes of its values do not fit.
    """
    name, options = operation.name, operation.options
    if name in UNARY:
        return shapes[0]
    if name in BINARY or name in ("where", "broadcast"):
        return broadcast(shapes)
    if name == "size":
        return ()

    shape = shapes[0]
    if name in REDUCTIONS:
        keeps, axes = bool(options[0]), options[1:]
        kept = ((ONE if axis in axes else dim) for axis, dim in enumerate(shape) if keeps or axis not in axes)
        return tuple(kept)

    axis = options[0]
    if name == "unsqueeze":
        return (*shape[:axis], ONE, *shape[axis:])
    if name == "concat":
        return _concat_shapes(shapes, axis)
    if name in _READS_ELEMENTS and shape[axis].symbol == "1" and _count_read(operation) > 1 - shape[axis].cut:
        raise ShapeError(f"dimension {axis} of {shape_text(shape)} is too small")
    if name == "slice":
        return _replace_dim(shape, axis, Dim(shape[axis].symbol, shape[axis].cut + options[1] + options[2]))
    if name in ("window", "topk", "argtopk"):
        return _replace_dim(shape, axis, Dim("1", 1 - options[-1]))
    if name in ("squeeze", "select"):
        return (*shape[:axis], *shape[axis + 1 :])
    assert name in ALONG_AXIS, name
    return shape


def _replace_dim(shape: Shape, axis: int, dim: Dim) -> Shape:
    """Return a shape with another dimension. Raises ShapeError if the dimension has no elements, or too many."""
    result = (*shape[:axis], dim, *shape[axis + 1 :])
    if dim.symbol == "1" and dim.cut > 0:
        raise ShapeError(f"dimension {axis} of {shape_text(shape)} is too small")
    check_shape(result)
    return result


def _concat_shapes(shapes: Sequence[Shape], axis: int) -> Shape:
    dims = [shape[axis] for shape in shapes]
    others = [dim for dim in dims if dim.symbol != "1"]
    if len(others) > 1 or len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) > 1:
        raise ShapeError(
            f"shapes {' and '.join(map(shape_text, shapes))} cannot be joined on dimension {axis}: only one of them "
            "may depend on the datum there, and the other dimensions must be equal"
        )
    fixed = sum(1 - dim.cut for dim in dims if dim.symbol == "1")
    return _replace_dim(
        shapes[0], axis, Dim(others[0].symbol, others[0].cut - fixed) if others else Dim("1", 1 - fixed)
    )


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the common shape.

    Raises ShapeError if dimensions differ, or if no value may have the common shape.
    """
    rank = max(map(len, shapes))
    result: list[Dim] = []
    for axis in range(-rank, 0):
        dims = {shape[axis] for shape in shapes if len(shape) >= -axis} - {ONE}
        if len(dims) > 1:
            raise ShapeError(f"shapes {' and '.join(map(shape_text, shapes))} do not broadcast")
        result.append(dims.pop() if dims else ONE)
    check_shape(tuple(result))
    return tuple(result)


def check_shape(shape: Shape) -> None:
    """Raise ShapeError unless a value may have this shape."""
    symbols = [dim.symbol for dim in shape if dim.symbol != "1"]
    if len(set(symbols)) < len(symbols):
        raise ShapeError(f"shape {shape_text(shape)} grows with the square of the length, which is not supported")
    added = max((-dim.cut for dim in shape if dim.symbol != "1"), default=0)
    if max(added, prod(1 - dim.cut for dim in shape if dim.symbol == "1")) > MAX_FIXED:
        raise ShapeError(
            f"shape {shape_text(shape)} has more than {MAX_FIXED} elements that do not depend on the datum"
        )


def _count_elements(shape: Shape) -> Counter[str]:
    """Return the number of elements as a polynomial: the coefficients of "", "T", "K" and "TK".

    For example, [T+1, K, 2] has 2 T K + 2 K elements. Slices do not count, because their padded
    arrays are not shorter.
    """
    counts = Counter({"": prod(1 - dim.cut for dim in shape if dim.symbol == "1")})
    for dim in sorted((dim for dim in shape if dim.symbol != "1"), key=lambda dim: dim.symbol != "T"):
        added = Counter({symbols: count * max(-dim.cut, 0) for symbols, count in counts.items()})
        counts = added + Counter({symbols + dim.symbol: count for symbols, count in counts.items()})
    return counts


def shape_text(shape: Shape) -> str:
    """Return a shape as error messages show it, for example "[T-1, K]"."""
    return f"[{', '.join(map(str, shape))}]"
