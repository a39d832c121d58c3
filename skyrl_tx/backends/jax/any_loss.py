"""All losses as one function of their number: so the loss of a request is data, and no program is compiled per loss.

A loss costs nothing beside the model it is computed on, and compiling that model is what takes long.

Legend: B rows, T positions, K targets per position, C config columns.
"""

from collections.abc import Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.losses import LOSSES, Loss, LossOutput, Mean

TARGETS = "target_tokens"
INPUTS: tuple[str, ...] = tuple(sorted({name for loss in LOSSES.values() for name in loss.spec.inputs} - {TARGETS}))
"""What some loss reads beside the targets; a loss that does not read one gets zeros and ignores them."""
NUM_COLUMNS = max(len(loss.columns) for loss in LOSSES.values())
"""The width of `config_BC`; a loss with fewer columns ignores the rest."""


def losses_for(ndim: int) -> tuple[Loss, ...]:
    """Return the losses that take targets [B, T] (2) or [B, T, K] (3); a loss's number is its place here."""
    return tuple(loss for loss in LOSSES.values() if loss.spec.inputs[TARGETS].max_ndim >= ndim - 1)


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
    """Return each position's loss and metrics; those that the loss does not report are zero (see `mean_names`)."""
    losses = losses_for(target_logprobs.ndim)
    names = sorted(set[str]().union(*(mean_names(loss.spec.name) for loss in losses)))
    zeros_BT = jnp.zeros(target_logprobs.shape[:2])
    nothing = Mean(total_BT=zeros_BT, count_BT=zeros_BT)

    def branch(loss: Loss, logprobs: jax.Array) -> LossOutput:
        own = {name: inputs[name] for name in loss.spec.inputs if name != TARGETS}
        output = loss.evaluate(logprobs, own, config_BC[:, : len(loss.columns)], start_BT)
        return LossOutput(loss_BT=output.loss_BT, means={name: output.means.get(name, nothing) for name in names})

    branches = [lambda logprobs, loss=loss: branch(loss, logprobs) for loss in losses]
    return jax.lax.switch(number, branches, target_logprobs)


def slope(
    number: jax.Array,
    target_logprobs: jax.Array,
    inputs: Mapping[str, jax.Array],
    config_BC: jax.Array,
    start_BT: jax.Array | None = None,
) -> jax.Array:
    """Return the derivative of the summed loss by each log-probability."""
    return jax.grad(lambda x: evaluate(number, x, inputs, config_BC, start_BT).loss_BT.sum())(target_logprobs)


def is_local(number: jax.Array, ndim: int) -> jax.Array:
    """Return whether the slope at a position follows from that position alone, see `Loss.is_local`."""
    return jnp.array([loss.is_local for loss in losses_for(ndim)])[number]


@cache
def mean_names(name: str) -> frozenset[str]:
    """Return the names of the means that a loss reports."""
    loss = LOSSES[name]
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    inputs = {name: one for name in loss.spec.inputs if name != TARGETS}
    config_BC = jax.ShapeDtypeStruct((1, len(loss.columns)), jnp.float32)
    return frozenset(jax.eval_shape(loss.evaluate, one, inputs, config_BC).means)
