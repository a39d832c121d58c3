"""Flash attention over packed rows on NVIDIA GPUs: Pallas kernels for Triton.

Dao 2023, arXiv:2307.08691. Scores, softmax and sums are float32; products have the type of keys and
values.

Each query attends to the keys from its first key up to itself. First keys ascend along a row, so
sequences and windows are the same case. Two positions decide how a block of queries treats a block
of keys: if all queries see all keys, no mask is computed, and if no query sees a key, the block is
not visited. The cost therefore depends on the lengths of the sequences and not on the length of the
row.

Gradients are sums in a fixed order, also over the query heads of a kv head.

Legend: B batch, N heads, K kv heads, G query heads per kv head, T tokens, H head dim, V head dim of
values, J blocks of keys.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from skyrl_tx.layers.attention import MASKED_SCORE
from skyrl_tx.layers.remat import mark_matmul

MULTIPLE = 128
"""Rows are padded to a multiple of this number, which is a multiple of all block sizes."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block sizes of one kernel, and how Triton compiles it."""

    queries: int
    keys: int
    warps: int
    stages: int = 2

    @property
    def compiler_params(self) -> plgpu.CompilerParams:
        """The parameters of the compiler."""
        return plgpu.CompilerParams(num_warps=self.warps, num_stages=self.stages)


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """The blocks of the three kernels."""

    forward: Blocks
    d_query: Blocks
    d_key: Blocks


LARGE_BLOCKS_MAX_DIM = 128
LARGE_BLOCKS = KernelBlocks(forward=Blocks(128, 64, 4), d_query=Blocks(64, 64, 4), d_key=Blocks(64, 64, 4))
"""For heads of up to LARGE_BLOCKS_MAX_DIM dims: the fastest of 25 variants on an H100."""
SMALL_BLOCKS = KernelBlocks(forward=Blocks(64, 32, 4), d_query=Blocks(32, 32, 4), d_key=Blocks(32, 32, 4))
"""For larger heads, and for devices in SMALL_MEMORY, where LARGE_BLOCKS do not fit."""
SMALL_MEMORY = frozenset({"8.6", "8.7", "8.9", "12.0", "12.1"})
"""Compute capabilities with 99 KiB of shared memory per block of threads.

See the CUDA C++ Programming Guide, table 27.
"""

_LOG2_E = math.log2(math.e)


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
    """Return the same as `causal_attention`. Sinks are constants."""
    B, T, *_ = q_BTNH.shape
    padded = -T % MULTIPLE
    if start_BT is None:
        start_BT = jnp.zeros((B, T), jnp.int32)
    start_BT = jnp.pad(start_BT, ((0, 0), (0, padded)), constant_values=T)  # padding is a separate sequence
    if window is not None:
        start_BT = jnp.maximum(start_BT, jnp.arange(T + padded, dtype=jnp.int32) - (window - 1))
    q, k, v = (jnp.pad(x, ((0, 0), (0, padded), (0, 0), (0, 0))) for x in (q_BTNH, k_BTKH, v_BTKH))
    out: jax.Array = _attend(interpret, q.astype(k.dtype), k, v, start_BT, sinks_N)
    return out[:, :T].astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(interpret: bool, *arrays: Any) -> jax.Array:
    return _forward(interpret, *arrays)[0]


def _forward(
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first_BT: jax.Array,
    sinks_N: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    """Return the output and the residuals, with each query's base-2 logsumexp of scores [B, N, T]."""
    (B, T, N, H), G, V = q.shape, q.shape[2] // k.shape[2], v.shape[3]
    blocks = _choose_blocks(H, V).forward
    queries, out_queries, keys, values, row, stats = _make_specs(blocks, T, G, H, V)

    out, logsumexp = pl.pallas_call(
        partial(_forward_kernel, blocks=blocks, dim=H, value_dim=V),
        grid=(T // blocks.queries, B, N),
        in_specs=[queries, keys, values, row],
        out_specs=[out_queries, stats],
        out_shape=[jax.ShapeDtypeStruct((B, T, N, V), q.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        compiler_params=blocks.compiler_params,
        interpret=interpret,
        name="mha_forward",
    )(q, k, v, first_BT)

    if sinks_N is not None:  # one more key per head, whose value is 0
        sink_N1 = sinks_N.astype(jnp.float32)[:, None] * _LOG2_E
        with_sink = jnp.logaddexp2(logsumexp, sink_N1)
        share_BNT = jnp.exp2(logsumexp - with_sink)
        out = (out.astype(jnp.float32) * jnp.swapaxes(share_BNT, 1, 2)[..., None]).astype(q.dtype)
        logsumexp = with_sink

    out, logsumexp = map(mark_matmul, (out, logsumexp))
    return out, (q, k, v, first_BT, out, logsumexp)


def _backward(interpret: bool, kept: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, first_BT, out, logsumexp = kept
    (B, T, N, H), K, V = q.shape, k.shape[2], v.shape[3]
    G, sizes = N // K, _choose_blocks(H, V)
    padded, padded_value = pl.next_power_of_2(H), pl.next_power_of_2(V)
    delta_BTN = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta_BNT = jnp.swapaxes(delta_BTN, 1, 2)

    # Gradient of the queries.
    blocks = sizes.d_query
    queries, d_outs, keys, values, row, stats = _make_specs(blocks, T, G, H, V)

    d_q: Any = pl.pallas_call(
        partial(_d_query_kernel, blocks=blocks, dim=H, value_dim=V),
        grid=(T // blocks.queries, B, N),
        in_specs=[queries, keys, values, row, d_outs, stats, stats],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=blocks.compiler_params,
        interpret=interpret,
        name="mha_d_query",
    )(q, k, v, first_BT, d_out, logsumexp, delta_BNT)

    # Gradients of keys and values.
    blocks = sizes.d_key
    J = T // blocks.keys
    ends = [_count_seeing_queries(first_BT, jnp.arange(J) * blocks.keys + key) for key in (0, blocks.keys - 1)]
    group, d_outs = (pl.BlockSpec((None, T, G, dim), lambda j, b, k: (b, 0, k, 0)) for dim in (padded, padded_value))
    keys, values = (
        pl.BlockSpec((None, blocks.keys, None, dim), lambda j, b, k: (b, j, k, 0)) for dim in (padded, padded_value)
    )
    stats = pl.BlockSpec((None, G, T), lambda j, b, k: (b, k, 0))
    row, end = (pl.BlockSpec((None, size), lambda j, b, k: (b, 0)) for size in (T, J))

    d_kv: Any = pl.pallas_call(
        partial(_d_key_kernel, blocks=blocks, dim=H, value_dim=V, num_heads=G),
        grid=(J, B, K),
        in_specs=[group, keys, values, row, end, end, d_outs, stats, stats],
        out_specs=[keys, values],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        compiler_params=blocks.compiler_params,
        interpret=interpret,
        name="mha_d_key",
    )(q, k, v, first_BT, *ends, d_out, logsumexp, delta_BNT)
    return d_q, *d_kv, None, None


_attend.defvjp(_forward, _backward)


def _make_specs(blocks: Blocks, T: int, G: int, H: int, V: int) -> tuple[pl.BlockSpec, ...]:
    """Return what a program for a block of queries of a head reads and writes.

    These are queries, outputs, the keys, values and first keys of the row, and statistics.
    """
    queries, outs = (
        pl.BlockSpec((None, blocks.queries, None, pl.next_power_of_2(dim)), lambda i, b, n: (b, i, n, 0))
        for dim in (H, V)
    )
    keys, values = (
        pl.BlockSpec((None, T, None, pl.next_power_of_2(dim)), lambda i, b, n: (b, 0, n // G, 0)) for dim in (H, V)
    )
    row = pl.BlockSpec((None, T), lambda i, b, n: (b, 0))
    return queries, outs, keys, values, row, pl.BlockSpec((None, None, blocks.queries), lambda i, b, n: (b, n, i))


def _choose_blocks(*dims: int) -> KernelBlocks:
    is_small = getattr(jax.devices()[0], "compute_capability", None) in SMALL_MEMORY
    return SMALL_BLOCKS if is_small or max(dims) > LARGE_BLOCKS_MAX_DIM else LARGE_BLOCKS


def _count_seeing_queries(first_BT: jax.Array, key_J: jax.Array) -> jax.Array:
    """Return how many queries have their first key at or before each key [B, J].

    This is the end of the queries that see the key.
    """
    return (first_BT[:, None, :] <= key_J[:, None]).sum(2, dtype=jnp.int32)


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    first_ref: Any,
    out_ref: Any,
    logsumexp_ref: Any,
    *,
    blocks: Blocks,
    dim: int,
    value_dim: int,
) -> None:
    """Compute one block of queries of a head."""
    begin = pl.program_id(0) * blocks.queries
    load, load_values = _make_loader(q_ref, dim), _make_loader(v_ref, value_dim)
    q = load(q_ref)
    first = first_ref[pl.ds(begin, blocks.queries)]

    def add_keys(index: Any, carry: Any, is_masked: bool) -> Any:
        out, total, highest = carry
        span = pl.ds(index * blocks.keys, blocks.keys)
        scores = dot(q, load(k_ref, span).T) * (_LOG2_E / math.sqrt(dim))
        if is_masked:
            scores = jnp.where(_make_mask(begin, first, index, blocks), scores, MASKED_SCORE)
        higher = jnp.maximum(highest, scores.max(1))
        rescale, weights = jnp.exp2(highest - higher), jnp.exp2(scores - higher[:, None])
        out = out * rescale[:, None] + dot(weights.astype(v_ref.dtype), load_values(v_ref, span))
        return out, total * rescale + weights.sum(1), higher

    out = jnp.zeros(out_ref.shape, jnp.float32)
    total = jnp.zeros(blocks.queries, jnp.float32)
    out, total, highest = _loop_over_keys(first_ref, begin, blocks, add_keys, (out, total, total - jnp.inf))
    logsumexp_ref[...] = highest + jnp.log2(total)
    _write(out_ref, out / total[:, None], value_dim)


def _d_query_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    first_ref: Any,
    d_out_ref: Any,
    logsumexp_ref: Any,
    delta_ref: Any,
    d_q_ref: Any,
    *,
    blocks: Blocks,
    dim: int,
    value_dim: int,
) -> None:
    """Compute the gradient of one block of queries of a head."""
    begin = pl.program_id(0) * blocks.queries
    load, load_values = _make_loader(q_ref, dim), _make_loader(v_ref, value_dim)
    q, d_out = load(q_ref), load_values(d_out_ref)
    first, logsumexp, delta = first_ref[pl.ds(begin, blocks.queries)], logsumexp_ref[...], delta_ref[...]

    def add_keys(index: Any, d_q: jax.Array, is_masked: bool) -> jax.Array:
        span = pl.ds(index * blocks.keys, blocks.keys)
        k = load(k_ref, span)
        scores = dot(q, k.T) * (_LOG2_E / math.sqrt(dim))
        if is_masked:
            scores = jnp.where(_make_mask(begin, first, index, blocks), scores, MASKED_SCORE)
        weights = jnp.exp2(scores - logsumexp[:, None])
        d_scores = weights * (dot(d_out, load_values(v_ref, span).T) - delta[:, None])
        return d_q + dot(d_scores.astype(k.dtype), k)

    d_q = _loop_over_keys(first_ref, begin, blocks, add_keys, jnp.zeros(q.shape, jnp.float32))
    _write(d_q_ref, d_q / math.sqrt(dim), dim)


def _d_key_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    first_ref: Any,
    end_of_first_ref: Any,
    end_of_last_ref: Any,
    d_out_ref: Any,
    logsumexp_ref: Any,
    delta_ref: Any,
    d_k_ref: Any,
    d_v_ref: Any,
    *,
    blocks: Blocks,
    dim: int,
    value_dim: int,
    num_heads: int,
) -> None:
    """Compute the gradients of one block of keys and values of a kv head, from all its query heads."""
    number = pl.program_id(0)
    begin = number * blocks.keys
    load, load_values = _make_loader(k_ref, dim), _make_loader(v_ref, value_dim)
    k, v = load(k_ref), load_values(v_ref)

    # Queries see a key from the key's position up to its end. Blocks of queries that see all keys
    # of the block need no mask.
    lowest = lax.div(begin, blocks.queries)
    upper = _count_blocks(end_of_last_ref[number], blocks.queries)
    all_from = jnp.minimum(_count_blocks(begin + blocks.keys - 1, blocks.queries), upper)
    all_to = jnp.maximum(lax.div(end_of_first_ref[number], blocks.queries), all_from)

    def add_head(head: Any, carry: Any) -> Any:
        def add_queries(index: Any, carry: Any, is_masked: bool) -> Any:
            d_k, d_v = carry
            span = pl.ds(index * blocks.queries, blocks.queries)
            q, d_out = load(q_ref, span, head), load_values(d_out_ref, span, head)
            # Scores are [keys, queries], so that weights need no transpose through shared memory.
            scores = dot(k, q.T) * (_LOG2_E / math.sqrt(dim))
            if is_masked:
                seen = _make_mask(index * blocks.queries, first_ref[span], number, blocks, by_key=True)
                scores = jnp.where(seen, scores, MASKED_SCORE)
            weights = jnp.exp2(scores - logsumexp_ref[head, span][None, :])
            d_scores = weights * (dot(v, d_out.T) - delta_ref[head, span][None, :])
            return d_k + dot(d_scores.astype(q.dtype), q), d_v + dot(weights.astype(d_out.dtype), d_out)

        return _loop_in_three_parts(add_queries, (lowest, all_from, all_to, upper), carry)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    d_k, d_v = lax.fori_loop(0, num_heads, add_head, zeros)
    _write(d_k_ref, d_k / math.sqrt(dim), dim)
    _write(d_v_ref, d_v, value_dim)


def _loop_over_keys(first_ref: Any, begin: Any, blocks: Blocks, step: Callable[..., Any], carry: Any) -> Any:
    """Run `step` for all blocks of keys that some query of the block starting at `begin` sees."""
    lowest = lax.div(first_ref[begin], blocks.keys)
    diagonal = lax.div(begin, blocks.keys)
    all_from = _count_blocks(first_ref[begin + blocks.queries - 1], blocks.keys)
    all_from = jnp.minimum(jnp.maximum(all_from, lowest), diagonal)
    return _loop_in_three_parts(
        step, (lowest, all_from, diagonal, _count_blocks(begin + blocks.queries, blocks.keys)), carry
    )


def _loop_in_three_parts(step: Callable[..., Any], bounds: tuple[Any, Any, Any, Any], carry: Any) -> Any:
    """Run `step` with mask, then without mask, then with mask."""
    for lower, upper, is_masked in zip(bounds[:-1], bounds[1:], (True, False, True), strict=True):
        carry = lax.fori_loop(lower, upper, partial(step, is_masked=is_masked), carry)
    return carry


def _count_blocks(num_positions: Any, size: int) -> Any:
    """Return how many blocks of `size` hold the first `num_positions` positions."""
    return lax.div(num_positions + (size - 1), size)


def _make_mask(begin: Any, first: jax.Array, key_block: Any, blocks: Blocks, *, by_key: bool = False) -> jax.Array:
    """Return which keys of a block each query from `begin` on sees: [queries, keys].

    With `by_key`, the result is [keys, queries].
    """
    query = begin + jnp.arange(blocks.queries, dtype=jnp.int32)
    key = key_block * blocks.keys + jnp.arange(blocks.keys, dtype=jnp.int32)
    query_axis, key_axis = (0, 1) if by_key else (1, 0)
    query, first = jnp.expand_dims(query, query_axis), jnp.expand_dims(first, query_axis)
    key = jnp.expand_dims(key, key_axis)
    return (key <= query) & (key >= first)


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the product of two matrices, accumulated in float32."""
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def _make_loader(ref: Any, dim: int) -> Callable[..., jax.Array]:
    """Return a function that reads references of this shape, whole or some rows.

    Padded dims are read as 0.
    """
    size = ref.shape[-1]
    mask = None if size == dim else (jnp.arange(size) < dim)[None, :]
    other = None if mask is None else 0.0

    def load(ref: Any, *rows_and_head: Any) -> jax.Array:
        where = ref.at[(*rows_and_head, slice(None))] if rows_and_head else ref
        return plgpu.load(where, mask=mask, other=other)

    return load


def _write(ref: Any, value: jax.Array, dim: int) -> None:
    size = ref.shape[-1]
    mask = None if size == dim else (jnp.arange(size) < dim)[None, :]
    plgpu.store(ref, value.astype(ref.dtype), mask=mask)
