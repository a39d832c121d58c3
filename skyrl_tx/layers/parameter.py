"""Descriptions of parameters without values (shape, axes, initialization), and the RMS norm."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from skyrl_tx.layers.stable_bits import apply_batch_invariant

Axis = Literal[
    "layers",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
    "vocab",
    "expert",
    "batch",
    "tokens",
    "row_heads",
    "expert_batch",
]
"""Logical axis names. Layers know only these; the mesh of a backend maps them to device axes.

The last four are axes of activations: rows, tokens of a row, heads while they mix whole rows, and
tokens on their way through experts.
"""

Init = Literal["normal", "ones", "zeros"]

INITIAL_STD = 0.02  # the initializer_range of the Hugging Face configs of all our families


@dataclass(frozen=True, slots=True)
class Parameter:
    """The description of one array. It is a leaf in JAX, so trees of it match the parameter tree."""

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    init: Init = "normal"
    layers: tuple[int, ...] | None = None
    """The numbers of the stacked layers, if the stack does not have all layers."""
    is_float32: bool = False
    """Whether the array is always float32, regardless of the type of the base weights.

    For small arrays.
    """

    num_heads: int = 1
    """The heads of a linear map's outputs, if checkpoints may interleave multiple maps by head."""

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"{self.axes} does not name the dims of {self.shape}"
        assert self.layers is None or len(self.layers) == self.shape[self.axes.index("layers")]


def flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of a parameter tree by dotted path, for example `layers.0.q_proj`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def map_named(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Return the tree with each leaf replaced by `function(dotted path, leaf)`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(jax.tree_util.keystr(path, simple=True, separator="."), leaf), tree
    )


def pseudo_random(shape: tuple[int, ...], seed: int, dtype: jnp.dtype) -> jax.Array:
    """Return deterministic noise of standard deviation INITIAL_STD, at the speed of memory.

    The noise is a hash of each element's coordinates, not a stateful generator. XLA fuses it into
    one loop under any sharding, so billions of elements take seconds. It is good enough for weights
    that only need the right shapes and scale.
    """
    bits = jnp.full(shape, seed & 0xFFFFFFFF, jnp.uint32)
    for dim in range(len(shape)):
        bits = bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
        bits = bits ^ (bits >> 16)
    uniform = (bits >> 8).astype(jnp.float32) * (2.0 / (1 << 24)) - 1.0
    return (uniform * (INITIAL_STD * 3**0.5)).astype(dtype)  # a uniform on [-a, a] has deviation a / sqrt(3)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Return `x` scaled to unit mean square over its last dim, times `weight`, in float32."""
    x = x.astype(jnp.float32)
    mean = apply_batch_invariant(lambda x: jnp.mean(jnp.square(x), axis=-1, keepdims=True), x)
    scale = jax.lax.rsqrt(mean + epsilon)
    return x * scale * weight.astype(jnp.float32)
