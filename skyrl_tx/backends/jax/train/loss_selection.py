"""Compute the loss of a request, selected by a number, so that all losses share compiled programs.

The loss is data and not a static argument, because a program includes the model and takes long to
compile. One program serves all local losses, and another program all other losses. A program
computes each of its losses at each position, and selects one. This takes little time compared with
the model, and fewer kernels than a branch for each loss.

Legend: B rows, T positions, K targets per position, C config columns.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TypeVar

import jax
import numpy as np

from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.losses import LOSSES, Loss, LossOutput

Tree = TypeVar("Tree")

LOSS_INPUTS: tuple[str, ...] = tuple(
    sorted({name for loss in LOSSES.values() for name in loss.spec.inputs} - {TARGET_TOKENS})
)
"""The inputs of all losses, without targets.
Inputs that the selected loss does not have are zero and ignored."""
NUM_COLUMNS = max(len(loss.columns) for loss in LOSSES.values())
"""The width of `config_BC`. A loss with fewer columns ignores the rest."""


@cache
def list_losses(ndim: int, *, is_local: bool) -> tuple[Loss, ...]:
    """Return the losses of one program, for targets [B, T] (`ndim` 2) or [B, T, K] (`ndim` 3).

    The number of a loss is its index in this tuple. With `is_local`, the program has the losses
    whose value at a position depends only on the arrays at that position, else all other losses.
    """
    return tuple(
        loss
        for loss in LOSSES.values()
        if loss.is_local == is_local and loss.spec.inputs[TARGET_TOKENS].max_ndim >= ndim - 1
    )


@cache
def get_loss_number(name: str, ndim: int) -> np.int32:
    """Return the number of a loss among the losses of its program."""
    losses = list_losses(ndim, is_local=LOSSES[name].is_local)
    return np.int32([loss.spec.name for loss in losses].index(name))


@partial(jax.jit, static_argnames="is_local", inline=True)
def evaluate(
    number: jax.Array,
    target_logprobs: jax.Array,
    inputs: Mapping[str, jax.Array],
    config_BC: jax.Array,
    start_BT: jax.Array | None = None,
    *,
    is_local: bool,
) -> LossOutput:
    """Return the loss and the metrics of each position.

    With `is_local`, the arrays may have any part of the positions of the rows.
    """
    losses = list_losses(target_logprobs.ndim, is_local=is_local)
    return _select(number, [loss.evaluate(target_logprobs, inputs, config_BC, start_BT) for loss in losses])


@partial(jax.jit, static_argnames="is_local", inline=True)
def evaluate_and_differentiate(
    number: jax.Array,
    target_logprobs: jax.Array,
    inputs: Mapping[str, jax.Array],
    config_BC: jax.Array,
    start_BT: jax.Array | None = None,
    *,
    is_local: bool,
) -> tuple[jax.Array, LossOutput]:
    """Return d loss / d logprob of the summed loss, and the loss itself.

    The gradient has the shape of `target_logprobs`. With `is_local`, the positions may be any part
    of the rows.
    """

    def differentiate(loss: Loss) -> tuple[jax.Array, LossOutput]:
        def sum_loss(logprobs: jax.Array) -> tuple[jax.Array, LossOutput]:
            output = loss.evaluate(logprobs, inputs, config_BC, start_BT)
            return output.loss_BT.sum(), output

        return jax.grad(sum_loss, has_aux=True)(target_logprobs)

    # Differentiate each loss, then select. The derivative of a selection would be NaN wherever the
    # derivative of any loss is NaN.
    return _select(number, [differentiate(loss) for loss in list_losses(target_logprobs.ndim, is_local=is_local)])


def _select(number: jax.Array, results: Sequence[Tree]) -> Tree:
    """Return one of the results, which have the same shapes."""
    if len(results) == 1:
        return results[0]
    return jax.tree.map(lambda *leaves: jax.lax.select_n(number, *leaves), *results)
