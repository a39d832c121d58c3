"""The common code of parts with a recurrent state and short convolutions: what they keep, and how their rule is run."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from skyrl_tx.layers.parameter import Axis, Parameter
from skyrl_tx.layers.recurrence import ChunkMasks, make_conv_masks
from skyrl_tx.layers.sharding import Layout, shard_before_exchange
from skyrl_tx.models.parts.base import CacheSpec, LayerParams

Masks = tuple[jax.Array, ChunkMasks]
"""The positions that the first ones of a sequence do not read: in the convolutions, and in the rule."""


def describe_recurrent_cache(
    state: tuple[int, int, int, int], channels: Mapping[str, int], conv_width: int
) -> CacheSpec:
    """Return the room of a state, whose first dim is cut like heads, and of the last inputs of each convolution."""
    axes: tuple[Axis, ...] = ("heads", "head_dim", "head_dim", "head_dim")
    tails = {
        f"{name}_take_tail": Parameter((conv_width - 1, size), ("head_dim", "heads"), "zeros")
        for name, size in channels.items()
    }
    return CacheSpec(fixed={"state": Parameter(state, axes, "zeros", is_float32=True), **tails})


def make_empty_state(room: CacheSpec, num_rows: int, dtype: Any) -> dict[str, jax.Array]:
    """Return what `room` keeps of rows that begin, [B, ...]; `dtype` is that of the weights."""
    return {
        name: jnp.zeros((num_rows, *each.shape), jnp.float32 if each.is_float32 else dtype)
        for name, each in room.fixed.items()
    }


def make_masks(start_BT: jax.Array | None, conv_width: int) -> Masks | None:
    """Return the masks of rows of several sequences; None if a row holds one."""
    return None if start_BT is None else (make_conv_masks(start_BT, conv_width), ChunkMasks.from_starts(start_BT))


def get_conv_kernel(params: LayerParams, name: str) -> jax.Array:
    """Return the weights of a convolution, [W, I]."""
    return params[f"{name}_conv"][:, 0].T


def gather_rows(x: jax.Array, layout: Layout) -> jax.Array:
    """Return [B, T, ...], by heads or channels, so that a device has all tokens of its rows, of a part of the heads."""
    if not layout.shards_rows:
        return x
    return layout.constrain(shard_before_exchange(x, layout), "batch", None, "row_heads", *[None] * (x.ndim - 3))


def shard_rows(x: jax.Array, layout: Layout) -> jax.Array:
    """Return [B, T, ...], by heads or channels, so that a device has its part of a row again."""
    return layout.constrain(x, "batch", "tokens", "heads", *[None] * (x.ndim - 3)) if layout.shards_rows else x


def run_rule(
    rule: Callable[..., tuple[jax.Array, jax.Array]],
    inputs: tuple[jax.Array, ...],
    state: jax.Array,
    masks: ChunkMasks | None,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """Return `rule(*inputs, state, masks)`, computed without communication between devices.

    Inputs and outputs are [B, T, heads, ...], states [B, heads, ...].
    """
    if not layout.is_sharded:
        return rule(*inputs, state, masks)
    assert layout.mesh is not None
    rows: tuple[Axis | None, ...] = ("batch", None, "row_heads")

    def get_spec(x: jax.Array, axes: tuple[Axis | None, ...]) -> Any:
        return layout.spec((*axes, *[None] * (x.ndim - len(axes))), x.shape)

    of_state = get_spec(state, ("batch", "row_heads"))
    in_specs = (
        *(get_spec(each, rows) for each in inputs),
        of_state,
        jax.tree.map(lambda m: get_spec(m, (None, "batch")), masks),
    )
    outputs, _ = jax.eval_shape(rule, *inputs, state, masks)
    out_specs = get_spec(outputs, rows), of_state
    alone = jax.shard_map(rule, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return alone(*inputs, state, masks)
