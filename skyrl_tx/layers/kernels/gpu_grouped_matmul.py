"""Grouped matrix products on NVIDIA GPUs: a Pallas kernel for Triton.

In a mixture-of-experts layer, the rows (tokens) of each expert are divided into tiles, and each
tile is multiplied with the matrix of its expert.

Without this kernel, XLA copies the matrix of each tile before it multiplies, which moves several
times the bytes of the matrices. A program (thread block) of this kernel computes a block of the
outputs of one tile, and reads the matrix where it is stored. Tiles of the same matrix are adjacent,
so all of them but the first find it in the L2 cache.

Legend: W tiles, P rows of a tile, X matrices, I inputs, O outputs. The LoRA product has matrices Y
and the inner dim R.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from skyrl_tx.layers.experts import AddedProducts
from skyrl_tx.layers.kernels.gpu_flash_attention import SMALL_MEMORY, dot

MAX_OUTPUTS, MAX_INPUTS = 128, 64
"""The maximum outputs of a program, and the maximum inputs in one iteration of its loop."""
MIN_DOT_DIM = 16
"""The smallest dim that Triton's `dot` accepts."""
MAX_SHORT_ROWS = 32
"""Tiles of up to this many rows are limited by reading the matrix, not by arithmetic.

For such tiles a program has fewer warps, and fetches the inputs of more iterations in advance.
"""


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
    """Multiply each tile of rows with one matrix, see `registry.MultiplyTiles`."""
    W, P, inputs = x_WPI.shape
    outputs = matrix_X.shape[1 if transposed else 2]
    block_outputs = min(_get_block_size(outputs), MAX_OUTPUTS)

    def make_whole_spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda o, w: (0,) * x.ndim)

    def make_tile_spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda o, w: (w,) + (0,) * (x.ndim - 1))

    # Programs read blocks of the matrices themselves, so they get references to all matrices
    used_1 = jnp.reshape(num_used, 1).astype(jnp.int32)
    arrays = [x_WPI, matrix_X, index_W.astype(jnp.int32)[:, None], used_1]
    specs = [make_tile_spec(arrays[0]), make_whole_spec(matrix_X), make_tile_spec(arrays[2]), make_whole_spec(used_1)]
    if added is not None:
        added_index = added.index_W.astype(jnp.int32)[:, None]
        arrays += [added.x_WPR, added.matrix_Y, added_index]
        specs += [make_tile_spec(added.x_WPR), make_whole_spec(added.matrix_Y), make_tile_spec(added_index)]

    is_small = getattr(jax.devices()[0], "compute_capability", None) in SMALL_MEMORY
    is_short = P <= MAX_SHORT_ROWS
    product: jax.Array = pl.pallas_call(
        partial(_kernel, inputs=inputs, outputs=outputs, transposed=transposed),
        grid=(pl.cdiv(outputs, block_outputs), W),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, P, block_outputs), lambda o, w: (w, 0, o)),
        out_shape=jax.ShapeDtypeStruct((W, P, outputs), out_dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=4 if is_short else 8, num_stages=2 if is_small else 4 if is_short else 3
        ),
        interpret=interpret,
        name="multiply_tiles",
    )(*arrays)
    return product


def _get_block_size(size: int) -> int:
    """Return the smallest block size that holds a dim. Triton needs a power of two."""
    return max(pl.next_power_of_2(size), MIN_DOT_DIM)


def _kernel(
    x_ref: Any,
    matrix_ref: Any,
    index_ref: Any,
    used_ref: Any,
    *others: Any,
    inputs: int,
    outputs: int,
    transposed: bool,
) -> None:
    """Compute one block of a tile's outputs, or zeros if the tile is not used."""
    *added, out_ref = others
    size, block_inputs = out_ref.shape[1], min(_get_block_size(inputs), MAX_INPUTS)
    begin = pl.program_id(0) * size
    is_used = pl.program_id(1) < used_ref[0]
    index = index_ref[0]

    def add_product(number: Any, out: jax.Array) -> jax.Array:
        start = number * block_inputs
        x = _load(x_ref, (), (0, x_ref.shape[0], None), (start, block_inputs, inputs))
        return out + _multiply(x, matrix_ref, index, (start, block_inputs, inputs), (begin, size, outputs), transposed)

    # Add up the products of all blocks of inputs. For an unused tile, the loop has no iterations.
    num_iterations = jnp.where(is_used, jnp.int32(pl.cdiv(inputs, block_inputs)), jnp.int32(0))
    out = lax.fori_loop(jnp.int32(0), num_iterations, add_product, jnp.zeros(out_ref.shape, jnp.float32))

    # Add the LoRA product. The loop has one iteration, or none for an unused tile.
    if added:
        added_x_ref, added_matrix_ref, added_index_ref = added
        rank = added_x_ref.shape[1]
        whole_rank = (0, _get_block_size(rank), rank)

        def add_lora_product(_: Any, out: jax.Array) -> jax.Array:
            x = _load(added_x_ref, (), (0, added_x_ref.shape[0], None), whole_rank).astype(x_ref.dtype)
            columns = (begin, size, outputs)
            return out + _multiply(x, added_matrix_ref, added_index_ref[0], whole_rank, columns, transposed)

        num_added = jnp.where(is_used, jnp.int32(1), jnp.int32(0))
        out = lax.fori_loop(jnp.int32(0), num_added, add_lora_product, out)

    # Store the outputs that exist
    mask = None if outputs % size == 0 else (begin + jnp.arange(size, dtype=jnp.int32) < outputs)[None, :]
    plgpu.store(out_ref, out.astype(out_ref.dtype), mask=mask)


_Span = tuple[Any, int, int | None]
"""(start, size, dim): which positions of a dim to read, and how many positions the dim has.

Positions beyond the end of the dim are read as zero. If `dim` is None, there are none.
"""


def _multiply(x: jax.Array, ref: Any, index: Any, inputs: _Span, outputs: _Span, transposed: bool) -> jax.Array:
    """Return the product of `x` with a part of matrix `index`."""
    if transposed:
        return dot(x, _load(ref, (index,), outputs, inputs).astype(x.dtype).T)
    return dot(x, _load(ref, (index,), inputs, outputs).astype(x.dtype))


def _load(ref: Any, leading: tuple[Any, ...], rows: _Span, columns: _Span) -> jax.Array:
    """Return a part of a matrix. `leading` is the index in the dims before its rows."""
    masks: list[jax.Array] = []
    for axis, (begin, size, number) in enumerate((rows, columns)):
        if number is not None and number % size:
            position = begin + jnp.arange(size, dtype=jnp.int32)
            masks.append(jnp.expand_dims(position < number, 1 - axis))
    where = ref.at[(*leading, *(pl.ds(begin, size) for begin, size, _ in (rows, columns)))]
    if not masks:
        return plgpu.load(where)
    mask = jnp.broadcast_to(masks[0] if len(masks) == 1 else masks[0] & masks[1], (rows[1], columns[1]))
    return plgpu.load(where, mask=mask, other=0.0)
