"""Gated feed-forward: SwiGLU of Shazeer 2020, arXiv:2002.05202."""

import jax

from skyrl_tx.layers.lora import RowAdapters, linear


def gated_mlp(
    x: jax.Array, gate_proj: jax.Array, up_proj: jax.Array, down_proj: jax.Array, adapters: RowAdapters
) -> jax.Array:
    """Return down(silu(gate(x)) * up(x)), each map with its adapter."""
    gate = linear(x, gate_proj, adapters.get("gate_proj"))
    up = linear(x, up_proj, adapters.get("up_proj"))
    return linear(jax.nn.silu(gate) * up, down_proj, adapters.get("down_proj"))
