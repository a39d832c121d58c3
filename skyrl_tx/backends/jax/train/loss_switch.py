"""All losses as one traced function of a loss number.

So the loss of a request is data, and one compiled program serves all losses. Compilation takes long, because it
includes the model; evaluating a loss takes little time compared with the model.

Legend: B rows, T positions, K targets per position, C config columns.
"""

from collections.abc import Mapping, Sequence
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
    return _switch(losses_for(target_logprobs.ndim), number, target_logprobs, inputs, config_BC, start_BT)


def _switch(
    losses: Sequence[Loss],
    branch: jax.Array,
    target_logprobs: jax.Array,
    inputs: Mapping[str, jax.Array],
    config_BC: jax.Array,
    start_BT: jax.Array | None,
) -> LossOutput:
    branches = [lambda logprobs, loss=loss: loss.evaluate(logprobs, inputs, config_BC, start_BT) for loss in losses]
    return jax.lax.switch(branch, branches, target_logprobs)


def local_gradient(
    number: jax.Array, target_logprobs: jax.Array, inputs: Mapping[str, jax.Array], config_BC: jax.Array
) -> jax.Array:
    """Return d loss / d logprob at each target, for the summed loss, in the shape of `target_logprobs`.

    Only for losses that are local, see `Loss.is_local`; a loss that is not gets numbers without meaning.
    """
    losses = [loss for loss in losses_for(target_logprobs.ndim) if loss.is_local]
    return _gradient(losses, number, target_logprobs, inputs, config_BC, None)


def row_gradient(
    number: jax.Array,
    target_logprobs: jax.Array,
    inputs: Mapping[str, jax.Array],
    config_BC: jax.Array,
    start_BT: jax.Array | None = None,
) -> jax.Array:
    """Return the same of whole rows, for losses that are not local; a local loss gets numbers without meaning."""
    losses = [loss for loss in losses_for(target_logprobs.ndim) if not loss.is_local]
    if not losses:
        return jnp.zeros(target_logprobs.shape)
    return _gradient(losses, number, target_logprobs, inputs, config_BC, start_BT)


def _gradient(
    losses: Sequence[Loss],
    number: jax.Array,
    target_logprobs: jax.Array,
    inputs: Mapping[str, jax.Array],
    config_BC: jax.Array,
    start_BT: jax.Array | None,
) -> jax.Array:
    """Return the gradient of one of `losses`. A program has no branch for others: each takes time to compile."""
    all_losses = losses_for(target_logprobs.ndim)
    branch = jnp.array([losses.index(loss) if loss in losses else 0 for loss in all_losses])[number]
    return jax.grad(lambda x: _switch(losses, branch, x, inputs, config_BC, start_BT).loss_BT.sum())(target_logprobs)


def is_local(number: jax.Array, ndim: int) -> jax.Array:
    """Return whether the gradient at a position follows from that position alone, see `Loss.is_local`."""
    return jnp.array([loss.is_local for loss in losses_for(ndim)])[number]
