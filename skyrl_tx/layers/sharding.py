"""Sharding of arrays over devices: a table of the backend maps logical axes to mesh axes.

Layers name the logical axes of their arrays and know no mesh. A dim whose size is not divisible by its mesh axes is
replicated, which costs time but not correctness.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from skyrl_tx.layers.parameter import Axis


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and its table. Without a mesh, or on a mesh of one device, there are no sharding constraints."""

    mesh: Mesh | None = None
    rules: tuple[tuple[Axis, tuple[str, ...]], ...] = ()

    @property
    def is_split(self) -> bool:
        """Whether there is more than one device."""
        return self.mesh is not None and self.mesh.size > 1

    def mesh_axes(self, axis: Axis) -> tuple[str, ...]:
        """Return the mesh axes of a logical axis."""
        return dict(self.rules).get(axis, ())

    def num_shards(self, axis: Axis) -> int:
        """Return the number of shards of a logical axis."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in self.mesh_axes(axis))

    @property
    def splits_rows(self) -> bool:
        """Whether a row's tokens are on several devices. Mixers exchange them for whole rows of a part of the heads."""
        return self.num_shards("tokens") > 1

    def spec(self, axes: tuple[Axis | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Return the partition spec of an array, with the mesh axes of each dim that divide its size."""
        assert self.mesh is not None and len(axes) == len(shape)
        cuts: list[tuple[str, ...]] = []
        for axis, size in zip(axes, shape, strict=True):
            names: tuple[str, ...] = ()
            for name in () if axis is None else self.mesh_axes(axis):
                if size % math.prod(self.mesh.shape[each] for each in (*names, name)):
                    break
                names = (*names, name)
            cuts.append(names)
        used = [name for names in cuts for name in names]
        assert len(used) == len(set(used)), f"{axes} would lie twice along one axis of the mesh"
        return PartitionSpec(*(names or None for names in cuts))

    def sharding(self, axes: tuple[Axis | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array of that shape."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def constrain(self, x: jax.Array, *axes: Axis | None) -> jax.Array:
        """Return `x` with a sharding constraint; None is replicated."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape)) if self.is_split else x

    def by_shard(
        self, function: Callable[..., Any], in_dims: tuple[int | None, ...], out_dims: int | None
    ) -> Callable[..., Any]:
        """Return `function` as each shard of the batch axis runs it, on its own part of the arrays.

        `in_dims` has the dim of each argument's leaves that is cut, and `out_dims` that of the results; None is whole.
        How arrays lie over the other axes of the mesh is decided by XLA.
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

    def shards_as_rows(self, x: jax.Array) -> jax.Array:
        """Return [B, T, ...] with each shard of a row as a row of its own, so that a loop over T uses all devices."""
        if not self.splits_rows:
            return x
        B, T = x.shape[:2]
        shards = self.num_shards("tokens")
        assert T % shards == 0, f"{T} tokens cannot be in {shards} shards"
        x = self.constrain(x, "batch", "tokens", *[None] * (x.ndim - 2))
        x = x.reshape(B, shards, T // shards, *x.shape[2:])
        x = self.constrain(x, "batch", "tokens", *[None] * (x.ndim - 2))
        return x.reshape(B * shards, T // shards, *x.shape[3:])

    def rows_of_shards(self, x: jax.Array, num_rows: int) -> jax.Array:
        """Undo `shards_as_rows`, for a result of `num_rows` rows."""
        if not self.splits_rows:
            return x
        x = x.reshape(num_rows, -1, *x.shape[2:])
        return self.constrain(x, "batch", "tokens", *[None] * (x.ndim - 2))


WHOLE = Layout()
"""No sharding: one device."""
