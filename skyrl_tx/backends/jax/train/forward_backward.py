"""The compiled functions of training.

Each computes one micro-batch of one adapter, with or without gradient. Only shapes, and whether the
loss is local, are static. Everything else that differs between requests is data, so a few compiled
programs serve all requests.

Even the loss is data, because a program includes the model and takes long to compile. One program
serves all local losses, and another program all other losses. A program computes each of its losses
at each position, and selects one. This takes little time compared with the model, and fewer kernels
than a branch for each loss.

Legend: B rows, T positions, D hidden size, K targets per position, C config columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx import models
from skyrl_tx.backends.jax import compiler
from skyrl_tx.backends.jax.mesh import constrain_adapter
from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.layers.attention import KeyRange
from skyrl_tx.layers.lora import Adapter, AdapterWeights, LoraPair
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.losses import LOSSES, MEANS, Loss, LossOutput

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
def evaluate_loss(
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
def differentiate_loss(
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


@struct.dataclass
class MicroBatch:
    """The input of one compiled call, as host arrays.

    Padding is zero in all arrays except `start_BT`, so it has no weight in the loss.
    """

    loss: Any
    """int32 scalar: the index of the loss in the table of `list_losses`."""
    tokens_BT: Any
    """int32."""
    start_BT: Any
    """int32: `start_BT[b, t]` is the position at which the example at position t of row b starts.

    The padding at the end of a row counts as one more example.
    """
    num_uses_BT: Any
    """int32: how many examples have the token at a position; 0 for padding."""
    targets: Any
    """int32 [B, T], or [B, T, K] if examples have multiple targets per position."""
    inputs: dict[str, Any]
    """The inputs of all losses by name: float32 in the shape of `targets`."""
    config_BC: Any
    """float32: the numbers of the loss's config, one column for each."""
    is_local: bool = struct.field(pytree_node=False)
    """Whether the loss of a position depends only on the arrays at that position."""
    prefix: KeyRange | None = None
    """The shared prefix that each position also attends to, int32 [B, T]. None if nothing is shared."""


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
    loss = evaluate_loss(batch.loss, logprobs, batch.inputs, batch.config_BC, batch.start_BT, is_local=batch.is_local)
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
            d_logprobs, loss = differentiate_loss(batch.loss, logprobs, inputs, config_BC, is_local=True)
            return d_logprobs, MicroBatchOutputs.pack(logprobs, loss)

        return models.loss_and_gradient(
            params, hidden_BTD, batch.targets, adapter, compute_chunk_loss, batch.inputs, total
        )

    # Other losses: first d loss / d logprob of whole rows, then the gradients.
    logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, adapter)
    d_logprobs, loss = differentiate_loss(batch.loss, logprobs, batch.inputs, config_BC, batch.start_BT, is_local=False)
    _, d_hidden_BTD, total = models.loss_and_gradient(
        params, hidden_BTD, batch.targets, adapter, lambda _, d_chunk: (d_chunk, ()), d_logprobs, total
    )
    return MicroBatchOutputs.pack(logprobs, loss), d_hidden_BTD, total


@jax.jit
def sum_gradients(x: AdapterWeights, y: AdapterWeights) -> AdapterWeights:
    """Return the sum of two gradients. Neither is donated."""
    return jax.tree.map(jnp.add, x, y)
