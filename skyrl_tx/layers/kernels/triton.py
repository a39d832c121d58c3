"""Attention over packed rows on NVIDIA GPUs: the Pallas kernels of JAX for Triton.

Source: `jax.experimental.pallas.ops.gpu.attention`. Scores, softmax and sums are float32; products are of the type of
keys and values. Sequences of a row are kept apart by ids, for which the start of each position serves.

Legend: B batch, N heads, K kv heads, G query heads per kv head, T tokens, H head dim.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.experimental.pallas.ops.gpu import attention

from skyrl_tx.layers.remat import mark_matmul

MULTIPLE = 128
"""Rows are padded to a multiple of all blocks."""
BLOCKS = ((128, 128, 128), (256, 64, 32))
"""(head dim, queries, keys): up to that dim, the sizes of a block of the forward pass.

The first are the library's, the second fit the shared memory of an L4 too (by its compiler: 99 KiB).
"""
BACKWARD_BLOCK = 32
"""Queries, and keys, per block of the backward pass: the library's default, as no GPU was at hand to choose by time."""


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    start_BT: jax.Array | None,
    sinks_N: None,
    *,
    interpret: bool,
) -> jax.Array:
    """Return what `causal_attention` returns without a window."""
    assert sinks_N is None
    B, T, N, _ = q_BTNH.shape
    G, padded = N // k_BTKH.shape[2], -T % MULTIPLE
    if start_BT is None:
        start_BT = jnp.zeros((B, T), jnp.int32)
    start_BT = jnp.pad(start_BT, ((0, 0), (0, padded)), constant_values=T)  # an id that no position has
    q, k, v = (jnp.pad(x, ((0, 0), (0, padded), (0, 0), (0, 0))) for x in (q_BTNH, k_BTKH, v_BTKH))
    out: jax.Array = _attend(G, interpret, q.astype(k.dtype), k, v, start_BT)
    return out[:, :T].astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(G: int, interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, start_BT: jax.Array) -> jax.Array:
    return _forward(G, interpret, q, k, v, start_BT)[0]


def _forward(
    G: int, interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, start_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the output and the residuals, with each query's logsumexp of scores [B, N, T], in base 2."""
    queries, keys = next(block for dim, *block in BLOCKS if q.shape[-1] <= dim)
    found: Any = attention.mha(
        q,
        _for_each_query(k, G),
        _for_each_query(v, G),
        start_BT,
        sm_scale=1 / math.sqrt(q.shape[-1]),
        causal=True,
        block_sizes=attention.BlockSizes(block_q=queries, block_k=keys),
        interpret=interpret,
        return_residuals=True,
    )
    out, logsumexp = map(mark_matmul, found)
    return out, (q, k, v, start_BT, out, logsumexp)


def _backward(G: int, interpret: bool, kept: tuple[jax.Array, ...], d_out: jax.Array) -> tuple[Any, ...]:
    """Call the library's kernel. Its own call rounds the sum of `out * d_out` to the type of `out`; here it is float32.

    The gradients of the query heads of a key/value head are added in float32.
    """
    q, k, v, start_BT, out, logsumexp = kept
    delta_BNT = jnp.einsum("btnh,btnh->bnt", *(x.astype(jnp.float32) for x in (out, d_out)))
    (B, T, N, H), size = q.shape, BACKWARD_BLOCK
    whole = pl.BlockSpec((None, T, None, pl.next_power_of_2(H)), lambda b, n, _: (b, 0, n, 0))
    block = pl.BlockSpec((None, size, None, pl.next_power_of_2(H)), lambda b, n, i: (b, i, n, 0))
    stats = pl.BlockSpec((None, None, T), lambda b, n, _: (b, n, 0))
    ids = pl.BlockSpec((None, T), lambda b, n, _: (b, 0))
    kernel = partial(
        attention.mha_backward_kernel,
        sm_scale=1 / math.sqrt(H),
        causal=True,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
        head_dim=H,
    )
    d_q, d_k, d_v = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)] * 3,
        in_specs=[whole, whole, whole, ids, whole, whole, stats, stats],
        out_specs=[block] * 3,
        grid=(B, N, T // size),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="mha_backward",
    )(q, _for_each_query(k, G), _for_each_query(v, G), start_BT, out, d_out, logsumexp, delta_BNT)
    d_k, d_v = (x.astype(jnp.float32).reshape(B, T, N // G, G, H).sum(3).astype(k.dtype) for x in (d_k, d_v))
    return d_q, d_k, d_v, None


_attend.defvjp(_forward, _backward)


def _for_each_query(x_BTKH: jax.Array, G: int) -> jax.Array:
    """Return keys, or values, with those of each query head, as the kernel knows no groups."""
    return jnp.repeat(x_BTKH, G, axis=2)
