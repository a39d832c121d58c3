"""The device mesh, and how arrays are sharded over it.

`AXIS_RULES` maps the logical axes of arrays to mesh axes:

- Batch rows are sharded over `dp`, `fsdp`, `cp` and `ep`.
- Weights are replicated over `dp`. Over `fsdp` and `cp` they are sharded for storage only: each
  layer gathers them before use.
- Attention heads, feed-forward layers and the vocabulary are sharded over `tp`, experts over `ep`.
- LoRA weights, their gradients and the optimizer's moments are sharded like the linear layer that
  the adapter belongs to. The LoRA rank is not sharded.
- The KV cache is sharded by heads and rows.

In training with `cp`, the tokens of a row are sharded over `cp` and `ep`, and batch rows only over
`dp` and `fsdp`. This is for rows that are too long for one device, see `make_training_layout`.
Before attention, an all-to-all swaps the sharding of tokens for a sharding of heads (`row_heads` is
the axis of activations then, `heads` the axis of weights). Expert layers gather the batch rows of
an `ep` group (`expert_batch`), or its tokens with `cp`.
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
"""Rules that replace the rules above in training with `cp`.
`ep` comes last, so the devices of an `ep` group hold adjacent tokens. Expert layers gather them."""

Placement = Callable[[Any], Any]
"""A function that puts a tree of host arrays on the devices."""


class MeshError(ValueError):
    """The mesh does not fit the devices or the model.

    If it does not fit the model, the message names the axis and the size of the model that the axis
    does not divide.
    """


def make_layout(config: MeshConfig) -> Layout:
    """Return a layout over all devices, or over the first device if the mesh has size 1.

    On multiple hosts these are the devices of all hosts, ordered by host, so the last mesh axes
    connect devices of one host. Raises MeshError if the size of the mesh is neither 1 nor the
    number of devices. On multiple hosts, 1 is not allowed either.
    """
    devices, num_devices = jax.devices(), config.num_devices
    if num_devices not in (1, len(devices)) or (num_devices < len(devices) and is_distributed()):
        where = " on all hosts" if is_distributed() else ""
        raise MeshError(
            f"{config} needs {num_devices} devices, but there are {len(devices)}{where}. Change the axes so that "
            f"their product is {len(devices)}"
        )
    return layout_from_devices(devices, config)


def describe_unused_devices(devices: Sequence[Any], config: MeshConfig) -> str | None:
    """Return a warning if the mesh leaves accelerators of this process unused; else None."""
    number = len(devices)
    if config.num_devices >= number or devices[0].platform == "cpu":
        return None
    return (
        f"{number} devices are visible, but the mesh uses only {config.num_devices}. To use all of them, set "
        f"--backend-config.mesh.dp {number}; `skyrl-tx plan` recommends a mesh for a model"
    )


def layout_from_devices(devices: Sequence[Any], config: MeshConfig) -> Layout:
    """Return a layout over the first `config.num_devices` devices.

    On TPU the order in the mesh follows the links between chips. Elsewhere it is the order of
    `devices`.
    """
    axes = config.axes
    device_array = mesh_utils.create_device_mesh(
        tuple(axes.values()), devices[: config.num_devices], allow_split_physical_axes=True
    )
    return layout_from_mesh(Mesh(device_array, tuple(axes)))


def layout_from_mesh(mesh: Mesh, rules: Mapping[Axis, tuple[str, ...]] = AXIS_RULES) -> Layout:
    """Return the layout of a mesh. Axes that the mesh does not have are left out of the rules."""
    present: list[tuple[Axis, tuple[str, ...]]] = []
    for axis, names in rules.items():
        present.append((axis, tuple(name for name in names if name in mesh.shape)))
    return Layout(mesh, tuple(present))


def make_training_layout(layout: Layout) -> Layout:
    """Return the layout for training.

    On a mesh with `cp`, the tokens of a row are sharded too. On any other mesh, the result is
    `layout` itself.
    """
    assert layout.mesh is not None
    if "cp" not in layout.mesh.shape:
        return layout
    return layout_from_mesh(layout.mesh, {**AXIS_RULES, **_CONTEXT_PARALLEL_RULES})


def count_replicas(layout: Layout) -> int:
    """Return the number of copies of the weights. Each copy computes its own rows."""
    assert layout.mesh is not None
    return layout.mesh.shape.get("dp", 1)


def check_divisible(layout: Layout, config: ModelConfig) -> None:
    """Raise MeshError if the model cannot be sharded evenly.

    For example, a model with 32 heads cannot be sharded over tp = 3.
    """
    layout = make_training_layout(layout)
    assert layout.mesh is not None
    if layout.num_shards("expert") > 1 and all(axis != "expert" for axis, _, _ in _iter_sharded_sizes(config)):
        raise MeshError(f"ep={layout.num_shards('expert')}: the model has no experts; use dp, fsdp and tp instead")

    for axis, size_name, size in _iter_sharded_sizes(config):
        axis = "row_heads" if axis == "heads" else axis  # with cp, more mesh axes shard the heads of a row
        if size % layout.num_shards(axis):
            shape = layout.mesh.shape
            degrees = " x ".join(f"{name}={shape[name]}" for name in layout.mesh_axes(axis) if shape[name] > 1)
            raise MeshError(f"{degrees} does not divide {size_name} = {size} of the model")


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
    """Return a function that puts adapters on the devices.

    LoRA pairs are sharded like their linear maps, and everything else is replicated. Pairs are
    recognized by name, so the tree may also hold moments or a gradient. With `is_pool`, the tree
    holds multiple adapters: each array has a leading dim with one entry per adapter.
    """
    axes = get_adapter_axes(config)
    assert layout.mesh is not None
    replicated = NamedSharding(layout.mesh, PartitionSpec())

    def put(path: str, leaf: Any) -> jax.Array:
        name, factor = path.split(".")[-2:] if "." in path else ("", path)
        if name not in axes:
            return put_on(leaf, replicated)
        leaf_axes = axes[name][0 if factor == "a" else 1]
        return put_on(leaf, layout.sharding((None, *leaf_axes) if is_pool else leaf_axes, leaf.shape))

    return lambda tree: map_named(put, tree)


def map_factors(
    function: Callable[[Any, tuple[Axis | None, ...]], Any], config: ModelConfig, weights: AdapterWeights
) -> AdapterWeights:
    """Return the results of a function of each LoRA factor and the logical axes of its dims."""
    axes = get_adapter_axes(config)
    return {
        name: LoraPair(a=function(pair.a, axes[name][0]), b=function(pair.b, axes[name][1]))
        for name, pair in weights.items()
    }


def constrain_adapter(layout: Layout, config: ModelConfig, weights: AdapterWeights) -> AdapterWeights:
    """Constrain computed adapter weights, or a gradient, to the sharding of the adapter."""
    return map_factors(lambda factor, axes: layout.constrain(factor, *axes), config, weights)


def choose_dtype(config: JaxConfig, layout: Layout) -> jnp.dtype:
    """Return the dtype of the base weights: the configured one, or the default of the platform."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype("float32" if get_platform(layout) == "cpu" else "bfloat16")


def get_platform(layout: Layout) -> str:
    """Return the platform of the devices: `cpu`, `gpu` or `tpu`."""
    assert layout.mesh is not None
    return layout.mesh.devices.flat[0].platform
