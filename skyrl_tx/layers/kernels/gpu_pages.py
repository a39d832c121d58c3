"""Attention over the past in pages on NVIDIA GPUs: a kernel in Pallas for Triton.

A program computes a block of the queries of one kv head of a row, and visits only pages that hold positions which they
see. It reads them where they are, in the stack of all layers. Where there are few programs, each visits a part of the
pages, and the parts are joined (Dao et al. 2023, "flash-decoding"). Scores, softmax and sums are float32; products are
of the type of keys and values.

Legend: B rows, K kv heads, G query heads per kv head, T tokens, R = G T queries of a kv head, H head dim, M pages of a
row, P positions of a page, Z parts of the pages of a row.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from skyrl_tx.layers.flash_attention import LOWEST, Stats
from skyrl_tx.layers.kv_cache import Pages

FEWEST, MOST = 16, 128
"""Queries per block: the least that the products of a GPU have, and the most, for chunks of prompts."""
PROGRAMS = 512
"""Programs that a call should have at least, to use all of a GPU."""
MOST_PARTS = 16

_LOG2_E = math.log2(math.e)


def past(
    q_BKGTH: jax.Array,
    pages: Pages,
    start_B: jax.Array,
    first_B: jax.Array,
    *,
    window: int | None,
    interpret: bool,
) -> Stats:
    """See `choice.Past`."""
    B, K, G, T, H = q_BKGTH.shape
    k, v = pages.stack.k, pages.stack.v
    assert v is not None
    *_, num_pages, _, P, _ = k.shape
    size = min(max(pl.next_power_of_2(G * T), FEWEST), MOST)
    blocks = pl.cdiv(G * T, size)
    parts = min(max(PROGRAMS // (B * K * blocks), 1), MOST_PARTS, pages.page_BM.shape[1])
    page_BM = jnp.pad(pages.page_BM, ((0, 0), (0, -pages.page_BM.shape[1] % parts)))
    M = page_BM.shape[1]
    page_BKM = (pages.layer * num_pages + page_BM)[:, None] * K + jnp.arange(K, dtype=jnp.int32)[:, None]
    q_XRH = q_BKGTH.reshape(B * K, G * T, H).astype(k.dtype)
    q_XRH = jnp.pad(q_XRH, ((0, 0), (0, blocks * size - G * T), (0, 0)))
    whole = pl.BlockSpec((k.size // (P * H), P, H), lambda x, r, z: (0, 0, 0))
    of_row = pl.BlockSpec((None,), lambda x, r, z: (x // K,))
    of_query = pl.BlockSpec((None, None, size), lambda x, r, z: (z, x, r))
    out, total, highest = pl.pallas_call(
        partial(_kernel, num_tokens=T, window=window),
        grid=(B * K, blocks, parts),
        in_specs=[
            pl.BlockSpec((None, size, H), lambda x, r, z: (x, r, 0)),
            whole,
            whole,
            pl.BlockSpec((None, None, M // parts), lambda x, r, z: (x, z, 0)),
            of_row,
            of_row,
        ],
        out_specs=[pl.BlockSpec((None, None, size, H), lambda x, r, z: (z, x, r, 0)), of_query, of_query],
        out_shape=[
            jax.ShapeDtypeStruct((parts, *q_XRH.shape), jnp.float32),
            *[jax.ShapeDtypeStruct((parts, *q_XRH.shape[:2]), jnp.float32)] * 2,
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_past",
    )(
        q_XRH,
        k.reshape(-1, P, H),
        v.reshape(-1, P, H),
        page_BKM.reshape(B * K, parts, M // parts),
        start_B,
        first_B,
    )

    def by_head(x: jax.Array) -> jax.Array:
        return x[:, : G * T].reshape(B, K, G, T, *x.shape[2:])

    highest, total, out = map(by_head, _joined(highest, total, out))
    return highest, total, out


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    page_ref: Any,
    start_ref: Any,
    first_ref: Any,
    out_ref: Any,
    total_ref: Any,
    highest_ref: Any,
    *,
    num_tokens: int,
    window: int | None,
) -> None:
    """Compute the statistics of a block of queries over a part of the pages."""
    (R, H), P, (num_pages,) = q_ref.shape, k_ref.shape[1], page_ref.shape
    q, start, first_page = q_ref[...], start_ref[...], pl.program_id(2) * num_pages
    query_R = pl.program_id(1) * R + jnp.arange(R, dtype=jnp.int32)
    position_R = first_ref[...] + lax.rem(query_R, jnp.int32(num_tokens))

    def step(index: Any, carry: Stats) -> Stats:
        highest, total, out = carry
        page = page_ref[index]
        k, v = k_ref[page], v_ref[page]
        scores = _dot(q, k.T) * (_LOG2_E / math.sqrt(H))
        key_P = (first_page + index) * P + jnp.arange(P, dtype=jnp.int32)
        seen = (key_P < start)[None, :]
        if window is not None:
            seen &= key_P[None, :] > position_R[:, None] - window
        scores = jnp.where(seen, scores, LOWEST)
        higher = jnp.maximum(highest, scores.max(1))
        rescale, weights = jnp.exp2(highest - higher), jnp.exp2(scores - higher[:, None])
        return higher, total * rescale + weights.sum(1), out * rescale[:, None] + _dot(weights.astype(v.dtype), v)

    lowest = jnp.int32(0) if window is None else jnp.maximum(lax.div(first_ref[...] - window + 1, P) - first_page, 0)
    upper = jnp.minimum(lax.div(start + (P - 1), P) - first_page, num_pages)
    zeros = jnp.zeros(R, jnp.float32)
    found = lax.fori_loop(lowest, upper, step, (zeros + LOWEST, zeros, jnp.zeros((R, H), jnp.float32)))
    highest, total_ref[...], out_ref[...] = found
    highest_ref[...] = highest / _LOG2_E


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def _joined(highest_ZXR: jax.Array, total_ZXR: jax.Array, out_ZXRH: jax.Array) -> Stats:
    """Return the statistics of all parts of a row."""
    if highest_ZXR.shape[0] == 1:
        return highest_ZXR[0], total_ZXR[0], out_ZXRH[0]
    highest = highest_ZXR.max(0)
    rescale = jnp.exp(highest_ZXR - highest)
    return highest, (total_ZXR * rescale).sum(0), (out_ZXRH * rescale[..., None]).sum(0)
