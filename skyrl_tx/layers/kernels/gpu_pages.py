"""Attention over the past in pages on NVIDIA GPUs: the Pallas kernel of JAX for Triton.

Source: `jax.experimental.pallas.ops.gpu.paged_attention`, whose kernel is called by us: the library's call returns the
result without the statistics by which the tokens of a slice, which are in no page yet, are added. A kv head of a row is
to the kernel a sequence with one head, whose pages are those of that head in the stack of all layers, so the stack is
not copied. Scores, softmax and sums are float32; products are of the type of keys and values.

Legend: B rows, K kv heads, G query heads per kv head, R queries of a kv head, H head dim, M pages of a row, P positions
of a page, Z parts of the pages of a row.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.experimental.pallas.ops.gpu import paged_attention

from skyrl_tx.layers.flash_attention import LOWEST, Stats
from skyrl_tx.layers.kv_cache import Pages

QUERIES = 16
"""Queries per block: the least that the products of a GPU have."""
PROGRAMS = 512
"""Programs that a call should have at least, to use all of a GPU: with fewer, the pages of a row are in parts."""
MOST_PARTS = 16


def past(
    q_BKGTH: jax.Array,
    pages: Pages,
    start_B: jax.Array,
    first_B: jax.Array,
    *,
    interpret: bool,
) -> Stats:
    """See `choice.Past`. There is one query for each head, and no window."""
    del first_B
    B, K, G, T, H = q_BKGTH.shape
    k, v = pages.stack.k, pages.stack.v
    assert T == 1 and v is not None
    *_, num_pages, _, P, _ = k.shape
    size = 1 if H > 64 else 2  # pages per block, so that one takes at most 32 KiB of keys
    parts = min(max(PROGRAMS // (B * K), 1), MOST_PARTS, -(-pages.page_BM.shape[1] // size))
    page_BM = jnp.pad(pages.page_BM, ((0, 0), (0, -pages.page_BM.shape[1] % (parts * size))))
    M = page_BM.shape[1]
    page_BKM = (pages.layer * num_pages + page_BM)[:, None] * K + jnp.arange(K, dtype=jnp.int32)[:, None]
    blocks = -(-G // QUERIES)
    q_XRH = jnp.pad(q_BKGTH.reshape(B * K, G, H).astype(k.dtype), ((0, 0), (0, blocks * QUERIES - G), (0, 0)))
    whole = pl.BlockSpec((k.size // (P * H), P, H), lambda x, r, z: (0, 0, 0))
    of_query = pl.BlockSpec((None, None, QUERIES), lambda x, r, z: (z, x, r))
    out, total, highest = pl.pallas_call(
        partial(
            paged_attention.paged_attention_kernel,
            num_heads=G,
            pages_per_compute_block=size,
            mask_value=LOWEST,
            attn_logits_soft_cap=None,
        ),
        grid=(B * K, blocks, parts),
        in_specs=[
            pl.BlockSpec((None, QUERIES, H), lambda x, r, z: (x, r, 0)),
            whole,
            None,
            whole,
            None,
            pl.BlockSpec((None, None, M // parts), lambda x, r, z: (x, z, 0)),
            pl.BlockSpec((1,), lambda x, r, z: (x,)),
        ],
        out_specs=[pl.BlockSpec((None, None, QUERIES, H), lambda x, r, z: (z, x, r, 0)), of_query, of_query],
        out_shape=[
            jax.ShapeDtypeStruct((parts, *q_XRH.shape), jnp.float32),
            *[jax.ShapeDtypeStruct((parts, *q_XRH.shape[:2]), jnp.float32)] * 2,
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_past",
    )(
        (q_XRH * (1 / math.sqrt(H))).astype(k.dtype),
        k.reshape(-1, P, H),
        None,
        v.reshape(-1, P, H),
        None,
        page_BKM.reshape(B * K, parts, M // parts),
        jnp.repeat(start_B, K),
    )
    found = _joined(highest, total, out)

    def by_head(x: jax.Array) -> jax.Array:
        return x[:, :G].reshape(B, K, G, T, *x.shape[2:])

    highest, total, out = map(by_head, found)
    return highest, total, out


def _joined(highest_ZXR: jax.Array, total_ZXR: jax.Array, out_ZXRH: jax.Array) -> Stats:
    """Return the statistics of all parts of a row."""
    highest = highest_ZXR.max(0)
    rescale = jnp.exp(highest_ZXR - highest)
    return highest, (total_ZXR * rescale).sum(0), (out_ZXRH * rescale[..., None]).sum(0)
