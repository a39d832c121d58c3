"""The compiled functions of training: one micro-batch of one adapter, with or without its gradient.

Legend: B rows, T positions. Only shapes are static, and whether the loss is local. Everything else that differs
between requests is data, their loss included.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx import models
from skyrl_tx.backends.jax import xla_options
from skyrl_tx.backends.jax.mesh import constrain_adapter
from skyrl_tx.backends.jax.train import loss_selection
from skyrl_tx.backends.jax.train.packing import MicroBatch
from skyrl_tx.layers.lora import Adapter, AdapterWeights
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.losses import LossOutput


@struct.dataclass
class Outputs:
    """The outputs of a micro-batch: log-probabilities in the shape of its targets, each position's loss and metrics."""

    logprobs: jax.Array
    loss: LossOutput


@partial(jax.jit, static_argnames="config")
def forward(
    params: models.DecoderParams, adapter: Adapter, batch: MicroBatch, *, config: models.ModelConfig
) -> Outputs:
    """Compute one micro-batch without a gradient."""
    hidden_BTD = models.forward(params, config, batch.tokens_BT, adapter, start_BT=batch.start_BT)
    logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, adapter)
    loss = loss_selection.evaluate(
        batch.loss, logprobs, batch.inputs, batch.config_BC, batch.start_BT, is_local=batch.is_local
    )
    return Outputs(logprobs, loss)


@partial(jax.jit, static_argnames=("config", "remat"), donate_argnames="total", compiler_options=xla_options.TRAINING)
def accumulate(
    params: models.DecoderParams,
    adapter: Adapter,
    total: AdapterWeights,
    batch: MicroBatch,
    *,
    config: models.ModelConfig,
    remat: RematPolicy,
) -> tuple[AdapterWeights, Outputs]:
    """Compute one micro-batch and add the gradient of its summed loss to `total`, whose memory is reused."""

    def hidden_of(weights: AdapterWeights) -> jax.Array:
        own = Adapter(weights, adapter.scale)
        return models.forward(params, config, batch.tokens_BT, own, start_BT=batch.start_BT, remat=remat)

    hidden_BTD, backward = jax.vjp(hidden_of, adapter.weights)
    outputs, d_hidden_BTD, d_unembed = _head(params, adapter, hidden_BTD, batch)
    (d_blocks,) = backward(d_hidden_BTD)
    total = jax.tree.map(jnp.add, total, d_blocks | d_unembed)
    return constrain_adapter(params.layout, config, total), outputs


def _head(
    params: models.DecoderParams, adapter: Adapter, hidden_BTD: jax.Array, batch: MicroBatch
) -> tuple[Outputs, jax.Array, AdapterWeights]:
    """Return the outputs, and the loss's gradient by the hidden states and by the unembedding's adapter.

    A local loss is computed with the chunk of logits that is in memory, so the logits are computed once. For any other
    loss they are computed twice, the first time to get d loss / d logprob of whole rows.
    """
    config_BC, layout = batch.config_BC, params.layout
    if batch.is_local:
        if layout.splits_rows:  # chunks have the shards of a row as rows
            config_BC = jnp.repeat(config_BC, layout.num_shards("tokens"), axis=0)

        def loss_of_chunk(logprobs: jax.Array, inputs: dict[str, jax.Array]) -> tuple[jax.Array, LossOutput]:
            return loss_selection.evaluate_and_differentiate(batch.loss, logprobs, inputs, config_BC, is_local=True)

        logprobs, loss, d_hidden_BTD, d_unembed = models.target_logprobs_and_gradient(
            params, hidden_BTD, batch.targets, adapter, loss_of_chunk, batch.inputs
        )
        return Outputs(logprobs, loss), d_hidden_BTD, d_unembed
    logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, adapter)
    d_logprobs, loss = loss_selection.evaluate_and_differentiate(
        batch.loss, logprobs, batch.inputs, config_BC, batch.start_BT, is_local=False
    )
    logprobs, _, d_hidden_BTD, d_unembed = models.target_logprobs_and_gradient(
        params, hidden_BTD, batch.targets, adapter, lambda _, of_chunk: (of_chunk, ()), d_logprobs
    )
    return Outputs(logprobs, loss), d_hidden_BTD, d_unembed


@jax.jit
def sum_gradients(x: AdapterWeights, y: AdapterWeights) -> AdapterWeights:
    """Return the sum of two gradients without donating either."""
    return jax.tree.map(jnp.add, x, y)
