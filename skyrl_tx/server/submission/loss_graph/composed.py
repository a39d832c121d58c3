"""Functions of torch that are composed of several operations: losses, gather, and tensor products.

No intermediate value grows with the square of the length. A product that needs such a value is
refused.
"""

from collections import Counter
from collections.abc import Sequence

from skyrl_tx.contract.custom_loss import MAX_EXACT, MAX_FIXED, ONE
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.submission.loss_graph.values import Argument, Arguments, Builder, Value

_MAX_EQUATION = 64


def square_error(args: Arguments) -> Value:
    """Translate `mse_loss`."""
    return _reduce(args, args.builder.emit("square", _subtract(args)))


def absolute_error(args: Arguments) -> Value:
    """Translate `l1_loss`."""
    return _reduce(args, args.builder.emit("abs", _subtract(args)))


def huber(args: Arguments) -> Value:
    """Translate `huber_loss`."""
    width = _read_positive(args, "delta")
    return _reduce(args, _join_quadratic_and_linear(args, width, width))


def smooth_absolute_error(args: Arguments) -> Value:
    """Translate `smooth_l1_loss`, which is `huber_loss` divided by the width of the quadratic part."""
    width = _read_positive(args, "beta")
    return _reduce(args, _join_quadratic_and_linear(args, width, 1.0))


def kl_divergence(args: Arguments) -> Value:
    """Translate `kl_div`."""
    emit, value, target = args.builder.emit, args.get_float("input"), args.get_float("target")
    if args.get_flag("log_target"):
        return _reduce(args, emit("mul", emit("exp", target), emit("sub", target, value)))

    # A target of 0 has no entropy. Its logarithm must not be computed, because it has no gradient.
    is_zero = emit("eq", target, args.builder.add_constant(0.0))
    safe = emit("where", is_zero, args.builder.add_constant(1.0), target)
    return _reduce(args, emit("mul", target, emit("sub", emit("log", safe), value)))


def negative_log_likelihood(args: Arguments) -> Value:
    """Translate `nll_loss` of log-probabilities [T, K] and classes [T]. Ignored classes do not count."""
    emit, value, target = args.builder.emit, args.get_float("input"), args.get_float("target")
    ignored = args.get("ignore_index", -100)
    if isinstance(ignored, bool) or not isinstance(ignored, int):
        raise UserError("argument ignore_index must be a whole number")
    if len(value.shape) != 2 or target.shape != value.shape[:1]:
        raise UserError(f"takes tensors [T, K] and [T], not {value.text} and {target.text}")

    # The log-probability of each class, or 0 if it is ignored
    picked = _pick(args.builder, value, emit("unsqueeze", target, options=(1,)), 1)
    counts = emit("ne", target, args.builder.add_constant(ignored))
    loss = emit("where", counts, emit("neg", emit("squeeze", picked, options=(1,))), args.builder.add_constant(0.0))
    if args.get("reduction", "mean") != "mean":
        return _reduce(args, loss)
    return emit("div", emit("sum", loss, options=(0, 0)), emit("sum", emit("to_float", counts), options=(0, 0)))


def gather(args: Arguments) -> Value:
    """Translate `gather` with a fixed number of indices along the axis, for example an index [T, 1]."""
    value, index = args.get_float("input"), args.get_float("index")
    axis = args.get_axis("dim", len(value.shape))
    others = [(*shape[:axis], *shape[axis + 1 :]) for shape in (value.shape, index.shape)]
    if len(index.shape) != len(value.shape) or others[0] != others[1] or index.shape[axis].symbol != "1":
        raise UserError(
            f"takes a tensor and an index of the same shape, except for a fixed size of the index in dim {axis}, such "
            f"as [T, K], dim 1 and [T, 1], not {value.text}, dim {axis} and {index.text}"
        )
    return _pick(args.builder, value, index, axis)


def topk(args: Arguments) -> Argument:
    """Translate `topk`. Returns the values and their indices."""
    value, count = args.get_float("input"), args.get("k")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_FIXED:
        raise UserError(f"argument k must be a whole number from 1 to {MAX_FIXED}")
    axis = args.get_axis("dim", len(value.shape), -1)

    # The smallest elements are the largest of the negative
    is_smallest = args.get("largest") is not None and not args.get_flag("largest")
    value = args.builder.emit("neg", value) if is_smallest else value
    values, indices = (args.builder.emit(name, value, options=(axis, count)) for name in ("topk", "argtopk"))
    return args.builder.emit("neg", values) if is_smallest else values, indices


def concatenate(args: Arguments) -> Value:
    """Translate `cat`."""
    values = _read_tensors(args)
    return _join(args.builder, values, args.get_axis("dim", len(values[0].shape), 0))


def stack(args: Arguments) -> Value:
    """Translate `stack`."""
    values = _read_tensors(args)
    axis = args.get_axis("dim", len(values[0].shape) + 1, 0)
    if len({value.shape for value in values}) > 1:
        raise UserError(f"takes tensors of one shape, not {', '.join(value.text for value in values)}")
    return _join(args.builder, [args.builder.emit("unsqueeze", value, options=(axis,)) for value in values], axis)


def _read_tensors(args: Arguments) -> list[Value]:
    given = args.get("tensors")
    values = [value for value in given if isinstance(value, Value)] if isinstance(given, tuple) else []
    if not values or not isinstance(given, tuple) or len(values) < len(given):
        raise UserError("argument tensors must be a list of tensors")
    if len({len(value.shape) for value in values}) > 1:
        raise UserError(f"takes tensors of as many dimensions, not {', '.join(value.text for value in values)}")
    return values


def _join(builder: Builder, values: Sequence[Value], axis: int) -> Value:
    """Return tensors joined along an axis. If some are bool, these become float32."""
    if not all(value.is_bool for value in values):
        values = [builder.to_float32(value) for value in values]
    return builder.emit("concat", *values, options=(axis,))


def truncate(args: Arguments) -> Value:
    """Translate a conversion to whole numbers, which have no gradient."""
    emit, value = args.builder.emit, args.get_float("input")
    whole = emit("mul", emit("sign", value), emit("floor", emit("abs", value)))
    return emit("stop_gradient", whole)


def matmul(args: Arguments) -> Value:
    """Translate `@` of vectors and matrices."""
    operands = [args.get_float("input"), args.get_float("other")]
    ranks = len(operands[0].shape), len(operands[1].shape)
    equation = {(1, 1): "k,k->", (2, 1): "tk,k->t", (1, 2): "t,tk->k", (2, 2): "ab,bc->ac"}.get(ranks)
    if equation is None:
        raise UserError(f"takes tensors of one or two dimensions, not {operands[0].text} and {operands[1].text}")
    return _contract(args.builder, operands, equation)


def einsum(args: Arguments) -> Value:
    """Translate `einsum`. The axes of all operands must be in the same order."""
    names = [name for name in ("first", "second", "third", "fourth") if args.get(name) is not None]
    equation = args.get("equation")
    if not isinstance(equation, str) or len(equation) > _MAX_EQUATION:
        raise UserError(f"argument equation must be a text of at most {_MAX_EQUATION} characters")
    return _contract(args.builder, [args.get_float(name) for name in names], equation.replace(" ", ""))


def _contract(builder: Builder, operands: Sequence[Value], equation: str) -> Value:
    """Return the sum of products that an equation such as "tk,k->t" describes."""
    left, arrow, result = equation.partition("->")
    subscripts = left.split(",")
    if not arrow:
        counts = Counter(left.replace(",", ""))
        result = "".join(sorted(letter for letter, count in counts.items() if count == 1))
    if [len(letters) for letters in subscripts] != [len(value.shape) for value in operands]:
        raise UserError(f"{left} does not fit tensors {', '.join(value.text for value in operands)}")

    # The order of the axes, from the operand with the most axes
    order = "".join(dict.fromkeys("".join(sorted(subscripts, key=len, reverse=True))))
    for letters in (*subscripts, result):
        positions = [order.find(letter) for letter in letters]
        if not (letters.isalpha() or not letters) or -1 in positions:
            raise UserError(f"subscripts {letters!r} must be letters of the operands")
        if sorted(set(positions)) != positions:
            raise UserError(f"subscripts {letters!r} need a diagonal or a transposed tensor, which are not supported")
    sizes = {
        (letter, dim)
        for letters, value in zip(subscripts, operands, strict=True)
        for letter, dim in zip(letters, value.shape, strict=True)
    }
    if len(sizes) != len(order):
        raise UserError(f"{left} does not fit tensors {', '.join(value.text for value in operands)}")

    # Multiply all operands with their axes in this order, then sum
    product: Value | None = None
    for letters, value in zip(subscripts, operands, strict=True):
        for axis, letter in enumerate(order):
            if letter not in letters:
                value = builder.emit("unsqueeze", value, options=(axis,))
        product = value if product is None else builder.emit("mul", product, value)
    assert product is not None
    axes = [axis for axis, letter in enumerate(order) if letter not in result]
    return builder.emit("sum", product, options=(0, *axes)) if axes else product


def _pick(builder: Builder, value: Value, index: Value, axis: int) -> Value:
    """Return the elements of `value` at the indices along an axis, or NaN where an index is out of range.

    For example, the elements of a value [T, K] at an index [T, 2] are [T, 2].
    """
    emit, zero, one = builder.emit, builder.add_constant(0.0), builder.add_constant(1.0)
    numbers = emit("sub", emit("cumsum", emit("broadcast", one, value), options=(axis,)), one)

    # Compare all elements with all indices, for example [T, K, 1] and [T, 1, 2]
    is_single = index.shape[axis] == ONE
    if not is_single:
        value, numbers = (emit("unsqueeze", operand, options=(axis + 1,)) for operand in (value, numbers))
        index = emit("unsqueeze", index, options=(axis,))
    is_picked = emit("eq", numbers, index)
    picked = emit("sum", emit("where", is_picked, value, zero), options=(int(is_single), axis))

    # 0 / 1 if the index is in range, else 0 / 0
    num_picked = emit("sum", emit("to_float", is_picked), options=(int(is_single), axis))
    return emit("add", picked, emit("div", zero, num_picked))


def _subtract(args: Arguments) -> Value:
    if args.get("weight") is not None:
        raise UserError("argument weight is not supported")
    return args.builder.emit("sub", args.get_float("input"), args.get_float("target"))


def _read_positive(args: Arguments, name: str) -> float:
    given = args.get(name, 1.0)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= MAX_EXACT:
        raise UserError(f"argument {name} must be a number above 0")
    return float(given)


def _join_quadratic_and_linear(args: Arguments, width: float, slope: float) -> Value:
    """Return a loss that is quadratic up to an error of `width`, and then linear with `slope`."""
    emit, constant = args.builder.emit, args.builder.add_constant
    error = emit("abs", _subtract(args))
    quadratic = emit("mul", emit("square", error), constant(0.5 * slope / width))
    linear = emit("mul", emit("sub", error, constant(0.5 * width)), constant(slope))
    return emit("where", emit("lt", error, constant(width)), quadratic, linear)


def _reduce(args: Arguments, value: Value) -> Value:
    """Apply the argument `reduction` of a loss."""
    for name in ("weight", "size_average", "reduce"):
        args.check_allowed(name, None)
    axes = tuple(range(len(value.shape)))
    match args.get("reduction", "mean"):
        case "none":
            return value
        case "sum" | "mean" as name:
            return args.builder.emit(name, value, options=(0, *axes)) if axes else value
        case "batchmean" if axes:
            total = args.builder.emit("sum", value, options=(0, *axes))
            return args.builder.emit("div", total, args.builder.emit("size", value, options=(0,)))
        case _:
            raise UserError("argument reduction must be 'none', 'sum' or 'mean', or 'batchmean' for kl_div")
