"""The adapters of the layers of one group, as its loop reads them.

Legend: L layers that have a map, n repeats of a cycle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.lora import Adapter, AdapterWeights, LoraPair, RowAdapter, RowSlots, select_rows
from skyrl_tx.layers.moe import pool_experts, share_experts
from skyrl_tx.models.config import Group, ModelConfig
from skyrl_tx.models.parts.base import LayerAdapters
from skyrl_tx.models.parts.feed_forward import EXPERT_PREFIX


@dataclass(frozen=True, slots=True)
class _Map:
    """The place of a group's layers among all layers that have a map."""

    first: int
    places: tuple[int, ...]  # in the cycle, of the layers that have the map

    def index(self, place: int, repeat: Any) -> Any:
        """Return which of the map's layers in this group one layer is."""
        num = len(self.places)
        return repeat if num == 1 else repeat * num + self.places.index(place)


GroupPairs = dict[str, tuple[LoraPair, ...]]
"""The arrays of a shared adapter that the loop over a group slices: by map, a pair [n, ...] of each of its layers."""


@struct.dataclass
class CutAdapter:
    """One adapter for all rows, cut into what the loops slice, for a gradient that is added to sums cut alike.

    JAX adds to a reference within a loop if the loop slices it as it is.
    """

    pairs: tuple[GroupPairs, ...]  # by group
    scale: jax.Array


def cut_pairs(config: ModelConfig, weights: AdapterWeights) -> tuple[GroupPairs, ...]:
    """Cut the pairs of layers, [L, ...], into what the loop over each group slices."""
    return tuple(_cut(group, _maps(config, group), weights) for group in config.groups)


def _cut(group: Group, maps: "dict[str, _Map]", weights: AdapterWeights) -> GroupPairs:
    def part(leaf: jax.Array, each: _Map, index: int) -> jax.Array:
        num = len(each.places)
        last = each.first + num * group.num_repeats
        if num == 1:
            return leaf if leaf.shape[0] == group.num_repeats else leaf[each.first : last]
        return leaf[each.first + index : last : num]

    return {
        name: tuple(
            jax.tree.map(lambda leaf, each=each, index=index: part(leaf, each, index), weights[name])
            for index in range(len(each.places))
        )
        for name, each in maps.items()
    }


def joined_pairs(config: ModelConfig, pairs: tuple[GroupPairs, ...]) -> AdapterWeights:
    """Undo `cut_pairs`."""

    def join(*parts: tuple[jax.Array, ...]) -> jax.Array:
        of_groups = [
            leaves[0] if len(leaves) == 1 else jnp.stack(leaves, axis=1).reshape(-1, *leaves[0].shape[1:])
            for leaves in parts
        ]
        return of_groups[0] if len(of_groups) == 1 else jnp.concatenate(of_groups)

    names = dict.fromkeys(name for group in pairs for name in group)
    found: AdapterWeights = {}
    for name in names:
        of_groups = [group[name] for group in pairs if name in group]
        found[name] = LoraPair(
            a=join(*(tuple(pair.a for pair in group) for group in of_groups)),
            b=join(*(tuple(pair.b for pair in group) for group in of_groups)),
        )
    return found


class GroupAdapters:
    """The adapters of one group.

    A shared adapter is sliced by the loop like the parameters, so its gradient is stacked; from slots each layer
    gathers those of its rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        adapter: Adapter | CutAdapter | None,
        slots: RowSlots | None,
        joins: bool,
    ) -> None:
        """`number` is that of the group."""
        self._group = config.groups[number]
        self._number = number
        self._joins = joins
        self._adapter = adapter
        self._slots = slots
        self._is_shared = adapter is not None and adapter.scale.ndim == 0
        self._maps = {} if adapter is None else _maps(config, self._group)

    @classmethod
    def of_all(
        cls,
        config: ModelConfig,
        adapter: Adapter | CutAdapter | None,
        slots: RowSlots | None,
        *,
        joins: bool = False,
    ) -> "Iterator[GroupAdapters]":
        """Yield the adapters of every group; `joins` is that of `RowAdapter`."""
        return (cls(config, number, adapter, slots, joins) for number in range(len(config.groups)))

    def pairs(self) -> GroupPairs:
        """Return what the loop slices of a shared adapter."""
        if self._adapter is None or not self._is_shared:
            return {}
        if isinstance(self._adapter, CutAdapter):
            return self._adapter.pairs[self._number]
        return _cut(self._group, self._maps, self._adapter.weights)

    def of_layer(self, place: int, repeat: Any, pairs: GroupPairs) -> LayerAdapters:
        """Return the adapters of one layer; `pairs` are those of this repeat."""
        adapter = self._adapter
        if adapter is None:
            return LayerAdapters()
        targets = self._group.stacks[place].block.targets()
        has_experts = any(target.num_experts is not None for target in targets.values())
        if self._is_shared:
            rows = {
                name: RowAdapter(self._pair(name, place, pairs), adapter.scale, joins=self._joins) for name in targets
            }
            return LayerAdapters(rows, share_experts(rows, EXPERT_PREFIX) if has_experts else None)
        assert isinstance(adapter, Adapter), "an adapter of all rows is shared"
        assert self._slots is not None, "an adapter with slots needs the slots of the rows"
        rows = {
            name: select_rows(adapter, name, self._slots, self._layer(name, place, repeat))
            for name, target in targets.items()
            if target.num_experts is None
        }
        if not has_experts:
            return LayerAdapters(rows)
        first = next(name for name, target in targets.items() if target.num_experts is not None)
        experts = pool_experts(adapter, EXPERT_PREFIX, self._slots, self._layer(first, place, repeat))
        return LayerAdapters(rows, experts)

    def _pair(self, name: str, place: int, pairs: GroupPairs) -> LoraPair:
        return pairs[name][self._maps[name].places.index(place)]

    def _layer(self, name: str, place: int, repeat: Any) -> Any:
        each = self._maps[name]
        return each.first + each.index(place, repeat)


def _maps(config: ModelConfig, group: Group) -> dict[str, _Map]:
    """Return the maps of a group's layers."""
    earlier = config.groups[: config.groups.index(group)]
    by_place = [stack.block.targets() for stack in group.stacks]
    found: dict[str, _Map] = {}
    for name in dict.fromkeys(name for targets in by_place for name in targets):
        first = sum(each.num_repeats for each in earlier for stack in each.stacks if name in stack.block.targets())
        found[name] = _Map(first, tuple(place for place, targets in enumerate(by_place) if name in targets))
    return found
