"""Devices, and where arrays live on them: the one table from logical axes to mesh axes.

One device for now. To shard a logical axis, give the mesh another axis and name it in `RULES`; no layer changes.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.layers.parameter import Axis, Parameter

RULES: Mapping[Axis, str | None] = {
    "layers": None,
    "embed": None,
    "heads": None,
    "kv_heads": None,
    "head_dim": None,
    "mlp": None,
    "vocab": None,
    "expert": None,
}


def make_mesh() -> Mesh:
    """Return the mesh over the first device that JAX sees."""
    return Mesh(np.array(jax.devices()[:1]), ("device",))


def place(mesh: Mesh, parameter: Parameter) -> NamedSharding:
    """Return where a base parameter lives."""
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in parameter.axes)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return where adapters, gradients and moments live: whole, on every device."""
    return NamedSharding(mesh, PartitionSpec())


def choose_dtype(config: JaxConfig, mesh: Mesh) -> jnp.dtype:
    """Return the type of the base weights."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype("float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16")
