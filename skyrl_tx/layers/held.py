"""The cache of the decoder: what it keeps of prompts and of slots, and what a mixer sees of it.

It has one `Held` for each stack of layers, with two kinds of arrays. *Positions*, such as keys and values, grow with
the tokens; a mixer never sees how they are stored, but calls `attend`. *Fixed-size state*, such as that of linear
attention, is replaced as a whole.

Legend: n layers of a stack, S decode slots, B batch rows, N heads, K kv heads, T tokens, C cache positions, H head dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.attention import cached_attention, extending_attention
from skyrl_tx.layers.kv_cache import KeyValues, Segments, append, read_segments
from skyrl_tx.layers.parameter import Axis, Parameter


def position_axes(each: Parameter) -> tuple[Axis | None, ...]:
    """Return the logical axes of an array of positions, given what `Room` says of one position."""
    heads, dim = each.axes
    return "layers", "batch", heads, None, dim


@struct.dataclass
class Held:
    """The cache of one stack: trees with leaves [n, S, K, C, H] and [n, S, ...], of prompts with B in place of S."""

    positions: Any = ()
    fixed: Any = ()


Cache = tuple[Held, ...]
"""The cache of all stacks."""


@struct.dataclass
class ChunkHeld:
    """The cache of one layer before a chunk of prompts: the state [B, ...], and the positions before `start`."""

    past: Any  # of the whole stack, which is not copied
    layer: Any
    fixed: Any
    start: jax.Array

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array | None,
        sinks_N: jax.Array | None = None,
        *,
        window: int | None = None,
    ) -> tuple[jax.Array, KeyValues]:
        """Return attention over the past and the chunk, [B, T, N, H], and the chunk's keys and values.

        Without values, the keys are the values too.
        """
        past, layer, start = self.past, self.layer, self.start
        mixed_BTNH = extending_attention(q_BTNH, k_BTKH, v_BTKH, past, layer, start, sinks_N, window=window)
        return mixed_BTNH, jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 1, 2), KeyValues(k=k_BTKH, v=v_BTKH))


@struct.dataclass
class StepHeld:
    """The cache of one layer before a decode step: the state [S, ...], the past, and the tokens of the slice."""

    past: Segments
    recent: KeyValues
    fixed: Any
    start_S: jax.Array
    num_recent: jax.Array

    def attend(
        self,
        q_SNH: jax.Array,
        k_SKH: jax.Array,
        v_SKH: jax.Array | None,
        sinks_N: jax.Array | None = None,
        *,
        window: int | None = None,
    ) -> tuple[jax.Array, KeyValues]:
        """Return attention over all tokens up to the new one, [S, N, H], and the slice's keys and values with it."""
        recent = append(self.recent, KeyValues(k=k_SKH, v=v_SKH), self.num_recent)
        num_recent = self.num_recent + 1
        mixed_SNH = cached_attention(q_SNH, self.past, recent, self.start_S, num_recent, sinks_N, window=window)
        return mixed_SNH, recent


@struct.dataclass
class SliceCache:
    """The cache during a decode slice: by stack the past, which is read-only, and what the steps change.

    `live` holds the recent tokens [n, S, K, T, H] and the state. Both are stacks; or by layer, tuples of layers, the
    past in segments, and `Held()` of a stack that keeps nothing. A step that takes its layer out of a stack copies it:
    on CPU that took longer than attention.

    S are the rows of the slice: by layer those of some slots, otherwise all slots.
    """

    past: tuple[Any, ...]
    live: tuple[Held | tuple[Held, ...], ...]
    start_S: jax.Array  # int32: positions that each row's past has
    num_recent: jax.Array  # int32 scalar
    read_length: int = struct.field(pytree_node=False)  # how many positions of the past are read

    def layer(self, stack: int, layer: Any, fixed: Any) -> StepHeld:
        """Return what one layer of a stack has; `fixed` is its state."""
        past, live = self.past[stack], self.live[stack]
        if isinstance(live, tuple):
            segments, recent = past[layer], live[layer].positions
        else:
            segments = _segments(past, layer, self.read_length)
            recent = jax.tree.map(lambda leaf: leaf[layer], live.positions)
        return StepHeld(segments, recent, fixed, self.start_S, self.num_recent)


def insert(cache: Cache, prompt: Cache, size: jax.Array, slot: jax.Array) -> Cache:
    """Copy the first `size` positions of a prompt, and its state, into one slot, from position 0 on.

    The rest of the slot is cleared: attention weighs positions not yet written with 0, and 0 * NaN of a former tenant
    would be NaN.
    """
    # Always true: but a mask that is the same for all slots would have XLA make the masked row before a loop over them,
    # and hold as much again.
    size = jnp.where(slot < jax.tree.leaves(cache)[0].shape[1], size, 0)

    def write(into: jax.Array, rows: jax.Array) -> jax.Array:
        length = into.shape[3]
        kept = rows[:, :, :, :length].astype(into.dtype)
        kept = jnp.where((jnp.arange(kept.shape[3]) < size)[:, None], kept, 0)
        rest = jnp.zeros((*kept.shape[:3], length - kept.shape[3], kept.shape[4]), into.dtype)
        into = jax.lax.dynamic_update_slice(into, kept, (0, slot, 0, 0, 0))
        return jax.lax.dynamic_update_slice(into, rest, (0, slot, 0, kept.shape[3], 0))

    return tuple(
        Held(
            positions=jax.tree.map(write, into.positions, one.positions),
            fixed=jax.tree.map(lambda all, row: _put_row(all, row, slot), into.fixed, one.fixed),
        )
        for into, one in zip(cache, prompt, strict=True)
    )


def write_chunk(held: Held, new: Held, start: jax.Array) -> Held:
    """Write the positions from `start` on [n, B, K, T, H], all of which `held` must have, and replace the state."""

    def write(into: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(into, rows.astype(into.dtype), start, axis=3)

    return Held(positions=jax.tree.map(write, held.positions, new.positions), fixed=new.fixed)


def state_of(cache: Cache) -> Any:
    """Return the state of fixed size of all stacks."""
    return tuple(held.fixed for held in cache)


def with_state(cache: Cache, state: Any) -> Cache:
    """Return a cache with another state in place of its own; nothing is copied."""
    return tuple(Held(held.positions, fixed) for held, fixed in zip(cache, state, strict=True))


def resize(cache: Cache, length: int) -> Cache:
    """Return a copy, cut or padded to `length` positions."""

    def copy(leaf: jax.Array) -> jax.Array:
        first = leaf[:, :, :, :length]
        return jnp.pad(first, ((0, 0), (0, 0), (0, 0), (0, length - first.shape[3]), (0, 0)))

    return tuple(Held(jax.tree.map(copy, held.positions), jax.tree.map(jnp.copy, held.fixed)) for held in cache)


def read_piece(cache: Cache, slot: jax.Array, start: jax.Array, size: int) -> Cache:
    """Return a copy of `size` positions [n, 1, K, T, H] and of the state of one slot, which must have all of them."""

    def read(leaf: jax.Array) -> jax.Array:
        num_layers, _, num_kv_heads, _, head_dim = leaf.shape
        return jax.lax.dynamic_slice(leaf, (0, slot, 0, start, 0), (num_layers, 1, num_kv_heads, size, head_dim))

    def row(leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=1)

    return tuple(Held(jax.tree.map(read, held.positions), jax.tree.map(row, held.fixed)) for held in cache)


def write_piece(cache: Cache, piece: Cache, slot: jax.Array, start: jax.Array) -> Cache:
    """Write what `read_piece` returned into a slot."""

    def write(into: jax.Array, leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(into, leaf, (0, slot, 0, start, 0))

    return tuple(
        Held(
            positions=jax.tree.map(write, into.positions, one.positions),
            fixed=jax.tree.map(lambda all, row: _put_row(all, row, slot), into.fixed, one.fixed),
        )
        for into, one in zip(cache, piece, strict=True)
    )


def open_slice(cache: Cache, start_S: jax.Array, *, read_length: int, max_tokens: int) -> SliceCache:
    """Return the cache for a decode slice of up to `max_tokens`; slots hold `start_S` <= `read_length` positions."""
    live = tuple(Held(_no_tokens(held.positions, max_tokens), held.fixed) for held in cache)
    return SliceCache(tuple(held.positions for held in cache), live, start_S, jnp.int32(0), read_length)


def open_rows(cache: Cache, slot_S: jax.Array, start_S: jax.Array, *, read_length: int, max_tokens: int) -> SliceCache:
    """Like `open_slice`, with copies by layer of the slots `slot_S`: only these are computed.

    A row without a sample has a slot that does not exist. It reads another one, and `start_S` is 0.
    """

    def rows(leaf: jax.Array, layer: int) -> jax.Array:
        return jnp.take(leaf[layer], slot_S, axis=0, mode="clip")

    def live(held: Held, num: int) -> Held | tuple[Held, ...]:
        empty = jax.tree.map(
            lambda leaf: jnp.zeros((slot_S.shape[0], leaf.shape[2], max_tokens, leaf.shape[4]), leaf.dtype),
            held.positions,
        )
        layers = (Held(empty, jax.tree.map(partial(rows, layer=layer), held.fixed)) for layer in range(num))
        return tuple(layers) if num else held

    num_layers = [next((leaf.shape[0] for leaf in jax.tree.leaves(held)), 0) for held in cache]
    return SliceCache(
        past=tuple(
            tuple(_segments(held.positions, layer, read_length, slot_S) for layer in range(num))
            for held, num in zip(cache, num_layers, strict=True)
        ),
        live=tuple(map(live, cache, num_layers)),
        start_S=start_S,
        num_recent=jnp.int32(0),
        read_length=read_length,
    )


def close_slice(cache: Cache, ended: SliceCache, slot_S: jax.Array | None = None) -> Cache:
    """Write what a decode slice changed into the slots of its rows. Positions >= C, and other slots, are ignored."""

    def stacked(live: Held | tuple[Held, ...]) -> Held:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *live) if isinstance(live, tuple) else live

    def put(into: jax.Array, new: jax.Array) -> jax.Array:
        return new if slot_S is None else into.at[:, slot_S].set(new, mode="drop")

    live = tuple(stacked(each) for each in ended.live)
    positions = _scatter([held.positions for held in cache], [each.positions for each in live], ended, slot_S)
    return tuple(
        Held(into, jax.tree.map(put, held.fixed, each.fixed))
        for held, into, each in zip(cache, positions, live, strict=True)
    )


def _no_tokens(positions: Any, max_tokens: int) -> Any:
    """Return zeros for the tokens of a slice, by stack."""
    return jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape[:3], max_tokens, leaf.shape[4]), leaf.dtype), positions)


def _scatter(into: list[Any], recent: list[Any], ended: SliceCache, slot_S: jax.Array | None) -> list[Any]:
    """Return the positions of all stacks with the recent tokens in their places."""
    if not jax.tree.leaves(into):
        return into
    (_, num_slots, _, length, _), num_tokens = jax.tree.leaves(into)[0].shape, jax.tree.leaves(recent)[0].shape[3]
    token_T = jnp.arange(num_tokens)
    position_ST = jnp.where(token_T < ended.num_recent, ended.start_S[:, None] + token_T, length)
    slot_S1 = (jnp.arange(num_slots) if slot_S is None else slot_S)[:, None]

    def write(into: jax.Array, new_nSKTH: jax.Array) -> jax.Array:
        # Two index arrays with a slice between put their dims first: [S, T, n, K, H].
        return into.at[:, slot_S1, :, position_ST].set(jnp.transpose(new_nSKTH, (1, 3, 0, 2, 4)), mode="drop")

    return jax.tree.map(write, into, recent)


def _segments(positions: Any, layer: Any, length: int, slot_S: jax.Array | None = None) -> Segments:
    return read_segments(positions, layer, length, slot_S) if isinstance(positions, KeyValues) else ()


def _put_row(all_rows: jax.Array, row: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(all_rows, row.astype(all_rows.dtype), slot, axis=1)
