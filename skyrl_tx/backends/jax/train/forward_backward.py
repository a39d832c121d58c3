"""The compiled functions of training.

Each computes one micro-batch of one adapter, with or without gradient. Only shapes, and whether the
loss is local, are static. Everything else that differs between requests is data, even the choice of
the loss, so a few compiled programs serve all requests.

Legend: B rows, T positions, D hidden size, K targets per position, C config columns.
"""

from dataclasses import replace
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
    """The outputs of a micro-batch, which are copied to the host.

    `packed` has the outputs at each position. Its columns are the log-probabilities of K targets,
    then the loss, `MEANS` and the count of `LossOutput`.
    """

    packed: jax.Array  # float32 [B, T, K + 5]
    expert_counts: tuple[jax.Array, ...] = ()  # int32 [layers, E] per stack, see `models.forward_and_count`

    @classmethod
    def pack(cls, logprobs: jax.Array, loss: LossOutput) -> Self:
        """Pack log-probabilities [B, T] or [B, T, K] and the loss of the same positions."""
        logprobs_BTK = logprobs.reshape(*logprobs.shape[:2], -1)
        loss_columns = loss.loss_BT, *(loss.totals[name] for name in MEANS), loss.count_BT
        return cls(jnp.concatenate([logprobs_BTK, *(column[..., None] for column in loss_columns)], axis=-1))

    @property
    def logprobs(self) -> jax.Array:
        """Log-probabilities [B, T, K]."""
        return self.packed[..., : -2 - len(MEANS)]

    @property
    def loss(self) -> LossOutput:
        """The loss, and the metrics of policy gradient losses."""
        loss_BT, *totals, count_BT = (self.packed[..., column] for column in range(-2 - len(MEANS), 0))
        return LossOutput(loss_BT, dict(zip(MEANS, totals, strict=True)), count_BT)


@partial(jax.jit, static_argnames="config")
def forward(
    params: models.DecoderParams, adapter: Adapter, batch: MicroBatch, *, config: models.ModelConfig
) -> MicroBatchOutputs:
    """Compute one micro-batch without a gradient."""
    rows: Any = {"num_uses_BT": batch.num_uses_BT, "start_BT": batch.start_BT, "prefix": batch.prefix}
    hidden_BTD, counts = models.forward_and_count(params, config, batch.tokens_BT, adapter, **rows)
    logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, adapter)
    loss = loss_selection.evaluate(
        batch.loss, logprobs, batch.inputs, batch.config_BC, batch.start_BT, is_local=batch.is_local
    )
    return replace(MicroBatchOutputs.pack(logprobs, loss), expert_counts=counts)


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
    """Compute one micro-batch, and add the gradient of its summed loss to `total`.

    The memory of `total` is reused.
    """

    def compute_hidden(pairs: tuple[models.GroupPairs, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        split_adapter = models.SplitAdapter(pairs, adapter.scale)
        rows: Any = {"num_uses_BT": batch.num_uses_BT, "start_BT": batch.start_BT, "prefix": batch.prefix}
        return models.forward_and_count(params, config, batch.tokens_BT, split_adapter, **rows, remat=remat)

    backward: Any  # a jax.VJP
    hidden_BTD, backward, counts = jax.vjp(compute_hidden, models.cut_pairs(config, adapter.weights), has_aux=True)
    outputs, d_hidden_BTD, unembed = _compute_head(params, adapter, hidden_BTD, batch, total["unembed"])

    # Add the gradient of each layer to the sum in place, so that no second array of all layers is
    # needed.
    sums = jax.tree.map(jax.new_ref, models.cut_pairs(config, total))
    backward.with_refs(sums)(d_hidden_BTD)
    total = {**models.join_pairs(config, jax.tree.map(jax.freeze, sums)), "unembed": unembed}
    return constrain_adapter(params.layout, config, total), replace(outputs, expert_counts=counts)


def _compute_head(
    params: models.DecoderParams, adapter: Adapter, hidden_BTD: jax.Array, batch: MicroBatch, total: LoraPair
) -> tuple[MicroBatchOutputs, jax.Array, LoraPair]:
    """Compute log-probabilities, loss and gradients from the hidden states.

    Returns the outputs, d loss / d hidden, and `total` plus the gradient of the unembedding's
    adapter.

    The logits are computed in chunks of positions. The loss of a position in a local loss needs
    that position only, so it is computed together with the logits of its chunk. Any other loss
    needs whole rows: the logits are computed once for d loss / d logprob, and a second time for the
    gradients.
    """
    config_BC, layout = batch.config_BC, params.layout

    # Local losses: loss and gradient of each chunk in one pass over the logits.
    if batch.is_local:
        if layout.shards_rows:  # in chunks, each shard of a row is a row
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

    # Other losses: first d loss / d logprob of whole rows, then the gradients.
    logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, adapter)
    d_logprobs, loss = loss_selection.evaluate_and_differentiate(
        batch.loss, logprobs, batch.inputs, config_BC, batch.start_BT, is_local=False
    )
    _, d_hidden_BTD, total = models.loss_and_gradient(
        params, hidden_BTD, batch.targets, adapter, lambda _, d_chunk: (d_chunk, ()), d_logprobs, total
    )
    return MicroBatchOutputs.pack(logprobs, loss), d_hidden_BTD, total


@jax.jit
def sum_gradients(x: AdapterWeights, y: AdapterWeights) -> AdapterWeights:
    """Return the sum of two gradients. Neither is donated."""
    return jax.tree.map(jnp.add, x, y)
