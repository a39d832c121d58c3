"""Experts of a mixture: their parameters, the router, and their computation by tiles.

An expert has three linear maps, or only two (up and down) if it has no gate. Each map has LoRA
factors A [E, I, R] and B [E, R, O]. All experts may share the factor next to the hidden size, which
is A of gate and up, and B of down. A shared factor is [1, I, R] or [1, R, O].

A *visit* is a pair of a token and one of its experts. Visits are sorted by group into tiles of one
group each, so the cost of the products depends on the number of rows and not on the number of
groups. All data movement consists of gathers, forwards and backwards. The order of additions
therefore does not depend on the device, and the numbers of different rows never mix. There are as
many tiles as the worst case needs; on CPU only the used tiles are computed.

`layers.moe` has two ways to compute the experts: a few tiles at a time, with copies of their
matrices (`map_tiles`), or all tiles at once (`apply_experts`), with a kernel that multiplies each
tile with the matrix of its expert in place. The results agree up to rounding: with the kernel,
products are rounded to the type of the weights before biases and activations.

Legend: n layers of a stack, A adapter slots, L layers, E experts, M tokens, K experts of a token,
J = M * K visits, G groups (of experts in `route`, else of visits), W tiles, P rows of a tile, D
embed, F mlp, R rank, I inputs and O outputs of a map.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.kernels.registry import MultiplyTiles
from skyrl_tx.layers.lora import Adapter, ExpertMap, LoraPair, RowAdapter, RowSlots, multiply
from skyrl_tx.layers.parameter import Axis
from skyrl_tx.layers.remat import mark_matmul
from skyrl_tx.layers.stable_bits import apply_batch_invariant, sum_last_dim

MAP_NAMES = ("gate_proj", "up_proj", "down_proj")
MAP_AXES: Mapping[str, tuple[Axis | None, Axis | None]] = {
    "gate_proj": (None, "mlp"),
    "up_proj": (None, "mlp"),
    "down_proj": ("mlp", None),
}
"""Sharding of an expert's maps during the computation: F is sharded, D is whole."""
BIAS_AXES: Mapping[str, Axis | None] = {"gate_bias": "mlp", "up_bias": "mlp", "down_bias": None}
"""The biases of these maps, with their sharding."""
MIN_TILE_ROWS, MAX_TILE_ROWS = 8, 128
TILES_AT_ONCE = 32
"""Tiles that accelerators compute at once without a kernel. Bounds the weights gathered for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """The activation of gpt-oss: (up + 1) * gate * sigmoid(slope * gate), clamped.

    The gate is at most `limit`, and |up| is at most `limit`.
    """

    limit: float
    slope: float


@struct.dataclass
class ExpertWeights:
    """The maps of all experts of a layer, their biases, and the activation between them.

    With `layer`, the maps hold all layers of a stack, [n, E, ...]. A kernel reads them in place.
    """

    gate_proj: jax.Array | None  # [E, D, F]; None: the activation is relu(up) squared
    up_proj: jax.Array  # [E, D, F]
    down_proj: jax.Array  # [E, F, D]
    gate_bias: jax.Array | None = None  # [E, F]
    up_bias: jax.Array | None = None  # [E, F]
    down_bias: jax.Array | None = None  # [E, D]
    layer: jax.Array | None = None
    clamp: Clamp | None = struct.field(pytree_node=False, default=None)  # None: the activation is silu(gate) * up

    @property
    def num_experts(self) -> int:
        """The number of experts of a layer."""
        return self.down_proj.shape[-3]

    @property
    def biases(self) -> dict[str, jax.Array | None]:
        """The biases by the names of their maps."""
        return {"gate_proj": self.gate_bias, "up_proj": self.up_bias, "down_proj": self.down_bias}

    @property
    def maps(self) -> dict[str, jax.Array]:
        """The maps that the experts have, by name, in the order of MAP_NAMES."""
        return {name: leaf for name in MAP_NAMES if (leaf := getattr(self, name)) is not None}


@struct.dataclass
class ExpertAdapters:
    """The adapters of one layer's experts: one adapter for all rows or, with `slots`, a pool.

    In a pool, a row with adapter slot a uses the factors of expert e at `[a, layer, e]`.
    """

    pairs: Mapping[str, LoraPair]  # by map: [E, I, R] and [E, R, O], or [A, L, E, ...]; E is 1 for a shared factor
    scale: jax.Array  # scalar, or [A]
    slots: RowSlots | None = None
    layer: jax.Array | int = 0


def get_expert_adapters(rows: Mapping[str, RowAdapter], prefix: str) -> ExpertAdapters:
    """Return the adapters of the experts for a single adapter that all rows share."""
    mapped = {name: rows[prefix + name] for name in MAP_NAMES if prefix + name in rows}
    scale = next(row.scale for row in mapped.values())
    return ExpertAdapters(pairs={name: row.pair for name, row in mapped.items()}, scale=scale)


def get_pooled_expert_adapters(adapter: Adapter, prefix: str, slots: RowSlots, layer: jax.Array) -> ExpertAdapters:
    """Return the adapters of one layer's experts in a pool, without a copy."""
    pairs = {name: adapter.weights[prefix + name] for name in MAP_NAMES if prefix + name in adapter.weights}
    return ExpertAdapters(pairs=pairs, scale=adapter.scale, slots=slots, layer=layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The settings of a router."""

    num_experts: int
    num_chosen: int  # experts per token
    renormalizes: bool  # whether the shares of the chosen experts sum to 1
    scores: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1  # groups of consecutive experts, all of the same size
    num_chosen_groups: int = 1  # groups per token: those with the highest sum of their two best scores
    factor: float = 1.0  # multiplies the shares


def route(
    x_MD: jax.Array,
    router_ED: jax.Array,
    routing: Routing,
    bias_E: jax.Array | None = None,
    correction_E: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the share and the number of each chosen expert, [M, K], the first choice first.

    `correction_E` is added to the scores for the choice only, not for the shares (Wang et al. 2024,
    arXiv:2408.15664).
    """
    score_ME = mark_matmul(multiply(x_MD, router_ED.T))
    if bias_E is not None:
        score_ME += bias_E.astype(jnp.float32)
    share_ME = (
        apply_batch_invariant(jax.nn.softmax, score_ME) if routing.scores == "softmax" else jax.nn.sigmoid(score_ME)
    )

    if correction_E is None and routing.num_groups == 1:
        share_MK, expert_MK = jax.lax.top_k(share_ME, routing.num_chosen)
    else:
        choice_ME = jax.lax.stop_gradient(share_ME if correction_E is None else share_ME + correction_E)
        _, expert_MK = jax.lax.top_k(_mask_other_groups(choice_ME, routing), routing.num_chosen)
        share_MK = jnp.take_along_axis(share_ME, expert_MK, axis=-1)

    if routing.renormalizes:
        share_MK = share_MK / sum_last_dim(share_MK)[..., None]
    return share_MK if routing.factor == 1 else share_MK * routing.factor, expert_MK


def count_visits(expert_MK: jax.Array, uses_M: jax.Array, num_experts: int) -> jax.Array:
    """Return how many tokens chose each expert, int32 [E]. Token m counts `uses_M[m]` times."""
    return jnp.zeros(num_experts, jnp.int32).at[expert_MK].add(uses_M[:, None])


def _mask_other_groups(score_ME: jax.Array, routing: Routing) -> jax.Array:
    """Return the scores, with minus infinity for experts outside a token's chosen groups."""
    if routing.num_groups == 1:
        return score_ME
    score_MGE = score_ME.reshape(score_ME.shape[0], routing.num_groups, -1)
    best_MG2, _ = jax.lax.top_k(score_MGE, 2)
    _, group_MK = jax.lax.top_k(best_MG2.sum(axis=-1), routing.num_chosen_groups)
    is_chosen_MG = (group_MK[:, :, None] == jnp.arange(routing.num_groups)).any(axis=1)
    return jnp.where(is_chosen_MG[:, :, None], score_MGE, -jnp.inf).reshape(score_ME.shape)


@struct.dataclass
class Tiling:
    """The row of each visit. Unused tiles have valid but meaningless group numbers."""

    row_MK: jax.Array  # of each visit, among all W * P rows
    visit_WP: jax.Array  # in each row; J if the row is empty
    group_W: jax.Array
    num_used: jax.Array  # tiles in use, which come first

    def gather_rows(self, x_MD: jax.Array) -> jax.Array:
        """Return the tokens of the visits in tiles [W, P, D]; empty rows are zero."""
        return jnp.take(x_MD, self.visit_WP // self.row_MK.shape[1], axis=0, mode="fill", fill_value=0)

    def gather_visits(self, x_MKD: jax.Array) -> jax.Array:
        """Return values of visits in tiles [W, P, D]; empty rows are zero."""
        return jnp.take(x_MKD.reshape(-1, x_MKD.shape[-1]), self.visit_WP, axis=0, mode="fill", fill_value=0)

    def collect_visits(self, x_WPD: jax.Array) -> jax.Array:
        """Return the value of each visit [M, K, D]; zero for a visit that was left out."""
        return jnp.take(x_WPD.reshape(-1, x_WPD.shape[-1]), self.row_MK, axis=0, mode="fill", fill_value=0)


def sort_into_tiles(group_MK: jax.Array, num_groups: int, min_tile_rows: int | None = None) -> Tiling:
    """Sort visits by group, and by token within a group. A visit to group `num_groups` is left out.

    `min_tile_rows` is the smallest tile of the kernel that reads the tiles, see `choose_tile_size`.
    """
    num_visits = group_MK.size
    num_tiles, tile_rows = get_tile_shape(num_visits, num_groups, min_tile_rows)

    # Count the visits and the tiles of each group, and place each visit.
    group_J = group_MK.reshape(-1)
    order_J = jnp.argsort(group_J, stable=True)
    sorted_J = group_J[order_J]
    count_G = jnp.bincount(group_J, length=num_groups)
    tiles_G = (count_G + tile_rows - 1) // tile_rows
    until_G = jnp.cumsum(tiles_G)
    first_tile_G, first_visit_G = until_G - tiles_G, jnp.cumsum(count_G) - count_G
    row_J = first_tile_G[sorted_J] * tile_rows + jnp.arange(num_visits) - first_visit_G[sorted_J]
    row_J = jnp.where(sorted_J < num_groups, row_J, num_tiles * tile_rows)

    # Accelerators compare with all groups, because a binary search would be a loop of tiny kernels.
    # CPU searches, because XLA would otherwise fuse the next operations and round differently.
    method = "scan" if min_tile_rows is None else "compare_all"
    group_W = jnp.searchsorted(until_G, jnp.arange(num_tiles), side="right", method=method)
    return Tiling(
        row_MK=jnp.zeros(num_visits, row_J.dtype).at[order_J].set(row_J).reshape(group_MK.shape),
        visit_WP=jnp.full(num_tiles * tile_rows, num_visits, order_J.dtype)
        .at[row_J]
        .set(order_J)
        .reshape(num_tiles, tile_rows),
        group_W=jnp.minimum(group_W, num_groups - 1),
        num_used=until_G[-1],
    )


def get_tile_shape(num_visits: int, num_groups: int, min_tile_rows: int | None = None) -> tuple[int, int]:
    """Return the number of tiles in the worst case, and the rows of each tile."""
    tile_rows = choose_tile_size(num_visits, num_groups, min_tile_rows)
    return (num_visits + min(num_groups, num_visits) * (tile_rows - 1)) // tile_rows, tile_rows


def choose_tile_size(num_visits: int, num_groups: int, min_tile_rows: int | None = None) -> int:
    """Return the number of rows of a tile, a power of two.

    Without a kernel, this is at most half of the average number of visits of a group, but at least
    MIN_TILE_ROWS. On CPU the size hardly matters: a loop of products of 16 to 128 rows took 1.3 to
    1.9 times as long as one product of equal size, and `lax.ragged_dot`, which multiplies every row
    with every group there, took 30 times as long.

    With `min_tile_rows`, for a kernel that reads the matrix of a group in place, it is at least
    twice the average number of visits, up to MAX_TILE_ROWS. Most groups of few visits then have one
    tile, so their matrices are read once.
    """
    if min_tile_rows is not None:
        tile_rows = min_tile_rows
        while tile_rows < MAX_TILE_ROWS and tile_rows * num_groups < 2 * num_visits:
            tile_rows *= 2
        return tile_rows

    tile_rows = MIN_TILE_ROWS
    while tile_rows < MAX_TILE_ROWS and 4 * tile_rows * num_groups <= num_visits:
        tile_rows *= 2
    return tile_rows


def map_tiles(function: Callable[[Any], Any], tiling: Tiling, tiles: Any) -> Any:
    """Apply `function` to each tile and stack the results. Results of unused tiles are undefined.

    The leaves of `tiles` have a leading W.
    """
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
    """Sum the leading dim by index, [size, ...], in the same order on every run."""

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
    """Products of rows [W, P, R] with matrices [Y, R, O], which are added to the products of tiles."""

    x_WPR: jax.Array
    matrix_Y: jax.Array
    index_W: jax.Array


@dataclass(frozen=True, slots=True)
class TiledMap:
    """One linear map of all experts with its adapters: x -> x W + scale (x A) B for each tile.

    As in `ExpertMap`, the caller passes x A if A is shared by all experts, and gets
    scale (x A) back if B is shared.
    """

    multiply: MultiplyTiles
    num_used: jax.Array
    matrix_XIO: jax.Array
    """The matrices of the map, of all experts and possibly of all layers."""
    matrix_W: jax.Array
    """The matrix of each tile."""
    a: jax.Array | None
    b: jax.Array | None
    """Both factors have rank 0 if there is no adapter. A shared factor is None."""
    adapter_W: jax.Array
    scale_W: jax.Array

    def apply(self, x_WPI: jax.Array, inner_WPR: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Return the map of `x` in the weights' type, and scale (x A) if B is shared."""
        h_WPR = self._compute_inner(x_WPI, inner_WPR)
        added = None if self.b is None else self._make_added(h_WPR, self.b)
        y_WPO = self._multiply_tiles(x_WPI, self.matrix_XIO, self.matrix_W, added, out_dtype=self.matrix_XIO.dtype)
        return y_WPO, h_WPR if self.b is None else None

    def compute_gradient(
        self, x_WPI: jax.Array, inner_WPR: jax.Array | None, d_y_WPO: jax.Array, d_outer_WPR: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, LoraPair]:
        """Return the gradients of `x`, of `inner`, and of each tile's factors.

        The gradient of `x` is in the weights' type, the other gradients are float32.
        """
        dtype, a, b = self.matrix_XIO.dtype, self.a, self.b
        if b is not None:
            d_outer_WPR = self._multiply_factor(d_y_WPO, b, transposed=True)
        assert d_outer_WPR is not None, "the gradient of scale (x A) must be given without B"
        d_h_WPR = d_outer_WPR * self.scale_W[:, None, None]
        added = None if a is None else self._make_added(d_h_WPR, a)
        d_x_WPI = self._multiply_tiles(d_y_WPO, self.matrix_XIO, self.matrix_W, added, transposed=True, out_dtype=dtype)
        d_b = None if b is None else _sum_outer_products(self._compute_inner(x_WPI, inner_WPR), d_y_WPO, dtype)
        if a is None:
            return d_x_WPI, d_h_WPR, LoraPair(a=None, b=d_b)  # type: ignore[arg-type]
        return d_x_WPI, None, LoraPair(a=_sum_outer_products(x_WPI, d_h_WPR, dtype), b=d_b)  # type: ignore[arg-type]

    def _compute_inner(self, x_WPI: jax.Array, inner_WPR: jax.Array | None) -> jax.Array:
        if self.a is not None:
            inner_WPR = self._multiply_factor(x_WPI, self.a)
        assert inner_WPR is not None, "x A must be given without A"
        return inner_WPR * self.scale_W[:, None, None]

    def _make_added(self, narrow_WPR: jax.Array, factor: jax.Array) -> AddedProducts | None:
        return AddedProducts(narrow_WPR, factor, self.adapter_W) if narrow_WPR.shape[-1] else None

    def _multiply_factor(self, x_WPI: jax.Array, factor: jax.Array, *, transposed: bool = False) -> jax.Array:
        """Return the product with a factor of the adapter, float32 [W, P, R]."""
        rank = factor.shape[1 if transposed else 2]
        if rank == 0:
            return jnp.zeros((*x_WPI.shape[:2], 0), jnp.float32)
        x_WPI = x_WPI.astype(self.matrix_XIO.dtype)
        return self._multiply_tiles(x_WPI, factor, self.adapter_W, None, transposed=transposed, out_dtype=jnp.float32)

    def _multiply_tiles(
        self, x_WPI: jax.Array, matrices: jax.Array, index_W: jax.Array, added: AddedProducts | None, **settings: Any
    ):
        return self.multiply(x_WPI, matrices, index_W, self.num_used, added, **settings)


def _sum_outer_products(x_WPI: jax.Array, y_WPO: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the sum of outer products over the rows of each tile, float32 [W, I, O].

    They are multiplied in `dtype`.
    """
    return jnp.einsum("wpi,wpo->wio", x_WPI.astype(dtype), y_WPO.astype(dtype), preferred_element_type=jnp.float32)


Activate = Callable[..., jax.Array]
"""A float32 function of the outputs of gate and up, or of up alone."""


def apply_experts(
    maps: Mapping[str, TiledMap] | Mapping[str, ExpertMap],
    add_bias: Callable[[str, jax.Array], jax.Array],
    activate: Activate,
    x_WPD: jax.Array,
    inner: Mapping[str, jax.Array],
) -> tuple[tuple[jax.Array, jax.Array | None], tuple[jax.Array, ...]]:
    """Compute the experts of all tiles, or of one tile.

    With an `ExpertMap` for each map, all arrays are of one tile and lack the leading W. Products
    are then not rounded before biases and activations.

    Args:
        maps: The maps by name; the last is down.
        add_bias: Adds the bias of a map, given its name and outputs.
        activate: The activation.
        x_WPD: The tokens in tiles.
        inner: Their products with shared A factors, by map.

    Returns:
        A pair of the outputs [W, P, D] and scale (x A) [W, P, R], which is None unless experts
        share B of down; and the outputs [W, P, F] of the other maps for the backward pass.
    """
    *others, (last, down) = maps.items()
    mapped = tuple(add_bias(name, tiled_map.apply(x_WPD, inner.get(name))[0]) for name, tiled_map in others)
    y_WPD, outer_WPR = down.apply(activate(*_to_float32(mapped)).astype(x_WPD.dtype), None)
    return (add_bias(last, y_WPD), outer_WPR), mapped


def compute_gradients(
    maps: Mapping[str, TiledMap] | Mapping[str, ExpertMap],
    activate: Activate,
    x_WPD: jax.Array,
    inner: Mapping[str, jax.Array],
    mapped: tuple[jax.Array, ...],
    share_WP: jax.Array,
    d_y_WPD: jax.Array,
    d_outer_WPR: jax.Array | None,
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], jax.Array, dict[str, LoraPair]]:
    """Return the gradients of tokens and `inner`, of the shares, and of each tile's factors by map.

    Maps are as in `apply_experts`.

    `d_y` and `d_outer` are the gradients of the weighted sums of a token's experts. Let z be the
    input of down, and g the gradient of z for a share of 1. Then the gradient of a share is the sum
    of z g over F, apart from biases, which the caller adds.
    """
    *others, (last, down) = maps.items()
    z_WPF, pull = jax.vjp(activate, *_to_float32(mapped))
    weighted_WPF = (share_WP[..., None] * z_WPF).astype(x_WPD.dtype)
    g_WPF, _, d_down = down.compute_gradient(weighted_WPF, None, d_y_WPD, d_outer_WPR)
    g_WPF = g_WPF.astype(jnp.float32)
    d_share_WP = (z_WPF * g_WPF).sum(axis=-1)

    d_x, d_inner, d_pairs = list[jax.Array](), dict[str, jax.Array](), dict[str, LoraPair]()
    for (name, tiled_map), d_WPF in zip(others, pull(share_WP[..., None] * g_WPF), strict=True):
        by_map_WPD, d_WPR, d_pairs[name] = tiled_map.compute_gradient(
            x_WPD, inner.get(name), d_WPF.astype(x_WPD.dtype), None
        )
        d_x.append(by_map_WPD.astype(jnp.float32))
        if d_WPR is not None:
            d_inner[name] = d_WPR
    return (reduce(jnp.add, d_x).astype(x_WPD.dtype), d_inner), d_share_WP, {**d_pairs, last: d_down}


def _to_float32(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x.astype(jnp.float32) for x in arrays)
