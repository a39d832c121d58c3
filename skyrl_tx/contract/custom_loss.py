"""Losses that a client defines, as data: a list of array operations from a closed vocabulary.

The API compiles what a client uploads to this form, requests carry it, and backends evaluate it. A loss is evaluated
once per datum; the values are summed. All numbers are float32 or bool.

Every dimension of a value is one of three: "T" is the number of positions of the datum, less what slices have cut off;
"K" is its number of targets per position, less the same; "1" is one. A value has each of "T" and "K" at most once, so
that no value has more elements than an input [T, K].
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

CUSTOM = "custom"
"""The name of these losses in requests."""
LOGPROBS = "logprobs"
"""The first input of every custom loss: the model's log-probabilities, in the shape of the targets."""

MAX_OPERATIONS = 256
"""The most operations of one loss. Compiling as many takes 3 to 10 s on a CPU, for which others wait; 1,024 take 40."""
MAX_ELEMENTS = 2**26
"""The most elements of all values of a loss on one datum: 256 MiB."""
MAX_EXACT = 2**24
"""Whole numbers up to this one are exact in float32."""

Symbol = Literal["T", "K", "1"]


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension: its symbol, and how many elements slices have cut off."""

    symbol: Symbol
    cut: int = 0

    def __str__(self) -> str:
        return f"{self.symbol}-{self.cut}" if self.cut else self.symbol


ONE = Dim("1")
Shape = tuple[Dim, ...]


class ShapeError(ValueError):
    """Shapes that do not fit an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLossInput:
    """An input of a loss: a scalar (rank 0), or an array [T] or [T, K]."""

    name: str
    rank: int

    @property
    def shape(self) -> Shape:
        """The shape of the input."""
        return (Dim("T"), Dim("K"))[: self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation: its name, the numbers of the values that it reads, and its options, see `OPERATIONS`."""

    name: str
    values: tuple[int, ...]
    options: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    """A loss of one datum.

    Values are numbered: first the inputs, then the constants, which are scalars, then the result of each operation,
    which reads earlier values only. `loss` is the number of the scalar to minimise. `metrics` are numbers of scalars by
    a name with the suffix `:sum` or `:mean`, which says how they combine over datums.
    """

    name: str
    inputs: tuple[CustomLossInput, ...]
    constants: tuple[float, ...]
    operations: tuple[Operation, ...]
    loss: int
    metrics: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def num_leaves(self) -> int:
        """The number of values that no operation computes."""
        return len(self.inputs) + len(self.constants)

    def shapes(self) -> list[Shape]:
        """Return the shape of every value. Raises ShapeError if the operations do not fit together."""
        shapes: list[Shape] = [*(each.shape for each in self.inputs), *((),) * len(self.constants)]
        for operation in self.operations:
            shapes.append(result_shape(operation, [shapes[value] for value in operation.values]))
        return shapes

    def needs(self) -> "Needs":
        """Return what the loss needs of a datum. Computed once per request: it takes time for each operation."""
        fewest: dict[Symbol, int] = {"T": 1, "K": 1, "1": 1}
        shapes = self.shapes()
        for dim in (dim for shape in shapes for dim in shape):
            fewest[dim.symbol] = max(fewest[dim.symbol], dim.cut + 1)
        for operation in self.operations:
            if operation.name == "select":
                axis, index = operation.options
                dim = shapes[operation.values[0]][axis]
                fewest[dim.symbol] = max(fewest[dim.symbol], dim.cut + (index + 1 if index >= 0 else -index))
        kinds = Counter(frozenset(dim.symbol for dim in shape) - {"1"} for shape in shapes)
        return Needs(
            positions=fewest["T"],
            targets=fewest["K"],
            elements=tuple(kinds[frozenset(each)] for each in ((), ("T",), ("K",), ("T", "K"))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The fewest positions and targets per position that leave no value of a loss empty, and its memory.

    `elements` are the numbers of its values that are scalars, [T], [K] and [T, K].
    """

    positions: int
    targets: int
    elements: tuple[int, ...]

    def num_elements(self, num_positions: int, num_targets: int) -> int:
        """Return the number of elements of all values on one datum, at most."""
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
"""Options: 1 if the reduced axes stay with size 1, or 0, then the axes."""
ALONG_AXIS = frozenset({"cumsum"})
"""Options: the axis."""
OTHERS = frozenset(
    {
        "where",  # condition, value where it holds, value elsewhere
        "unsqueeze",  # options: the axis of size 1 in the result
        "squeeze",  # options: an axis of size 1
        "slice",  # options: axis, elements cut off at its start, elements cut off at its end
        "select",  # options: axis, index, which is counted from the end if negative
        "size",  # options: an axis, whose size is the result, a scalar
        "broadcast",  # the first value in the shape of both
    }
)
OPERATIONS = UNARY | BINARY | REDUCTIONS | ALONG_AXIS | OTHERS
"""The vocabulary. Its functions are those of numpy; their derivatives are those of torch."""
GIVES_BOOL = frozenset(
    {*("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"), "logical_not", "is_nan"}
)
"""Operations whose result is bool. Others give float32, or the type of what they read."""


def result_shape(operation: Operation, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of an operation's result. Raises ShapeError if the shapes of what it reads do not fit."""
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
    if name == "slice":
        cut = Dim(shape[axis].symbol, shape[axis].cut + options[1] + options[2])
        return (*shape[:axis], cut, *shape[axis + 1 :])
    if name in ("squeeze", "select"):
        return (*shape[:axis], *shape[axis + 1 :])
    assert name in ALONG_AXIS, name
    return shape


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the common shape. Raises ShapeError for dimensions that differ, or that a value may not have together."""
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
        raise ShapeError(f"shape {shape_text(shape)} grows with the square of the length, which is not offered")


def shape_text(shape: Shape) -> str:
    """Return a shape as error messages show it."""
    return f"[{', '.join(map(str, shape))}]"
