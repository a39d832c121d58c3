"""Sharding of arrays over devices, and gathering of one layer's weights.

The backend has a table that maps logical axes to mesh axes. Layers name the logical axes of their
arrays and know no mesh. A dim whose size is not divisible by its mesh axes is replicated, which
costs time but is correct.

A loop over layers reads slices of stacked parameters. XLA copies a whole stack into the order of
dims that suits the slices best, unless the slice itself fixes the order. `gather_weight` fixes it:

- On GPU, XLA gathers an array along its slowest dim only. `gather_weight` makes the shards of each
  layer's weight the slowest dim, gathers them, and then restores the order.
- On TPU, `gather_weight` keeps the maps of experts in the order in which they are stored, because
  products with the transposed maps would otherwise reorder them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as DimOrder
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from skyrl_tx.layers.parameter import Axis


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and its table of axes. Without a mesh, or with one device, nothing is constrained."""

    mesh: Mesh | None = None
    rules: tuple[tuple[Axis, tuple[str, ...]], ...] = ()

    @property
    def is_sharded(self) -> bool:
        """Whether there is more than one device."""
        return self.mesh is not None and self.mesh.size > 1

    def mesh_axes(self, axis: Axis) -> tuple[str, ...]:
        """Return the mesh axes of a logical axis."""
        return dict(self.rules).get(axis, ())

    def num_shards(self, axis: Axis) -> int:
        """Return the number of shards of a logical axis."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in self.mesh_axes(axis))

    @property
    def shards_rows(self) -> bool:
        """Whether the tokens of a row are sharded (context parallelism).

        Mixers then exchange shards of rows for whole rows of some heads.
        """
        return self.num_shards("tokens") > 1

    def spec(self, axes: tuple[Axis | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Return the partition spec of an array.

        A dim uses the leading mesh axes that divide its size.
        """
        assert self.mesh is not None and len(axes) == len(shape)
        cuts: list[tuple[str, ...]] = []
        for axis, size in zip(axes, shape, strict=True):
            names: tuple[str, ...] = ()
            for name in () if axis is None else self.mesh_axes(axis):
                if size % math.prod(self.mesh.shape[used] for used in (*names, name)):
                    break
                names = (*names, name)
            cuts.append(names)
        all_names = [name for names in cuts for name in names]
        assert len(all_names) == len(set(all_names)), f"{axes} would use a mesh axis twice"
        return PartitionSpec(*(names or None for names in cuts))

    def sharding(self, axes: tuple[Axis | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array of that shape."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def constrain(self, x: jax.Array, *axes: Axis | None) -> jax.Array:
        """Return `x` with a sharding constraint; an axis of None is replicated."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape)) if self.is_sharded else x

    def map_shards(
        self, function: Callable[..., Any], in_dims: tuple[int | None, ...], out_dims: int | None
    ) -> Callable[..., Any]:
        """Return `function` mapped over the shards of the batch axis.

        `in_dims` has, for each argument, the dim of its leaves that is sharded, and `out_dims` is
        the dim of the results. None means not sharded. XLA decides how arrays lie over the other
        axes of the mesh.
        """
        if self.num_shards("batch") == 1:
            return function
        names = self.mesh_axes("batch")

        def spec(dim: int | None) -> PartitionSpec:
            return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, names)

        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(map(spec, in_dims)),
            out_specs=spec(out_dims),
            axis_names=set(names),
            check_vma=False,
        )

    def split_shards(self, x: jax.Array) -> jax.Array:
        """Return [B, T, ...] with each shard of a row as a separate row.

        A loop over T then uses all devices.
        """
        if not self.shards_rows:
            return x
        B, T = x.shape[:2]
        shards = self.num_shards("tokens")
        assert T % shards == 0, f"{T} tokens cannot be split into {shards} shards"
        x = self.constrain(x, "batch", "tokens", *[None] * (x.ndim - 2))
        x = x.reshape(B, shards, T // shards, *x.shape[2:])
        x = self.constrain(x, "batch", "tokens", *[None] * (x.ndim - 2))
        return x.reshape(B * shards, T // shards, *x.shape[3:])

    def merge_shards(self, x: jax.Array, num_rows: int) -> jax.Array:
        """Undo `split_shards`, for a result of `num_rows` rows."""
        if not self.shards_rows:
            return x
        x = x.reshape(num_rows, -1, *x.shape[2:])
        return self.constrain(x, "batch", "tokens", *[None] * (x.ndim - 2))


UNSHARDED = Layout()
"""No sharding: one device."""


def gather_weight(weight: jax.Array, axes: tuple[Axis, ...], layout: Layout) -> jax.Array:
    """Gather the "embed" dim of one layer's weight, where XLA would copy the weight otherwise.

    The other dims stay sharded by their `axes`. Elsewhere the weight is returned as it is. See the
    module docstring.
    """
    by_platform: dict[str, Callable[[jax.Array], jax.Array]] = {}
    if layout.num_shards("embed") > 1 and "embed" in axes and len(axes) > 1:
        by_platform["cuda"] = partial(_gather_by_parts, axes=axes, layout=layout)
    if "expert" in axes and len(axes) == 3:
        by_platform["tpu"] = _keep_stored_order
    return jax.lax.platform_dependent(weight, **by_platform, default=lambda x: x) if by_platform else weight


def _keep_stored_order(weight: jax.Array) -> jax.Array:
    return with_layout_constraint(weight, DimOrder(major_to_minor=tuple(range(weight.ndim))))


def shard_before_exchange(x: jax.Array, layout: Layout) -> jax.Array:
    """Constrain [B, T, heads or channels, ...] to token shards, before an exchange to whole rows.

    This matters on GPU with gathered weights, where XLA would otherwise exchange more in the
    backward pass: instead of the gradient of `x`, it would exchange sums of the hidden size that
    each device computes partially for all tokens.
    """

    def constrain_parts(x: jax.Array) -> jax.Array:
        return layout.constrain(x, "batch", "tokens", "heads", *[None] * (x.ndim - 3))

    return jax.lax.platform_dependent(x, cuda=constrain_parts, default=lambda x: x)


def _gather_by_parts(weight: jax.Array, *, axes: tuple[Axis, ...], layout: Layout) -> jax.Array:
    number, dim = layout.num_shards("embed"), axes.index("embed")
    if weight.shape[dim] % number:
        return weight
    before, after = axes[:dim], axes[dim + 1 :]
    parts = weight.reshape(*weight.shape[:dim], number, -1, *weight.shape[dim + 1 :])
    parts = jnp.moveaxis(layout.constrain(parts, *before, "embed", None, *after), dim, 0)
    parts = layout.constrain(parts, "embed", *before, None, *after)
    whole = layout.constrain(parts, None, *before, None, *after)
    return jnp.moveaxis(whole, 0, dim).reshape(weight.shape)
