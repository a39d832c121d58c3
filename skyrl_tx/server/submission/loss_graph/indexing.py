"""`x[...]` with whole numbers, slices, None and `...`, all known when the loss is uploaded."""

from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.submission.loss_graph.arguments import Argument, Items, Range
from skyrl_tx.server.submission.loss_graph.builder import Builder, Value

_MAX_INDEX = 4096
"""The largest index, so that it fits the shortest sequences that can matter."""


def item(builder: Builder, value: Value, index: Argument) -> Value:
    """Return `value[index]`. Raises UserError for an index whose result depends on numbers or on the length."""
    parts = index.items if isinstance(index, Items) else (index,)
    wanted = sum(1 for part in parts if part is not None and part is not Ellipsis)
    if wanted > len(value.shape) or sum(1 for part in parts if part is Ellipsis) > 1:
        raise UserError(f"{wanted} indices do not fit a tensor {value.text}")
    axis = 0
    for position, part in enumerate(parts):
        if part is Ellipsis:
            rest = parts[position + 1 :]
            axis = len(value.shape) - sum(1 for each in rest if each is not None)
        elif part is None:
            value = builder.emit("unsqueeze", value, options=(axis,))
            axis += 1
        elif isinstance(part, Range):
            value = _slice(builder, value, axis, part)
            axis += 1
        elif isinstance(part, int) and not isinstance(part, bool):
            _check_axis(value, axis)
            value = builder.emit("select", value, options=(axis, _bounded(part)))
        else:
            raise UserError("an index must be a whole number, a slice, None or `...`; use torch.where for a mask")
    return value


def _slice(builder: Builder, value: Value, axis: int, part: Range) -> Value:
    if part.step not in (None, 1):
        raise UserError("slices with a step are not offered")
    start, stop = part.start or 0, part.stop
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise UserError("a slice must start at a whole number, 0 or more")
    if stop is not None and (not isinstance(stop, int) or isinstance(stop, bool) or stop >= 0):
        raise UserError(
            "a slice must end at a negative number, or at the end: other ends are not there for every datum"
        )
    cut = _bounded(start), _bounded(-(stop or 0))
    if cut == (0, 0):
        return value
    _check_axis(value, axis)
    return builder.emit("slice", value, options=(axis, *cut))


def _check_axis(value: Value, axis: int) -> None:
    if value.shape[axis].symbol == "1":
        raise UserError(f"dimension {axis} of {value.text} has size 1; use squeeze")


def _bounded(index: int) -> int:
    if abs(index) > _MAX_INDEX:
        raise UserError(f"an index must be at most {_MAX_INDEX}")
    return index
