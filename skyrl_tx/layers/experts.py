"""The parameters of the experts of a mixture: linear maps, biases, activation and LoRA adapters.

An expert has three linear maps, or only two (up and down) if it has no gate. Each map has LoRA
factors A [E, I, R] and B [E, R, O]. All experts may share the factor next to the hidden size, which
is A of gate and up, and B of down. A shared factor is [1, I, R] or [1, R, O].

Legend: n layers of a stack, A adapter slots, L layers, E experts, D embed, F mlp, R rank, I inputs
and O outputs of a map.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from flax import struct

from skyrl_tx.layers.lora import Adapter, LoraPair, RowAdapter, RowSlots
from skyrl_tx.layers.parameter import Axis

MAP_NAMES = ("gate_proj", "up_proj", "down_proj")
MAP_AXES: Mapping[str, tuple[Axis | None, Axis | None]] = {
    "gate_proj": (None, "mlp"),
    "up_proj": (None, "mlp"),
    "down_proj": ("mlp", None),
}
"""Sharding of an expert's maps during the computation: F is sharded, D is whole."""
BIAS_AXES: Mapping[str, Axis | None] = {"gate_bias": "mlp", "up_bias": "mlp", "down_bias": None}
"""The biases of these maps, with their sharding."""


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
