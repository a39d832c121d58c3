"""Grouped matrix products on TPU: a Pallas kernel.

In a mixture-of-experts layer, the rows (tokens) of each expert are divided into tiles, and each
tile is multiplied with the matrix of its expert.

In plain JAX this is a gather of one matrix per tile, followed by a batched product. XLA then copies
the matrix of each tile, which moves several times the bytes of the matrices. This kernel makes no
copy: while it multiplies one block of a matrix, it fetches the next block from where the matrix is
stored. The caller sorts the tiles by matrix, so that each matrix is fetched once. The number of
tiles is fixed, so the last tiles may be unused. Their result is zero.

JAX's `megablox` also multiplies groups of rows, but it cannot add the LoRA product of each row, and
it leaves the rows of unused tiles undefined.

Legend: W tiles, P rows of a tile, X matrices, I inputs, O outputs. The LoRA product has matrices Y
and the inner dim R.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from skyrl_tx.layers.experts import AddedProducts

MAX_BLOCK_BYTES = 2**21
"""The maximum size of a block of a matrix, unless LANES outputs alone take more.

VMEM holds two blocks at a time: one is multiplied while the next is fetched.
"""
LANES = 128
"""The lanes of a vector register. A block has a multiple of LANES outputs, or all outputs."""


def multiply_tiles(
    x_WPI: jax.Array,
    matrix_X: jax.Array,
    index_W: jax.Array,
    num_used: jax.Array,
    added: AddedProducts | None = None,
    *,
    transposed: bool = False,
    out_dtype: Any = jnp.float32,
    interpret: bool,
) -> jax.Array:
    """Multiply each tile of rows with one matrix, see `registry.MultiplyTiles`.

    Args:
        x_WPI: Tiles of rows.
        matrix_X: Matrices [X, I, O], or [X, O, I] if `transposed`.
        index_W: The index of each tile's matrix. Tiles of the same matrix are adjacent.
        num_used: The number of used tiles, which come first. The result of all other tiles is zero.
        added: The LoRA product, which is added to the first one: its rows, its matrices, and the
            index of each tile's matrix.
        transposed: Whether the matrices are transposed, including the LoRA matrices.
        out_dtype: The type of the result.
        interpret: Whether to interpret the kernel, for tests without a TPU.

    Returns:
        The products [W, P, O].
    """
    W, P, inputs = x_WPI.shape
    outputs, dtype = matrix_X.shape[1 if transposed else 2], x_WPI.dtype
    size = _get_block_size(inputs * matrix_X.dtype.itemsize, outputs)

    # The outer loop is over blocks of outputs (o), the inner loop over tiles (w). Pallas fetches a
    # block only if its index differs from the previous iteration. Unused tiles therefore ask for
    # the blocks of the last used tile, which are in VMEM already.
    def get_fetched_tile(w: Any, used: Any) -> Any:
        return jnp.minimum(w, jnp.maximum(used[0] - 1, 0))

    def make_tile_spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, *x.shape[1:]), lambda o, w, index, added_index, used: (get_fetched_tile(w, used), 0, 0)
        )

    def make_matrix_spec(x: jax.Array, index_position: int) -> pl.BlockSpec:
        # `prefetched` are the `scalars` below. `index_position` says which of them has the indices.
        def locate_block(o: Any, w: Any, *prefetched: Any) -> tuple[Any, ...]:
            index = prefetched[index_position][get_fetched_tile(w, prefetched[-1])]
            return (index, o, 0) if transposed else (index, 0, o)

        block = (None, size, x.shape[2]) if transposed else (None, x.shape[1], size)
        return pl.BlockSpec(block, locate_block)

    arrays, specs = [x_WPI, matrix_X], [make_tile_spec(x_WPI), make_matrix_spec(matrix_X, 0)]
    added_index_W = index_W  # not used without a LoRA product
    if added is not None:
        added_index_W = added.index_W
        arrays += [added.x_WPR, added.matrix_Y]
        specs += [make_tile_spec(added.x_WPR), make_matrix_spec(added.matrix_Y, 1)]
    scalars = (x.astype(jnp.int32) for x in (index_W, added_index_W, jnp.reshape(num_used, 1)))

    product: jax.Array = pl.pallas_call(
        partial(_kernel, transposed=transposed, dtype=dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(outputs, size), W),
            in_specs=specs,
            out_specs=pl.BlockSpec((None, P, size), lambda o, w, *_: (w, 0, o)),
        ),
        out_shape=jax.ShapeDtypeStruct((W, P, outputs), out_dtype),
        interpret=interpret,
        name="multiply_tiles",
    )(*scalars, *arrays)
    return product


def _get_block_size(row_bytes: int, outputs: int) -> int:
    """Return the outputs per block: the largest multiple of LANES that MAX_BLOCK_BYTES allows, or all.

    `row_bytes` is the size of the matrix entries for one output.
    """
    size = max(MAX_BLOCK_BYTES // (row_bytes * LANES), 1) * LANES
    return min(size, outputs)


def _kernel(
    index_ref: Any,
    added_index_ref: Any,
    used_ref: Any,
    x_ref: Any,
    matrix_ref: Any,
    *added_and_out_refs: Any,
    transposed: bool,
    dtype: Any,
) -> None:
    """Compute one block of a tile's outputs, or zeros if the tile is not used."""
    *added, out_ref = added_and_out_refs
    is_used = pl.program_id(1) < used_ref[0]

    @pl.when(is_used)
    def _() -> None:
        out = _multiply(x_ref[...], matrix_ref[...], dtype, transposed)
        if added:
            added_x_ref, added_matrix_ref = added
            out += _multiply(added_x_ref[...], added_matrix_ref[...], dtype, transposed)
        out_ref[...] = out.astype(out_ref.dtype)

    @pl.when(jnp.logical_not(is_used))
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)


def _multiply(x: jax.Array, matrix: jax.Array, dtype: Any, transposed: bool) -> jax.Array:
    # Set the precision explicitly. The backend's default is `highest`, and a TPU would then need six
    # passes to multiply bfloat16.
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(dtype), matrix.astype(dtype), dims, precision=precision, preferred_element_type=jnp.float32
    )
