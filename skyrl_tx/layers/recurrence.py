"""Parts that delta nets and Mamba share: rows cut into chunks, masks of packed rows, short convolutions.

Legend: B batch, T tokens, N chunks, C positions of a chunk (i reads, j is read).
"""

import jax
import jax.numpy as jnp
from flax import struct

CHUNK_POSITIONS = 64
"""Positions of a chunk. It divides every end of a chunk of prompts, so prompts are cut where whole rows are."""


def split_chunks(leaf: jax.Array) -> jax.Array:
    """Return [B, T, ...] as [N, B, C, ...], padded with zeros."""
    length = leaf.shape[1]
    size = min(CHUNK_POSITIONS, 1 << (length - 1).bit_length())
    num_chunks = -(-length // size)
    padding = [(0, 0)] * leaf.ndim
    padding[1] = (0, num_chunks * size - length)
    leaf = jnp.pad(leaf, padding)
    return jnp.moveaxis(leaf.reshape(leaf.shape[0], num_chunks, size, *leaf.shape[2:]), 1, 0)


@struct.dataclass
class ChunkMasks:
    """Masks of rows that hold several sequences, chunk by chunk."""

    reads_NBij: jax.Array  # whether position j is an earlier one of the sequence of i, or i itself
    continues_NBC: jax.Array  # whether the sequence of a position began in an earlier chunk

    @classmethod
    def from_starts(cls, start_BT: jax.Array) -> "ChunkMasks":
        """Return the masks, given the start in the row of the sequence of each position."""
        start_NBC = split_chunks(start_BT)
        index = jnp.arange(start_NBC.shape[2])
        same_NBij = start_NBC[..., :, None] == start_NBC[..., None, :]
        first_N11 = (jnp.arange(start_NBC.shape[0]) * start_NBC.shape[2])[:, None, None]
        return cls(reads_NBij=same_NBij & (index[:, None] >= index), continues_NBC=start_NBC < first_N11)


def get_chunk_masks(masks: ChunkMasks | None, size: int) -> tuple[jax.Array, jax.Array]:
    """Return both masks of one chunk, [B, i, j] and [B, C]; of rows with one sequence if there are none."""
    if masks is None:
        index = jnp.arange(size)
        return (index[:, None] >= index)[None], jnp.ones((1, index.size), bool)
    return masks.reads_NBij, masks.continues_NBC  # of this chunk, without N


def make_conv_masks(start_BT: jax.Array, width: int) -> jax.Array:
    """Return for each distance below `width` whether the position so far before is of the same sequence: 1 or 0.

    `start_BT` is the start in the row of the sequence of each position. Returns float32 [W, B, T, 1].
    """
    position_BT = jnp.arange(start_BT.shape[1]) - start_BT
    return (position_BT >= jnp.arange(width)[:, None, None]).astype(jnp.float32)[..., None]


def short_conv(
    x_BTI: jax.Array, weight_WI: jax.Array, tail_BWI: jax.Array, masks_WBT1: jax.Array | None = None
) -> jax.Array:
    """Return for each position the weighted sum of the last W inputs, float32 [B, T, I].

    The last weight is that of the position itself. `tail` [B, W - 1, I] are the inputs before the row. With `masks`
    the first outputs of a sequence read no input of another.
    """
    width, length = weight_WI.shape[0], x_BTI.shape[1]
    weight = weight_WI.astype(jnp.float32)
    padded = jnp.concatenate([tail_BWI.astype(jnp.float32), x_BTI.astype(jnp.float32)], axis=1)
    y_BTI = jnp.zeros((), jnp.float32)
    for place in range(width):
        each = padded[:, place : place + length] * weight[place]
        y_BTI = y_BTI + (each if masks_WBT1 is None else each * masks_WBT1[width - 1 - place])
    return y_BTI


def get_last_inputs(x_BTI: jax.Array, tail_BWI: jax.Array, size: jax.Array | int) -> jax.Array:
    """Return the inputs that the next position reads, [B, W - 1, I], after the first `size` (or [B]) of a row."""
    padded, width = jnp.concatenate([tail_BWI, x_BTI.astype(tail_BWI.dtype)], axis=1), tail_BWI.shape[1]
    if jnp.ndim(size) == 0:
        return jax.lax.dynamic_slice_in_dim(padded, size, width, axis=1)
    return jax.vmap(lambda x_TI, size: jax.lax.dynamic_slice_in_dim(x_TI, size, width))(padded, size)


def short_conv_step(x_SI: jax.Array, weight_WI: jax.Array, tail_SWI: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sum for one token of each slot, float32 [S, I], and the inputs that the next one reads."""
    window_SWI = jnp.concatenate([tail_SWI, x_SI[:, None].astype(tail_SWI.dtype)], axis=1)
    y_SI = jnp.zeros((), jnp.float32)
    for place in range(weight_WI.shape[0]):
        y_SI = y_SI + window_SWI[:, place].astype(jnp.float32) * weight_WI[place].astype(jnp.float32)
    return y_SI, window_SWI[:, 1:]
