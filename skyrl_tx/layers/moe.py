"""Mixture of experts: a router sends each token to a few of many feed-forwards (arXiv:1701.06538).

Shazeer et al. 2017. `experts` has the parameters, the router and the tiles.

The products of LoRA factors that all experts share are computed once per token: before tokens go to
experts, and after the outputs of experts are summed.

The rows that an expert reads are sorted into tiles. A tile holds rows of one expert *and one
adapter*, so that tenants do not meet even inside a product.

Legend: M tokens, D embed, E experts, K experts of a token, F mlp, W tiles, P rows of a tile, R
rank, X adapters of experts: E for a single adapter, or A * L * E for a pool.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from skyrl_tx.layers.experts import (
    BIAS_AXES,
    MAP_AXES,
    MAP_NAMES,
    TILES_AT_ONCE,
    Clamp,
    ExpertAdapters,
    ExpertWeights,
    Routing,
    TiledMap,
    Tiling,
    apply_experts,
    compute_gradients,
    get_tile_shape,
    map_tiles,
    route,
    sort_into_tiles,
    sum_by_index,
)
from skyrl_tx.layers.kernels.registry import NO_KERNELS, Kernels, MultiplyTiles
from skyrl_tx.layers.lora import ExpertMap, LoraPair, multiply_factor, multiply_groups
from skyrl_tx.layers.parameter import Axis
from skyrl_tx.layers.remat import mark_matmul
from skyrl_tx.layers.sharding import UNSHARDED, Layout
from skyrl_tx.layers.stable_bits import apply_batch_invariant


@struct.dataclass
class _Visits:
    """Tokens as experts read them, with their chosen experts, shares and adapter slots.

    `inner` has the products of the tokens with the shared A factors, by map.
    """

    x_MD: jax.Array
    share_MK: jax.Array
    expert_MK: jax.Array
    slot_M: jax.Array | None  # None without a pool
    inner: Mapping[str, jax.Array]  # [M, R]


def apply_mixture(
    x: jax.Array,
    router_ED: jax.Array,
    weights: ExpertWeights,
    adapters: ExpertAdapters | None,
    routing: Routing,
    layout: Layout = UNSHARDED,
    router_bias_E: jax.Array | None = None,
    correction_E: jax.Array | None = None,
    latent: jax.Array | None = None,
    kernels: Kernels = NO_KERNELS,
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of each token's expert outputs, and the chosen experts [M, K].

    The sum is float32 in the shape of `x` [..., D]. With `latent`, the experts read `latent` and
    the router reads `x`. Outputs then have the shape of `latent`.
    """
    x_MD = x.reshape(-1, x.shape[-1])
    shape = x.shape if latent is None else latent.shape
    read_MD = x_MD if latent is None else latent.reshape(-1, shape[-1])
    slot_M, group_M, dtype = None, None, weights.down_proj.dtype

    # Split off the factors that all experts share.
    shared_a, shared_b = dict[str, jax.Array](), dict[str, jax.Array]()
    if adapters is not None:
        adapters, shared_a, shared_b = _split_shared_factors(adapters, routing.num_experts)
        if (slots := adapters.slots) is not None:
            slot_M, group_M = slots.expand_to_rows(x_MD.shape[0]), slots.group_M
            adapters = adapters.replace(slots=None)  # type: ignore[attr-defined]
    inner = {name: mark_matmul(_multiply_rows(read_MD, factor, group_M, dtype)) for name, factor in shared_a.items()}

    # Tokens and outputs are moved in the type of the weights, which experts read and return. Sums
    # are float32.
    visits = _Visits(
        read_MD.astype(dtype), *route(x_MD, router_ED, routing, router_bias_E, correction_E), slot_M, inner
    )
    sums = partial(_sum_on_each_device, layout) if layout.is_sharded else _sum_experts
    y_MD, outer_MR = sums(kernels, visits, weights, adapters)
    if outer_MR is not None:
        y_MD = y_MD + _multiply_rows(outer_MR, shared_b["down_proj"], group_M, dtype)
    return y_MD.reshape(shape), visits.expert_MK


def _split_shared_factors(
    adapters: ExpertAdapters, num_experts: int
) -> tuple[ExpertAdapters, dict[str, jax.Array], dict[str, jax.Array]]:
    """Split off the factors that all experts share. Returns (adapters, shared A, shared B).

    The adapters have None for shared factors. The shared factors are by map, [I, R] and [R, O]; for
    a pool they have a leading G, as in `RowAdapter`.
    """

    def is_shared(leaf: jax.Array) -> bool:
        return num_experts > 1 and leaf.shape[-3] == 1

    def select_factor(leaf: jax.Array) -> jax.Array:
        return leaf[0] if adapters.slots is None else leaf[adapters.slots.slot_G, adapters.layer, 0]

    pairs = adapters.pairs.items()
    shared_a = {name: select_factor(pair.a) for name, pair in pairs if is_shared(pair.a)}
    shared_b = {name: select_factor(pair.b) for name, pair in pairs if is_shared(pair.b)}
    own = {
        name: LoraPair(a=None if name in shared_a else pair.a, b=None if name in shared_b else pair.b)  # type: ignore[arg-type]
        for name, pair in pairs
    }
    return adapters.replace(pairs=own), shared_a, shared_b  # type: ignore[attr-defined]


def _multiply_rows(x_MI: jax.Array, factor: jax.Array, group_M: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Return rows times one factor [I, O], or times one factor per group of rows [G, I, O].

    They are multiplied in `dtype`.
    """
    if factor.ndim == 2:
        return multiply_factor(x_MI, factor, dtype)
    return multiply_groups(x_MI, factor.astype(dtype), group_M)


def _sum_on_each_device(
    layout: Layout, kernels: Kernels, visits: _Visits, weights: ExpertWeights, adapters: ExpertAdapters | None
) -> tuple[jax.Array, jax.Array | None]:
    """Compute `_sum_experts` on a mesh: each device computes its experts, and the sums are added.

    A device has all tokens that may go to its experts, and ignores visits to other experts. No
    token is ever dropped.
    """
    assert layout.mesh is not None
    num_shards, num_experts = layout.num_shards("expert"), weights.num_experts
    summed_over = layout.mesh_axes("expert") + layout.mesh_axes("mlp")

    def sum_local(
        visits: _Visits, weights: ExpertWeights, adapters: ExpertAdapters | None
    ) -> tuple[jax.Array, jax.Array | None]:
        first = jax.lax.axis_index(layout.mesh_axes("expert")) * (num_experts // num_shards)
        here = visits.replace(expert_MK=visits.expert_MK - first)  # type: ignore[attr-defined]
        if weights.down_bias is not None:  # F is sharded over "mlp" and summed, so only one shard adds the bias
            is_first = jax.lax.axis_index(layout.mesh_axes("mlp")) == 0
            weights = weights.replace(down_bias=jnp.where(is_first, weights.down_bias, 0))  # type: ignore[attr-defined]
        return jax.lax.psum(_sum_experts(kernels, here, weights, adapters), summed_over)

    def get_token_spec(leaf: jax.Array) -> PartitionSpec:
        return layout.spec(("expert_batch", *[None] * (leaf.ndim - 1)), leaf.shape)

    def get_map_spec(leaf: jax.Array | None, *axes: Axis | None) -> PartitionSpec | None:
        return None if leaf is None else layout.spec((*[None] * (leaf.ndim - 3), "expert", *axes), leaf.shape)

    def get_bias_spec(leaf: jax.Array | None, axis: Axis | None) -> PartitionSpec | None:
        return None if leaf is None else layout.spec(("expert", axis), leaf.shape)

    weight_specs = weights.replace(  # type: ignore[attr-defined]
        **{name: get_map_spec(leaf, *MAP_AXES[name]) for name, leaf in weights.maps.items()},
        **{name: get_bias_spec(getattr(weights, name), axis) for name, axis in BIAS_AXES.items()},
        layer=None if weights.layer is None else PartitionSpec(),
    )

    # Specs of the adapters.
    adapter_specs = None
    if adapters is not None:
        pairs = {
            name: LoraPair(
                a=get_map_spec(pair.a, MAP_AXES[name][0], None),  # type: ignore[arg-type]
                b=get_map_spec(pair.b, None, MAP_AXES[name][1]),  # type: ignore[arg-type]
            )
            for name, pair in adapters.pairs.items()
        }
        adapter_specs = ExpertAdapters(pairs=pairs, scale=PartitionSpec(), layer=PartitionSpec())  # type: ignore[arg-type]
        adapters = adapters.replace(layer=jnp.asarray(adapters.layer))  # type: ignore[attr-defined]

    # Values that a spec replicates are equal on all devices only because of the sum, which JAX
    # cannot check.
    run = jax.shard_map(
        sum_local,
        mesh=layout.mesh,
        in_specs=(jax.tree.map(get_token_spec, visits), weight_specs, adapter_specs),
        out_specs=get_token_spec(visits.x_MD),
        check_vma=False,
    )
    return run(visits, weights, adapters)


def _sum_experts(
    kernels: Kernels, visits: _Visits, weights: ExpertWeights, adapters: ExpertAdapters | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the weighted sum of the outputs of these experts for each token, [M, D].

    Experts of other devices count as zero. If the experts share B of down, also returns the
    weighted sum [M, R] that it has to be multiplied with.
    """
    num_experts = weights.num_experts
    num_groups, group_MK = num_experts, visits.expert_MK
    if visits.slot_M is not None:
        assert adapters is not None
        group_MK = visits.slot_M[:, None] * num_experts + group_MK
        num_groups *= adapters.scale.shape[0]
    is_here_MK = (visits.expert_MK >= 0) & (visits.expert_MK < num_experts)
    min_tile_rows = None if kernels.experts is None else kernels.experts.min_tile_rows
    # Marked like products, so that the backward pass keeps the tiling instead of sorting again.
    tiling = sort_into_tiles(jnp.where(is_here_MK, group_MK, num_groups), num_groups, min_tile_rows)
    tiling = jax.tree.map(mark_matmul, tiling)
    pairs, indices = _assign_adapters(weights, adapters, tiling, num_experts)
    return _run_experts(kernels, (visits.x_MD, visits.inner), visits.share_MK, weights, pairs, indices, tiling)


@struct.dataclass
class _TileIndices:
    """The expert and the adapter of each tile."""

    expert_W: jax.Array
    adapter_W: jax.Array  # among X: E for a single adapter, or A * L * E for a pool
    scale_W: jax.Array


def _assign_adapters(
    weights: ExpertWeights, adapters: ExpertAdapters | None, tiling: Tiling, num_experts: int
) -> tuple[dict[str, LoraPair], _TileIndices]:
    """Return the adapters of all experts by map, and the indices of each tile."""
    expert_W = tiling.group_W % num_experts
    if adapters is None:  # rank 0: products over an empty dim are zero, and no program computes them
        pairs = {name: _make_empty_pair(leaf) for name, leaf in weights.maps.items()}
        zeros_W = jnp.zeros_like(expert_W)
        return pairs, _TileIndices(expert_W, zeros_W, zeros_W.astype(jnp.float32))
    if adapters.scale.ndim == 0:
        scale_W = jnp.broadcast_to(adapters.scale, expert_W.shape)
        return dict(adapters.pairs), _TileIndices(expert_W, expert_W, scale_W)
    num_layers = jax.tree.leaves(dict(adapters.pairs))[0].shape[1]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[-2:]), dict(adapters.pairs))  # nothing is copied
    slot_W = tiling.group_W // num_experts
    adapter_W = (slot_W * num_layers + adapters.layer) * num_experts + expert_W
    return flat, _TileIndices(expert_W, adapter_W, adapters.scale[slot_W])


def _make_empty_pair(weight_EIO: jax.Array) -> LoraPair:
    *_, inputs, outputs = weight_EIO.shape
    return LoraPair(a=jnp.zeros((1, inputs, 0)), b=jnp.zeros((1, 0, outputs)))


def _make_expert_maps(
    weights: ExpertWeights, pairs: Mapping[str, LoraPair], expert: jax.Array, adapter: jax.Array, scale: jax.Array
) -> dict[str, ExpertMap]:
    """Return the maps of one tile, by name."""
    maps: dict[str, ExpertMap] = {}
    for name, leaf in weights.maps.items():
        weight_IO = leaf[expert]
        pair = jax.tree.map(lambda leaf, dtype=weight_IO.dtype: leaf[adapter].astype(dtype), pairs[name])
        maps[name] = ExpertMap(weight_IO=weight_IO, a_IR=pair.a, b_RO=pair.b, scale=scale)
    return maps


def _activate(clamp: Clamp | None, *mapped: jax.Array) -> jax.Array:
    """Return the activation of the outputs of gate and up, or of up alone."""
    if len(mapped) == 1:
        return jnp.square(jax.nn.relu(mapped[0]))
    gate, up = mapped
    if clamp is None:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
    return (up + 1) * gate * jax.nn.sigmoid(clamp.slope * gate)


def _multiply_bias(d_y_PO: jax.Array, bias_EO: jax.Array | None, expert: jax.Array) -> jax.Array | float:
    """Return the dot product of each row with the bias of its expert, for one tile or all tiles."""
    if bias_EO is None:
        return 0.0
    return (d_y_PO.astype(jnp.float32) * bias_EO[expert].astype(jnp.float32)[..., None, :]).sum(axis=-1)


def _add_bias(biases: Mapping[str, jax.Array | None], expert: jax.Array, name: str, y_PO: jax.Array) -> jax.Array:
    """Add the bias of its expert to the outputs of one map, for one tile or all tiles, in the type of `y`."""
    bias_EO = biases[name]
    if bias_EO is None:
        return y_PO
    return (y_PO.astype(jnp.float32) + bias_EO[expert][..., None, :].astype(jnp.float32)).astype(y_PO.dtype)


_Tokens = tuple[jax.Array, Mapping[str, jax.Array]]
"""Tokens [M, D], and their products [M, R] with the shared A factors, by map."""


def _make_tiled_maps(
    multiply: MultiplyTiles, weights: ExpertWeights, pairs: dict[str, LoraPair], indices: _TileIndices, tiling: Tiling
) -> dict[str, TiledMap]:
    matrix_W = indices.expert_W if weights.layer is None else weights.layer * weights.num_experts + indices.expert_W
    maps: dict[str, TiledMap] = {}
    for name, leaf in weights.maps.items():
        matrices, (a, b) = leaf.reshape(-1, *leaf.shape[-2:]), (pairs[name].a, pairs[name].b)
        maps[name] = TiledMap(multiply, tiling.num_used, matrices, matrix_W, a, b, indices.adapter_W, indices.scale_W)
    return maps


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_experts(kernels: Kernels, *arguments: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return the outputs of each token's experts, summed by their shares: float32 [M, D].

    If the experts share B of down, B is left out, and the sum [M, R] that it has to be multiplied
    with is returned as well. The gradient of a share is computed from the inputs of down (see
    `experts.compute_gradients`), so the outputs of single experts are not kept.
    """
    return _run_experts_forward(kernels, *arguments)[0]


def _run_experts_forward(
    kernels: Kernels,
    tokens: _Tokens,
    share_MK: jax.Array,
    weights: ExpertWeights,
    pairs: dict[str, LoraPair],
    indices: _TileIndices,
    tiling: Tiling,
):
    dtype = weights.down_proj.dtype
    rows, activate = jax.tree.map(tiling.gather_rows, tokens), partial(_activate, weights.clamp)

    def run_tile(tile: tuple[_Tokens, _TileIndices]):
        (x_PD, inner), index = tile
        maps = _make_expert_maps(weights, pairs, index.expert_W, index.adapter_W, index.scale_W)
        add_bias = partial(_add_bias, weights.biases, index.expert_W)
        (y_PD, outer_PR), mapped = apply_experts(maps, add_bias, activate, x_PD, inner)
        return (y_PD.astype(dtype), outer_PR), tuple(y_PF.astype(dtype) for y_PF in mapped)

    if (multiply := kernels.get_tile_kernel()) is not None:
        maps = _make_tiled_maps(multiply, weights, pairs, indices, tiling)
        add_bias = partial(_add_bias, weights.biases, indices.expert_W)
        outputs_W, mapped_WPF = apply_experts(maps, add_bias, activate, *rows)
    else:
        outputs_W, mapped_WPF = map_tiles(run_tile, tiling, (rows, indices))

    def sum_by_share(y_MKO: jax.Array) -> jax.Array:
        return apply_batch_invariant(
            lambda share_MK, y_MKO: (share_MK[..., None] * y_MKO).sum(axis=1), share_MK, y_MKO, width=y_MKO.shape[2]
        )

    mapped_WPF = jax.tree.map(mark_matmul, mapped_WPF)
    y_MD, outer_MR = jax.tree.map(sum_by_share, jax.tree.map(tiling.collect_visits, outputs_W))
    outputs = y_MD, None if outer_MR is None else mark_matmul(outer_MR)
    return outputs, (tokens, share_MK, weights, pairs, indices, tiling, mapped_WPF)


def _run_experts_backward(kernels: Kernels, kept: Any, d_outputs: tuple[jax.Array, jax.Array | None]):
    """Return the gradients of tokens, shares and LoRA factors.

    Weights, biases and scales are constants.
    """
    tokens, share_MK, weights, pairs, indices, tiling, mapped_WPF = kept
    activate = partial(_activate, weights.clamp)

    def run_tile_backward(tile: Any) -> tuple[_Tokens, jax.Array, dict[str, LoraPair]]:
        (x_PD, inner), (d_y_PD, d_outer_PR), share_P, mapped, index = tile
        maps = _make_expert_maps(weights, pairs, index.expert_W, index.adapter_W, index.scale_W)
        d_tokens, d_share_P, d_pairs = compute_gradients(
            maps, activate, x_PD, inner, mapped, share_P, d_y_PD, d_outer_PR
        )
        return d_tokens, d_share_P + _multiply_bias(d_y_PD, weights.down_bias, index.expert_W), d_pairs

    def sum_visits(d_W: jax.Array) -> jax.Array:
        return tiling.collect_visits(d_W).astype(jnp.float32).sum(axis=1).astype(d_W.dtype)

    # Rows are gathered without their shares, so that one product gives the gradient of the shares
    # too.
    d_y_MD, d_outer_MR = d_outputs
    rows, d_rows = jax.tree.map(tiling.gather_rows, (tokens, (d_y_MD.astype(tokens[0].dtype), d_outer_MR)))
    share_WP = tiling.gather_visits(share_MK[..., None])[..., 0]

    if (multiply := kernels.get_tile_kernel()) is not None:
        maps = _make_tiled_maps(multiply, weights, pairs, indices, tiling)
        (x_WPD, inner), (d_y_WPD, d_outer_WPR) = rows, d_rows
        tiles = x_WPD, inner, mapped_WPF, share_WP, d_y_WPD, d_outer_WPR
        d_tokens_W, d_share_WP, d_pairs_W = compute_gradients(maps, activate, *tiles)
        d_share_WP += _multiply_bias(d_y_WPD, weights.down_bias, indices.expert_W)
    else:
        tiles = rows, d_rows, share_WP, mapped_WPF, indices
        d_tokens_W, d_share_WP, d_pairs_W = map_tiles(run_tile_backward, tiling, tiles)

    d_tokens = jax.tree.map(sum_visits, d_tokens_W)
    d_share_MK = tiling.collect_visits(d_share_WP[..., None])[..., 0]
    d_pairs = jax.tree.map(
        lambda d, leaf: sum_by_index(d, indices.adapter_W, tiling.num_used, leaf.shape[0]), d_pairs_W, pairs
    )
    return d_tokens, d_share_MK, None, d_pairs, None, None


_run_experts.defvjp(_run_experts_forward, _run_experts_backward)


def estimate_backward_bytes(
    *,
    num_visits: int,
    num_experts: int,
    hidden_size: int,
    mlp_size: int,
    rank: int,
    itemsize: int,
    num_maps: int = len(MAP_NAMES),
) -> int:
    """Return the bytes that `_run_experts_backward` holds at the same time on an accelerator.

    In the weights' type, of `itemsize` bytes: the inputs and both gradients (of outputs and of
    inputs) by tile, one gradient by visit, and the weights of the tiles that are computed at once.
    In float32: the gradients of the factors of each tile. The estimate was compared with the TPU
    compiler's account in tests/unit/backends/jax/test_training_costs.py.
    """
    num_tiles, tile_rows = get_tile_shape(num_visits, num_experts)
    rows = (3 * num_tiles * tile_rows + num_visits) * hidden_size
    factors = num_tiles * rank * num_maps * (hidden_size + mlp_size)
    weights = min(TILES_AT_ONCE, num_tiles) * num_maps * hidden_size * mlp_size
    return itemsize * (rows + weights) + 4 * factors
