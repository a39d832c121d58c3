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

from skyrl_tx.layers.attention import attend_segments, decode_attention, paged_attention
from skyrl_tx.layers.flash_attention import SoftmaxStats
from skyrl_tx.layers.kv_cache import KeyValues, Pages, Segments, append_token, read_segments
from skyrl_tx.layers.parameter import Axis, Parameter
from skyrl_tx.layers.sharding import UNSHARDED, Layout


def get_position_axes(each: Parameter) -> tuple[Axis | None, ...]:
    """Return the logical axes of an array of positions, given what `CacheSpec` says of one position."""
    heads, dim = each.axes
    return "layers", "batch", heads, None, dim


@struct.dataclass
class LayerCache:
    """The cache of one stack: trees with leaves [n, pages, K, P, H] and [n, states, ...].

    What is new of rows has the leaves [n, B, K, T, H] and [n, B, ...].
    """

    positions: Any = ()
    fixed: Any = ()


Cache = tuple[LayerCache, ...]
"""The cache of all stacks. Page 0 and state 0 are empty: nothing is written to them."""


@struct.dataclass
class BlockTable:
    """The block table: where the cache has what it keeps of rows. Page p holds the same positions in all stacks.

    Numbers are those within the row's shard.
    """

    page_BM: jax.Array  # int32: page m has the positions from m * P on; 0 if the row has none
    state_B: jax.Array  # int32; 0 if the row has none


@struct.dataclass
class PrefillLayerCache:
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
        kernel: Callable[..., SoftmaxStats] | None = None,
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
class DecodeLayerCache:
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
        kernel: Callable[..., SoftmaxStats] | None = None,
        step: Callable[..., SoftmaxStats] | None = None,
    ) -> tuple[jax.Array, KeyValues]:
        """Return attention over all tokens up to the new one, [S, N, H], and the slice's keys and values with it.

        The kernels are those for the past (`kernels.choice.Kernels.past`) and for a whole step (`Kernels.step`);
        segments have none.
        """
        recent = append_token(self.recent, KeyValues(k=k_SKH, v=v_SKH), self.num_recent)
        num_recent, start_S, past = self.num_recent + 1, self.start_S, self.past
        if not isinstance(past, Pages):
            return attend_segments(q_SNH, past, recent, start_S, num_recent, sinks_N, window=window), recent
        if step is not None:
            return decode_attention(q_SNH, past, start_S, recent, num_recent, sinks_N, kernel=step), recent
        token_T = jnp.arange(recent.values.shape[2])
        seen_T = token_T < num_recent if window is None else (token_T < num_recent) & (token_T >= num_recent - window)
        position_S1 = start_S[:, None] + self.num_recent
        mixed_S1NH = paged_attention(
            q_SNH[:, None], position_S1, past, start_S, recent, seen_T[None], sinks_N, window=window, kernel=kernel
        )
        return mixed_S1NH[:, 0], recent


@struct.dataclass
class DecodeSliceCache:
    """The cache during a decode slice: by stack the past, which is read-only, and what the steps change.

    `live` holds the recent tokens [n, S, K, T, H] and the state: both are stacks, or by layer, tuples of layers, and
    `Held()` of a stack that keeps nothing. A step that takes its layer out of a stack copies it: on CPU that took
    longer than attention. The past is in its pages; or by layer too, copies in segments.
    """

    past: tuple[Any, ...]
    live: tuple[LayerCache | tuple[LayerCache, ...], ...]
    page_SM: jax.Array
    start_S: jax.Array  # int32: positions that each row's past has
    num_recent: jax.Array  # int32 scalar

    def get_layer(self, stack: int, layer: Any, fixed: Any) -> DecodeLayerCache:
        """Return what one layer of a stack has; `fixed` is its state."""
        past, live = self.past[stack], self.live[stack]
        past = past[layer] if past and isinstance(past, tuple) else Pages(past, layer, self.page_SM)
        if isinstance(live, tuple):
            recent = live[layer].positions
        else:
            recent = jax.tree.map(lambda leaf: leaf[layer], live.positions)
        return DecodeLayerCache(past, recent, fixed, self.start_S, self.num_recent)


def read_states(cache: Cache, table: BlockTable, layout: Layout = UNSHARDED) -> tuple[Any, ...]:
    """Return copies of the states of rows, [n, B, ...], by stack."""

    def read_shard(fixed: Any, state_B: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf.at[:, state_B].get(mode="clip"), fixed)

    return layout.map_shards(read_shard, (1, 0), 1)(tuple(held.fixed for held in cache), table.state_B)


def unstack_layers(stack: Any) -> tuple[Any, ...]:
    """Return a tree of stacked arrays [n, ...] as n trees, none if it is empty."""
    num_layers = next((leaf.shape[0] for leaf in jax.tree.leaves(stack)), 0)
    return tuple(jax.tree.map(lambda leaf, layer=layer: leaf[layer], stack) for layer in range(num_layers))


def write_cache(
    cache: Cache,
    new: tuple[LayerCache | tuple[LayerCache, ...], ...],
    table: BlockTable,
    start_B: jax.Array,
    size: jax.Array,
    layout: Layout = UNSHARDED,
) -> Cache:
    """Write the first `size` new positions of each row from `start_B` on, and replace its state.

    What is new is in stacks or by layer. `size` is one for all rows, or [B]. Positions for which a row has no page, and
    the state of a row that has none, are ignored.
    """

    def write_shard(cache: Cache, new: Cache, table: BlockTable, start_B: jax.Array, size_B: jax.Array) -> Cache:
        def write_positions(into: jax.Array, new_nBKTH: jax.Array) -> jax.Array:
            given = into, new_nBKTH.astype(into.dtype), table.page_BM, start_B, size_B
            return jax.lax.platform_dependent(*given, tpu=write_by_page, default=write_by_position)

        def write_state(into: jax.Array, new: jax.Array) -> jax.Array:
            state_B = jnp.where(table.state_B > 0, table.state_B, into.shape[1])
            return into.at[:, state_B].set(new.astype(into.dtype), mode="drop")

        return tuple(
            LayerCache(
                jax.tree.map(write_positions, held.positions, each.positions),
                jax.tree.map(write_state, held.fixed, each.fixed),
            )
            for held, each in zip(cache, new, strict=True)
        )

    def stack_layers(new: LayerCache | tuple[LayerCache, ...]) -> LayerCache:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *new) if isinstance(new, tuple) else new

    size_B = jnp.broadcast_to(size, start_B.shape)
    return layout.map_shards(write_shard, (1, 1, 0, 0, 0), 1)(
        cache, tuple(map(stack_layers, new)), table, start_B, size_B
    )


def write_by_position(
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


def write_by_page(
    into: jax.Array, new_nBKTH: jax.Array, page_BM: jax.Array, start_B: jax.Array, size_B: jax.Array
) -> jax.Array:
    """Do the same by changing whole pages, one after another: few large copies, as many small ones are slow on TPU."""
    page_size, (_, B, _, T, _), M = into.shape[3], new_nBKTH.shape, page_BM.shape[1]
    span = (T + page_size - 2) // page_size + 1  # the pages that T positions may lie in

    def write_page(i: jax.Array, into: jax.Array) -> jax.Array:
        row, index = i // span, start_B[i // span] // page_size + i % span
        page = jnp.where(index < M, page_BM[row, jnp.minimum(index, M - 1)], 0)
        first = index * page_size - start_B[row]  # the token of the page's first position, which may be before the row
        token_P = first + jnp.arange(page_size)
        padded = jnp.pad(new_nBKTH[:, row], ((0, 0), (0, 0), (page_size, page_size), (0, 0)))
        own = jax.lax.dynamic_slice_in_dim(padded, first + page_size, page_size, axis=2)
        is_new_P = (token_P >= 0) & (token_P < size_B[row]) & (page > 0)
        mixed = jnp.where(is_new_P[:, None], own, into.at[:, page].get(mode="clip"))
        return into.at[:, page].set(mixed)

    return jax.lax.fori_loop(0, B * span, write_page, into)


def copy_pages(
    cache: Cache,
    page_RN2: jax.Array,
    num_pages_R: jax.Array,
    state_RN2: jax.Array,
    num_states_R: jax.Array,
    layout: Layout = UNSHARDED,
) -> Cache:
    """Copy the first pages of a list of each shard, each a source and a target, and the first states of another.

    They are copied one by one, so that no second cache exists. A copy of page 0, or of state 0, clears the target: no
    attention has to be trusted with a NaN of its former tenant.
    """

    def copy_pairs(tree: Any, pair_N2: jax.Array, count: jax.Array) -> Any:
        def copy_pair(i: jax.Array, tree: Any) -> Any:
            source, target = pair_N2[i, :1], pair_N2[i, 1:]
            return jax.tree.map(lambda leaf: leaf.at[:, target].set(leaf.at[:, source].get(mode="clip")), tree)

        return jax.lax.fori_loop(0, count, copy_pair, tree)

    def copy_shard(
        cache: Cache, page_1N2: jax.Array, num_pages: jax.Array, state_1N2: jax.Array, num_states: jax.Array
    ):
        positions = copy_pairs(tuple(held.positions for held in cache), page_1N2[0], num_pages[0])
        fixed = copy_pairs(tuple(held.fixed for held in cache), state_1N2[0], num_states[0])
        return tuple(LayerCache(*each) for each in zip(positions, fixed, strict=True))

    return layout.map_shards(copy_shard, (1, 0, 0, 0, 0), 1)(cache, page_RN2, num_pages_R, state_RN2, num_states_R)


def open_decode_slice(
    cache: Cache,
    table: BlockTable,
    start_S: jax.Array,
    layout: Layout = UNSHARDED,
    *,
    max_tokens: int,
    has_separate_layers: bool = False,
) -> DecodeSliceCache:
    """Return the cache for a decode slice of up to `max_tokens`; rows hold `start_S` positions.

    What steps change is by layer if the parameters are.
    """
    num_rows = table.state_B.shape[0]

    def make_empty(leaf: jax.Array) -> jax.Array:
        num_layers, _, num_kv_heads, _, head_dim = leaf.shape
        return jnp.zeros((num_layers, num_rows, num_kv_heads, max_tokens, head_dim), leaf.dtype)

    states = read_states(cache, table, layout)
    live = (
        LayerCache(jax.tree.map(make_empty, held.positions), fixed) for held, fixed in zip(cache, states, strict=True)
    )
    return DecodeSliceCache(
        past=tuple(held.positions for held in cache),
        live=tuple((unstack_layers(held) or held) if has_separate_layers else held for held in live),
        page_SM=table.page_BM,
        start_S=start_S,
        num_recent=jnp.int32(0),
    )


def open_decode_slice_by_layer(
    cache: Cache, table: BlockTable, start_S: jax.Array, *, read_length: int, max_tokens: int
) -> DecodeSliceCache:
    """Like `open_decode_slice`, with copies by layer of what the rows have; `start_S` <= `read_length`."""

    def make_live(held: LayerCache, num: int) -> LayerCache | tuple[LayerCache, ...]:
        num_rows = table.state_B.shape[0]
        empty = jax.tree.map(
            lambda leaf: jnp.zeros((num_rows, leaf.shape[2], max_tokens, leaf.shape[4]), leaf.dtype), held.positions
        )

        def read_state(leaf: jax.Array, layer: int) -> jax.Array:
            return leaf.at[layer, table.state_B].get(mode="clip")

        layers = (LayerCache(empty, jax.tree.map(partial(read_state, layer=layer), held.fixed)) for layer in range(num))
        return tuple(layers) if num else held

    def read_layer_segments(held: LayerCache, layer: int) -> Segments:
        return read_segments(Pages(held.positions, layer, table.page_BM), read_length) if held.positions else ()

    num_layers = [next((leaf.shape[0] for leaf in jax.tree.leaves(held)), 0) for held in cache]
    return DecodeSliceCache(
        past=tuple(
            tuple(read_layer_segments(held, layer) for layer in range(num))
            for held, num in zip(cache, num_layers, strict=True)
        ),
        live=tuple(map(make_live, cache, num_layers)),
        page_SM=table.page_BM,
        start_S=start_S,
        num_recent=jnp.int32(0),
    )


def close_decode_slice(cache: Cache, ended: DecodeSliceCache, table: BlockTable, layout: Layout = UNSHARDED) -> Cache:
    """Write what a decode slice changed, see `write`."""
    return write_cache(cache, ended.live, table, ended.start_S, ended.num_recent, layout)
