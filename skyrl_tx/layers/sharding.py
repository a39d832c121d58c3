"""Where arrays lie when there are several devices: a table of the backend's, from logical axes to axes of its mesh.

Layers name the logical axes of what they hold, and know no mesh. A dim whose size its mesh axes do not divide stays
whole on each device: that costs time, never correctness.
"""

import math
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from skyrl_tx.layers.parameter import Axis


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and its table. Without a mesh, or on a mesh of one device, nothing is ever said to the compiler."""

    mesh: Mesh | None = None
    rules: tuple[tuple[Axis, tuple[str, ...]], ...] = ()

    @property
    def is_split(self) -> bool:
        """Whether there is more than one device."""
        return self.mesh is not None and self.mesh.size > 1

    def mesh_axes(self, axis: Axis) -> tuple[str, ...]:
        """Return the axes of the mesh that a logical axis lies along."""
        return dict(self.rules).get(axis, ())

    def num_shards(self, axis: Axis) -> int:
        """Return into how many parts a logical axis is cut."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in self.mesh_axes(axis))

    def spec(self, axes: tuple[Axis | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Return how an array of that shape is cut, with as many of a dim's mesh axes as divide its size."""
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
        """Return where an array of that shape lies."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def constrain(self, x: jax.Array, *axes: Axis | None) -> jax.Array:
        """Return `x`, which the compiler shall hold cut like that; None is whole."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape)) if self.is_split else x


WHOLE = Layout()
"""All on one device."""
