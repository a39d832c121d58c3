"""The compiled functions of training: one micro-batch of one adapter, with or without its gradient.

Legend: B rows, T positions. Only shapes are static, and whether the loss is local. Everything else that differs
between requests is data, their loss included.
"""

from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx import models
from skyrl_tx.backends.jax import compiler
from skyrl_tx.backends.jax.mesh import constrain_adapter
from skyrl_tx.backends.jax.train import loss_selection
from skyrl_tx.backends.jax.train.packing import MicroBatch
from skyrl_tx.layers.lora import Adapter, AdapterWeights, LoraPair
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.losses import MEANS, LossOutput


@struct.dataclass
class MicroBatchOutputs:
    """The outputs of a micro-batch at each position, in one array, so that they are written and copied together.

    Log-probabilities of K targets, then the loss, `MEANS` and the count of `LossOutput`.
    """

    packed: jax.Array  # float32 [B, T, K + 5]

    @classmethod
    def pack(cls, logprobs: jax.Array, loss: LossOutput) -> Self:
        """Pack log-probabilities [B, T] or [B, T, K] and the loss of some positions."""
        of_targets = logprobs.reshape(*logprobs.shape[:2], -1)
        of_loss = loss.loss_BT, *(loss.totals[name] for name in MEANS), loss.count_BT
        return cls(jnp.concatenate([of_targets, *(each[..., None] for each in of_loss)], axis=-1))

    @property
    def logprobs(self) -> jax.Array:
        """Log-probabilities [B, T, K]."""
        return self.packed[..., : -2 - len(MEANS)]

    @property
    def loss(self) -> LossOutput:
        """The loss and what policy gradients report."""
        loss_BT, *totals, count_BT = (self.packed[..., column] for column in range(-2 - len(MEANS), 0))
        return LossOutput(loss_BT, dict(zip(MEANS, totals, strict=True)), count_BT)


@partial(jax.jit, static_argnames="config")
def forward(
    params: models.DecoderParams, adapter: Adapter, batch: MicroBatch, *, config: models.ModelConfig
) -> MicroBatchOutputs:
    """Compute one micro-batch without a gradient."""
    hidden_BTD = models.forward(params, config, batch.tokens_BT, adapter, start_BT=batch.start_BT)
    logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, adapter)
    loss = loss_selection.evaluate(
        batch.loss, logprobs, batch.inputs, batch.config_BC, batch.start_BT, is_local=batch.is_local
    )
    return MicroBatchOutputs.pack(logprobs, loss)


@partial(
    jax.jit, static_argnames=("config", "remat"), donate_argnames="total", compiler_options=compiler.TRAINING_OPTIONS
)
def accumulate(
    params: models.DecoderParams,
    adapter: Adapter,
    total: AdapterWeights,
    batch: MicroBatch,
    *,
    config: models.ModelConfig,
    remat: RematPolicy,
) -> tuple[AdapterWeights, MicroBatchOutputs]:
    """Compute one micro-batch and add the gradient of its summed loss to `total`, whose memory is reused."""

    def compute_hidden(pairs: tuple[models.GroupPairs, ...]) -> jax.Array:
        own = models.CutAdapter(pairs, adapter.scale)
        return models.forward(params, config, batch.tokens_BT, own, start_BT=batch.start_BT, remat=remat)

    backward: Any  # a jax.VJP
    hidden_BTD, backward = jax.vjp(compute_hidden, models.cut_pairs(config, adapter.weights))
    outputs, d_hidden_BTD, unembed = _compute_head(params, adapter, hidden_BTD, batch, total["unembed"])
    # Added to the sums layer by layer: no second array of all layers exists, and no zeros to begin with.
    sums = jax.tree.map(jax.new_ref, models.cut_pairs(config, total))
    backward.with_refs(sums)(d_hidden_BTD)
    total = {**models.join_pairs(config, jax.tree.map(jax.freeze, sums)), "unembed": unembed}
    return constrain_adapter(params.layout, config, total), outputs


def _compute_head(
    params: models.DecoderParams, adapter: Adapter, hidden_BTD: jax.Array, batch: MicroBatch, total: LoraPair
) -> tuple[MicroBatchOutputs, jax.Array, LoraPair]:
    """Return the outputs, the loss's gradient by the hidden states, and `total` plus that by the unembedding's adapter.

    A local loss is computed with the chunk of logits that is in memory, so the logits are computed once. For any other
    loss they are computed twice, the first time to get d loss / d logprob of whole rows.
    """
    config_BC, layout = batch.config_BC, params.layout
    if batch.is_local:
        if layout.shards_rows:  # chunks have the shards of a row as rows
            config_BC = jnp.repeat(config_BC, layout.num_shards("tokens"), axis=0)

        def compute_chunk_loss(
            logprobs: jax.Array, inputs: dict[str, jax.Array]
        ) -> tuple[jax.Array, MicroBatchOutputs]:
            d_logprobs, loss = loss_selection.evaluate_and_differentiate(
                batch.loss, logprobs, inputs, config_BC, is_local=True
            )
            return d_logprobs, MicroBatchOutputs.pack(logprobs, loss)

        return models.loss_and_gradient(
            params, hidden_BTD, batch.targets, adapter, compute_chunk_loss, batch.inputs, total
        )
    logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, adapter)
    d_logprobs, loss = loss_selection.evaluate_and_differentiate(
        batch.loss, logprobs, batch.inputs, config_BC, batch.start_BT, is_local=False
    )
    _, d_hidden_BTD, total = models.loss_and_gradient(
        params, hidden_BTD, batch.targets, adapter, lambda _, of_chunk: (of_chunk, ()), d_logprobs, total
    )
    return MicroBatchOutputs.pack(logprobs, loss), d_hidden_BTD, total


@jax.jit
def sum_gradients(x: AdapterWeights, y: AdapterWeights) -> AdapterWeights:
    """Return the sum of two gradients without donating either."""
    return jax.tree.map(jnp.add, x, y)
