"""Builds a `CustomLoss` operation by operation, and tracks the type and shape of every value."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
