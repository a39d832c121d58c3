"""The compiled half of training: one micro-batch of one adapter, with or without its gradient.

Legend: B rows, T positions. All that differs between requests is data, their loss too; only shapes are static.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx import models
from skyrl_tx.backends.jax import any_loss
from skyrl_tx.backends.jax.mesh import constrain_adapter
from skyrl_tx.backends.jax.packing import MicroBatch
from skyrl_tx.layers.kept import Kept
from skyrl_tx.layers.lora import Adapter, AdapterWeights
from skyrl_tx.losses import LossOutput


@struct.dataclass
class Outputs:
    """What a micro-batch gives: log-probabilities in the shape of its targets, and each position's loss and metrics."""

    logprobs: jax.Array
    loss: LossOutput


@partial(jax.jit, static_argnames="config")
def forward(
    params: models.DecoderParams, adapter: Adapter, batch: MicroBatch, *, config: models.ModelConfig
) -> Outputs:
    """Compute one micro-batch."""
    hidden_BTD = models.forward(params, config, batch.tokens_BT, adapter, start_BT=batch.start_BT)
    logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, adapter)
    return Outputs(logprobs, any_loss.evaluate(batch.loss, logprobs, batch.inputs, batch.config_BC, batch.start_BT))


@partial(jax.jit, static_argnames=("config", "remat"), donate_argnames="total")
def accumulate(
    params: models.DecoderParams,
    adapter: Adapter,
    total: AdapterWeights,
    batch: MicroBatch,
    *,
    config: models.ModelConfig,
    remat: bool,
) -> tuple[AdapterWeights, Outputs]:
    """Compute one micro-batch and add the gradient of its summed loss to `total`, whose memory is reused."""

    def hidden_of(weights: AdapterWeights) -> jax.Array:
        own = Adapter(weights, adapter.scale)
        kept = Kept.INPUTS if remat else Kept.PRODUCTS
        return models.forward(params, config, batch.tokens_BT, own, start_BT=batch.start_BT, kept=kept)

    hidden_BTD, backward = jax.vjp(hidden_of, adapter.weights)
    logprobs, d_hidden_BTD, d_unembed = _head(params, adapter, hidden_BTD, batch)
    (d_blocks,) = backward(d_hidden_BTD)
    loss = any_loss.evaluate(batch.loss, logprobs, batch.inputs, batch.config_BC, batch.start_BT)
    outputs = Outputs(logprobs, loss)
    return constrain_adapter(params.layout, config, add(total, d_blocks | d_unembed)), outputs


def _head(
    params: models.DecoderParams, adapter: Adapter, hidden_BTD: jax.Array, batch: MicroBatch
) -> tuple[jax.Array, jax.Array, AdapterWeights]:
    """Return log-probabilities, and the loss's gradient by the hidden states and by the unembedding's adapter.

    The logits are computed once, chunk by chunk, for a loss whose slope can be told from the chunk. For any other
    they are computed twice: the slopes come from a look at whole rows beforehand.
    """
    is_local = any_loss.is_local(batch.loss, batch.targets.ndim)

    def slopes_of_rows() -> jax.Array:
        logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, adapter)
        return any_loss.slope(batch.loss, logprobs, batch.inputs, batch.config_BC, batch.start_BT)

    def slope(logprobs: jax.Array, pieces: tuple[jax.Array, dict[str, jax.Array]]) -> jax.Array:
        known, inputs = pieces
        return jnp.where(is_local, any_loss.slope(batch.loss, logprobs, inputs, batch.config_BC), known)

    known = jax.lax.cond(is_local, lambda: jnp.zeros(batch.targets.shape), slopes_of_rows)
    return models.target_logprobs_and_gradient(params, hidden_BTD, batch.targets, adapter, slope, (known, batch.inputs))


def add(x: AdapterWeights, y: AdapterWeights) -> AdapterWeights:
    """Return the sum of two gradients."""
    return jax.tree.map(jnp.add, x, y)


@jax.jit
def sum_gradients(x: AdapterWeights, y: AdapterWeights) -> AdapterWeights:
    """Return the sum of two gradients, both of which stay."""
    return add(x, y)


def zeros_like(weights: AdapterWeights) -> AdapterWeights:
    """Return a gradient of zeros, placed as the weights are: placed otherwise, it would compile `accumulate` twice."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, device=leaf.sharding), weights)
