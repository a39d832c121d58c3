"""The KV cache of the decoder: its arrays, and how layers read and write them.

The cache has one `LayerCache` for each stack of layers, with two kinds of arrays:

- *Positions*, for example keys and values, grow with the number of tokens and are stored in pages.
  A mixer never sees how they are stored: it calls `attend`.
- *Fixed-size state*, for example the state of linear attention, is replaced as a whole.

The host decides which pages and states a row has, and passes them as a `BlockTable`.

On a mesh, each shard of the batch axis has its own pages and states and the rows that use them, so
that no part of the cache is ever sent to another shard.

Legend: n layers of a stack, S rows of a decode step, B batch rows, M pages of a row, P positions of
a page, N heads (or copies), K kv heads, T tokens, H head dim, R shards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.attention import SoftmaxStats
from skyrl_tx.layers.kv_cache import (
    KeyValues,
    Pages,
    Segments,
    append_token,
    attend_segments,
    decode_attention,
    paged_attention,
    read_segments,
)
from skyrl_tx.layers.parameter import Axis, Parameter
from skyrl_tx.layers.sharding import UNSHARDED, Layout


def get_position_axes(parameter: Parameter) -> tuple[Axis | None, ...]:
    """Return the logical axes of an array of positions, given its entry in `CacheSpec`."""
    heads, dim = parameter.axes
    return "layers", "batch", heads, None, dim


@struct.dataclass
class LayerCache:
    """The cache of one stack: trees with leaves [n, pages, K, P, H] and [n, states, ...].

    The same class holds new entries of rows, with leaves [n, B, K, T, H] and [n, B, ...].
    """

    positions: Any = ()
    fixed: Any = ()


Cache = tuple[LayerCache, ...]
"""The cache of all stacks. Page 0 and state 0 stay empty: nothing is written to them."""


@struct.dataclass
class BlockTable:
    """The pages and the state of each row. A page number means the same positions in all stacks.

    Numbers count within the shard of the row.
    """

    page_BM: jax.Array  # int32: page m holds the positions from m * P on; 0 if the row has no such page
    state_B: jax.Array  # int32; 0 if the row has no state


@struct.dataclass
class PrefillLayerCache:
    """The cache of one layer during prefill: the state [B, ...] and the positions before `start`."""

    past: Pages
    fixed: Any
    start: jax.Array  # scalar, or [B]

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
        """Return attention over past and chunk, [B, T, N, H], and the chunk's keys and values.

        Without values, the keys also serve as values. `kernel` is an `AttendPast` (see
        `kernels.registry`).
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
    """The cache of one layer in a decode step: the state [S, ...], the past, the slice's tokens."""

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
        """Return attention over all tokens up to the new one, [S, N, H], and the recent tokens.

        The recent tokens are the slice's keys and values, including the new token. `kernel` is an
        `AttendPast` and `step` an `AttendStep` (see `kernels.registry`). Segments use neither.
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
    """The cache during a decode slice: the read-only past, and the part that steps change.

    `live` has one entry per stack, with the recent tokens [n, S, K, T, H] and the states. An entry
    is a `LayerCache` of the whole stack or a tuple with one per layer, and it is `LayerCache()` for
    a stack that caches nothing. A step that takes its layer out of a stack copies it, which on CPU
    took longer than attention.

    `past` has the pages of each stack, or a tuple with the `Segments` of each layer, which are
    copies.
    """

    past: tuple[Any, ...]
    live: tuple[LayerCache | tuple[LayerCache, ...], ...]
    page_SM: jax.Array
    start_S: jax.Array  # int32: number of positions in each row's past
    num_recent: jax.Array  # int32 scalar: tokens of the slice so far

    def get_layer(self, stack: int, layer: Any, fixed: Any) -> DecodeLayerCache:
        """Return the cache of one layer of a stack, whose state is `fixed`."""
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

    return layout.map_shards(read_shard, (1, 0), 1)(tuple(stack.fixed for stack in cache), table.state_B)


def unstack_layers(stack: Any) -> tuple[Any, ...]:
    """Split a tree of stacked arrays [n, ...] into n trees; an empty tree gives none."""
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

    `new` is stacked or by layer. `size` is a scalar or [B]. Positions without a page, and the state
    of a row without a state slot, are ignored.
    """

    def write_shard(cache: Cache, new: Cache, table: BlockTable, start_B: jax.Array, size_B: jax.Array) -> Cache:
        def write_positions(into: jax.Array, new_nBKTH: jax.Array) -> jax.Array:
            arguments = into, new_nBKTH.astype(into.dtype), table.page_BM, start_B, size_B
            return jax.lax.platform_dependent(*arguments, tpu=write_by_page, default=write_by_position)

        def write_state(into: jax.Array, new: jax.Array) -> jax.Array:
            state_B = jnp.where(table.state_B > 0, table.state_B, into.shape[1])
            return into.at[:, state_B].set(new.astype(into.dtype), mode="drop")

        return tuple(
            LayerCache(
                jax.tree.map(write_positions, stack.positions, new_stack.positions),
                jax.tree.map(write_state, stack.fixed, new_stack.fixed),
            )
            for stack, new_stack in zip(cache, new, strict=True)
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
    """Write the first `size_B` positions of each row into its pages, each head separately.

    All dims but the last are indexed. With slices between the indices, XLA on TPU would copy the
    cache into another layout and back.
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
    """Do the same as `write_by_position`, by rewriting whole pages one after another.

    On TPU, a few large copies are faster than many small ones.
    """
    page_size, (_, B, _, T, _), M = into.shape[3], new_nBKTH.shape, page_BM.shape[1]
    span = (T + page_size - 2) // page_size + 1  # the number of pages that T positions may touch

    def write_page(i: jax.Array, into: jax.Array) -> jax.Array:
        row, index = i // span, start_B[i // span] // page_size + i % span
        page = jnp.where(index < M, page_BM[row, jnp.minimum(index, M - 1)], 0)
        first = index * page_size - start_B[row]  # the token at the page's first position; may be negative
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
    """Copy pages and states of each shard, given as (source, target) pairs.

    The first `num_pages_R` and `num_states_R` pairs of each shard count. They are copied one by
    one, so that no second cache is allocated. A copy of page 0 or state 0 clears the target, so
    that attention never reads a NaN of a previous owner.
    """

    def copy_pairs(tree: Any, pair_N2: jax.Array, count: jax.Array) -> Any:
        def copy_pair(i: jax.Array, tree: Any) -> Any:
            source, target = pair_N2[i, :1], pair_N2[i, 1:]
            return jax.tree.map(lambda leaf: leaf.at[:, target].set(leaf.at[:, source].get(mode="clip")), tree)

        return jax.lax.fori_loop(0, count, copy_pair, tree)

    def copy_shard(
        cache: Cache, page_1N2: jax.Array, num_pages: jax.Array, state_1N2: jax.Array, num_states: jax.Array
    ):
        positions = copy_pairs(tuple(stack.positions for stack in cache), page_1N2[0], num_pages[0])
        fixed = copy_pairs(tuple(stack.fixed for stack in cache), state_1N2[0], num_states[0])
        return tuple(map(LayerCache, positions, fixed))

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
    """Return the cache for a decode slice of up to `max_tokens`. Rows hold `start_S` positions.

    `has_separate_layers` says whether the parameters are by layer; `live` is then by layer too.
    """
    num_rows = table.state_B.shape[0]

    def make_empty(leaf: jax.Array) -> jax.Array:
        num_layers, _, num_kv_heads, _, head_dim = leaf.shape
        return jnp.zeros((num_layers, num_rows, num_kv_heads, max_tokens, head_dim), leaf.dtype)

    states = read_states(cache, table, layout)
    live = (
        LayerCache(jax.tree.map(make_empty, stack.positions), fixed) for stack, fixed in zip(cache, states, strict=True)
    )
    return DecodeSliceCache(
        past=tuple(stack.positions for stack in cache),
        live=tuple((unstack_layers(stack) or stack) if has_separate_layers else stack for stack in live),
        page_SM=table.page_BM,
        start_S=start_S,
        num_recent=jnp.int32(0),
    )


def open_decode_slice_by_layer(
    cache: Cache, table: BlockTable, start_S: jax.Array, *, read_length: int, max_tokens: int
) -> DecodeSliceCache:
    """Like `open_decode_slice`, but copies the past and the states of the rows by layer.

    `start_S` must be at most `read_length`.
    """

    def make_live(stack: LayerCache, num: int) -> LayerCache | tuple[LayerCache, ...]:
        num_rows = table.state_B.shape[0]
        empty = jax.tree.map(
            lambda leaf: jnp.zeros((num_rows, leaf.shape[2], max_tokens, leaf.shape[4]), leaf.dtype), stack.positions
        )

        def read_state(leaf: jax.Array, layer: int) -> jax.Array:
            return leaf.at[layer, table.state_B].get(mode="clip")

        layers = (
            LayerCache(empty, jax.tree.map(partial(read_state, layer=layer), stack.fixed)) for layer in range(num)
        )
        return tuple(layers) if num else stack

    def read_layer_segments(stack: LayerCache, layer: int) -> Segments:
        return read_segments(Pages(stack.positions, layer, table.page_BM), read_length) if stack.positions else ()

    num_layers = [next((leaf.shape[0] for leaf in jax.tree.leaves(stack)), 0) for stack in cache]
    return DecodeSliceCache(
        past=tuple(
            tuple(read_layer_segments(stack, layer) for layer in range(num))
            for stack, num in zip(cache, num_layers, strict=True)
        ),
        live=tuple(map(make_live, cache, num_layers)),
        page_SM=table.page_BM,
        start_S=start_S,
        num_recent=jnp.int32(0),
    )


def close_decode_slice(cache: Cache, ended: DecodeSliceCache, table: BlockTable, layout: Layout = UNSHARDED) -> Cache:
    """Write the changes of a decode slice into the cache, see `write_cache`."""
    return write_cache(cache, ended.live, table, ended.start_S, ended.num_recent, layout)
