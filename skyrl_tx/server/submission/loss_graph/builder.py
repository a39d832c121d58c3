"""Builds a `CustomLoss` operation by operation, and knows type and shape of every value."""

import math
import re
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
from skyrl_tx.server.schemas.training import CreateCustomLossRequest, GraphInput, LossGraphNode
from skyrl_tx.server.submission.loss_graph.arguments import (
    Argument,
    Arguments,
    DictArgument,
    ListArgument,
    read_argument,
)
from skyrl_tx.server.submission.loss_graph.vocabulary import FUNCTIONS, METHODS
from skyrl_tx.server.submission.validation import quote_value, refuse_extra, require

_MAX_FLOAT32 = 3.4028234663852886e38
_WITHOUT_GRADIENT = GIVES_BOOL | {"stop_gradient", "size"}
_KEEPS_BOOL = frozenset({"unsqueeze", "squeeze", "slice", "select", "stop_gradient"})


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value of the loss: an input, a constant, or the result of an operation.

    `has_gradient` says whether it depends on the log-probabilities in a way that can be differentiated.
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
        """The value's shape as error messages show it."""
        return shape_text(self.shape)


@dataclass(slots=True)
class Builder:
    """The values of one loss so far."""

    inputs: Sequence[CustomLossInput]
    input_values: list[Value] = field(init=False)
    _constants: dict[float, Value] = field(init=False, default_factory=dict[float, Value])
    _results: list[Value] = field(init=False, default_factory=list[Value])

    def __post_init__(self) -> None:
        self.input_values = [Value(each.shape, has_gradient=each.name == LOGPROBS) for each in self.inputs]

    def add_constant(self, number: float) -> Value:
        """Return a scalar constant. Raises UserError for NaN, and for a number that float32 does not hold."""
        if isinstance(number, float) and math.isnan(number):
            raise UserError("a constant is NaN")
        if abs(number) > _MAX_FLOAT32 and not (isinstance(number, float) and math.isinf(number)):
            raise UserError("a constant does not fit float32")
        number = float(number) + 0.0  # -0.0 and 0.0 are one constant
        if number not in self._constants:
            self._constants[number] = Value((), constant=number)
        return self._constants[number]

    def emit(self, operation: str, *reads: Value, options: tuple[int, ...] = ()) -> Value:
        """Return the result of an operation. Raises UserError for shapes that do not fit, or too many operations."""
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
        """Return a value as bool: whether it is not 0."""
        return value if value.is_bool else self.emit("ne", value, self.add_constant(0.0))

    def finish(self, name: str, loss: Value, metrics: Mapping[str, Value]) -> CustomLoss:
        """Return the loss without the operations whose results it does not need."""
        wanted = {id(loss), *map(id, metrics.values())}
        for value in reversed(self._results):  # what a value reads comes before it
            if id(value) in wanted:
                wanted.update(map(id, value.reads))
        constants = [value for value in self._constants.values() if id(value) in wanted]
        results = [value for value in self._results if id(value) in wanted]
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


_MAX_INPUTS = 16
_MAX_METRICS = 32
_FORMAT = 1
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_IN_THE_CLIENT = "pass the function itself to forward_backward_custom to run it in the client"


def compile_loss(request: CreateCustomLossRequest) -> CustomLoss:
    """Return the loss of an upload. Raises UserError that names the field or the node which is not offered."""
    require(request.graph.format == _FORMAT, f"graph.format {request.graph.format}: this server reads {_FORMAT}")
    inputs = _read_inputs(request.inputs)
    nodes = request.graph.nodes
    require(bool(nodes) and nodes[-1].op == "output", "graph.nodes: the last node must be the output")
    builder = Builder(inputs)
    results: dict[str, Argument] = {}
    placeholders = iter(zip(inputs, builder.input_values, strict=True))

    def find(name: str) -> Argument:
        if name not in results:
            raise UserError(f"reads node {quote_value(name)}, which is not before it")
        return results[name]

    for index, node in enumerate(nodes):
        where = f"graph.nodes[{index}] {quote_value(node.name)}"
        try:
            refuse_extra(node, "")
            require(node.name not in results, "has the name of an earlier node")
            args = tuple(read_argument(each, find) for each in node.args)
            kwargs = {name: read_argument(each, find) for name, each in node.kwargs.items()}
            if node.op == "placeholder":
                declared = next(placeholders, None)
                require(declared is not None and declared[0].name == node.target, _describe_undeclared(node))
                assert declared is not None
                results[node.name] = declared[1]
            elif node.op == "output":
                require(index == len(nodes) - 1, "is an output that is not the last node")
                require(next(placeholders, None) is None, "inputs has more names than the graph has placeholders")
                return _build_loss(builder, request.name, args)
            else:
                results[node.name] = _call_function(builder, node, args, kwargs)
        except UserError as error:
            raise UserError(f"{where}: {error.message}") from error
    raise AssertionError("the last node is the output")


def _read_inputs(sent: Sequence[GraphInput]) -> tuple[CustomLossInput, ...]:
    require(1 <= len(sent) <= _MAX_INPUTS, f"inputs: has {len(sent)} names; must have 1 to {_MAX_INPUTS}")
    for index, each in enumerate(sent):
        refuse_extra(each, f"inputs[{index}].")
        require(
            _INPUT_NAME.fullmatch(each.name) is not None,
            f"inputs[{index}].name {quote_value(each.name)}: must be a lowercase name of letters, digits and underscores",
        )
        lowest = 1 if index == 0 else 0
        require(lowest <= each.rank <= 2, f"inputs[{index}].rank {each.rank}: must be from {lowest} to 2")
    require(sent[0].name == LOGPROBS, f"inputs[0].name {quote_value(sent[0].name)}: must be {LOGPROBS!r}")
    require(len({each.name for each in sent}) == len(sent), "inputs: a name is there twice")
    return tuple(CustomLossInput(name=each.name, rank=each.rank) for each in sent)


def _describe_undeclared(node: LossGraphNode) -> str:
    return f"is placeholder {quote_value(node.target)}; placeholders must be those of `inputs`, in their order"


def _call_function(
    builder: Builder, node: LossGraphNode, args: tuple[Argument, ...], kwargs: dict[str, Argument]
) -> Argument:
    if node.op not in ("call_function", "call_method"):
        raise UserError(
            f"op {quote_value(node.op)} is not offered: a custom loss calls functions and methods of tensors"
        )
    entry = (FUNCTIONS if node.op == "call_function" else METHODS).get(node.target)
    kind = "function" if node.op == "call_function" else "method"
    if entry is None:
        raise UserError(
            f"{kind} {quote_value(node.target)} is not offered in custom losses on this server; {_IN_THE_CLIENT}"
        )
    try:
        return entry.function(Arguments(builder, entry.parameters, args, kwargs))
    except UserError as error:
        raise UserError(f"{kind} {quote_value(node.target)}: {error.message}") from error


def _build_loss(builder: Builder, name: str, args: tuple[Argument, ...]) -> CustomLoss:
    given = args[0] if len(args) == 1 else None
    if not (isinstance(given, ListArgument) and len(given.items) == 2 and isinstance(given.items[1], DictArgument)):
        raise UserError("must return (loss, metrics), where metrics is a dict")
    loss, metrics = given.items[0], given.items[1].items
    value = _check_scalar("the loss", loss)
    require(value.has_gradient, f"the loss does not depend on {LOGPROBS}, so it has no gradient")
    require(not value.is_bool, "the loss is bool; must be a float")
    require(len(metrics) <= _MAX_METRICS, f"has {len(metrics)} metrics; must have at most {_MAX_METRICS}")
    for key in metrics:
        require(
            _METRIC_NAME.fullmatch(key) is not None,
            f"metric {quote_value(key)} must be named custom/<name>:sum or custom/<name>:mean in lowercase",
        )
    found = {key: builder.to_float32(_check_scalar(f"metric {key}", each)) for key, each in metrics.items()}
    return builder.finish(name, value, found)


def _check_scalar(what: str, given: Argument) -> Value:
    if not isinstance(given, Value):
        raise UserError(f"{what} must be a tensor")
    require(given.shape == (), f"{what} has shape {given.text}; must be a scalar")
    return given
