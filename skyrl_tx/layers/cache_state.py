"""The cache of the decoder: what it keeps of prompts and samples, and what a mixer sees of it.

It has one `Held` for each stack of layers, with two kinds of arrays. *Positions*, such as keys and values, grow with
the tokens and are in pages; a mixer never sees how they are stored, but calls `attend`. *Fixed-size state*, such as
that of linear attention, is replaced as a whole. The host decides which pages and states a row has: its `Table`.

On a mesh each shard of the batch axis has pages and states of its own, and the rows that read and write them, so that
nothing of the cache is sent to another shard.

Legend: n layers of a stack, S rows of a decode step, B batch rows, M pages of a row, P positions of a page, N heads (or
copies), K kv heads, T tokens, H head dim, R shards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.attention import cached_attention, paged_attention, step_attention
from skyrl_tx.layers.flash_attention import Stats
from skyrl_tx.layers.kv_cache import KeyValues, Pages, Segments, append, read_segments
from skyrl_tx.layers.parameter import Axis, Parameter
from skyrl_tx.layers.sharding import WHOLE, Layout


def position_axes(each: Parameter) -> tuple[Axis | None, ...]:
    """Return the logical axes of an array of positions, given what `Room` says of one position."""
    heads, dim = each.axes
    return "layers", "batch", heads, None, dim


@struct.dataclass
class Held:
    """The cache of one stack: trees with leaves [n, pages, K, P, H] and [n, states, ...].

    What is new of rows has the leaves [n, B, K, T, H] and [n, B, ...].
    """

    positions: Any = ()
    fixed: Any = ()


Cache = tuple[Held, ...]
"""The cache of all stacks. Page 0 and state 0 are empty: nothing is written to them."""


@struct.dataclass
class Table:
    """The block table: where the cache has what it keeps of rows. Page p holds the same positions in all stacks.

    Numbers are those within the row's shard.
    """

    page_BM: jax.Array  # int32: page m has the positions from m * P on; 0 if the row has none
    state_B: jax.Array  # int32; 0 if the row has none


@struct.dataclass
class ChunkHeld:
    """The cache of one layer before chunks of prompts: the state [B, ...], and the positions before `start`."""

    past: Pages
    fixed: Any
    start: jax.Array  # of all rows, or of each [B]

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array | None,
        sinks_N: jax.Array | None = None,
        *,
        window: int | None = None,
        kernel: Callable[..., Stats] | None = None,
    ) -> tuple[jax.Array, KeyValues]:
        """Return attention over the past and the chunk, [B, T, N, H], and the chunk's keys and values.

        Without values, the keys are the values too. The kernel is that for chunks (`kernels.choice.Kernels.past`).
        """
        B, T = q_BTNH.shape[:2]
        new = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 1, 2), KeyValues(k=k_BTKH, v=v_BTKH))
        seen_TT = jnp.tri(T, dtype=jnp.bool_)
        if window is not None:
            seen_TT &= ~jnp.tri(T, k=-window, dtype=jnp.bool_)
        start_B = jnp.broadcast_to(self.start, (B,))
        position_BT = start_B[:, None] + jnp.arange(T)
        mixed = paged_attention(
            q_BTNH, position_BT, self.past, start_B, new, seen_TT, sinks_N, window=window, kernel=kernel
        )
        return mixed, new


@struct.dataclass
class StepHeld:
    """The cache of one layer before a decode step: the state [S, ...], the past, and the tokens of the slice."""

    past: Segments | Pages
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
        kernel: Callable[..., Stats] | None = None,
        step: Callable[..., Stats] | None = None,
    ) -> tuple[jax.Array, KeyValues]:
        """Return attention over all tokens up to the new one, [S, N, H], and the slice's keys and values with it.

        The kernels are those for the past (`kernels.choice.Kernels.past`) and for a whole step (`Kernels.step`);
        segments have none.
        """
        recent = append(self.recent, KeyValues(k=k_SKH, v=v_SKH), self.num_recent)
        num_recent, start_S, past = self.num_recent + 1, self.start_S, self.past
        if not isinstance(past, Pages):
            return cached_attention(q_SNH, past, recent, start_S, num_recent, sinks_N, window=window), recent
        if step is not None:
            return step_attention(q_SNH, past, start_S, recent, num_recent, sinks_N, kernel=step), recent
        token_T = jnp.arange(recent.values.shape[2])
        seen_T = token_T < num_recent if window is None else (token_T < num_recent) & (token_T >= num_recent - window)
        position_S1 = start_S[:, None] + self.num_recent
        mixed_S1NH = paged_attention(
            q_SNH[:, None], position_S1, past, start_S, recent, seen_T[None], sinks_N, window=window, kernel=kernel
        )
        return mixed_S1NH[:, 0], recent


@struct.dataclass
class SliceCache:
    """The cache during a decode slice: by stack the past, which is read-only, and what the steps change.

    `live` holds the recent tokens [n, S, K, T, H] and the state: both are stacks, or by layer, tuples of layers, and
    `Held()` of a stack that keeps nothing. A step that takes its layer out of a stack copies it: on CPU that took
    longer than attention. The past is in its pages; or by layer too, copies in segments.
    """

    past: tuple[Any, ...]
    live: tuple[Held | tuple[Held, ...], ...]
    page_SM: jax.Array
    start_S: jax.Array  # int32: positions that each row's past has
    num_recent: jax.Array  # int32 scalar

    def layer(self, stack: int, layer: Any, fixed: Any) -> StepHeld:
        """Return what one layer of a stack has; `fixed` is its state."""
        past, live = self.past[stack], self.live[stack]
        past = past[layer] if past and isinstance(past, tuple) else Pages(past, layer, self.page_SM)
        if isinstance(live, tuple):
            recent = live[layer].positions
        else:
            recent = jax.tree.map(lambda leaf: leaf[layer], live.positions)
        return StepHeld(past, recent, fixed, self.start_S, self.num_recent)


def read_states(cache: Cache, table: Table, layout: Layout = WHOLE) -> tuple[Any, ...]:
    """Return copies of the states of rows, [n, B, ...], by stack."""

    def read(fixed: Any, state_B: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf.at[:, state_B].get(mode="clip"), fixed)

    return layout.by_shard(read, (1, 0), 1)(tuple(held.fixed for held in cache), table.state_B)


def by_layer(stack: Any) -> tuple[Any, ...]:
    """Return a tree of stacked arrays [n, ...] as n trees, none if it is empty."""
    num_layers = next((leaf.shape[0] for leaf in jax.tree.leaves(stack)), 0)
    return tuple(jax.tree.map(lambda leaf, layer=layer: leaf[layer], stack) for layer in range(num_layers))


def write(
    cache: Cache,
    new: tuple[Held | tuple[Held, ...], ...],
    table: Table,
    start_B: jax.Array,
    size: jax.Array,
    layout: Layout = WHOLE,
) -> Cache:
    """Write the first `size` new positions of each row from `start_B` on, and replace its state.

    What is new is in stacks or by layer. `size` is one for all rows, or [B]. Positions for which a row has no page, and
    the state of a row that has none, are ignored.
    """

    def local(cache: Cache, new: Cache, table: Table, start_B: jax.Array, size_B: jax.Array) -> Cache:
        def put(into: jax.Array, new_nBKTH: jax.Array) -> jax.Array:
            given = into, new_nBKTH.astype(into.dtype), table.page_BM, start_B, size_B
            return jax.lax.platform_dependent(*given, tpu=put_by_page, default=put_by_position)

        def state(into: jax.Array, new: jax.Array) -> jax.Array:
            state_B = jnp.where(table.state_B > 0, table.state_B, into.shape[1])
            return into.at[:, state_B].set(new.astype(into.dtype), mode="drop")

        return tuple(
            Held(jax.tree.map(put, held.positions, each.positions), jax.tree.map(state, held.fixed, each.fixed))
            for held, each in zip(cache, new, strict=True)
        )

    def stacked(new: Held | tuple[Held, ...]) -> Held:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *new) if isinstance(new, tuple) else new

    size_B = jnp.broadcast_to(size, start_B.shape)
    return layout.by_shard(local, (1, 1, 0, 0, 0), 1)(cache, tuple(map(stacked, new)), table, start_B, size_B)


def put_by_position(
    into: jax.Array, new_nBKTH: jax.Array, page_BM: jax.Array, start_B: jax.Array, size_B: jax.Array
) -> jax.Array:
    """Write the first `size_B` positions of each row into its pages, each head of each position by itself.

    All dims but the last are indexed. For slices between indices, XLA on TPU copies the cache into another layout and
    back.
    """
    (_, num_pages, _, page_size, _), token_T = into.shape, jnp.arange(new_nBKTH.shape[3])
    position_BT = start_B[:, None] + token_T
    page_BT = jnp.take_along_axis(page_BM, position_BT // page_size, axis=1, mode="fill", fill_value=0)
    page_BT = jnp.where((token_T < size_B[:, None]) & (page_BT > 0), page_BT, num_pages)
    n, _, K, _, _ = new_nBKTH.shape
    layer_n111, head_K1 = jnp.arange(n)[:, None, None, None], jnp.arange(K)[:, None]
    at = (layer_n111, page_BT[:, None], head_K1, position_BT[:, None] % page_size)
    return into.at[at].set(new_nBKTH, mode="drop")


def put_by_page(
    into: jax.Array, new_nBKTH: jax.Array, page_BM: jax.Array, start_B: jax.Array, size_B: jax.Array
) -> jax.Array:
    """Do the same by changing whole pages, one after another: few large copies, as many small ones are slow on TPU."""
    page_size, (_, B, _, T, _), M = into.shape[3], new_nBKTH.shape, page_BM.shape[1]
    span = (T + page_size - 2) // page_size + 1  # the pages that T positions may lie in

    def one(i: jax.Array, into: jax.Array) -> jax.Array:
        row, index = i // span, start_B[i // span] // page_size + i % span
        page = jnp.where(index < M, page_BM[row, jnp.minimum(index, M - 1)], 0)
        first = index * page_size - start_B[row]  # the token of the page's first position, which may be before the row
        token_P = first + jnp.arange(page_size)
        padded = jnp.pad(new_nBKTH[:, row], ((0, 0), (0, 0), (page_size, page_size), (0, 0)))
        own = jax.lax.dynamic_slice_in_dim(padded, first + page_size, page_size, axis=2)
        is_new_P = (token_P >= 0) & (token_P < size_B[row]) & (page > 0)
        mixed = jnp.where(is_new_P[:, None], own, into.at[:, page].get(mode="clip"))
        return into.at[:, page].set(mixed)

    return jax.lax.fori_loop(0, B * span, one, into)


def copy(
    cache: Cache,
    page_RN2: jax.Array,
    num_pages_R: jax.Array,
    state_RN2: jax.Array,
    num_states_R: jax.Array,
    layout: Layout = WHOLE,
) -> Cache:
    """Copy the first pages of a list of each shard, each a source and a target, and the first states of another.

    They are copied one by one, so that no second cache exists. A copy of page 0, or of state 0, clears the target: no
    attention has to be trusted with a NaN of its former tenant.
    """

    def copied(tree: Any, pair_N2: jax.Array, count: jax.Array) -> Any:
        def one(i: jax.Array, tree: Any) -> Any:
            source, target = pair_N2[i, :1], pair_N2[i, 1:]
            return jax.tree.map(lambda leaf: leaf.at[:, target].set(leaf.at[:, source].get(mode="clip")), tree)

        return jax.lax.fori_loop(0, count, one, tree)

    def local(cache: Cache, page_1N2: jax.Array, num_pages: jax.Array, state_1N2: jax.Array, num_states: jax.Array):
        positions = copied(tuple(held.positions for held in cache), page_1N2[0], num_pages[0])
        fixed = copied(tuple(held.fixed for held in cache), state_1N2[0], num_states[0])
        return tuple(Held(*each) for each in zip(positions, fixed, strict=True))

    return layout.by_shard(local, (1, 0, 0, 0, 0), 1)(cache, page_RN2, num_pages_R, state_RN2, num_states_R)


def open_slice(
    cache: Cache,
    table: Table,
    start_S: jax.Array,
    layout: Layout = WHOLE,
    *,
    max_tokens: int,
    has_separate_layers: bool = False,
) -> SliceCache:
    """Return the cache for a decode slice of up to `max_tokens`; rows hold `start_S` positions.

    What steps change is by layer if the parameters are.
    """
    num_rows = table.state_B.shape[0]

    def no_tokens(leaf: jax.Array) -> jax.Array:
        num_layers, _, num_kv_heads, _, head_dim = leaf.shape
        return jnp.zeros((num_layers, num_rows, num_kv_heads, max_tokens, head_dim), leaf.dtype)

    states = read_states(cache, table, layout)
    live = (Held(jax.tree.map(no_tokens, held.positions), fixed) for held, fixed in zip(cache, states, strict=True))
    return SliceCache(
        past=tuple(held.positions for held in cache),
        live=tuple((by_layer(held) or held) if has_separate_layers else held for held in live),
        page_SM=table.page_BM,
        start_S=start_S,
        num_recent=jnp.int32(0),
    )


def open_rows(cache: Cache, table: Table, start_S: jax.Array, *, read_length: int, max_tokens: int) -> SliceCache:
    """Like `open_slice`, with copies by layer of what the rows have; `start_S` <= `read_length`."""

    def live(held: Held, num: int) -> Held | tuple[Held, ...]:
        num_rows = table.state_B.shape[0]
        empty = jax.tree.map(
            lambda leaf: jnp.zeros((num_rows, leaf.shape[2], max_tokens, leaf.shape[4]), leaf.dtype), held.positions
        )

        def state(leaf: jax.Array, layer: int) -> jax.Array:
            return leaf.at[layer, table.state_B].get(mode="clip")

        layers = (Held(empty, jax.tree.map(partial(state, layer=layer), held.fixed)) for layer in range(num))
        return tuple(layers) if num else held

    def segments(held: Held, layer: int) -> Segments:
        return read_segments(Pages(held.positions, layer, table.page_BM), read_length) if held.positions else ()

    num_layers = [next((leaf.shape[0] for leaf in jax.tree.leaves(held)), 0) for held in cache]
    return SliceCache(
        past=tuple(
            tuple(segments(held, layer) for layer in range(num)) for held, num in zip(cache, num_layers, strict=True)
        ),
        live=tuple(map(live, cache, num_layers)),
        page_SM=table.page_BM,
        start_S=start_S,
        num_recent=jnp.int32(0),
    )


def close_slice(cache: Cache, ended: SliceCache, table: Table, layout: Layout = WHOLE) -> Cache:
    """Write what a decode slice changed, see `write`."""
    return write(cache, ended.live, table, ended.start_S, ended.num_recent, layout)
