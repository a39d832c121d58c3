"""Causal attention with grouped heads over whole rows, with all scores at once or in blocks.

The blocks are flash attention (Dao et al. 2022, arXiv:2205.14135), written as XLA loops. It never
holds the scores of all pairs, forwards or backwards. Blocks that lie wholly in the future are not
visited.

Legend: B batch, T query and U key tokens, N heads, K kv heads, G query heads per kv head
(N = K * G), H head dim, which may differ between keys and values, Q queries and U keys of a block.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.remat import mark_matmul

DENSE_LENGTH = 64
"""Up to this many tokens, all scores are computed at once.

Above, blocks are faster, and their memory is linear in T.
"""

BLOCK = 64
"""Number of queries, and of keys, per block.

With gradient on CPU, 64 was measured 1.3 times as fast as 128 at 8 x 256 and 1 x 4,096 tokens, 1.4
times at 1 x 2,048, and equal at 16 x 128. Dense attention is slower than both from 128 tokens on.
"""

MASKED_SCORE = -1e30
"""The score of a masked position."""


@struct.dataclass
class KeyRange:
    """The keys from `start_BT[b, t]` up to and excluding `end_BT[b, t]`, for each position.

    In training it is the shared prefix of a position's sequence, elsewhere in the row. A position
    without a shared prefix has start T and end 0.
    """

    start_BT: jax.Array
    end_BT: jax.Array

    @property
    def sizes_BT(self) -> jax.Array:
        """The number of keys of each position."""
        return jnp.maximum(self.end_BT - self.start_BT, 0)

    def includes(self, key_U: jax.Array) -> jax.Array:
        """Return whether each position attends to each of the given keys, [B, T, U]."""
        return (key_U >= self.start_BT[:, :, None]) & (key_U < self.end_BT[:, :, None])


def find_positions(num_tokens: int, start_BT: jax.Array | None, prefix: KeyRange | None) -> jax.Array:
    """Return the index of each token in its sequence, which includes its prefix: [B, T], or [T] without starts."""
    index_T = jnp.arange(num_tokens)
    position_BT = index_T if start_BT is None else index_T - start_BT
    return position_BT if prefix is None else position_BT + prefix.sizes_BT


SoftmaxStats = tuple[jax.Array, jax.Array, jax.Array]
"""The highest score of the keys so far, the sum of weights relative to it, and the weighted values."""


def causal_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    start_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    *,
    prefix: KeyRange | None = None,
    window: int | None = None,
    kernel: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Return attention of each position over itself and earlier positions, float32 [B, T, N, H].

    There is no padding mask: rows are padded on the right, and no real position attends to the
    padding.

    Args:
        q_BTNH: Queries.
        k_BTKH: Keys.
        v_BTKH: Values.
        start_BT: The first key that a position attends to, ascending along T. A row can so hold
            multiple sequences, for example 0, 0, 0, 3, 3 for two sequences of three and two tokens.
        sinks_N: For each head, the score of one more key whose value is 0. Sinks get no gradient.
        prefix: Earlier keys of the row that a position attends to as well, as if they came directly
            before its own sequence. No kernel computes this.
        window: A position attends to at most this many positions, including itself.
        kernel: The kernel for these heads (see `Kernels.get_attention_kernel`), if there is one. It
            computes rows of more than DENSE_LENGTH tokens.
    """
    B, T, N, H = q_BTNH.shape
    assert prefix is None or kernel is None, "kernels do not attend to a shared prefix"
    if kernel is not None and T > DENSE_LENGTH:
        return kernel(q_BTNH, k_BTKH, v_BTKH, start_BT, sinks_N)

    # A window is equivalent to a start that moves with the position. The prefix has the keys of the
    # window that are not in the position's own sequence.
    if window is not None and window < T:
        if prefix is not None:
            assert start_BT is not None
            num_own_BT = jnp.arange(T, dtype=jnp.int32) - start_BT + 1
            prefix = replace(prefix, start_BT=jnp.maximum(prefix.start_BT, prefix.end_BT - (window - num_own_BT)))
        first_T = jnp.maximum(jnp.arange(T, dtype=jnp.int32) - (window - 1), 0)
        start_BT = jnp.broadcast_to(first_T, (B, T)) if start_BT is None else jnp.maximum(start_BT, first_T)

    K = k_BTKH.shape[2]
    q_BKGTH = jnp.transpose(q_BTNH.reshape(B, T, K, N // K, H), (0, 2, 3, 1, 4))
    k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
    attend = dense_attention if T <= DENSE_LENGTH else flash_attention
    out_BKGTH = attend(q_BKGTH, k_BKTH, v_BKTH, start_BT, group_sinks(sinks_N, K), prefix=prefix)
    return jnp.transpose(out_BKGTH, (0, 3, 1, 2, 4)).reshape(B, T, N, v_BTKH.shape[3])


def dense_attention(
    q_BKGTH: jax.Array,
    k_BKUH: jax.Array,
    v_BKUH: jax.Array,
    start_BT: jax.Array | None = None,
    sinks_KG: jax.Array | None = None,
    *,
    prefix: KeyRange | None = None,
) -> jax.Array:
    """Compute the same as `flash_attention`, from all scores at once."""
    scores = compute_scores("bkgth,bkuh->bkgtu", q_BKGTH, k_BKUH)
    visible_BTU = jnp.tri(q_BKGTH.shape[3], dtype=jnp.bool_)[None]
    if start_BT is not None:
        visible_BTU &= jnp.arange(k_BKUH.shape[2]) >= start_BT[:, :, None]
    if prefix is not None:
        visible_BTU |= prefix.includes(jnp.arange(k_BKUH.shape[2]))
    scores = jnp.where(visible_BTU[:, None, None], scores, -jnp.inf)
    if sinks_KG is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sinks = jnp.broadcast_to(jax.lax.stop_gradient(sinks_KG)[:, :, None, None], (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bkgtu,bkuh->bkgth", weights.astype(v_BKUH.dtype), v_BKUH, preferred_element_type=jnp.float32)


def group_sinks(sinks_N: jax.Array | None, num_kv_heads: int) -> jax.Array | None:
    """Return the sinks of heads by kv head, [K, G]."""
    return None if sinks_N is None else sinks_N.reshape(num_kv_heads, -1)


def compute_scores(equation: str, q: jax.Array, k: jax.Array) -> jax.Array:
    """Return the scores of queries and keys in the type of the keys, accumulated in float32."""
    scores = jnp.einsum(equation, q.astype(k.dtype), k, preferred_element_type=jnp.float32)
    return scores / math.sqrt(q.shape[-1])


def flash_attention(
    q_BKGTH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    start_BT: jax.Array | None = None,
    sinks_KG: jax.Array | None = None,
    *,
    prefix: KeyRange | None = None,
    query_block: int = BLOCK,
    key_block: int = BLOCK,
) -> jax.Array:
    """Return attention of each position over itself and earlier ones, float32 [B, K, G, T, H].

    `start_BT`, ascending along T, is the first key that each position attends to, so that a row may
    hold multiple consecutive sequences. Each position attends to its keys in `prefix` as well, which
    end before its start. Blocks without a visible key are mostly not visited. Sinks are constants,
    see `make_empty_stats`.
    """
    T = q_BKGTH.shape[3]
    padded = -T % math.lcm(query_block, key_block)  # on the right, where no real position attends to it

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padded), (0, 0)])

    if start_BT is None:
        start_BT = jnp.zeros((q_BKGTH.shape[0], T), jnp.int32)
    start_BT, prefix = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, padded)], mode="edge"), (start_BT, prefix))
    out: jax.Array = _flash(query_block, key_block, pad(q_BKGTH), pad(k_BKTH), pad(v_BKTH), start_BT, prefix, sinks_KG)
    return out[:, :, :, :T]


def make_empty_stats(q_BKGQH: jax.Array, value_dim: int, sinks_KG: jax.Array | None) -> SoftmaxStats:
    """Return the statistics before any key. A sink is the score of one more key, whose value is 0.

    Without sinks the highest score starts finite, because a query may attend to nothing in its
    first blocks. Its first real score then scales the sum so far to 0.
    """
    zeros = jnp.zeros((*q_BKGQH.shape[:-1], value_dim), jnp.float32)
    if sinks_KG is None:
        return jnp.full(zeros.shape[:-1], MASKED_SCORE), zeros[..., 0], zeros
    highest = jnp.broadcast_to(sinks_KG[:, :, None].astype(jnp.float32), zeros.shape[:-1])
    return highest, jnp.ones_like(highest), zeros


def add_keys(carry: SoftmaxStats, scores_BKGQU: jax.Array, v_BKUH: jax.Array) -> SoftmaxStats:
    """Return the statistics with one more block of keys."""
    highest, total, out = carry
    higher = jnp.maximum(highest, scores_BKGQU.max(-1))
    weights, rescale = jnp.exp(scores_BKGQU - higher[..., None]), jnp.exp(highest - higher)
    added = _dot("bkgqu,bkuh->bkgqh", weights.astype(v_BKUH.dtype), v_BKUH)
    return higher, total * rescale + weights.sum(-1), out * rescale[..., None] + added


def merge_stats(first: SoftmaxStats, second: SoftmaxStats) -> SoftmaxStats:
    """Return the statistics of the keys of both."""
    (highest, total, out), (other_highest, other_total, other_out) = first, second
    higher = jnp.maximum(highest, other_highest)
    scale, other_scale = jnp.exp(highest - higher), jnp.exp(other_highest - higher)
    total = total * scale + other_total * other_scale
    return higher, total, out * scale[..., None] + other_out * other_scale[..., None]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(query_block: int, key_block: int, *arrays: Any) -> jax.Array:
    return _forward(query_block, key_block, *arrays)[0]


def _forward(
    query_block: int,
    key_block: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start_BT: jax.Array,
    prefix: KeyRange | None,
    sinks_KG: jax.Array | None,
):
    """Return the output and the residuals, including each query's logsumexp of scores [B, K, G, T]."""

    def run_query_block(_: None, start: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q_BKGQH = _slice_block(q, start, query_block)
        start_BQ, prefix_BQ = _slice_ranges((start_BT, prefix), start, query_block)
        first, last, get_block = _list_key_blocks(start, start_BQ, prefix_BQ, query_block, key_block)

        def add_key_block(j: jax.Array, carry: SoftmaxStats) -> SoftmaxStats:
            key = get_block(j) * key_block
            scores = _compute_block_scores(q_BKGQH, _slice_block(k, key, key_block), start, key, start_BQ, prefix_BQ)
            return add_keys(carry, scores, _slice_block(v, key, key_block))

        highest, total, out = jax.lax.fori_loop(
            first, last, add_key_block, make_empty_stats(q_BKGQH, v.shape[-1], sinks_KG)
        )
        return None, (out / total[..., None], highest + jnp.log(total))

    starts = jnp.arange(0, q.shape[3], query_block, dtype=jnp.int32)
    _, (outs, logsumexps) = jax.lax.scan(run_query_block, None, starts)
    out = mark_matmul(jnp.moveaxis(outs, 0, 3).reshape(*q.shape[:-1], v.shape[-1]))
    logsumexp = mark_matmul(jnp.moveaxis(logsumexps, 0, 3).reshape(q.shape[:-1]))
    return out, (q, k, v, start_BT, prefix, out, logsumexp)


def _backward(query_block: int, key_block: int, kept: tuple[Any, ...], d_out: jax.Array):
    q, k, v, start_BT, prefix, out, logsumexp = kept
    delta = (out * d_out).sum(-1, keepdims=True)

    def run_query_block(carry: tuple[jax.Array, jax.Array], start: jax.Array):
        q_BKGQH, d_out_BKGQH = _slice_block(q, start, query_block), _slice_block(d_out, start, query_block)
        delta_BKGQ1 = _slice_block(delta, start, query_block)
        logsumexp_BKGQ1 = _slice_block(logsumexp[..., None], start, query_block)
        start_BQ, prefix_BQ = _slice_ranges((start_BT, prefix), start, query_block)
        first, last, get_block = _list_key_blocks(start, start_BQ, prefix_BQ, query_block, key_block)

        def add_key_block(j: jax.Array, carry: SoftmaxStats) -> SoftmaxStats:
            d_q, d_k, d_v = carry
            key = get_block(j) * key_block
            k_BKUH, v_BKUH = (_slice_block(x, key, key_block) for x in (k, v))
            weights = jnp.exp(_compute_block_scores(q_BKGQH, k_BKUH, start, key, start_BQ, prefix_BQ) - logsumexp_BKGQ1)
            d_weights = _dot("bkgqh,bkuh->bkgqu", d_out_BKGQH.astype(v.dtype), v_BKUH)
            d_scores = (weights * (d_weights - delta_BKGQ1) / math.sqrt(q.shape[-1])).astype(k.dtype)
            d_q = d_q + _dot("bkgqu,bkuh->bkgqh", d_scores, k_BKUH)
            d_k = _add_block(d_k, _dot("bkgqu,bkgqh->bkuh", d_scores, q_BKGQH.astype(k.dtype)), key)
            d_v_BKUH = _dot("bkgqu,bkgqh->bkuh", weights.astype(v.dtype), d_out_BKGQH.astype(v.dtype))
            return d_q, d_k, _add_block(d_v, d_v_BKUH, key)

        d_q, d_k, d_v = jax.lax.fori_loop(first, last, add_key_block, (jnp.zeros(q_BKGQH.shape, jnp.float32), *carry))
        return (d_k, d_v), d_q

    starts = jnp.arange(0, q.shape[3], query_block, dtype=jnp.int32)
    zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    (d_k, d_v), d_qs = jax.lax.scan(run_query_block, zeros, starts)
    d_q = jnp.moveaxis(d_qs, 0, 3).reshape(q.shape)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, None


_flash.defvjp(_forward, _backward)


def _slice_ranges(ranges: Any, start: jax.Array, size: int) -> Any:
    """Return `size` positions of each array [B, T] of a tree."""
    return jax.tree.map(lambda x_BT: jax.lax.dynamic_slice_in_dim(x_BT, start, size, axis=1), ranges)


def _list_key_blocks(
    start: jax.Array, start_BQ: jax.Array, prefix_BQ: KeyRange | None, query_block: int, key_block: int
) -> tuple[jax.Array | int, jax.Array, Callable[[jax.Array], jax.Array]]:
    """Return which key blocks the queries from `start` on can see.

    The result is a range of steps, first and end, and a function that returns the block of a step.
    """
    first = start_BQ[:, 0].min() // key_block
    last = (start + query_block + key_block - 1) // key_block
    if prefix_BQ is None:
        return first, last, lambda j: j

    # First the blocks of the prefix that are not among the own blocks, then the own blocks.
    prefix_first = prefix_BQ.start_BT.min() // key_block
    prefix_last = jnp.minimum((prefix_BQ.end_BT.max() + key_block - 1) // key_block, first)
    num_before = jnp.maximum(prefix_last - prefix_first, 0)
    return 0, num_before + last - first, lambda j: jnp.where(j < num_before, prefix_first + j, first + j - num_before)


def _compute_block_scores(
    q_BKGQH: jax.Array,
    k_BKUH: jax.Array,
    query_start: jax.Array,
    key_start: jax.Array,
    start_BQ: jax.Array,
    prefix_BQ: KeyRange | None,
) -> jax.Array:
    scores = compute_scores("bkgqh,bkuh->bkgqu", q_BKGQH, k_BKUH)
    query_Q1 = query_start + jnp.arange(q_BKGQH.shape[3])[:, None]
    key_U = key_start + jnp.arange(k_BKUH.shape[2])
    visible_BQU = (key_U <= query_Q1) & (key_U >= start_BQ[:, :, None])
    if prefix_BQ is not None:
        visible_BQU |= prefix_BQ.includes(key_U)
    return jnp.where(visible_BQU[:, None, None], scores, MASKED_SCORE)


def _dot(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _slice_block(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Return `size` positions of [..., T, H]."""
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=x.ndim - 2)


def _add_block(x: jax.Array, added: jax.Array, start: jax.Array) -> jax.Array:
    summed = _slice_block(x, start, added.shape[-2]) + added
    return jax.lax.dynamic_update_slice_in_dim(x, summed, start, axis=x.ndim - 2)
