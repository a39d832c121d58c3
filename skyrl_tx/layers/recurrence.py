"""Chunks, masks of packed rows and short convolutions, which all recurrences over tokens use.

The recurrences are in `recurrent_rules`. In training and prefill, rows are cut into
chunks. Within a chunk, all positions are computed by matrix products; only the chunks are
sequential. In decoding, functions called `..._step` compute one token of each sequence.

Legend: B batch, T tokens, S slots (one decoding sequence each), N chunks, C positions of a chunk (i
reads, j is read), W weights and I channels of a convolution.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.custom_derivatives import linear_call

from skyrl_tx.layers.attention import KeyRange

CHUNK_POSITIONS = 64
"""Positions of a chunk.

Prefill chunks end at multiples of it, so that prefill and training cut a prompt at the same
positions.
"""


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
    """Masks of rows that hold multiple sequences, chunk by chunk."""

    reads_NBij: jax.Array  # whether j <= i, and both are in the same sequence
    continues_NBC: jax.Array  # whether a position reads the state before the chunk
    prefix: "PrefixMasks | None" = None

    @classmethod
    def from_starts(cls, start_BT: jax.Array, prefix: KeyRange | None = None) -> "ChunkMasks":
        """Return the masks.

        `start_BT` is the index in the row where the sequence of a position starts, and `prefix` has
        the positions of its shared prefix. A prefix comes before the sequences that continue it, and
        no other prefix comes between them.
        """
        start_NBC = split_chunks(start_BT)
        index = jnp.arange(start_NBC.shape[2])
        same_NBij = start_NBC[..., :, None] == start_NBC[..., None, :]
        first_N11 = (jnp.arange(start_NBC.shape[0]) * start_NBC.shape[2])[:, None, None]
        reads_NBij, continues_NBC = same_NBij & (index[:, None] >= index), start_NBC < first_N11
        if prefix is None:
            return cls(reads_NBij, continues_NBC)

        # A sequence that starts in this chunk may continue a prefix that started before.
        begin_NBC, end_NBC = split_chunks(prefix.start_BT), split_chunks(prefix.end_BT)
        is_new_NBC = (start_NBC >= first_N11) & (end_NBC > begin_NBC)
        reads_through_NBC = is_new_NBC & (begin_NBC < first_N11) & (end_NBC > first_N11)

        # Which positions are in the prefix, and which are between the prefix and the sequence.
        position_N11C = first_N11[..., None] + index
        is_after_NBij = position_N11C >= end_NBC[..., None]
        skips_NBij = is_after_NBij & (position_N11C < start_NBC[..., None]) & is_new_NBC[..., None]
        masks = PrefixMasks(
            reads_NBij=(position_N11C >= begin_NBC[..., None]) & ~is_after_NBij,
            skips_NBij=skips_NBij.astype(jnp.float32),
            resumes_NBC=is_new_NBC & (end_NBC <= first_N11),
            last_NB=_find_last_ends(prefix),
        )
        return cls(reads_NBij, continues_NBC | reads_through_NBC, masks)


@struct.dataclass
class PrefixMasks:
    """More masks of rows with shared prefixes, chunk by chunk.

    A sequence continues the state after its prefix. Between them are the other sequences with this
    prefix, which it skips.
    """

    reads_NBij: jax.Array  # whether j is in the prefix of i
    skips_NBij: jax.Array  # 1 if j is after the prefix of i and before the sequence of i, which starts in the chunk
    resumes_NBC: jax.Array  # whether a position reads the state after its prefix, which ended in an earlier chunk
    last_NB: jax.Array  # the last position of the chunk at which a prefix ends, int32; -1 without one

    def sum_skipped(self, decay_NBHC: jax.Array) -> "DecaySums":
        """Return the sum of the decays that each position skips."""
        return DecaySums(
            *(jnp.einsum("nbij,nbhj->nbhi", self.skips_NBij, part) for part in DecaySums.split(decay_NBHC))
        )


def _find_last_ends(prefix: KeyRange) -> jax.Array:
    """Return the last position in each chunk at which a prefix ends, int32 [N, B]; -1 without one."""
    B, T = prefix.end_BT.shape
    last_BT = jnp.where(prefix.sizes_BT > 0, prefix.end_BT - 1, T)
    is_end_BT = jnp.zeros((B, T + 1), bool).at[jnp.arange(B)[:, None], last_BT].set(True)[:, :T]
    is_end_NBC = split_chunks(is_end_BT)
    return jnp.where(is_end_NBC, jnp.arange(is_end_NBC.shape[2], dtype=jnp.int32), -1).max(axis=2)


@struct.dataclass
class DecaySums:
    """The sum of the decays of a chunk up to each position, in two parts [..., C].

    The decay between two positions is a difference of two sums. A sum over a chunk is often near
    -40, where float32 has an error of 2e-6, and then every decay would have this error. So decays
    are split into multiples of `STEP`, whose sums are exact, and into rests, whose sums are small.
    """

    STEP: ClassVar[float] = 2.0**-10

    coarse: jax.Array
    fine: jax.Array

    @classmethod
    def from_decays(cls, decay: jax.Array) -> "DecaySums":
        """Return the sums of decays [..., C], which are logarithms."""
        return cls(*(jnp.cumsum(part, axis=-1) for part in cls.split(decay)))

    @classmethod
    def split(cls, decay: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a multiple of `STEP` next to each decay, and the rest."""
        coarse = jax.lax.stop_gradient(jnp.round(decay / cls.STEP) * cls.STEP)
        return coarse, decay - coarse

    @property
    def total(self) -> jax.Array:
        """The sums, [..., C]."""
        return self.coarse + self.fine

    def subtract(self, other: "DecaySums") -> jax.Array:
        """Return for each position i the decay since each position j of `other`, [..., i, j]."""
        coarse = self.coarse[..., :, None] - other.coarse[..., None, :]
        return coarse + (self.fine[..., :, None] - other.fine[..., None, :])


def get_chunk_masks(masks: ChunkMasks | None, size: int) -> tuple[jax.Array, jax.Array]:
    """Return both masks of one chunk, [B, i, j] and [B, C]. Without masks, a row is one sequence."""
    if masks is None:
        index = jnp.arange(size)
        return (index[:, None] >= index)[None], jnp.ones((1, index.size), bool)
    return masks.reads_NBij, masks.continues_NBC  # `scan` has removed the axis N


def make_conv_masks(start_BT: jax.Array, width: int) -> jax.Array:
    """Return for each distance w < `width` whether position t - w is in the sequence of t.

    `start_BT` is the index in the row where the sequence of a position starts. Returns 1 or 0,
    float32 [W, B, T, 1].
    """
    position_BT = jnp.arange(start_BT.shape[1]) - start_BT
    return (position_BT >= jnp.arange(width)[:, None, None]).astype(jnp.float32)[..., None]


def make_prefix_conv_masks(start_BT: jax.Array, prefix: KeyRange, width: int) -> tuple[jax.Array, jax.Array]:
    """Return which position each position reads at each distance, where sequences continue their prefixes.

    The first is like `make_conv_masks`. The second has the positions, int32 [W, B, T].
    """
    distance_W11, index_T = jnp.arange(width)[:, None, None], jnp.arange(start_BT.shape[1])
    in_prefix = prefix.end_BT - (distance_W11 - (index_T - start_BT))
    is_own = index_T - start_BT >= distance_W11
    is_read = is_own | ((prefix.sizes_BT > 0) & (in_prefix >= prefix.start_BT))
    source_WBT = jnp.where(is_own, index_T - distance_W11, jnp.where(is_read, in_prefix, 0))
    return is_read.astype(jnp.float32)[..., None], source_WBT


def short_conv(
    x_BTI: jax.Array,
    weight_WI: jax.Array,
    tail_BWI: jax.Array,
    masks_WBT1: jax.Array | None = None,
    source_WBT: jax.Array | None = None,
) -> jax.Array:
    """Return for each position the weighted sum of the last W inputs, float32 [B, T, I].

    The last weight belongs to the position itself. `tail` [B, W - 1, I] has the inputs before the
    row. With `masks`, a sequence reads no input of another sequence. With `source`, each position
    reads the inputs at these positions, and none of `tail`.
    """
    width, length = weight_WI.shape[0], x_BTI.shape[1]
    weight = weight_WI.astype(jnp.float32)
    if source_WBT is not None:
        assert masks_WBT1 is not None
        taps = source_WBT, masks_WBT1, jnp.flip(weight, 0)
        return linear_call(_sum_inputs, _add_to_inputs, taps, x_BTI.astype(jnp.float32))

    padded = jnp.concatenate([tail_BWI.astype(jnp.float32), x_BTI.astype(jnp.float32)], axis=1)
    y_BTI = jnp.zeros((), jnp.float32)
    for tap in range(width):
        term = padded[:, tap : tap + length] * weight[tap]
        y_BTI = y_BTI + (term if masks_WBT1 is None else term * masks_WBT1[width - 1 - tap])
    return y_BTI


_Taps = tuple[jax.Array, jax.Array, jax.Array]
"""For each distance: the positions to read [W, B, T], whether they are read [W, B, T, 1], and the weights [W, I]."""


def _sum_inputs(taps: _Taps, x_BTI: jax.Array) -> jax.Array:
    """Return the weighted sums of inputs, one distance after another, so that only one needs memory."""

    def add_inputs(y_BTI: jax.Array, tap: _Taps) -> tuple[jax.Array, None]:
        source_BT, mask_BT1, weight_I = tap
        read_BTI = jnp.take_along_axis(x_BTI, source_BT[..., None], axis=1, mode="promise_in_bounds")
        return y_BTI + read_BTI * weight_I * mask_BT1, None

    return jax.lax.scan(add_inputs, jnp.zeros_like(x_BTI), taps)[0]


def _add_to_inputs(taps: _Taps, y_BTI: jax.Array) -> jax.Array:
    """Return the transpose of `_sum_inputs`."""
    row_B1 = jnp.arange(y_BTI.shape[0])[:, None]

    def add_outputs(x_BTI: jax.Array, tap: _Taps) -> tuple[jax.Array, None]:
        source_BT, mask_BT1, weight_I = tap
        return x_BTI.at[row_B1, source_BT].add(y_BTI * weight_I * mask_BT1, mode="promise_in_bounds"), None

    return jax.lax.scan(add_outputs, jnp.zeros_like(y_BTI), taps)[0]


def get_last_inputs(x_BTI: jax.Array, tail_BWI: jax.Array, size: jax.Array | int) -> jax.Array:
    """Return the last W - 1 inputs before position `size`, [B, W - 1, I], as `tail` of the next call.

    `size` is a scalar or [B].
    """
    padded, width = jnp.concatenate([tail_BWI, x_BTI.astype(tail_BWI.dtype)], axis=1), tail_BWI.shape[1]
    if jnp.ndim(size) == 0:
        return jax.lax.dynamic_slice_in_dim(padded, size, width, axis=1)
    return jax.vmap(lambda x_TI, size: jax.lax.dynamic_slice_in_dim(x_TI, size, width))(padded, size)


def short_conv_step(x_SI: jax.Array, weight_WI: jax.Array, tail_SWI: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sum for one token of each slot, float32 [S, I], and the inputs for the next token."""
    window_SWI = jnp.concatenate([tail_SWI, x_SI[:, None].astype(tail_SWI.dtype)], axis=1)
    y_SI = jnp.zeros((), jnp.float32)
    for tap in range(weight_WI.shape[0]):
        y_SI = y_SI + window_SWI[:, tap].astype(jnp.float32) * weight_WI[tap].astype(jnp.float32)
    return y_SI, window_SWI[:, 1:]
