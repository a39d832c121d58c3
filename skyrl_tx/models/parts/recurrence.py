"""The common code of parts with a recurrent state: sharding of their rule, and kernels of their convolutions."""

from collections.abc import Callable
from typing import Any

import jax

from skyrl_tx.layers.chunks import ChunkMasks
from skyrl_tx.layers.parameter import Axis
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.models.parts.base import LayerParams


def kernel_of(params: LayerParams, name: str) -> jax.Array:
    """Return the weights of a convolution, [W, I]."""
    return params[f"{name}_conv"][:, 0].T


def apply_rule(
    rule: Callable[..., tuple[jax.Array, jax.Array]],
    inputs: tuple[jax.Array, ...],
    state: jax.Array,
    masks: ChunkMasks | None,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """Return `rule(*inputs, state, masks)`, computed without communication between devices.

    Inputs and outputs are [B, T, heads, ...], states [B, heads, ...].
    """
    if not layout.is_split:
        return rule(*inputs, state, masks)
    assert layout.mesh is not None
    rows: tuple[Axis | None, ...] = ("batch", None, "heads")

    def spec(x: jax.Array, axes: tuple[Axis | None, ...]) -> Any:
        return layout.spec((*axes, *[None] * (x.ndim - len(axes))), x.shape)

    of_state = spec(state, ("batch", "heads"))
    in_specs = *(spec(each, rows) for each in inputs), of_state, jax.tree.map(lambda m: spec(m, (None, "batch")), masks)
    outputs, _ = jax.eval_shape(rule, *inputs, state, masks)
    out_specs = spec(outputs, rows), of_state
    alone = jax.shard_map(rule, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return alone(*inputs, state, masks)
