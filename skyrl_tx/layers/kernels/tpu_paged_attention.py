"""Attention over the pages of the KV cache on TPU: a Pallas kernel that reads the pages in place.

There are two reasons not to use JAX's kernels (`paged_attention`, `ragged_paged_attention`). They
read the pages of one layer in another layout, while our cache stacks the pages of all layers in one
array, and a layer would have to be copied out of it. They also return no softmax statistics, and
these are needed to add the newest tokens of a decode slice, which are in no page yet.

The kernel computes one row at a time. It goes through the keys of the row in blocks of a few pages,
and fetches the next block while it computes with the current one. Scores, softmax and sums are
float32. The inputs of matrix products have the type of the keys and values.

Legend: B rows, K kv heads, G query heads per kv head, T tokens, R queries of a kv head (G T, padded
and possibly split), H head dim, M pages of a row, P positions of a page.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from skyrl_tx.layers.attention import MASKED_SCORE, SoftmaxStats
from skyrl_tx.layers.kv_cache import Pages

MAX_BLOCK_KEYS = 256
"""The maximum number of keys per block. With many heads, MAX_BLOCK_BYTES is reached earlier."""
MAX_BLOCK_BYTES = 2**20
"""The maximum size of the keys of a block. The values take the same again."""
MAX_QUERIES = 512
"""Queries that are computed together, over all kv heads. Their scores of a block take 512 KiB."""
SUBLANES, LANES = 8, 128
"""The shape of a register.

Queries are padded to a multiple of SUBLANES. The highest score and the sum of weights are one
number per query, but are stored LANES times, because the last dim of an output fills registers.
"""
MAX_TABLE_BYTES = 2**18
"""The maximum size of the page table of one call, which is stored in scalar memory (SMEM).

If the table of a batch is larger, the kernel is called multiple times, each time for some rows.
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
    """Return the softmax statistics of queries over the pages, see `registry.AttendPast`.

    The number of tokens must be a power of two.
    """
    B, K, G, T, H = q_BKGTH.shape
    assert T & (T - 1) == 0 and pages.stack.v is not None

    # Split rows with many queries, for example in prefill. Each part is a row for the kernel.
    q_BKRH = q_BKGTH.reshape(B, K, G * T, H).astype(pages.stack.k.dtype)
    size = min(G * T + -(G * T) % SUBLANES, MAX_QUERIES)
    q_BKRH = jnp.pad(q_BKRH, ((0, 0), (0, 0), (0, -(G * T) % size), (0, 0)))
    splits = q_BKRH.shape[2] // size
    q = jnp.moveaxis(q_BKRH.reshape(B, K, splits, size, H), 2, 1).reshape(B * splits, K, size, H)
    tokens = min(T, size)
    first = (first_B[:, None] + jnp.arange(splits) * size % T).reshape(-1)
    page, start = (jnp.repeat(x, splits, axis=0) for x in (pages.page_BM, start_B))

    # Call the kernel for as many rows at a time as have page numbers in MAX_TABLE_BYTES
    max_rows = max(MAX_TABLE_BYTES // (4 * page.shape[1]), 1)
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
    """Call the kernel for some rows. Returns the three statistics, with the numbers repeated LANES times."""
    (B, K, R, H), M = q_BKRH.shape, page_BM.shape[1]
    k, v = pages.stack.k, pages.stack.v
    *_, P, _ = k.shape

    # Choose how many kv heads are computed together, and how many pages are in a block
    num_heads = next(heads for heads in range(K, 0, -1) if K % heads == 0 and heads * R <= max(MAX_QUERIES, R))
    page_bytes = num_heads * P * H * k.dtype.itemsize
    block_pages = max(min(MAX_BLOCK_KEYS // P, MAX_BLOCK_BYTES // page_bytes, M), 1)
    num_cores = 2 if B % 2 == 0 else 1  # if the device has two cores, each computes half of the rows

    def locate_row(core: Any, i: Any, heads: Any, *_: Any) -> tuple[Any, ...]:
        return core * (B // num_cores) + i, heads, 0, 0

    def make_block_spec(last: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, num_heads, R, last), locate_row)

    # Queries and results are fetched and stored by Pallas. Pages stay in HBM, and the kernel copies
    # one block of them to each half of a buffer.
    buffer = pltpu.VMEM((2, num_heads, block_pages * P, H), k.dtype)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(num_cores, B // num_cores, K // num_heads),
        in_specs=[make_block_spec(H), pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=[make_block_spec(LANES), make_block_spec(LANES), make_block_spec(H)],
        scratch_shapes=[buffer, buffer, pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((2,))],
    )

    stats: list[jax.Array] = pl.pallas_call(
        partial(_kernel, block_pages=block_pages, row_pages=M, tokens=tokens, window=window),
        grid_spec=grid_spec,
        out_shape=[jax.ShapeDtypeStruct((B, K, R, last), jnp.float32) for last in (LANES, LANES, H)],
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
    block_pages: int,
    row_pages: int,
    tokens: int,
    window: int | None,
) -> None:
    """Compute the statistics of one row for a group of its kv heads.

    Query r of a kv head is for token r % `tokens`. `slot_ref` has the half of the buffers (0 or 1)
    that the current block is fetched into.
    """
    core, i, group = (pl.program_id(axis) for axis in range(3))
    num_rows, num_groups = pl.num_programs(1), pl.num_programs(2)
    num_heads, _, H = q_ref.shape
    page_size = k_hbm.shape[3]
    size = block_pages * page_size
    precision = jax.lax.Precision.HIGHEST if k_hbm.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    def get_first_block(row: Any) -> Any:
        return 0 if window is None else jax.lax.div(jnp.maximum(first_ref[row] - (window - 1), 0), size)

    def make_copies(row: Any, group: Any, block: Any, slot: Any) -> list[Any]:
        copies: list[Any] = []
        for number in range(block_pages):
            index = jnp.minimum(block * block_pages + number, row_pages - 1)
            at = (layer_ref[0], page_ref[row * row_pages + index], pl.ds(group * num_heads, num_heads))
            into = (slot, slice(None), pl.ds(number * page_size, page_size))
            for pages, buffer in ((k_hbm, k_buffer), (v_hbm, v_buffer)):
                copies.append(pltpu.make_async_copy(pages.at[at], buffer.at[into], semaphores.at[slot]))
        return copies

    def fetch(row: Any, group: Any, block: Any, slot: Any) -> None:
        for copy in make_copies(row, group, block, slot):
            copy.start()

    # The blocks of the row, from `first` up to and excluding `end`
    row = core * num_rows + i
    first = get_first_block(row)
    end = jax.lax.div(start_ref[row] + size - 1, size)
    end = jnp.maximum(end, first + 1)  # a row without past visits one block, which is masked

    # Start with the statistics of no keys
    highest_ref[...] = jnp.full_like(highest_ref, MASKED_SCORE)
    total_ref[...] = jnp.zeros_like(total_ref)
    out_ref[...] = jnp.zeros_like(out_ref)

    # The first program of a core fetches its own first block. After that, each program fetches the
    # first block of the next program.
    @pl.when((i == 0) & (group == 0))
    def _() -> None:
        slot_ref[0] = 0
        fetch(row, group, first, 0)

    def add_block(block: Any, _: Any) -> None:
        slot = slot_ref[0]

        # Fetch the next block: of this program, of the next group of heads, or of the next row
        @pl.when(block + 1 < end)
        def _() -> None:
            fetch(row, group, block + 1, 1 - slot)

        @pl.when((block + 1 == end) & (group + 1 < num_groups))
        def _() -> None:
            fetch(row, group + 1, first, 1 - slot)

        @pl.when((block + 1 == end) & (group + 1 == num_groups) & (i + 1 < num_rows))
        def _() -> None:
            fetch(row + 1, 0, get_first_block(row + 1), 1 - slot)

        # Wait for this block
        for copy in make_copies(row, group, block, slot):
            copy.wait()
        slot_ref[0] = 1 - slot

        # Compute the scores, and mask keys that a query does not see
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

        # Add the keys to the statistics (online softmax)
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

    jax.lax.fori_loop(first, end, add_block, None)
