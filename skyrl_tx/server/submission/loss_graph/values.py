"""Values of a loss while its graph is compiled, and arguments of the graph's nodes.

`Builder` adds operations, and tracks the type and shape of every value. `read_argument` decodes an
argument of a node, and `Arguments` binds the arguments of a call to parameter names.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import TypeAlias, cast

from skyrl_tx.contract.custom_loss import (
    GIVES_BOOL,
    LOGPROBS,
    MAX_OPERATIONS,
    CustomLoss,
    CustomLossInput,
    Operation,
    Shape,
    ShapeError,
    result_shape,
    shape_text,
)
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.submission.validation import quote_value

_MAX_DEPTH = 4
_MAX_ITEMS = 64
_FLOATS = {"inf": float("inf"), "-inf": float("-inf")}
_MAX_FLOAT32 = 3.4028234663852886e38
_WITHOUT_GRADIENT = GIVES_BOOL | {"stop_gradient", "size", "argtopk"}
_KEEPS_BOOL = frozenset({"unsqueeze", "squeeze", "slice", "select", "window", "concat", "stop_gradient"})


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value of the loss: an input, a constant, or the result of an operation.

    `has_gradient` says whether the value depends on the logprobs in a differentiable way.
    """

    shape: Shape
    is_bool: bool = False
    has_gradient: bool = False
    operation: str = ""
    reads: tuple["Value", ...] = ()
    options: tuple[int, ...] = ()
    constant: float | None = None

    @property
    def text(self) -> str:
        """The shape of the value for error messages."""
        return shape_text(self.shape)


@dataclass(slots=True)
class Builder:
    """The values of one loss that have been added so far."""

    inputs: Sequence[CustomLossInput]
    input_values: list[Value] = field(init=False)
    _constants: dict[float, Value] = field(init=False, default_factory=dict[float, Value])
    _results: list[Value] = field(init=False, default_factory=list[Value])

    def __post_init__(self) -> None:
        self.input_values = [
            Value(loss_input.shape, has_gradient=loss_input.name == LOGPROBS) for loss_input in self.inputs
        ]

    def add_constant(self, number: float) -> Value:
        """Return a scalar constant.

        Raises UserError for NaN and for numbers that do not fit float32.
        """
        if isinstance(number, float) and math.isnan(number):
            raise UserError("a constant is NaN")
        if abs(number) > _MAX_FLOAT32 and not (isinstance(number, float) and math.isinf(number)):
            raise UserError("a constant does not fit float32")
        number = float(number) + 0.0  # -0.0 and 0.0 are one constant
        if number not in self._constants:
            self._constants[number] = Value((), constant=number)
        return self._constants[number]

    def emit(self, operation: str, *reads: Value, options: tuple[int, ...] = ()) -> Value:
        """Add an operation and return its result.

        Raises UserError if the shapes do not fit, or if the loss has too many operations.
        """
        if len(self._results) == MAX_OPERATIONS:
            raise UserError(f"the loss has more than {MAX_OPERATIONS} operations")
        try:
            shape = result_shape(
                Operation(name=operation, values=(), options=options), [value.shape for value in reads]
            )
        except ShapeError as error:
            raise UserError(str(error)) from error

        value = Value(
            shape=shape,
            is_bool=operation in GIVES_BOOL or (operation in _KEEPS_BOOL and reads[0].is_bool),
            has_gradient=operation not in _WITHOUT_GRADIENT and any(value.has_gradient for value in reads),
            operation=operation,
            reads=reads,
            options=options,
        )
        self._results.append(value)
        return value

    def to_float32(self, value: Value) -> Value:
        """Return a value as float32."""
        return self.emit("to_float", value) if value.is_bool else value

    def to_bool(self, value: Value) -> Value:
        """Return a value as bool: True where it is not 0."""
        return value if value.is_bool else self.emit("ne", value, self.add_constant(0.0))

    def finish(self, name: str, loss: Value, metrics: Mapping[str, Value]) -> CustomLoss:
        """Return the loss. Operations whose results are not needed are dropped."""
        # Find the values that the loss and the metrics need. Operations come after their operands.
        needed = {id(loss), *map(id, metrics.values())}
        for value in reversed(self._results):
            if id(value) in needed:
                needed.update(map(id, value.reads))

        # Number the inputs, constants and results in this order.
        constants = [value for value in self._constants.values() if id(value) in needed]
        results = [value for value in self._results if id(value) in needed]
        numbers = {id(value): number for number, value in enumerate([*self.input_values, *constants, *results])}

        return CustomLoss(
            name=name,
            inputs=tuple(self.inputs),
            constants=tuple(value.constant for value in constants if value.constant is not None),
            operations=tuple(
                Operation(
                    name=value.operation,
                    values=tuple(numbers[id(read)] for read in value.reads),
                    options=value.options,
                )
                for value in results
            ),
            loss=numbers[id(loss)],
            metrics={key: numbers[id(value)] for key, value in metrics.items()},
        )


@dataclass(frozen=True, slots=True)
class ShapeArgument:
    """The shape of a value, from `x.shape` or `x.size()`."""

    value: Value


@dataclass(frozen=True, slots=True)
class DtypeArgument:
    """A dtype of torch, by its name."""

    name: str


Argument: TypeAlias = (
    Value
    | ShapeArgument
    | DtypeArgument
    | dict[str, "Argument"]
    | tuple["Argument", ...]
    | slice
    | EllipsisType
    | bool
    | int
    | float
    | str
    | None
)
"""An argument: a value of the loss, or a Python value that is known at upload time.

Lists are tuples. Only the output node may have a dict.
"""


def read_argument(sent: object, find: Callable[[str], Argument], depth: int = 0) -> Argument:
    """Decode an argument. Raises UserError if it has an unknown form.

    The encoding is defined in `tinker/types/custom_loss_graph.py`. For example, `{"ref": "mul_1"}`
    is the result of an earlier node, which `find` looks up, and `{"slice": [0, -1, null]}` is a
    slice.
    """
    if depth > _MAX_DEPTH:
        raise UserError(f"an argument is nested more than {_MAX_DEPTH} levels deep")

    # Plain values and lists stand for themselves.
    if sent is None or isinstance(sent, bool | int | float | str):
        return sent
    if isinstance(sent, list):
        return _read_items(cast(list[object], sent), find, depth)

    # Everything else is an object with one key, which names the kind.
    table = cast(dict[str, object], sent) if isinstance(sent, dict) else dict[str, object]()
    if len(table) != 1:
        raise UserError(f"argument {quote_value(table or type(cast(object, sent)).__name__)} is not understood")
    ((kind, content),) = table.items()

    match kind, content:
        case "ref", str():
            return find(content)
        case "tuple", list():
            return _read_items(cast(list[object], content), find, depth)

        # Indices and constants
        case "slice", list() if len(cast(list[object], content)) == 3:
            return slice(*_read_items(cast(list[object], content), find, depth))
        case "ellipsis", True:
            return Ellipsis
        case "float", str() if content in _FLOATS:
            return _FLOATS[content]
        case "float", "nan":
            raise UserError("a constant is NaN")

        # Dtypes and dicts
        case "dtype", str():
            return DtypeArgument(content)
        case "dict", dict():
            items = cast(dict[str, object], content)
            if len(items) > _MAX_ITEMS:
                raise UserError(f"a dict has {len(items)} items; must have at most {_MAX_ITEMS}")
            return {key: read_argument(item, find, depth + 1) for key, item in items.items()}
        case _:
            raise UserError(f"argument {quote_value(table)} is not understood")


def _read_items(sent: list[object], find: Callable[[str], Argument], depth: int) -> tuple[Argument, ...]:
    if len(sent) > _MAX_ITEMS:
        raise UserError(f"a list has {len(sent)} items; must have at most {_MAX_ITEMS}")
    return tuple(read_argument(item, find, depth + 1) for item in sent)


_KINDS: Mapping[type, str] = {
    dict: "a dict",
    tuple: "a list",
    slice: "a slice",
    EllipsisType: "`...`",
}


class Arguments:
    """The arguments of one call by parameter name.

    The `get` methods convert an argument, and raise UserError that names it if it has the wrong
    type.
    """

    def __init__(
        self, builder: Builder, parameters: str, args: Sequence[Argument], kwargs: Mapping[str, Argument]
    ) -> None:
        """Bind positional and keyword arguments.

        `parameters` lists the parameter names. The names of optional parameters end with `?`, for
        example `"input dim?"`. Raises UserError for too many, missing or unknown arguments.
        """
        self.builder = builder
        names = parameters.split()
        self._given: dict[str, Argument] = {}
        if len(args) > len(names):
            raise UserError(f"has {len(args)} arguments; it takes at most {len(names)} here: {_join_names(names)}")
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            plain = name.removesuffix("?")
            if plain not in {parameter.removesuffix("?") for parameter in names}:
                raise UserError(f"argument {quote_value(name)} is not supported; it takes {_join_names(names)}")
            if plain in self._given:
                raise UserError(f"argument {plain} is given twice")
            self._given[plain] = value
        for name in names:
            if not name.endswith("?") and name not in self._given:
                raise UserError(f"argument {name} is missing; it takes {_join_names(names)}")

    def get(self, name: str, default: Argument = None) -> Argument:
        """Return an argument without conversion."""
        return self._given.get(name, default)

    def get_value(self, name: str) -> Value:
        """Return a tensor, or a number as a constant."""
        given = self.get(name)
        if isinstance(given, Value):
            return given
        if isinstance(given, bool | int | float):
            return self.builder.add_constant(given)
        raise UserError(f"argument {name} must be a tensor or a number, not {_describe_kind(given)}")

    def get_tensor(self, name: str) -> Value:
        """Return a tensor."""
        given = self.get(name)
        if not isinstance(given, Value):
            raise UserError(f"argument {name} must be a tensor, not {_describe_kind(given)}")
        return given

    def get_float(self, name: str) -> Value:
        """Return a tensor or a number as float32."""
        return self.builder.to_float32(self.get_value(name))

    def get_flag(self, name: str) -> bool:
        """Return True or False. False if the argument is absent."""
        given = self.get(name, False)
        if not isinstance(given, bool):
            raise UserError(f"argument {name} must be True or False, not {_describe_kind(given)}")
        return given

    def get_axis(self, name: str, rank: int, default: int | None = None) -> int:
        """Return the index of a dimension, counted from the first.

        For example, -1 becomes `rank - 1`.
        """
        return resolve_axis(self.get(name, default), name, rank)

    def get_axes(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the sorted indices of dimensions.

        Returns all dimensions if the argument is absent or an empty tuple, as torch does.
        """
        given = self.get(name)
        if given is None or given == ():
            return tuple(range(rank))
        items = given if isinstance(given, tuple) else (given,)
        axes = tuple(resolve_axis(item, name, rank) for item in items)
        if len(set(axes)) < len(axes):
            raise UserError(f"argument {name} names a dimension twice")
        return tuple(sorted(axes))

    def check_allowed(self, name: str, *allowed: Argument) -> None:
        """Raise UserError unless an argument is absent or has one of the allowed values."""
        given = self.get(name, allowed[0])
        if not any(given is value or (type(given) is type(value) and given == value) for value in allowed):
            raise UserError(f"argument {name} {_describe_kind(given)} is not supported")

    def check_float32(self, name: str) -> None:
        """Raise UserError unless a dtype is absent or float32."""
        given = self.get(name)
        if given is not None and given != DtypeArgument("float32"):
            raise UserError(f"argument {name} {_describe_kind(given)} is not supported: losses are computed in float32")


def resolve_axis(given: Argument, name: str, rank: int) -> int:
    """Return the index of a dimension, counted from the first.

    Raises UserError if `given` is not a whole number, or is out of range.
    """
    if isinstance(given, bool) or not isinstance(given, int):
        raise UserError(f"argument {name} must be a whole number, not {_describe_kind(given)}")
    if not -rank <= given < rank:
        raise UserError(f"argument {name} {quote_value(given)} is outside a tensor of {rank} dimensions")
    return given % rank


def _describe_kind(given: Argument) -> str:
    """Describe an argument for an error message."""
    if given is None:
        return "None"
    if isinstance(given, Value):
        return f"a tensor {given.text}"
    if isinstance(given, ShapeArgument):
        return "a shape"
    if isinstance(given, DtypeArgument):
        return f"torch.{given.name[:40]}"
    if isinstance(given, bool | int | float | str):
        return quote_value(given)
    return _KINDS[type(given)]


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(name.removesuffix("?") for name in names) or "none"
