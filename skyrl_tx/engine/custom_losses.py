"""Passes with a loss of the client: what `validate` and `prepare` do for other losses. Pure functions."""

from collections.abc import Iterator

import numpy as np

from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.custom_loss import CUSTOM, LOGPROBS, MAX_ELEMENTS, MAX_EXACT, CustomLoss, CustomLossInput, Needs
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.losses import TARGET_TOKENS, LossInput, LossSpec
from skyrl_tx.contract.requests import Datum, ModelPass

TARGETS_ONLY = LossSpec(name=CUSTOM, inputs={TARGET_TOKENS: LossInput(is_integer=True, max_ndim=2)})
"""The part of the inputs that all custom losses share."""


def check(field: str, datum: Datum, loss: CustomLoss, needs: Needs) -> None:
    """Check the inputs of one datum other than its targets, and that its size fits the loss."""
    length = datum.tokens.size
    shapes = {LOGPROBS: datum.loss_inputs[TARGET_TOKENS].shape}
    for each in loss.inputs:
        if each.name == LOGPROBS:
            continue
        array = datum.loss_inputs.get(each.name)
        if array is None:
            raise UserError(f"{field}.loss_fn_inputs[{each.name!r}] is missing: loss {loss.name!r} reads it")
        shapes[each.name] = _check_input(f"{field}.loss_fn_inputs[{each.name!r}]", array, each, length)
    width: int | None = None
    for each in loss.inputs:
        shape = shapes[each.name]
        if len(shape) != each.rank:
            raise UserError(
                f"{field}: loss {loss.name!r} declares {each.name!r} with {each.rank} dimensions; it has {len(shape)}"
            )
        if each.rank == 2:
            if width is not None and shape[1] != width:
                raise UserError(
                    f"{field}: inputs of loss {loss.name!r} have {width} and {shape[1]} targets per position"
                )
            width = shape[1]
    if length < needs.positions:
        raise UserError(f"{field} has {length} tokens; loss {loss.name!r} needs at least {needs.positions}")
    if (width or 1) < needs.targets:
        raise UserError(f"{field} has {width} targets per position; loss {loss.name!r} needs at least {needs.targets}")
    if (count := needs.num_elements(length, width or 1)) > MAX_ELEMENTS:
        raise UserError(
            f"{field}: loss {loss.name!r} would compute {count} numbers of its {length} tokens; must be at most "
            f"{MAX_ELEMENTS}"
        )


def _check_input(field: str, array: NumberArray, expected: CustomLossInput, length: int) -> tuple[int, ...]:
    """Check an input's numbers; return its shape. A scalar may arrive as [1]: protobuf has no empty shape."""
    if expected.rank == 0 and array.size == 1:
        shape: tuple[int, ...] = ()
    else:
        shape = array.shape
        if not shape or shape[0] != length or array.size == 0:
            raise UserError(f"{field} has shape {list(shape)}; model_input has {length} tokens")
    if array.dtype.kind in "iu" and ((array > MAX_EXACT) | (array < -MAX_EXACT)).any():
        raise UserError(f"{field} holds a whole number above {MAX_EXACT}, which float32 does not hold exactly")
    if not np.isfinite(array).all():
        raise UserError(f"{field} holds {array[~np.isfinite(array)][0]}; numbers must be finite")
    return shape


def examples(request_id: RequestId, model_id: ModelId, request: ModelPass, loss: CustomLoss) -> Iterator[PassExample]:
    """Yield a valid request's examples, in the contract's dtypes."""
    for datum in request.data:
        inputs: dict[str, NumberArray] = {}
        for each in loss.inputs:
            if each.name != LOGPROBS:
                array = np.ascontiguousarray(datum.loss_inputs[each.name], np.float32)
                inputs[each.name] = array.reshape(()) if each.rank == 0 else array
        inputs[TARGET_TOKENS] = np.ascontiguousarray(datum.loss_inputs[TARGET_TOKENS], np.int32)
        yield PassExample(
            request_id=request_id,
            model_id=model_id,
            tokens=np.ascontiguousarray(datum.tokens, np.int32),
            loss=CUSTOM,
            loss_inputs=inputs,
            loss_config={},
            custom=loss,
        )
