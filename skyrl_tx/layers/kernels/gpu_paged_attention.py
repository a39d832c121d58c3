"""Attention over the pages of the KV cache on NVIDIA GPUs: a Pallas kernel for Triton.

A program computes a block of the queries of one kv head of a row. It visits only pages with
positions that these queries see, and reads them in place, in the stack of all layers. If there are
few programs, each visits a part of the pages, and the parts are merged (Dao et al. 2023,
"flash-decoding"). Scores, softmax and sums are float32; products have the type of keys and values.
In a decode step, the first part also has the recent tokens, which are in no page yet.

Legend: B rows, K kv heads, G query heads per kv head, T tokens, R = G T queries of a kv head, H
head dim, M pages of a row, P positions of a page, U recent tokens, Z parts of the pages of a row.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from skyrl_tx.layers.attention import MASKED_SCORE, SoftmaxStats
from skyrl_tx.layers.kernels.gpu_flash_attention import dot
from skyrl_tx.layers.kv_cache import KeyValues, Pages

MIN_QUERIES, MAX_QUERIES = 16, 128
"""Queries per block: the minimum of products on a GPU, and the maximum, for prefill chunks."""
MIN_PROGRAMS = 512
"""A call should have at least this many programs, to use all of a GPU."""
MAX_PARTS = 16

_LOG2_E = math.log2(math.e)


def attend_step(
    q_BKGH: jax.Array,
    pages: Pages,
    start_B: jax.Array,
    recent: KeyValues,
    num_recent: jax.Array,
    *,
    window: int | None,
    interpret: bool,
) -> SoftmaxStats:
    """See `registry.AttendStep`."""
    first_B = start_B + num_recent - 1
    q_BKGTH = q_BKGH[:, :, :, None]
    new = recent, num_recent
    stats = attend_past(q_BKGTH, pages, start_B, first_B, new, window=window, interpret=interpret)
    return jax.tree.map(lambda x: x[:, :, :, 0], stats)


def attend_past(
    q_BKGTH: jax.Array,
    pages: Pages,
    start_B: jax.Array,
    first_B: jax.Array,
    recent: tuple[KeyValues, jax.Array] | None = None,
    *,
    window: int | None,
    interpret: bool,
) -> SoftmaxStats:
    """See `registry.AttendPast`. In a decode step, `recent` has the recent tokens and their number."""
    B, K, G, T, H = q_BKGTH.shape
    k, v = pages.stack.k, pages.stack.v
    assert v is not None
    *_, num_pages, _, P, _ = k.shape

    # Choose the blocks of queries and the parts of the pages.
    size = min(max(pl.next_power_of_2(G * T), MIN_QUERIES), MAX_QUERIES)
    blocks = pl.cdiv(G * T, size)
    parts = min(max(MIN_PROGRAMS // (B * K * blocks), 1), MAX_PARTS, pages.page_BM.shape[1])
    page_BM = jnp.pad(pages.page_BM, ((0, 0), (0, -pages.page_BM.shape[1] % parts)))
    M = page_BM.shape[1]
    page_BKM = (pages.layer * num_pages + page_BM)[:, None] * K + jnp.arange(K, dtype=jnp.int32)[:, None]

    q_XRH = q_BKGTH.reshape(B * K, G * T, H).astype(k.dtype)

    # Describe the inputs.
    whole = pl.BlockSpec((k.size // (P * H), P, H), lambda x, r, z: (0, 0, 0))
    row_spec = pl.BlockSpec((None,), lambda x, r, z: (x // K,))
    query_spec = pl.BlockSpec((None, None, size), lambda x, r, z: (z, x, r))
    new, specs = (), ()
    if recent is not None:
        new_keys, num_recent = recent
        U = new_keys.k.shape[2]
        keys = pl.BlockSpec((None, max(pl.next_power_of_2(U), MIN_QUERIES), H), lambda x, r, z: (x, 0, 0))
        new = *(x.reshape(B * K, U, H) for x in (new_keys.k, new_keys.values)), jnp.broadcast_to(num_recent, (B,))
        specs = keys, keys, row_spec

    in_specs = [
        pl.BlockSpec((None, size, H), lambda x, r, z: (x, r, 0)),
        whole,
        whole,
        pl.BlockSpec((None, None, M // parts), lambda x, r, z: (x, z, 0)),
        row_spec,
        row_spec,
        *specs,
    ]

    run = pl.pallas_call(
        partial(_kernel, num_queries=G * T, num_tokens=T, window=window),
        grid=(B * K, blocks, parts),
        in_specs=in_specs,
        out_specs=[pl.BlockSpec((None, None, size, H), lambda x, r, z: (z, x, r, 0)), query_spec, query_spec],
        out_shape=[
            jax.ShapeDtypeStruct((parts, *q_XRH.shape), jnp.float32),
            *[jax.ShapeDtypeStruct((parts, *q_XRH.shape[:2]), jnp.float32)] * 2,
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_past",
    )

    page_XZM = page_BKM.reshape(B * K, parts, M // parts)
    out, total, highest = run(q_XRH, k.reshape(-1, P, H), v.reshape(-1, P, H), page_XZM, start_B, first_B, *new)

    def reshape_heads(x: jax.Array) -> jax.Array:
        return x.reshape(B, K, G, T, *x.shape[2:])

    highest, total, out = map(reshape_heads, _merge_parts(highest, total, out))
    return highest, total, out


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    page_ref: Any,
    start_ref: Any,
    first_ref: Any,
    *others: Any,
    num_queries: int,
    num_tokens: int,
    window: int | None,
) -> None:
    """Compute the statistics of a block of queries over a part of the pages and over recent tokens."""
    *recent, out_ref, total_ref, highest_ref = others
    (R, H), P, (num_pages,) = q_ref.shape, k_ref.shape[1], page_ref.shape
    query_R = pl.program_id(1) * R + jnp.arange(R, dtype=jnp.int32)
    is_query_R = query_R < num_queries
    q = plgpu.load(q_ref, mask=is_query_R[:, None], other=0.0)
    start, first_page = start_ref[...], pl.program_id(2) * num_pages
    position_R = first_ref[...] + lax.rem(query_R, jnp.int32(num_tokens))

    def add_keys(carry: SoftmaxStats, k: jax.Array, v: jax.Array, key_P: jax.Array, seen_P: jax.Array) -> SoftmaxStats:
        highest, total, out = carry
        scores, seen = dot(q, k.T) * (_LOG2_E / math.sqrt(H)), seen_P[None, :]
        if window is not None:
            seen &= key_P[None, :] > position_R[:, None] - window
        scores = jnp.where(seen, scores, MASKED_SCORE)
        higher = jnp.maximum(highest, scores.max(1))
        rescale, weights = jnp.exp2(highest - higher), jnp.exp2(scores - higher[:, None])
        return higher, total * rescale + weights.sum(1), out * rescale[:, None] + dot(weights.astype(v.dtype), v)

    def add_page(index: Any, carry: SoftmaxStats) -> SoftmaxStats:
        page, key_P = page_ref[index], (first_page + index) * P + jnp.arange(P, dtype=jnp.int32)
        return add_keys(carry, k_ref[page], v_ref[page], key_P, key_P < start)

    lowest = jnp.int32(0) if window is None else jnp.maximum(lax.div(first_ref[...] - window + 1, P) - first_page, 0)
    upper = jnp.minimum(lax.div(start + (P - 1), P) - first_page, num_pages)
    zeros = jnp.zeros(R, jnp.float32)
    stats = lax.fori_loop(lowest, upper, add_page, (zeros + MASKED_SCORE, zeros, jnp.zeros((R, H), jnp.float32)))

    if recent:
        new_k_ref, new_v_ref, num_recent_ref = recent
        token_U = jnp.arange(new_k_ref.shape[0], dtype=jnp.int32)
        num_recent = num_recent_ref[...]
        is_recent_U = token_U < num_recent

        def add_recent(_: Any, carry: SoftmaxStats) -> SoftmaxStats:
            new_k, new_v = (plgpu.load(ref, mask=is_recent_U[:, None], other=0.0) for ref in (new_k_ref, new_v_ref))
            return add_keys(carry, new_k, new_v, start + token_U, is_recent_U)

        once = jnp.where(pl.program_id(2) == 0, jnp.int32(1), jnp.int32(0))
        stats = lax.fori_loop(jnp.int32(0), once, add_recent, stats)

    highest, total, out = stats
    plgpu.store(total_ref, total, mask=is_query_R)
    plgpu.store(out_ref, out, mask=is_query_R[:, None])
    plgpu.store(highest_ref, highest / _LOG2_E, mask=is_query_R)


def _merge_parts(highest_ZXR: jax.Array, total_ZXR: jax.Array, out_ZXRH: jax.Array) -> SoftmaxStats:
    """Return the statistics of all parts of a row."""
    if highest_ZXR.shape[0] == 1:
        return highest_ZXR[0], total_ZXR[0], out_ZXRH[0]
    highest = highest_ZXR.max(0)
    rescale = jnp.exp(highest_ZXR - highest)
    return highest, (total_ZXR * rescale).sum(0), (out_ZXRH * rescale[..., None]).sum(0)
