"""The device mesh, and the table of logical axes that says how arrays are sharded over it.

Batch rows are sharded over `dp`, `fsdp` and `ep`. Weights that all rows need are whole on each shard of `dp`. Over
`fsdp` they are sharded for storage, and each layer gathers them before use. Heads, feed-forward layers and vocabulary
are sharded over `tp`, experts over `ep`. For rows that are too long for one device there is `cp`: in sampling it is
like `fsdp`, and in training it shards the tokens of a row, as `ep` does then (see `make_training_layout`).
Adapters, gradients and moments are sharded like the linear maps that they adapt, with whole ranks; the KV cache like
heads and rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.devices import is_distributed
from skyrl_tx.backends.jax.devices import put as put_on
from skyrl_tx.layers.lora import AdapterWeights, LoraPair
from skyrl_tx.layers.parameter import Axis, Parameter, map_named
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.models import ModelConfig, get_adapter_axes

AXIS_RULES: Mapping[Axis, tuple[str, ...]] = {
    "layers": (),
    "embed": ("fsdp", "cp"),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "head_dim": (),
    "mlp": ("tp",),
    "vocab": ("tp",),
    "expert": ("ep",),
    "batch": ("dp", "fsdp", "cp", "ep"),
    "tokens": (),
    "row_heads": ("tp",),
    "expert_batch": ("dp", "fsdp", "cp"),
}
_CONTEXT_PARALLEL_RULES: Mapping[Axis, tuple[str, ...]] = {
    "batch": ("dp", "fsdp"),
    "tokens": ("cp", "ep"),
    "row_heads": ("tp", "cp", "ep"),
}
"""The other axes of training if there is `cp`. `ep` comes last: over it, experts gather neighbouring tokens."""

Placement = Callable[[Any], Any]
"""A function that puts a tree of host arrays on the devices."""


class MeshError(ValueError):
    """The mesh does not fit the devices or the model. The message names the axis and the sizes."""


def make_layout(config: MeshConfig) -> Layout:
    """Return a layout over all devices that JAX sees, or over the first device for a mesh of size 1.

    With several hosts these are the devices of all, those of a host one after another: the last axes are within a host.
    """
    devices, wanted = jax.devices(), config.num_devices
    if wanted not in (1, len(devices)) or (wanted < len(devices) and is_distributed()):
        where = " on all hosts" if is_distributed() else ""
        raise MeshError(f"{config} needs {wanted} devices, but there are {len(devices)}{where}")
    return layout_from_devices(devices, config)


def describe_unused_devices(devices: Sequence[Any], config: MeshConfig) -> str | None:
    """Return a warning if a mesh leaves accelerators of this process unused; None if there are none."""
    if config.num_devices >= len(devices) or devices[0].platform == "cpu":
        return None
    number, flag = len(devices), "--backend-config.mesh.dp"
    used = f"{number} devices are visible, and {config.num_devices} is used: {flag} {number} uses all of them"
    return f"{used}, and `skyrl-tx plan` names the best mesh for a model"


def layout_from_devices(devices: Sequence[Any], config: MeshConfig) -> Layout:
    """Return a layout over the first devices of a list, as many as the mesh has.

    On TPU their order follows the links between chips; elsewhere it is that of the list.
    """
    axes = config.axes
    own = mesh_utils.create_device_mesh(
        tuple(axes.values()), devices[: config.num_devices], allow_split_physical_axes=True
    )
    return layout_from_mesh(Mesh(own, tuple(axes)))


def layout_from_mesh(mesh: Mesh, rules: Mapping[Axis, tuple[str, ...]] = AXIS_RULES) -> Layout:
    """Return the layout of a mesh, which need not have all axes."""
    own: list[tuple[Axis, tuple[str, ...]]] = []
    for axis, names in rules.items():
        own.append((axis, tuple(name for name in names if name in mesh.shape)))
    return Layout(mesh, tuple(own))


def make_training_layout(layout: Layout) -> Layout:
    """Return the layout of training. It is the same one but on a mesh with `cp`, which shards the tokens of rows."""
    assert layout.mesh is not None
    return (
        layout_from_mesh(layout.mesh, {**AXIS_RULES, **_CONTEXT_PARALLEL_RULES})
        if "cp" in layout.mesh.shape
        else layout
    )


def count_replicas(layout: Layout) -> int:
    """Return the number of copies of the weights, each of which has rows of its own."""
    assert layout.mesh is not None
    return layout.mesh.shape.get("dp", 1)


def check_divisible(layout: Layout, config: ModelConfig) -> None:
    """Raise MeshError unless every mesh axis divides the sizes that it shards."""
    layout = make_training_layout(layout)
    if layout.num_shards("expert") > 1 and all(axis != "expert" for axis, _, _ in _iter_sharded_sizes(config)):
        raise MeshError(f"ep={layout.num_shards('expert')}: the model has no experts; use dp, fsdp and tp")
    for axis, name, size in _iter_sharded_sizes(config):
        axis = "row_heads" if axis == "heads" else axis  # which more axes may shard
        if size % layout.num_shards(axis):
            assert layout.mesh is not None
            degrees = " x ".join(f"{each}={n}" for each in layout.mesh_axes(axis) if (n := layout.mesh.shape[each]) > 1)
            raise MeshError(f"{degrees} does not divide {name} = {size} of the model")


def _iter_sharded_sizes(config: ModelConfig) -> Iterator[tuple[Axis, str, int]]:
    """Yield the logical axes that a mesh may shard, with their names in config.json and sizes."""
    yield "embed", "hidden_size", config.hidden_size
    yield "vocab", "vocab_size", config.vocab_size
    for stack in config.stacks:
        for part in stack.block.parts:
            yield from part.list_sharded_sizes()


def get_parameter_sharding(layout: Layout, parameter: Parameter) -> NamedSharding:
    """Return the sharding of a base parameter."""
    return layout.sharding(parameter.axes, parameter.shape)


def make_adapter_placement(layout: Layout, config: ModelConfig, *, is_pool: bool = False) -> Placement:
    """Return the placement of adapters: LoRA pairs are sharded like their linear maps, all else is replicated.

    Pairs are found by name, so a tree may also hold moments or a gradient. A pool has a leading dim of adapter slots.
    """
    axes = get_adapter_axes(config)
    assert layout.mesh is not None
    whole = NamedSharding(layout.mesh, PartitionSpec())

    def put(path: str, leaf: Any) -> jax.Array:
        name, factor = path.split(".")[-2:] if "." in path else ("", path)
        if name not in axes:
            return put_on(leaf, whole)
        own = axes[name][0 if factor == "a" else 1]
        return put_on(leaf, layout.sharding((None, *own) if is_pool else own, leaf.shape))

    return lambda tree: map_named(put, tree)


def constrain_adapter(layout: Layout, config: ModelConfig, weights: AdapterWeights) -> AdapterWeights:
    """Constrain computed adapter weights, or a gradient, to the sharding of the adapter."""
    axes = get_adapter_axes(config)
    return {
        name: LoraPair(a=layout.constrain(pair.a, *axes[name][0]), b=layout.constrain(pair.b, *axes[name][1]))
        for name, pair in weights.items()
    }


def choose_dtype(config: JaxConfig, layout: Layout) -> jnp.dtype:
    """Return the dtype of the base weights."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype("float32" if get_platform(layout) == "cpu" else "bfloat16")


def get_platform(layout: Layout) -> str:
    """Return the platform of the devices: `cpu`, `gpu` or `tpu`."""
    assert layout.mesh is not None
    return layout.mesh.devices.flat[0].platform
