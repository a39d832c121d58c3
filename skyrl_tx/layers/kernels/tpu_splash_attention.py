"""Attention over packed rows on TPU: splash attention, a Pallas kernel of JAX.

The kernel is `jax.experimental.pallas.ops.tpu.splash_attention`. Scores, softmax and sums are
float32. The inputs of matrix products have the type of the keys and values.

A row may hold multiple sequences. The kernel separates them by segment ids, and we use the start of
a sequence as its id. The kernel skips a block of keys if none of the block's queries may attend to
it, because of the causal mask, the window, or the starts of sequences.

Legend: B batch, N heads, K kv heads, T tokens, H head dim, which may differ between keys and
values, I blocks of queries, J blocks of keys.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from skyrl_tx.layers.remat import MATMUL

MULTIPLE = 128
"""Rows are padded to a multiple of this number of positions, the lanes of a vector register."""
BLOCK_SIZES = (512, 256, 128)
"""Queries and keys per block: the first of these sizes that divides the padded length of the row."""


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    start_BT: jax.Array | None,
    sinks_N: jax.Array | None,
    *,
    window: int | None,
    interpret: bool,
) -> jax.Array:
    """Return the same as `causal_attention`, up to rounding. Sinks get no gradient."""
    T, padded = q_BTNH.shape[1], -q_BTNH.shape[1] % MULTIPLE
    if start_BT is not None:
        start_BT = jnp.pad(start_BT, ((0, 0), (0, padded)), constant_values=T)  # a segment id that no sequence has
    q, k, v = (jnp.swapaxes(_pad(x, padded), 1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    # The kernel does not divide scores by the root of the head dim. Divide the queries instead,
    # which rounds them once more.
    q = (q.astype(jnp.float32) / math.sqrt(q.shape[-1])).astype(k.dtype)
    out_BNTH: jax.Array = _attend(window, interpret, q, k, v, start_BT, sinks_N)
    return jnp.swapaxes(out_BNTH, 1, 2)[:, :T].astype(jnp.float32)


def _pad(x: jax.Array, padded: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, padded), (0, 0), (0, 0)))


def _run(
    window: int | None,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start_BT: jax.Array | None,
    sinks_N: jax.Array | None,
) -> jax.Array:
    """Run the kernel for queries [B, N, T, H], keys and values [B, K, T, H]. Returns [B, N, T, H]."""
    N, T = q.shape[1:3]

    block = next(size for size in BLOCK_SIZES if T % size == 0)
    mask = masks.CausalMask((T, T))
    if window is not None and window < T:
        mask = masks.LocalMask((T, T), (window - 1, 0), 0)

    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * N),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        residual_checkpoint_name=MATMUL,
        interpret=interpret,
    )

    def attend_row(q: jax.Array, k: jax.Array, v: jax.Array, start_T: jax.Array | None) -> Any:
        if start_T is None:
            return kernel(q, k, v, sinks=sinks_N)
        row_kernel = _skip_hidden_blocks(kernel, start_T[::block], block)
        return row_kernel(q, k, v, splash.SegmentIds(q=start_T, kv=start_T), sinks=sinks_N)

    out: jax.Array = jax.vmap(attend_row)(q, k, v, start_BT)
    return out


def _skip_hidden_blocks(
    kernel: splash.SplashAttentionKernel, start_I: jax.Array, block: int
) -> splash.SplashAttentionKernel:
    """Return a kernel that skips blocks of keys that end before the sequences of a block's queries start.

    Skipping changes no bit of the result, because all weights of such a block are 0.

    `start_I` has, for each block of queries, the start of the sequence of its first query. This is
    the lowest start in the block. The kernel has a table of iterations [heads, I, J]. The table's
    `data_next` is the block of keys that an iteration reads or, for the gradient of keys and
    values, the block of queries. Iterations with a `block_mask` of 0 are skipped.
    """
    forward, d_query, d_key = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    assert d_query is not None and d_key is not None and d_key.data_next is not None

    def get_last_key(key_block: jax.Array) -> jax.Array:
        return (key_block + 1) * block - 1

    def mask_blocks(info: Any, is_seen: jax.Array) -> Any:
        return info._replace(block_mask=jnp.where(is_seen, info.block_mask, 0).astype(info.block_mask.dtype))

    def mask_by_query(info: Any) -> Any:
        return mask_blocks(info, get_last_key(info.data_next.astype(jnp.int32)) >= start_I[:, None])

    key_block_J = jnp.arange(d_key.data_next.shape[-1])
    by_key = mask_blocks(d_key, get_last_key(key_block_J) >= start_I[d_key.data_next.astype(jnp.int32)])
    return splash.SplashAttentionKernel(mask_by_query(forward), mask_by_query(d_query), by_key, **kernel.kwargs)


# The kernel has no argument for the precision of its products. It uses JAX's default at the time
# when it is traced. JAX traces the gradient after it has left the forward function, so a context
# there would not apply to the gradient. The functions below set the precision in both.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(window: int | None, interpret: bool, q: jax.Array, k: jax.Array, *others: Any) -> jax.Array:
    with _use_precision_for(k):
        return _run(window, interpret, q, k, *others)


def _forward(
    window: int | None, interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, *constants: Any
) -> tuple[jax.Array, Any]:
    with _use_precision_for(k):
        return jax.vjp(lambda q, k, v: _run(window, interpret, q, k, v, *constants), q, k, v)


def _backward(window: int | None, interpret: bool, backward: Any, d_out: jax.Array) -> tuple[Any, ...]:
    with _use_precision_for(d_out):
        return (*backward(d_out), None, None)


_attend.defvjp(_forward, _backward)


def _use_precision_for(x: jax.Array) -> Any:
    """Return a context for products of the type of `x`: in full precision for float32, else in one pass."""
    return jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default")
