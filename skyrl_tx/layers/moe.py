"""A mixture of experts: a router sends each token to a few of many feed-forwards (Shazeer et al., arXiv:1701.06538).

Legend: M tokens, D embed, E experts, K experts of a token, F mlp, W tiles, P places of a tile, R rank, X adapters of
experts: E of the one adapter, or A * L * E of a pool.

Each expert has adapters of its own: A [E, I, R] and B [E, R, O] for each of its three maps, of the adapter's rank. A
tile holds tokens of one expert *and one adapter*, so that tenants do not meet even inside a product.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.lora import AdaptedMap, Adapter, LoraPair, RowAdapter, multiply
from skyrl_tx.layers.tiles import Tiling, arrange, each_tile, sum_by_index

MAPS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router chooses."""

    num_experts: int
    num_chosen: int  # of each token
    renormalizes: bool  # whether the weights of the chosen sum to 1


@struct.dataclass
class ExpertWeights:
    """The maps of all experts of a layer."""

    gate_proj: jax.Array  # [E, D, F]
    up_proj: jax.Array  # [E, D, F]
    down_proj: jax.Array  # [E, F, D]


@struct.dataclass
class ExpertAdapters:
    """The adapters of one layer's experts.

    Of one adapter for all rows, `place_G` is None and X is E. Of a pool, a row of group g finds that of expert e at
    `(place_G[g] * L + layer) * E + e`.
    """

    pairs: Mapping[str, LoraPair]  # of MAPS: [X, I, R] and [X, R, O]
    scale: jax.Array  # scalar, or [A]
    place_G: jax.Array | None = None
    layer: jax.Array | int = 0
    num_layers: int = struct.field(pytree_node=False, default=1)


def share_experts(rows: Mapping[str, RowAdapter], prefix: str) -> ExpertAdapters | None:
    """Return the adapters of the experts, of the one adapter that all rows share; None of None."""
    if not rows:
        return None
    found = {name: rows[prefix + name] for name in MAPS}
    return ExpertAdapters(pairs={name: row.pair for name, row in found.items()}, scale=found[MAPS[0]].scale)


def pool_experts(adapter: Adapter, prefix: str, place_G: jax.Array, layer: jax.Array) -> ExpertAdapters:
    """Return the adapters of one layer's experts in a pool, of which nothing is copied."""
    pairs = {name: adapter.weights[prefix + name] for name in MAPS}
    num_layers = pairs[MAPS[0]].a.shape[1]
    flat = {name: jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[-2:]), pair) for name, pair in pairs.items()}
    return ExpertAdapters(pairs=flat, scale=adapter.scale, place_G=place_G, layer=layer, num_layers=num_layers)


def mixture(
    x: jax.Array, router_ED: jax.Array, weights: ExpertWeights, adapters: ExpertAdapters | None, routing: Routing
) -> jax.Array:
    """Return the weighted sum of what each token's experts make of it: float32, in the shape of `x` [..., D]."""
    x_MD = x.reshape(-1, x.shape[-1])
    share_MK, expert_MK = route(x_MD, router_ED, routing)
    num_groups = routing.num_experts
    group_MK = expert_MK
    if adapters is not None and adapters.place_G is not None:
        place_M = jnp.repeat(adapters.place_G, x_MD.shape[0] // adapters.place_G.shape[0])
        group_MK = place_M[:, None] * num_groups + expert_MK
        num_groups *= adapters.scale.shape[0]
    tiling = arrange(group_MK, num_groups)
    tiles = _adapters_of_tiles(weights, adapters, tiling, routing.num_experts)
    y_MKD = _experts(x_MD, weights, tiles.pairs, tiles.indices, tiling)
    return (share_MK[..., None] * y_MKD).sum(axis=1).reshape(x.shape)


def route(x_MD: jax.Array, router_ED: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Return the share and the number of each chosen expert, [M, K], the largest share first."""
    share_ME = jax.nn.softmax(multiply(x_MD, router_ED.T), axis=-1)
    share_MK, expert_MK = jax.lax.top_k(share_ME, routing.num_chosen)
    if routing.renormalizes:
        share_MK = share_MK / share_MK.sum(axis=-1, keepdims=True)
    return share_MK, expert_MK


@struct.dataclass
class _TileIndices:
    """What each tile reads."""

    expert_W: jax.Array
    adapter_W: jax.Array  # among X
    scale_W: jax.Array


@struct.dataclass
class _TileAdapters:
    pairs: dict[str, LoraPair]
    indices: _TileIndices


def _adapters_of_tiles(
    weights: ExpertWeights, adapters: ExpertAdapters | None, tiling: Tiling, num_experts: int
) -> _TileAdapters:
    expert_W = tiling.group_W % num_experts
    if adapters is None:  # of rank 0: products with nothing are zero, and no program computes them
        pairs = {name: _nothing(getattr(weights, name)) for name in MAPS}
        zeros_W = jnp.zeros_like(expert_W)
        return _TileAdapters(pairs, _TileIndices(expert_W, zeros_W, zeros_W.astype(jnp.float32)))
    if adapters.place_G is None:
        scale_W = jnp.broadcast_to(adapters.scale, expert_W.shape)
        return _TileAdapters(dict(adapters.pairs), _TileIndices(expert_W, expert_W, scale_W))
    place_W = tiling.group_W // num_experts
    adapter_W = (place_W * adapters.num_layers + adapters.layer) * num_experts + expert_W
    return _TileAdapters(dict(adapters.pairs), _TileIndices(expert_W, adapter_W, adapters.scale[place_W]))


def _nothing(weight_EIO: jax.Array) -> LoraPair:
    _, inputs, outputs = weight_EIO.shape
    return LoraPair(a=jnp.zeros((1, inputs, 0)), b=jnp.zeros((1, 0, outputs)))


def _maps(
    weights: ExpertWeights, pairs: Mapping[str, LoraPair], expert: jax.Array, adapter: jax.Array, scale: jax.Array
) -> list[AdaptedMap]:
    """Return the three maps of one tile."""
    found: list[AdaptedMap] = []
    for name in MAPS:
        weight_IO = getattr(weights, name)[expert]
        pair = jax.tree.map(lambda leaf, dtype=weight_IO.dtype: leaf[adapter].astype(dtype), pairs[name])
        found.append(AdaptedMap(weight_IO=weight_IO, pair=pair, scale=scale, is_merged=False))
    return found


def _gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


@jax.custom_vjp
def _experts(
    x_MD: jax.Array, weights: ExpertWeights, pairs: dict[str, LoraPair], indices: _TileIndices, tiling: Tiling
) -> jax.Array:
    """Return what each chosen expert makes of each token, [M, K, D]."""
    return _experts_forward(x_MD, weights, pairs, indices, tiling)[0]


def _experts_forward(
    x_MD: jax.Array, weights: ExpertWeights, pairs: dict[str, LoraPair], indices: _TileIndices, tiling: Tiling
):
    def one(tile: tuple[jax.Array, _TileIndices]) -> tuple[jax.Array, jax.Array, jax.Array]:
        x_PD, of = tile
        gate, up, down = _maps(weights, pairs, of.expert_W, of.adapter_W, of.scale_W)
        gate_PF, up_PF = gate.product(x_PD), up.product(x_PD)
        return down.product(_gate(gate_PF, up_PF)), gate_PF, up_PF

    y_WPD, gate_WPF, up_WPF = each_tile(one, tiling, (tiling.gather(x_MD), indices))
    return tiling.take_back(y_WPD), (x_MD, weights, pairs, indices, tiling, gate_WPF, up_WPF)


def _experts_backward(kept, d_y_MKD: jax.Array):
    """The gradient by tokens and by the adapters' factors; the weights and scales are constants."""
    x_MD, weights, pairs, indices, tiling, gate_WPF, up_WPF = kept

    def one(tile) -> tuple[jax.Array, dict[str, LoraPair]]:
        x_PD, d_y_PD, gate_PF, up_PF, of = tile
        gate, up, down = _maps(weights, pairs, of.expert_W, of.adapter_W, of.scale_W)
        inner_PF, pull = jax.vjp(_gate, gate_PF, up_PF)
        d_inner_PF, d_down = down.gradient(inner_PF, d_y_PD)
        d_gate_PF, d_up_PF = pull(d_inner_PF)
        by_gate_PD, d_gate = gate.gradient(x_PD, d_gate_PF)
        by_up_PD, d_up = up.gradient(x_PD, d_up_PF)
        return by_gate_PD + by_up_PD, dict(zip(MAPS, (d_gate, d_up, d_down), strict=True))

    rows = (tiling.gather(x_MD), tiling.gather_visits(d_y_MKD), gate_WPF, up_WPF, indices)
    d_x_WPD, d_pairs_W = each_tile(one, tiling, rows)
    d_pairs = jax.tree.map(
        lambda d, leaf: sum_by_index(d, indices.adapter_W, tiling.num_used, leaf.shape[0]), d_pairs_W, pairs
    )
    return tiling.take_back(d_x_WPD).sum(axis=1), None, d_pairs, None, None


_experts.defvjp(_experts_forward, _experts_backward)
