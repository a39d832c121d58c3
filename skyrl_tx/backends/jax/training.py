"""The compiled half of training: one micro-batch of one adapter, with or without its gradient.

Legend: B rows, T positions. All that differs between requests is data, their loss too; only shapes are static.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx import models
from skyrl_tx.backends.jax import any_loss
from skyrl_tx.backends.jax.packing import MicroBatch
from skyrl_tx.layers.lora import Adapter, AdapterWeights
from skyrl_tx.losses import LossOutput


@struct.dataclass
class Outputs:
    """What a micro-batch gives: log-probabilities in the shape of its targets, and each row's loss and metrics."""

    logprobs: jax.Array
    loss: LossOutput


def _evaluate(
    weights: AdapterWeights,
    scale: jax.Array,
    params: models.DecoderParams,
    batch: MicroBatch,
    config: models.ModelConfig,
    remat: bool,
) -> tuple[jax.Array, Outputs]:
    """Return the summed loss, and all that the micro-batch gives."""
    adapter = Adapter(weights=weights, scale=scale)
    hidden_BTD = models.forward(params, config, batch.tokens_BT, adapter, remat=remat)
    logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, adapter)
    output = any_loss.evaluate(batch.loss, logprobs, batch.inputs, batch.config_BC)
    return output.loss_B.sum(), Outputs(logprobs=logprobs, loss=output)


@partial(jax.jit, static_argnames="config")
def forward(
    params: models.DecoderParams, adapter: Adapter, batch: MicroBatch, *, config: models.ModelConfig
) -> Outputs:
    """Compute one micro-batch."""
    return _evaluate(adapter.weights, adapter.scale, params, batch, config, remat=False)[1]


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
    gradient_of = jax.grad(_evaluate, has_aux=True)
    gradient, outputs = gradient_of(adapter.weights, adapter.scale, params, batch, config, remat)
    return add(total, gradient), outputs


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
