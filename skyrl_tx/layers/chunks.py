"""Rows cut into chunks, which linear attention computes one after the other, and masks of rows with several sequences.

Legend: B batch, T tokens, N chunks, C positions of a chunk (i of the reading one, j of the one that is read).
"""

import jax
import jax.numpy as jnp
from flax import struct

CHUNK = 64
"""Positions of a chunk. It divides every end of a chunk of prompts, so prompts are cut where whole rows are."""


def into_chunks(leaf: jax.Array) -> jax.Array:
    """Return [B, T, ...] as [N, B, C, ...], padded with zeros."""
    length = leaf.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())
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
    def of(cls, start_BT: jax.Array) -> "ChunkMasks":
        """Return the masks, given the start in the row of the sequence of each position."""
        start_NBC = into_chunks(start_BT)
        index = jnp.arange(start_NBC.shape[2])
        same_NBij = start_NBC[..., :, None] == start_NBC[..., None, :]
        first_N11 = (jnp.arange(start_NBC.shape[0]) * start_NBC.shape[2])[:, None, None]
        return cls(reads_NBij=same_NBij & (index[:, None] >= index), continues_NBC=start_NBC < first_N11)


def read_masks(masks: ChunkMasks | None, size: int) -> tuple[jax.Array, jax.Array]:
    """Return both masks of one chunk, [B, i, j] and [B, C]; of rows with one sequence if there are none."""
    if masks is None:
        index = jnp.arange(size)
        return (index[:, None] >= index)[None], jnp.ones((1, index.size), bool)
    return masks.reads_NBij, masks.continues_NBC  # of this chunk, without N
