"""Attention over the pages of the KV cache on TPU: a Pallas kernel that reads the pages in place.

JAX's kernels (`paged_attention`, `ragged_paged_attention`) read pages of one layer in other
layouts. They return the result without its softmax statistics, which are needed to add the tokens
of a decode slice that are in no page yet. This kernel reads the stack of all layers, which is not
copied. It computes each row separately, in blocks of the row's positions, and fetches the next
block meanwhile. Scores, softmax and sums are float32; products have the type of keys and values.

Legend: B rows, K kv heads, R queries of a kv head, H head dim, M pages of a row, P positions of a
page, U keys of a block, C cores.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from skyrl_tx.layers.flash_attention import MASKED_SCORE, SoftmaxStats
from skyrl_tx.layers.kv_cache import Pages

BLOCK_KEYS = 256
"""Keys per block. With many heads there are fewer, so that a block takes at most BLOCK_BYTES."""
BLOCK_BYTES = 2**20
MAX_QUERIES = 512
"""Queries that are computed together, over all kv heads: the scores of a block take half a MiB."""
ROWS, WIDTH = 8, 128
"""The shape of a register.

Queries are padded to a multiple of ROWS; one number per query fills a WIDTH.
"""
TABLE_BYTES = 2**18
"""The maximum bytes of the page numbers of one call, which lie in scalar memory.

Calls with more rows are split.
"""


def attend_past(
    q_BKGTH: jax.Array,
    pages: Pages,
    start_B: jax.Array,
    first_B: jax.Array,
    *,
    window: int | None,
    interpret: bool,
) -> SoftmaxStats:
    """See `registry.AttendPast`. The number of tokens must be a power of two."""
    B, K, G, T, H = q_BKGTH.shape
    assert T & (T - 1) == 0 and pages.stack.v is not None

    # Cut the queries of a row into parts, which become rows themselves.
    q_BKRH = q_BKGTH.reshape(B, K, G * T, H).astype(pages.stack.k.dtype)
    size = min(G * T + -(G * T) % ROWS, MAX_QUERIES)
    q_BKRH = jnp.pad(q_BKRH, ((0, 0), (0, 0), (0, -(G * T) % size), (0, 0)))
    splits = q_BKRH.shape[2] // size
    q = jnp.moveaxis(q_BKRH.reshape(B, K, splits, size, H), 2, 1).reshape(B * splits, K, size, H)
    tokens = min(T, size)
    first = (first_B[:, None] + jnp.arange(splits) * size % T).reshape(-1)
    page, start = (jnp.repeat(x, splits, axis=0) for x in (pages.page_BM, start_B))

    # Call the kernel for as many rows as scalar memory can describe.
    max_rows = max(TABLE_BYTES // (4 * page.shape[1]), 1)
    run = partial(_run, pages, tokens=tokens, window=window, interpret=interpret)
    parts = [run(*(x[b : b + max_rows] for x in (q, page, start, first))) for b in range(0, B * splits, max_rows)]
    highest, total, out = (jnp.concatenate(arrays) for arrays in zip(*parts, strict=True))

    def reshape_queries(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(B, splits, K, size, *x.shape[3:]), 1, 2)
        return x.reshape(B, K, splits * size, *x.shape[4:])[:, :, : G * T].reshape(B, K, G, T, *x.shape[4:])

    return reshape_queries(highest[..., 0]), reshape_queries(total[..., 0]), reshape_queries(out)


def _run(
    pages: Pages,
    q_BKRH: jax.Array,
    page_BM: jax.Array,
    start_B: jax.Array,
    first_B: jax.Array,
    *,
    tokens: int,
    window: int | None,
    interpret: bool,
) -> list[jax.Array]:
    (B, K, R, H), M = q_BKRH.shape, page_BM.shape[1]
    k, v = pages.stack.k, pages.stack.v
    *_, P, _ = k.shape
    num_heads = next(heads for heads in range(K, 0, -1) if K % heads == 0 and heads * R <= max(MAX_QUERIES, R))
    page_bytes = num_heads * P * H * k.dtype.itemsize
    num_pages = max(min(BLOCK_KEYS // P, BLOCK_BYTES // page_bytes, M), 1)
    num_cores = 2 if B % 2 == 0 else 1  # if the device has two cores, they share the rows

    def locate_row(core: Any, i: Any, heads: Any, *_: Any) -> tuple[Any, ...]:
        return core * (B // num_cores) + i, heads, 0, 0

    def make_block_spec(last: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, num_heads, R, last), locate_row)

    buffer = pltpu.VMEM((2, num_heads, num_pages * P, H), k.dtype)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(num_cores, B // num_cores, K // num_heads),
        in_specs=[make_block_spec(H), pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=[make_block_spec(WIDTH), make_block_spec(WIDTH), make_block_spec(H)],
        scratch_shapes=[buffer, buffer, pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((2,))],
    )

    stats: list[jax.Array] = pl.pallas_call(
        partial(_kernel, num_pages=num_pages, row_pages=M, tokens=tokens, window=window),
        grid_spec=grid_spec,
        out_shape=[jax.ShapeDtypeStruct((B, K, R, last), jnp.float32) for last in (WIDTH, WIDTH, H)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="paged_past",
    )(jnp.int32(pages.layer).reshape(1), start_B, first_B, page_BM.reshape(-1), q_BKRH, k, v)
    return stats


def _kernel(
    layer_ref: Any,
    start_ref: Any,
    first_ref: Any,
    page_ref: Any,
    q_ref: Any,
    k_hbm: Any,
    v_hbm: Any,
    highest_ref: Any,
    total_ref: Any,
    out_ref: Any,
    k_buffer: Any,
    v_buffer: Any,
    slot_ref: Any,
    semaphores: Any,
    *,
    num_pages: int,
    row_pages: int,
    tokens: int,
    window: int | None,
) -> None:
    """Compute the statistics of one row and some of its kv heads."""
    core, i, group = (pl.program_id(axis) for axis in range(3))
    num_rows, num_groups = pl.num_programs(1), pl.num_programs(2)
    num_heads, _, H = q_ref.shape
    page_size = k_hbm.shape[3]
    size = num_pages * page_size
    precision = jax.lax.Precision.HIGHEST if k_hbm.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    def get_first_block(row: Any) -> Any:
        return 0 if window is None else jax.lax.div(jnp.maximum(first_ref[row] - (window - 1), 0), size)

    def make_copies(row: Any, group: Any, block: Any, slot: Any) -> list[Any]:
        copies: list[Any] = []
        for number in range(num_pages):
            index = jnp.minimum(block * num_pages + number, row_pages - 1)
            at = (layer_ref[0], page_ref[row * row_pages + index], pl.ds(group * num_heads, num_heads))
            into = (slot, slice(None), pl.ds(number * page_size, page_size))
            for pages, buffer in ((k_hbm, k_buffer), (v_hbm, v_buffer)):
                copies.append(pltpu.make_async_copy(pages.at[at], buffer.at[into], semaphores.at[slot]))
        return copies

    def fetch(row: Any, group: Any, block: Any, slot: Any) -> None:
        for copy in make_copies(row, group, block, slot):
            copy.start()

    row = core * num_rows + i
    first = get_first_block(row)
    last = jax.lax.div(start_ref[row] + size - 1, size)
    last = jnp.maximum(last, first + 1)  # a row without past visits one block, which is masked

    highest_ref[...] = jnp.full_like(highest_ref, MASKED_SCORE)
    total_ref[...] = jnp.zeros_like(total_ref)
    out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when((i == 0) & (group == 0))
    def _() -> None:
        slot_ref[0] = 0
        fetch(row, group, first, 0)

    def add_block(block: Any, _: Any) -> None:
        slot = slot_ref[0]

        @pl.when(block + 1 < last)
        def _() -> None:
            fetch(row, group, block + 1, 1 - slot)

        @pl.when((block + 1 == last) & (group + 1 < num_groups))
        def _() -> None:
            fetch(row, group + 1, first, 1 - slot)

        @pl.when((block + 1 == last) & (group + 1 == num_groups) & (i + 1 < num_rows))
        def _() -> None:
            fetch(row + 1, 0, get_first_block(row + 1), 1 - slot)

        # Wait for this block.
        for copy in make_copies(row, group, block, slot):
            copy.wait()
        slot_ref[0] = 1 - slot

        scores = jax.lax.dot_general(
            q_ref[...],
            k_buffer[slot],
            (((2,), (2,)), ((0,), (0,))),
            precision=precision,
            preferred_element_type=jnp.float32,
        ) * (1 / math.sqrt(H))

        position = block * size + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        visible = position < start_ref[row]
        if window is not None:
            token = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) & (tokens - 1)
            visible &= position > first_ref[row] + token - window
        scores = jnp.where(visible, scores, MASKED_SCORE)

        highest = highest_ref[...]
        higher = jnp.maximum(highest, scores.max(axis=2, keepdims=True))
        weights = jnp.where(visible, jnp.exp(scores - higher[..., :1]), 0.0)
        rescale = jnp.exp(highest - higher)
        added = jax.lax.dot_general(
            weights.astype(v_buffer.dtype),
            v_buffer[slot],
            (((2,), (1,)), ((0,), (0,))),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

        highest_ref[...] = higher
        total_ref[...] = total_ref[...] * rescale + weights.sum(axis=2, keepdims=True)
        out_ref[...] = out_ref[...] * rescale[..., :1] + added

    jax.lax.fori_loop(first, last, add_block, None)
