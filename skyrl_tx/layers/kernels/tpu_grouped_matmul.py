"""Grouped matrix products on TPU: a Pallas kernel.

Each tile of rows is multiplied with one matrix.

If this is written in plain JAX (a gather and a batched product), XLA first copies the matrix of
each tile. In a mixture-of-experts layer, this moves several times the bytes of the matrices. This
kernel copies nothing: it reads the index of the next tile's matrix, and fetches a block of that
matrix while it multiplies the previous block. The caller sorts tiles by matrix, so that each matrix
is fetched once. The last tiles may be unused, because the number of tiles is fixed; their result is
zero. JAX's `megablox` also multiplies groups of rows, but it cannot add the LoRA product of each
row, and it leaves the rows of unused tiles undefined.

Legend: W tiles, P rows of a tile, X matrices, I inputs, O outputs. The second product, for LoRA,
has matrices Y with the inner dim R.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from skyrl_tx.layers.grouped_experts import AddedProducts

MATRIX_BYTES = 2**21
"""The maximum bytes of a block of a matrix. But a block has at least WIDTH outputs.

VMEM holds two blocks at a time: one is multiplied while the next is fetched.
"""
WIDTH = 128
"""The lanes of a vector register. The number of outputs of a block is a multiple of it, or all outputs."""


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
        num_used: The number of tiles that are used. The result is zero for all other tiles.
        added: A second product that is added to the first one, for LoRA: its rows, matrices, and
            the matrix of each tile.
        transposed: Whether the matrices are transposed.
        out_dtype: The type of the products that are returned.
        interpret: Whether to interpret the kernel, for tests without a TPU.

    Returns:
        The products [W, P, O].
    """
    W, P, inputs = x_WPI.shape
    outputs, dtype = matrix_X.shape[1 if transposed else 2], x_WPI.dtype
    size = _get_block_size(inputs * matrix_X.dtype.itemsize, outputs)

    # Unused tiles have the block index of the last used tile. Pallas does not fetch a block again
    # if its index is unchanged. The outer loop is over blocks of outputs.
    def get_fetched_tile(w: Any, used: Any) -> Any:
        return jnp.minimum(w, jnp.maximum(used[0] - 1, 0))

    def make_tile_spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, *x.shape[1:]), lambda o, w, index, added_index, used: (get_fetched_tile(w, used), 0, 0)
        )

    def make_matrix_spec(x: jax.Array, index_position: int) -> pl.BlockSpec:
        def locate_block(o: Any, w: Any, *numbers: Any) -> tuple[Any, ...]:
            number = numbers[index_position][get_fetched_tile(w, numbers[-1])]
            return (number, o, 0) if transposed else (number, 0, o)

        block = (None, size, x.shape[2]) if transposed else (None, x.shape[1], size)
        return pl.BlockSpec(block, locate_block)

    arrays, specs = [x_WPI, matrix_X], [make_tile_spec(x_WPI), make_matrix_spec(matrix_X, 0)]
    added_index_W = index_W
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
    """Return the outputs per block: all, or as many whole registers as MATRIX_BYTES allows."""
    size = max(MATRIX_BYTES // (row_bytes * WIDTH), 1) * WIDTH
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
    """Compute some outputs of a tile; zeros if the tile is not used."""
    *added, out_ref = added_and_out_refs
    is_used = pl.program_id(1) < used_ref[0]

    @pl.when(is_used)
    def _() -> None:
        out = _multiply(x_ref[...], matrix_ref[...], dtype, transposed)
        if added:
            narrow_ref, other_ref = added
            out += _multiply(narrow_ref[...], other_ref[...], dtype, transposed)
        out_ref[...] = out.astype(out_ref.dtype)

    @pl.when(jnp.logical_not(is_used))
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)


def _multiply(x: jax.Array, matrix: jax.Array, dtype: Any, transposed: bool) -> jax.Array:
    # Set the precision by type: the context's precision `highest` would multiply bfloat16 in six
    # passes.
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(dtype), matrix.astype(dtype), dims, precision=precision, preferred_element_type=jnp.float32
    )
