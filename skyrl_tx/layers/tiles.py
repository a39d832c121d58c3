"""Rows sorted by group into tiles, each of one group: the cost of a product per group is that of its rows.

Legend: M rows, K groups that each row goes to, J = M * K row visits, G groups, W tiles, P places of a tile, D row size.

Everything is a gather, forwards and backwards: no order of additions depends on the device, and no row meets another's
numbers. Tiles are as many as the worst case needs, and on CPU only those in use are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

FEWEST, MOST = 8, 128  # places of a tile
TILES_AT_ONCE = 32  # tiles computed at once on accelerators: bounds the weights that are gathered for them


@struct.dataclass
class Tiling:
    """The place of each visit. Group numbers of unused tiles are valid but meaningless."""

    place_MK: jax.Array  # of each visit, among all W * P places
    visit_WP: jax.Array  # in each place; J where it is empty
    group_W: jax.Array
    num_used: jax.Array  # tiles; those in use come first

    def gather_rows(self, x_MD: jax.Array) -> jax.Array:
        """Return rows in their places [W, P, D]; empty places are zero."""
        return jnp.take(x_MD, self.visit_WP // self.place_MK.shape[1], axis=0, mode="fill", fill_value=0)

    def gather_visits(self, x_MKD: jax.Array) -> jax.Array:
        """Return values of visits in their places [W, P, D]; empty places are zero."""
        return jnp.take(x_MKD.reshape(-1, x_MKD.shape[-1]), self.visit_WP, axis=0, mode="fill", fill_value=0)

    def collect_visits(self, x_WPD: jax.Array) -> jax.Array:
        """Return the value at the place of each visit [M, K, D]; zero for a visit that was left out."""
        return jnp.take(x_WPD.reshape(-1, x_WPD.shape[-1]), self.place_MK, axis=0, mode="fill", fill_value=0)


def sort_into_tiles(group_MK: jax.Array, num_groups: int, fewest: int | None = None) -> Tiling:
    """Sort visits by group, in order of rows within one. A visit to group `num_groups` is left out.

    `fewest` are the fewest places of a tile for a kernel, see `choose_tile_size`.
    """
    num_visits = group_MK.size
    num_tiles, places = get_tile_shape(num_visits, num_groups, fewest)
    group_J = group_MK.reshape(-1)
    order_J = jnp.argsort(group_J, stable=True)
    sorted_J = group_J[order_J]
    count_G = jnp.bincount(group_J, length=num_groups)
    tiles_G = (count_G + places - 1) // places
    until_G = jnp.cumsum(tiles_G)
    first_tile_G, first_visit_G = until_G - tiles_G, jnp.cumsum(count_G) - count_G
    place_J = first_tile_G[sorted_J] * places + jnp.arange(num_visits) - first_visit_G[sorted_J]
    place_J = jnp.where(sorted_J < num_groups, place_J, num_tiles * places)
    # On accelerators compared with all: a search in steps is a loop of small kernels, which take the time of their
    # starts. On CPU it stays a loop, as XLA fuses what follows otherwise, and rounds it otherwise.
    method = "scan" if fewest is None else "compare_all"
    group_W = jnp.searchsorted(until_G, jnp.arange(num_tiles), side="right", method=method)
    return Tiling(
        place_MK=jnp.zeros(num_visits, place_J.dtype).at[order_J].set(place_J).reshape(group_MK.shape),
        visit_WP=jnp.full(num_tiles * places, num_visits, order_J.dtype)
        .at[place_J]
        .set(order_J)
        .reshape(num_tiles, places),
        group_W=jnp.minimum(group_W, num_groups - 1),
        num_used=until_G[-1],
    )


def get_tile_shape(num_visits: int, num_groups: int, fewest: int | None = None) -> tuple[int, int]:
    """Return how many tiles the worst case needs, and the places of each."""
    places = choose_tile_size(num_visits, num_groups, fewest)
    return (num_visits + min(num_groups, num_visits) * (places - 1)) // places, places


def choose_tile_size(num_visits: int, num_groups: int, fewest: int | None = None) -> int:
    """Return how many places a tile has: at most half of what a group gets on average, or the fewest.

    With `fewest`, for a kernel that reads the matrix of a group where it is, at least twice of what a group gets: then
    most groups of few visits have one tile, and their matrices are read once.

    On CPU the size hardly matters: a loop of products of 16 to 128 places took 1.3 to 1.9 times as long as one product
    of equal size, and `lax.ragged_dot`, which multiplies every row with every group there, 30 times.
    """
    if fewest is not None:
        while fewest < MOST and fewest * num_groups < 2 * num_visits:
            fewest *= 2
        return fewest
    places = FEWEST
    while places < MOST and 4 * places * num_groups <= num_visits:
        places *= 2
    return places


def map_tiles(function: Callable[[Any], Any], tiling: Tiling, tiles: Any) -> Any:
    """Return `function` of each tile, stacked; `tiles` has leading W. Values of unused tiles are undefined."""
    tile = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tiles)
    shapes = jax.eval_shape(function, tile)
    num_tiles = tiling.group_W.shape[0]

    def run_in_sequence(num_used: jax.Array, tiles: Any) -> Any:
        def run_tile(i: jax.Array, into: Any) -> Any:
            result = function(jax.tree.map(lambda leaf: leaf[i], tiles))
            return jax.tree.map(lambda into, leaf: into.at[i].set(leaf), into, result)

        empty = jax.tree.map(lambda leaf: jnp.zeros((num_tiles, *leaf.shape), leaf.dtype), shapes)
        return jax.lax.fori_loop(0, num_used, run_tile, empty)

    def run_batched(num_used: jax.Array, tiles: Any) -> Any:
        return jax.lax.map(function, tiles, batch_size=min(TILES_AT_ONCE, num_tiles))

    return jax.lax.platform_dependent(tiling.num_used, tiles, cpu=run_in_sequence, default=run_batched)


def sum_by_index(x_W: jax.Array, index_W: jax.Array, num_used: jax.Array, size: int) -> jax.Array:
    """Return the sums of the leading dim by index, [size, ...], in one order on every run."""

    def sum_in_order(x_W: jax.Array, index_W: jax.Array, num_used: jax.Array) -> jax.Array:
        def add_tile(i: jax.Array, total: jax.Array) -> jax.Array:
            return total.at[index_W[i]].add(x_W[i])

        return jax.lax.fori_loop(0, num_used, add_tile, jnp.zeros((size, *x_W.shape[1:]), x_W.dtype))

    def sum_by_matmul(x_W: jax.Array, index_W: jax.Array, num_used: jax.Array) -> jax.Array:
        is_used_W = jnp.arange(index_W.shape[0]) < num_used
        belongs_XW = (index_W == jnp.arange(size)[:, None]) & is_used_W
        return jnp.tensordot(belongs_XW.astype(x_W.dtype), x_W, 1)

    return jax.lax.platform_dependent(x_W, index_W, num_used, cpu=sum_in_order, default=sum_by_matmul)


@dataclass(frozen=True, slots=True)
class AddedProducts:
    """Products of other rows [W, P, R] with other matrices [Y, R, O], added to the products of tiles, one for each."""

    x_WPR: jax.Array
    matrix_Y: jax.Array
    index_W: jax.Array
