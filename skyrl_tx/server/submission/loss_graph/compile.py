"""Compiles a `torch.fx` graph to a `CustomLoss`, node by node.

An error names the node and what is wrong with it.
"""

import re
from collections.abc import Sequence

from skyrl_tx.contract.custom_loss import LOGPROBS, CustomLoss, CustomLossInput
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.schemas.training import CreateCustomLossRequest, GraphInput, LossGraphNode
from skyrl_tx.server.submission.loss_graph.torch_functions import FUNCTIONS, METHODS
from skyrl_tx.server.submission.loss_graph.values import Argument, Arguments, Builder, Value, read_argument
from skyrl_tx.server.submission.validation import quote_value, refuse_extra, require

_MAX_INPUTS = 16
_MAX_METRICS = 32
_FORMAT = 1
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_IN_THE_CLIENT = "pass the function itself to forward_backward_custom to run it in the client"


def compile_loss(request: CreateCustomLossRequest) -> CustomLoss:
    """Compile an uploaded loss.

    Raises UserError that names the field or node that this server does not support.
    """
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
            args = tuple(read_argument(sent, find) for sent in node.args)
            kwargs = {name: read_argument(sent, find) for name, sent in node.kwargs.items()}

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
    for index, item in enumerate(sent):
        where = f"inputs[{index}]"
        refuse_extra(item, f"{where}.")
        require(
            _INPUT_NAME.fullmatch(item.name) is not None,
            f"{where}.name {quote_value(item.name)}: must be a lowercase name of letters, digits and underscores",
        )
        lowest = 1 if index == 0 else 0
        require(lowest <= item.rank <= 2, f"{where}.rank {item.rank}: must be from {lowest} to 2")

    require(sent[0].name == LOGPROBS, f"inputs[0].name {quote_value(sent[0].name)}: must be {LOGPROBS!r}")
    require(len({item.name for item in sent}) == len(sent), "inputs: a name is there twice")
    return tuple(CustomLossInput(name=item.name, rank=item.rank) for item in sent)


def _describe_undeclared(node: LossGraphNode) -> str:
    return (
        f"is placeholder {quote_value(node.target)}; the placeholders must be the names in `inputs`, in the same order"
    )


def _call_function(
    builder: Builder, node: LossGraphNode, args: tuple[Argument, ...], kwargs: dict[str, Argument]
) -> Argument:
    if node.op not in ("call_function", "call_method"):
        raise UserError(
            f"op {quote_value(node.op)} is not supported: a custom loss calls functions and methods of tensors"
        )
    entry = (FUNCTIONS if node.op == "call_function" else METHODS).get(node.target)
    kind = "function" if node.op == "call_function" else "method"
    if entry is None:
        raise UserError(
            f"{kind} {quote_value(node.target)} is not supported in custom losses on this server; {_IN_THE_CLIENT}"
        )
    try:
        return entry.function(Arguments(builder, entry.parameters, args, kwargs))
    except UserError as error:
        raise UserError(f"{kind} {quote_value(node.target)}: {error.message}") from error


def _build_loss(builder: Builder, name: str, args: tuple[Argument, ...]) -> CustomLoss:
    given = args[0] if len(args) == 1 else None
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)):
        raise UserError("must return (loss, metrics), where metrics is a dict")

    loss, metrics = given[0], given[1]
    value = _check_scalar("the loss", loss)
    require(value.has_gradient, f"the loss does not depend on {LOGPROBS}, so it has no gradient")
    require(not value.is_bool, "the loss is bool; must be a float")

    require(len(metrics) <= _MAX_METRICS, f"has {len(metrics)} metrics; must have at most {_MAX_METRICS}")
    for key in metrics:
        require(
            _METRIC_NAME.fullmatch(key) is not None,
            f"metric {quote_value(key)} must be named custom/<name>:sum or custom/<name>:mean in lowercase",
        )
    metric_values = {key: builder.to_float32(_check_scalar(f"metric {key}", metric)) for key, metric in metrics.items()}
    return builder.finish(name, value, metric_values)


def _check_scalar(what: str, given: Argument) -> Value:
    if not isinstance(given, Value):
        raise UserError(f"{what} must be a tensor")
    require(given.shape == (), f"{what} has shape {given.text}; must be a scalar")
    return given
