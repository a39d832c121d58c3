"""Log-probabilities of given tokens, without the logits of all positions in memory.

Legend: B batch, T tokens, D embed, V vocab, K targets per position, P positions (B * T), C
positions of a chunk.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from skyrl_tx.layers.lora import AdaptedMap, ConcatenatedMap, LoraPair, RowAdapter
from skyrl_tx.layers.stable_bits import exp_unfused

PositionLoss = Callable[[jax.Array, Any], tuple[jax.Array, Any]]
"""A loss of single positions: (log-probabilities, further inputs) -> (derivative, further outputs).

The derivative is with respect to the log-probabilities. Inputs and outputs are trees of arrays
[B, T, ...].
"""

CHUNK_POSITIONS = 256
"""Positions whose logits exist at once, in [C, V] float32. Measured as fast as any larger chunk."""
JOINED_CHUNKS = 4
"""GPUs compute this many chunks at once.

With a single chunk of 256 positions, they would spend as much time on reading the unembedding as on
multiplying.
"""


def logits(hidden: jax.Array, unembed_VD: jax.Array, adapter: RowAdapter | None) -> jax.Array:
    """Return float32 logits [B, ..., V] of hidden states [B, ..., D]."""
    x = hidden.astype(unembed_VD.dtype)
    y = jnp.einsum("...d,vd->...v", x, unembed_VD, preferred_element_type=jnp.float32)
    return y if adapter is None else y + adapter.compute_delta(hidden, unembed_VD.dtype)


def target_logprobs(
    hidden_BTD: jax.Array,
    unembed_VD: jax.Array,
    targets: jax.Array,
    adapter: RowAdapter | None,
    *,
    chunk: int = CHUNK_POSITIONS,
) -> jax.Array:
    """Return log p(target) at each position, float32 in the shape of `targets`.

    `targets` is [B, T], or [B, T, K] for K targets per position.

    The result is differentiable by the hidden states and the adapter. The gradient recomputes the
    logits of each chunk.
    """
    run = partial(_target_logprobs, adapter=adapter, chunk=chunk)
    return _run_by_platform(run, unembed_VD, hidden_BTD, targets)


def _target_logprobs(
    unembed_VD: jax.Array,
    hidden_BTD: jax.Array,
    targets: jax.Array,
    *,
    adapter: RowAdapter | None,
    chunk: int,
    is_joined: bool,
) -> jax.Array:
    unembed = None
    if adapter is not None and adapter.scale.ndim == 0:
        unembed = _adapt_unembedding(hidden_BTD, unembed_VD, adapter, is_joined)
        chunk *= JOINED_CHUNKS if is_joined else 1

    @jax.checkpoint
    def score_chunk(pieces: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, targets = pieces
        x = hidden.reshape(-1, hidden.shape[-1])
        y = logits(hidden, unembed_VD, adapter).reshape(x.shape[0], -1) if unembed is None else unembed.apply(x)
        return _score(y, targets)[0]

    chunks = jax.lax.map(score_chunk, (_split_chunks(hidden_BTD, chunk), _split_chunks(targets, chunk)))
    return _join_chunks(chunks, *targets.shape[:2])


def loss_and_gradient(
    hidden_BTD: jax.Array,
    unembed_VD: jax.Array,
    targets: jax.Array,
    adapter: RowAdapter,
    loss: PositionLoss,
    inputs: Any,
    total: LoraPair,
    *,
    chunk: int = CHUNK_POSITIONS,
) -> tuple[Any, jax.Array, LoraPair]:
    """Return the loss's outputs and its gradients by the hidden states and by the adapter.

    The gradient by the adapter is added to `total`. The gradient is computed while the logits of a
    chunk exist, so logits are computed once. This requires that the loss of a position depends on
    this position alone. `inputs` is a tree of arrays [B, T, ...], which is split into the same
    chunks.
    """
    run = partial(_compute_gradient, adapter=adapter, loss=loss, chunk=chunk)
    return _run_by_platform(run, unembed_VD, hidden_BTD, targets, inputs, total)


def _compute_gradient(
    unembed_VD: jax.Array,
    hidden_BTD: jax.Array,
    targets: jax.Array,
    inputs: Any,
    total: LoraPair,
    *,
    adapter: RowAdapter,
    loss: PositionLoss,
    chunk: int,
    is_joined: bool,
) -> tuple[Any, jax.Array, LoraPair]:
    cut = partial(_split_chunks, chunk=chunk * (JOINED_CHUNKS if is_joined else 1))
    unembed = _adapt_unembedding(hidden_BTD, unembed_VD, adapter, is_joined)

    def add_chunk(total: LoraPair, pieces: Any) -> tuple[LoraPair, tuple[Any, jax.Array]]:
        hidden, targets, inputs = pieces
        x_CD = hidden.reshape(-1, hidden.shape[-1])
        targets_CK = targets.reshape(x_CD.shape[0], -1)
        logprobs, exp_CV, total_C1 = _score(unembed.apply(x_CD), targets)
        d_logprobs, outputs = loss(logprobs, inputs)
        d_logprobs_CK = d_logprobs.reshape(targets_CK.shape)

        # d log p(target) / d logits = (1 at the target) - softmax
        d_y_CV = exp_CV * (-d_logprobs_CK.sum(axis=-1, keepdims=True) / total_C1)

        # Add at the target by comparing with all tokens, in the loop that computes `d_y_CV`;
        # additions at indices would be a separate loop. Multiple targets use indices on CPU,
        # because comparing each target with all tokens takes longer.
        if is_joined or targets_CK.shape[1] == 1:
            is_target_CVK = jnp.arange(d_y_CV.shape[1])[:, None] == targets_CK[:, None]
            d_y_CV = d_y_CV + jnp.where(is_target_CVK, d_logprobs_CK[:, None], 0).sum(axis=-1)
        else:
            d_y_CV = d_y_CV.at[jnp.arange(x_CD.shape[0])[:, None], targets_CK].add(d_logprobs_CK)

        d_x_CD, d_pair = unembed.compute_gradient(x_CD, d_y_CV)
        return jax.tree.map(jnp.add, total, d_pair), (outputs, d_x_CD.reshape(hidden.shape))

    pieces = (cut(hidden_BTD), cut(targets), jax.tree.map(cut, inputs))
    total, chunks = jax.lax.scan(add_chunk, total, pieces)
    num_rows, length = targets.shape[:2]
    return *jax.tree.map(partial(_join_chunks, num_rows=num_rows, length=length), chunks), total


def _run_by_platform(run: Callable[..., Any], unembed_VD: jax.Array, *arguments: Any) -> Any:
    """Run a function of the unembedding, with `is_joined` on GPU unless the unembedding is float32.

    Joined means that the factor of the adapter is appended to the unembedding. The logits of a
    chunk are the largest arrays of a pass. XLA for GPUs has a separate kernel for each product and
    each sum, and none keeps the logits in a cache.
    """
    if unembed_VD.dtype == jnp.float32:
        return run(unembed_VD, *arguments, is_joined=False)
    on_gpu, elsewhere = partial(run, is_joined=True), partial(run, is_joined=False)
    return jax.lax.platform_dependent(unembed_VD, *arguments, cuda=on_gpu, default=elsewhere)


def _adapt_unembedding(
    hidden_BTD: jax.Array, unembed_VD: jax.Array, adapter: RowAdapter, is_joined: bool
) -> AdaptedMap | ConcatenatedMap:
    """Return the unembedding with the adapter that all rows share.

    The choice depends on the number of all positions, so positions score alike with and without a
    gradient.
    """
    num_positions = hidden_BTD.shape[0] * hidden_BTD.shape[1]
    adapted = AdaptedMap.from_weight(unembed_VD, adapter.pair, adapter.scale, num_positions, is_transposed=True)
    return ConcatenatedMap.from_adapted(adapted) if is_joined else adapted


def _score(y_CV: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log p(target) in the shape of `targets`, and the softmax.

    The softmax is returned as its numerators [C, V] and denominators [C, 1].
    """
    highest_C1 = jax.lax.stop_gradient(y_CV.max(axis=-1, keepdims=True))
    exp_CV = exp_unfused(y_CV - highest_C1)  # the gradient, if there is one, needs it too
    total_C1 = exp_CV.sum(axis=-1, keepdims=True)
    chosen_CK = jnp.take_along_axis(y_CV, targets.reshape(y_CV.shape[0], -1), axis=-1, mode="promise_in_bounds")
    return (chosen_CK - highest_C1 - jnp.log(total_C1)).reshape(targets.shape), exp_CV, total_C1


def _split_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """Split [B, T, ...] along T into [chunks, B, about chunk / B, ...], padded with zeros.

    All rows are split together.
    """
    B, T = x.shape[:2]
    length = max(1, min(T, chunk // B))
    x = jnp.pad(x, [(0, 0), (0, -T % length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.swapaxes(x.reshape(B, -1, length, *x.shape[2:]), 0, 1)


def _join_chunks(chunks: jax.Array, num_rows: int, length: int) -> jax.Array:
    """Undo `_split_chunks`, for a result [B, T, ...] of `num_rows` rows of `length` positions."""
    return jnp.swapaxes(chunks, 0, 1).reshape(num_rows, -1, *chunks.shape[3:])[:, :length]
