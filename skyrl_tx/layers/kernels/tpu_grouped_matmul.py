"""Products of tiles of rows with one matrix each, on TPU: a Pallas kernel.

XLA multiplies tiles side by side after it has copied the matrix of each, which for the experts of a mixture moves
several times their bytes. Here the number of a tile's matrix says which block is fetched next, while the one before is
multiplied. Tiles of the same matrix are neighbours, so that it is fetched once. `megablox` of JAX multiplies groups of
rows too, but adds no product with a second matrix, and gives rows of tiles that are not used no value.

Legend: W tiles, P rows of a tile, X matrices, I inputs, O outputs, Y other matrices, R their inner dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from skyrl_tx.layers.grouped_experts import AddedProducts

MATRIX_BYTES = 2**21
"""Bytes of the block of a matrix, at most, unless WIDTH outputs take more. Two are in memory at a time."""
WIDTH = 128
"""The width of a register, of which blocks have a multiple unless they have all outputs."""


def multiply_tiles(
    x_WPI: jax.Array,
    matrix_X: jax.Array,
    index_W: jax.Array,
    num_used: jax.Array,
    added: AddedProducts | None = None,
    *,
    transposed: bool = False,
    result: Any = jnp.float32,
    interpret: bool,
) -> jax.Array:
    """See `choice.MultiplyTiles`."""
    W, P, inputs = x_WPI.shape
    outputs, dtype = matrix_X.shape[1 if transposed else 2], x_WPI.dtype
    size = _get_block_size(inputs * matrix_X.dtype.itemsize, outputs)

    # Tiles that are not used fetch what the last one has fetched. The outer loop is over blocks of outputs.
    def get_fetched_tile(w: Any, used: Any) -> Any:
        return jnp.minimum(w, jnp.maximum(used[0] - 1, 0))

    def make_tile_spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda o, w, index, own, used: (get_fetched_tile(w, used), 0, 0))

    def make_matrix_spec(x: jax.Array, place: int) -> pl.BlockSpec:
        def locate_block(o: Any, w: Any, *numbers: Any) -> tuple[Any, ...]:
            number = numbers[place][get_fetched_tile(w, numbers[-1])]
            return (number, o, 0) if transposed else (number, 0, o)

        block = (None, size, x.shape[2]) if transposed else (None, x.shape[1], size)
        return pl.BlockSpec(block, locate_block)

    arrays, specs = [x_WPI, matrix_X], [make_tile_spec(x_WPI), make_matrix_spec(matrix_X, 0)]
    own_W = index_W
    if added is not None:
        own_W = added.index_W
        arrays += [added.x_WPR, added.matrix_Y]
        specs += [make_tile_spec(added.x_WPR), make_matrix_spec(added.matrix_Y, 1)]
    found: jax.Array = pl.pallas_call(
        partial(_kernel, transposed=transposed, dtype=dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(outputs, size), W),
            in_specs=specs,
            out_specs=pl.BlockSpec((None, P, size), lambda o, w, *_: (w, 0, o)),
        ),
        out_shape=jax.ShapeDtypeStruct((W, P, outputs), result),
        interpret=interpret,
        name="multiply_tiles",
    )(*(each.astype(jnp.int32) for each in (index_W, own_W, jnp.reshape(num_used, 1))), *arrays)
    return found


def _get_block_size(row_bytes: int, outputs: int) -> int:
    """Return the outputs of a block: all, or as many whole registers as a block of the matrix may take."""
    size = max(MATRIX_BYTES // (row_bytes * WIDTH), 1) * WIDTH
    return min(size, outputs)


def _kernel(
    index_ref: Any,
    own_ref: Any,
    used_ref: Any,
    x_ref: Any,
    matrix_ref: Any,
    *others: Any,
    transposed: bool,
    dtype: Any,
) -> None:
    """Compute some outputs of a tile; zeros where it is not used."""
    *added, out_ref = others
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
    # The precision is that of the type: the context's, `highest`, would multiply bfloat16 in six passes.
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(dtype), matrix.astype(dtype), dims, precision=precision, preferred_element_type=jnp.float32
    )
