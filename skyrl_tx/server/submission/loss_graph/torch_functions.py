"""The functions and methods of torch that a custom loss may use.

Each one is translated to operations of `skyrl_tx.contract.custom_loss`. Losses, products and
functions that rearrange tensors are in `composed`. Where a function is not differentiable, the
gradient is torch's: for example, a clamp passes the gradient at its bounds, and a relu passes none
at 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skyrl_tx.contract.custom_loss import ONE
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.submission.loss_graph import composed
from skyrl_tx.server.submission.loss_graph.values import (
    Argument,
    Arguments,
    Builder,
    DtypeArgument,
    ShapeArgument,
    Value,
)

_Function = Callable[[Arguments], Argument]
_MAX_INDEX = 4096
"""Maximum absolute value of an index."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The parameters of a function (see `Arguments`), and the function that translates a call."""

    parameters: str
    function: _Function


def _unary(operation: str) -> _Function:
    return lambda args: args.builder.emit(operation, args.get_float("input"))


def _binary(operation: str) -> _Function:
    return lambda args: args.builder.emit(operation, args.get_float("input"), args.get_float("other"))


def _logical(operation: str) -> _Function:
    return lambda args: args.builder.emit(
        operation, args.builder.to_bool(args.get_value("input")), args.builder.to_bool(args.get_value("other"))
    )


def _bitwise(operation: str) -> _Function:
    def function(args: Arguments) -> Value:
        values = [args.get_value("input"), args.get_value("other")]
        if not all(value.is_bool for value in values):
            raise UserError("`&`, `|` and `^` need bool tensors, such as comparisons and x.bool()")
        return args.builder.emit(operation, *values)

    return function


def _invert(args: Arguments) -> Value:
    if not (value := args.get_tensor("input")).is_bool:
        raise UserError("`~` needs a bool tensor, such as a comparison or x.bool()")
    return args.builder.emit("logical_not", value)


def _div(args: Arguments) -> Value:
    args.check_allowed("rounding_mode", None)
    return args.builder.emit("div", args.get_float("input"), args.get_float("other"))


def _pow(args: Arguments) -> Value:
    base, exponent = args.get_float("input"), args.get_float("exponent")
    if exponent.constant == 1.0:
        return base
    simple = {2.0: "square", 0.5: "sqrt", -1.0: "reciprocal"}.get(exponent.constant or 0.0)
    return args.builder.emit("pow", base, exponent) if simple is None else args.builder.emit(simple, base)


def _clamp(args: Arguments) -> Value:
    value, low, high = args.get_float("input"), args.get("min"), args.get("max")
    if low is None and high is None:
        raise UserError("one of the arguments min and max is needed")
    for name, outside in (("min", "lt"), ("max", "gt")):
        if args.get(name) is not None:
            bound = args.get_float(name)
            value = args.builder.emit("where", args.builder.emit(outside, value, bound), bound, value)
    return value


def _relu(args: Arguments) -> Value:
    args.check_allowed("inplace", False)
    value, zero = args.get_float("input"), args.builder.add_constant(0.0)
    return args.builder.emit("where", args.builder.emit("le", value, zero), zero, value)


def _softplus(args: Arguments) -> Value:
    args.check_allowed("beta", 1, 1.0)
    args.check_allowed("threshold", 20, 20.0)
    return args.builder.emit("softplus", args.get_float("input"))


def _log_sigmoid(args: Arguments) -> Value:
    emit = args.builder.emit
    return emit("neg", emit("softplus", emit("neg", args.get_float("input"))))


def _where(args: Arguments) -> Value:
    if not (condition := args.get_tensor("condition")).is_bool:
        raise UserError("argument condition must be a bool tensor, such as a comparison or x.bool()")
    return args.builder.emit("where", condition, args.get_float("input"), args.get_float("other"))


def _fill_where(args: Arguments) -> Value:
    if not (mask := args.get_tensor("mask")).is_bool:
        raise UserError("argument mask must be a bool tensor, such as a comparison or x.bool()")
    return args.builder.emit("where", mask, args.get_float("value"), args.get_float("input"))


def _reduction(operation: str) -> _Function:
    def function(args: Arguments) -> Value:
        args.check_float32("dtype")
        return _reduce(args, operation, args.get_float("input"), args.get_flag("keepdim"))

    return function


def _reduce(args: Arguments, operation: str, value: Value, keeps: bool) -> Value:
    return args.builder.emit(operation, value, options=(int(keeps), *args.get_axes("dim", len(value.shape))))


def _extreme(reduction: str, binary: str) -> _Function:
    def function(args: Arguments) -> Value:
        other = args.get("other")
        if isinstance(other, Value):
            return args.builder.emit(binary, args.get_float("input"), args.builder.to_float32(other))
        if other is not None:
            raise UserError(
                f"max and min over a dimension, which also return indices, are not supported; use {reduction}"
            )
        return _reduce(args, reduction, args.get_float("input"), keeps=False)

    return function


def _variance(args: Arguments) -> Value:
    emit, value = args.builder.emit, args.get_float("input")
    args.check_allowed("correction", 1, 0)
    correction = args.get("correction", 1) if args.get("unbiased") is None else args.get_flag("unbiased")
    axes = args.get_axes("dim", len(value.shape))

    deviation = emit("sub", value, emit("mean", value, options=(1, *axes)))
    total = emit("sum", emit("square", deviation), options=(int(args.get_flag("keepdim")), *axes))
    count = args.builder.add_constant(1.0)
    for axis in axes:
        count = emit("mul", count, emit("size", value, options=(axis,)))
    return emit("div", total, emit("sub", count, args.builder.add_constant(1.0 if correction else 0.0)))


def _deviation(args: Arguments) -> Value:
    return args.builder.emit("sqrt", _variance(args))


def _log_softmax(args: Arguments) -> Value:
    args.check_float32("dtype")
    value = args.get_float("input")
    axis = args.get_axis("dim", len(value.shape))
    return args.builder.emit("sub", value, args.builder.emit("logsumexp", value, options=(1, axis)))


def _softmax(args: Arguments) -> Value:
    return args.builder.emit("exp", _log_softmax(args))


def _cumsum(args: Arguments) -> Value:
    args.check_float32("dtype")
    value = args.get_float("input")
    return args.builder.emit("cumsum", value, options=(args.get_axis("dim", len(value.shape)),))


def _dot(args: Arguments) -> Value:
    values = args.get_float("input"), args.get_float("other")
    if any(len(value.shape) != 1 for value in values):
        raise UserError(f"dot needs two one-dimensional tensors, not {values[0].text} and {values[1].text}")
    return args.builder.emit("sum", args.builder.emit("mul", *values), options=(0, 0))


def _full(number: float) -> _Function:
    def function(args: Arguments) -> Value:
        args.check_float32("dtype")
        return args.builder.emit("broadcast", args.builder.add_constant(number), args.get_tensor("input"))

    return function


def _full_like(args: Arguments) -> Value:
    args.check_float32("dtype")
    return args.builder.emit("broadcast", args.get_float("fill_value"), args.get_tensor("input"))


def _same(args: Arguments) -> Value:
    return args.get_tensor("input")


def _to(args: Arguments) -> Value:
    match args.get("dtype"):
        case DtypeArgument("float32"):
            return args.get_float("input")
        case DtypeArgument("bool"):
            return args.builder.to_bool(args.get_tensor("input"))
        case DtypeArgument("int64" | "int32"):
            return composed.truncate(args)
        case _:
            raise UserError("only the dtypes torch.float32 and torch.bool are supported, and torch.int64 for indices")


def _unsqueeze(args: Arguments) -> Value:
    value = args.get_tensor("input")
    return args.builder.emit("unsqueeze", value, options=(args.get_axis("dim", len(value.shape) + 1),))


def _squeeze(args: Arguments) -> Value:
    value = args.get_tensor("input")
    axis = args.get_axis("dim", len(value.shape))
    if value.shape[axis] != ONE:
        raise UserError(f"dimension {axis} of {value.text} is not of size 1 for every datum")
    return args.builder.emit("squeeze", value, options=(axis,))


def _size(args: Arguments) -> Argument:
    value = args.get_tensor("input")
    return (
        ShapeArgument(value)
        if args.get("dim") is None
        else emit_size(args, value, args.get_axis("dim", len(value.shape)))
    )


def _numel(args: Arguments) -> Value:
    value, count = args.get_tensor("input"), args.builder.add_constant(1.0)
    for axis in range(len(value.shape)):
        count = args.builder.emit("mul", count, emit_size(args, value, axis))
    return count


def _attribute(args: Arguments) -> Argument:
    name, pair = args.get("name"), args.get("input")
    if isinstance(pair, tuple) and name in ("values", "indices") and len(pair) == 2:
        return pair[name == "indices"]  # `topk` returns values and indices
    value = args.get_tensor("input")
    if name == "shape":
        return ShapeArgument(value)
    if name == "ndim":
        return len(value.shape)
    raise UserError("the supported attributes of a tensor are shape and ndim")


def _item(args: Arguments) -> Argument:
    source, index = args.get("input"), args.get("index")
    if isinstance(source, ShapeArgument | tuple):
        count = len(source.value.shape) if isinstance(source, ShapeArgument) else len(source)
        if isinstance(index, bool) or not isinstance(index, int) or not -count <= index < count:
            raise UserError(
                f"the index of {count} values must be a whole number from {-count} to {count - 1}, not {index}"
            )
        return emit_size(args, source.value, index % count) if isinstance(source, ShapeArgument) else source[index]
    return _index(args.builder, args.get_tensor("input"), index)


def emit_size(args: Arguments, value: Value, axis: int) -> Value:
    """Return the size of a dimension as a scalar."""
    return args.builder.emit("size", value, options=(axis,))


def _index(builder: Builder, value: Value, index: Argument) -> Value:
    """Return `value[index]`.

    Raises UserError unless each size of the result is a constant, or the length of a dimension of
    `value` minus a constant.
    """
    parts = index if isinstance(index, tuple) else (index,)
    num_indices = sum(1 for part in parts if part is not None and part is not Ellipsis)
    if num_indices > len(value.shape) or sum(1 for part in parts if part is Ellipsis) > 1:
        raise UserError(f"{num_indices} indices do not fit a tensor {value.text}")

    axis = 0
    for position, part in enumerate(parts):
        if part is Ellipsis:
            # `...` stands for all dimensions that the indices after it do not need.
            axis = len(value.shape) - sum(1 for rest in parts[position + 1 :] if rest is not None)
        elif part is None:
            value = builder.emit("unsqueeze", value, options=(axis,))
            axis += 1
        elif isinstance(part, slice):
            value = _slice(builder, value, axis, part)
            axis += 1
        elif isinstance(part, int) and not isinstance(part, bool):
            _refuse_size_one(value, axis)
            value = builder.emit("select", value, options=(axis, _check_index(part)))
        else:
            raise UserError("an index must be a whole number, a slice, None or `...`; use torch.where for a mask")
    return value


def _slice(builder: Builder, value: Value, axis: int, part: slice) -> Value:
    """Translate `value[start:stop]` on an axis.

    The length of the result must be a constant, or the length of the dimension minus a constant.
    """
    if part.step not in (None, 1):
        raise UserError("slices with a step are not supported")
    start, stop = (_check_bound(part.start) or 0), _check_bound(part.stop)
    dim = value.shape[axis]

    # The size of a dimension is the length that its symbol stands for, minus `cut`. The symbol "1"
    # stands for the number 1, so a constant size is 1 - cut.
    if dim.symbol == "1" and dim != ONE:
        size = 1 - dim.cut
        start, stop, _ = slice(start, stop).indices(size)
        return value if (start, stop) == (0, size) else builder.emit("slice", value, options=(axis, start, size - stop))

    # Other dimensions depend on the datum. If both bounds count from the same side, the slice has a
    # fixed length.
    if (start < 0) == (stop is None or stop < 0):
        count = (stop or 0) - start
        if count <= 0:
            raise UserError("a slice must have at least one element")
        _refuse_size_one(value, axis)
        return builder.emit("window", value, options=(axis, start, count))
    if start < 0:
        raise UserError("a slice that starts at a negative index must end at a negative index or at the end")
    if (start, stop) == (0, None):
        return value
    _refuse_size_one(value, axis)
    return builder.emit("slice", value, options=(axis, start, -(stop or 0)))


def _check_bound(bound: Argument) -> int | None:
    if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool)):
        raise UserError("a slice must start and end at whole numbers")
    return None if bound is None else _check_index(bound)


def _refuse_size_one(value: Value, axis: int) -> None:
    if value.shape[axis] == ONE:
        raise UserError(f"dimension {axis} of {value.text} has size 1; use squeeze")


def _check_index(index: int) -> int:
    if abs(index) > _MAX_INDEX:
        raise UserError(f"an index must be at most {_MAX_INDEX}")
    return index


_UNARY = {
    **{name: name for name in ("neg", "abs", "sign", "floor", "square", "reciprocal", "sqrt", "exp", "expm1", "log")},
    **{name: name for name in ("log1p", "sin", "cos", "tanh", "sigmoid")},
    **{"negative": "neg", "absolute": "abs", "isnan": "is_nan"},
}
_BINARY = {
    **{name: name for name in ("add", "sub", "mul", "maximum", "minimum", "logaddexp")},
    **{name: name for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{"subtract": "sub", "multiply": "mul", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
    "not_equal": "ne",
}
_REDUCTION_PARAMETERS = "input dim? keepdim? dtype?"
_SHARED: Mapping[str, Entry] = {
    **{name: Entry("input", _unary(operation)) for name, operation in _UNARY.items()},
    **{name: Entry("input other", _binary(operation)) for name, operation in _BINARY.items()},
    **{name: Entry("input other", _logical(name)) for name in ("logical_and", "logical_or", "logical_xor")},
    "logical_not": Entry(
        "input", lambda args: args.builder.emit("logical_not", args.builder.to_bool(args.get_tensor("input")))
    ),
    "div": Entry("input other rounding_mode?", _div),
    "divide": Entry("input other rounding_mode?", _div),
    "true_divide": Entry("input other rounding_mode?", _div),
    "pow": Entry("input exponent", _pow),
    "clamp": Entry("input min? max?", _clamp),
    "clip": Entry("input min? max?", _clamp),
    "clamp_min": Entry("input min", _clamp),
    "clamp_max": Entry("input max", _clamp),
    "relu": Entry("input inplace?", _relu),
    "masked_fill": Entry("input mask value", _fill_where),
    **{name: Entry(_REDUCTION_PARAMETERS, _reduction(name)) for name in ("sum", "mean")},
    **{name: Entry("input dim? keepdim?", _reduction(name)) for name in ("amax", "amin")},
    "logsumexp": Entry("input dim keepdim?", _reduction("logsumexp")),
    "max": Entry("input other?", _extreme("amax", "maximum")),
    "min": Entry("input other?", _extreme("amin", "minimum")),
    "var": Entry("input dim? unbiased? keepdim? correction?", _variance),
    "std": Entry("input dim? unbiased? keepdim? correction?", _deviation),
    "softmax": Entry("input dim dtype?", _softmax),
    "log_softmax": Entry("input dim dtype?", _log_softmax),
    "cumsum": Entry("input dim dtype?", _cumsum),
    "dot": Entry("input other", _dot),
    "matmul": Entry("input other", composed.matmul),
    "mv": Entry("input other", composed.matmul),
    "gather": Entry("input dim index", composed.gather),
    "topk": Entry("input k dim? largest? sorted?", composed.topk),
    "clone": Entry("input", _same),
    "detach": Entry("input", lambda args: args.builder.emit("stop_gradient", args.get_tensor("input"))),
    "unsqueeze": Entry("input dim", _unsqueeze),
    "squeeze": Entry("input dim", _squeeze),
    "numel": Entry("input", _numel),
}
"""Functions `torch.<name>` that also exist as methods of a tensor."""

_METHODS_ONLY: Mapping[str, Entry] = {
    "float": Entry("input", lambda args: args.get_float("input")),
    "bool": Entry("input", lambda args: args.builder.to_bool(args.get_tensor("input"))),
    "long": Entry("input", composed.truncate),
    "int": Entry("input", composed.truncate),
    "to": Entry("input dtype", _to),
    "type": Entry("input dtype", _to),
    "contiguous": Entry("input", _same),
    "size": Entry("input dim?", _size),
    "dim": Entry("input", lambda args: len(args.get_tensor("input").shape)),
    "where": Entry("input condition other", _where),
}
_LOSS_PARAMETERS = "input target size_average? reduce? reduction?"
_NEURAL: Mapping[str, Entry] = {
    "sigmoid": _SHARED["sigmoid"],
    "tanh": _SHARED["tanh"],
    "relu": _SHARED["relu"],
    "softmax": Entry("input dim _stacklevel? dtype?", _softmax),
    "log_softmax": Entry("input dim _stacklevel? dtype?", _log_softmax),
    "mse_loss": Entry(f"{_LOSS_PARAMETERS} weight?", composed.square_error),
    "l1_loss": Entry(f"{_LOSS_PARAMETERS} weight?", composed.absolute_error),
    "smooth_l1_loss": Entry(f"{_LOSS_PARAMETERS} beta?", composed.smooth_absolute_error),
    "huber_loss": Entry("input target reduction? delta? weight?", composed.huber),
    "kl_div": Entry(f"{_LOSS_PARAMETERS} log_target?", composed.kl_divergence),
    "nll_loss": Entry(
        "input target weight? size_average? ignore_index? reduce? reduction?", composed.negative_log_likelihood
    ),
}
_OPERATORS: Mapping[str, Entry] = {
    **{name: _SHARED[name] for name in ("add", "sub", "mul", "neg", "abs", "pow", "eq", "ne", "lt", "le", "gt", "ge")},
    "truediv": Entry("input other", _div),
    "matmul": _SHARED["matmul"],
    "pos": Entry("input", _same),
    "and_": Entry("input other", _bitwise("logical_and")),
    "or_": Entry("input other", _bitwise("logical_or")),
    "xor": Entry("input other", _bitwise("logical_xor")),
    "invert": Entry("input", _invert),
    "getitem": Entry("input index", _item),
}

METHODS: Mapping[str, Entry] = {**_SHARED, **_METHODS_ONLY}
"""Methods of a tensor by name."""
FUNCTIONS: Mapping[str, Entry] = {
    **{f"torch.{name}": entry for name, entry in _SHARED.items()},
    "torch.where": Entry("condition input other", _where),
    "torch.zeros_like": Entry("input dtype?", _full(0.0)),
    "torch.ones_like": Entry("input dtype?", _full(1.0)),
    "torch.full_like": Entry("input fill_value dtype?", _full_like),
    **{f"torch.{name}": Entry("tensors dim?", composed.concatenate) for name in ("cat", "concat", "concatenate")},
    "torch.stack": Entry("tensors dim?", composed.stack),
    "torch.functional.einsum": Entry("equation first second? third? fourth?", composed.einsum),
    **{f"torch.nn.functional.{name}": entry for name, entry in _NEURAL.items()},
    "torch.nn.functional.softplus": Entry("input beta? threshold?", _softplus),
    "torch._C._nn.softplus": Entry("input beta? threshold?", _softplus),
    "torch.nn.functional.logsigmoid": Entry("input", _log_sigmoid),
    "torch._C._nn.log_sigmoid": Entry("input", _log_sigmoid),
    **{f"torch._C._special.special_{name}": _SHARED[name] for name in ("expm1", "log1p", "softmax", "log_softmax")},
    "torch._C._special.special_expit": _SHARED["sigmoid"],
    "torch._C._special.special_logsumexp": _SHARED["logsumexp"],
    **{f"operator.{name}": entry for name, entry in _OPERATORS.items()},
    "getattr": Entry("input name", _attribute),
}
"""Functions by the qualified name that `torch.fx` records."""
