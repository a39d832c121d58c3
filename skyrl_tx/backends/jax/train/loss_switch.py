"""All losses as one traced function of a loss number.

So the loss of a request is data, and one compiled program serves all losses. Compilation takes long, because it
includes the model; evaluating a loss takes little time compared with the model.

Legend: B rows, T positions, K targets per position, C config columns.
"""

from collections.abc import Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.losses import LOSSES, Loss, LossOutput

INPUTS: tuple[str, ...] = tuple(
    sorted({name for loss in LOSSES.values() for name in loss.spec.inputs} - {TARGET_TOKENS})
)
"""The inputs of all losses, without targets. A loss ignores those that it does not have; they are zero."""
NUM_COLUMNS = max(len(loss.columns) for loss in LOSSES.values())
"""The width of `config_BC`. A loss with fewer columns ignores the rest."""


@cache
def losses_for(ndim: int) -> tuple[Loss, ...]:
    """Return the losses that accept targets [B, T] (`ndim` 2) or [B, T, K] (3). A loss's number is its index here."""
    return tuple(loss for loss in LOSSES.values() if loss.spec.inputs[TARGET_TOKENS].max_ndim >= ndim - 1)


@cache
def number_of(name: str, ndim: int) -> np.int32:
    """Return a loss's number."""
    return np.int32([loss.spec.name for loss in losses_for(ndim)].index(name))


def evaluate(
    number: jax.Array,
    target_logprobs: jax.Array,
    inputs: Mapping[str, jax.Array],
    config_BC: jax.Array,
    start_BT: jax.Array | None = None,
) -> LossOutput:
    """Return each position's loss and metrics."""
    branches = [
        lambda logprobs, loss=loss: loss.evaluate(logprobs, inputs, config_BC, start_BT)
        for loss in losses_for(target_logprobs.ndim)
    ]
    return jax.lax.switch(number, branches, target_logprobs)


def logprob_gradient(
    number: jax.Array,
    target_logprobs: jax.Array,
    inputs: Mapping[str, jax.Array],
    config_BC: jax.Array,
    start_BT: jax.Array | None = None,
) -> jax.Array:
    """Return d loss / d logprob at each target, for the summed loss, in the shape of `target_logprobs`."""
    return jax.grad(lambda x: evaluate(number, x, inputs, config_BC, start_BT).loss_BT.sum())(target_logprobs)


def is_local(number: jax.Array, ndim: int) -> jax.Array:
    """Return whether the gradient at a position follows from that position alone, see `Loss.is_local`."""
    return jnp.array([loss.is_local for loss in losses_for(ndim)])[number]
