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
from skyrl_tx.layers.moe import get_expert_adapters, get_pooled_expert_adapters
from skyrl_tx.models.config import Group, ModelConfig
from skyrl_tx.models.parts.base import LayerAdapters
from skyrl_tx.models.parts.feed_forward import EXPERT_PREFIX


@dataclass(frozen=True, slots=True)
class _TargetLayers:
    """The place of a group's layers among all layers that have a map."""

    first: int
    cycle_positions: tuple[int, ...]  # in the cycle, of the layers that have the map

    def get_index(self, place: int, repeat: Any) -> Any:
        """Return which of the map's layers in this group one layer is."""
        num = len(self.cycle_positions)
        return repeat if num == 1 else repeat * num + self.cycle_positions.index(place)


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
    return tuple(_cut_group(group, _find_target_layers(config, group), weights) for group in config.groups)


def _cut_group(group: Group, maps: "dict[str, _TargetLayers]", weights: AdapterWeights) -> GroupPairs:
    def cut_leaf(leaf: jax.Array, each: _TargetLayers, index: int) -> jax.Array:
        num = len(each.cycle_positions)
        last = each.first + num * group.num_repeats
        if num == 1:
            return leaf if leaf.shape[0] == group.num_repeats else leaf[each.first : last]
        return leaf[each.first + index : last : num]

    return {
        name: tuple(
            jax.tree.map(lambda leaf, each=each, index=index: cut_leaf(leaf, each, index), weights[name])
            for index in range(len(each.cycle_positions))
        )
        for name, each in maps.items()
    }


def join_pairs(config: ModelConfig, pairs: tuple[GroupPairs, ...]) -> AdapterWeights:
    """Undo `cut_pairs`."""

    def join_factors(*parts: tuple[jax.Array, ...]) -> jax.Array:
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
            a=join_factors(*(tuple(pair.a for pair in group) for group in of_groups)),
            b=join_factors(*(tuple(pair.b for pair in group) for group in of_groups)),
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
        self._find_target_layers = {} if adapter is None else _find_target_layers(config, self._group)

    @classmethod
    def from_adapter(
        cls,
        config: ModelConfig,
        adapter: Adapter | CutAdapter | None,
        slots: RowSlots | None,
        *,
        joins: bool = False,
    ) -> "Iterator[GroupAdapters]":
        """Yield the adapters of every group; `joins` is that of `RowAdapter`."""
        return (cls(config, number, adapter, slots, joins) for number in range(len(config.groups)))

    def get_pairs(self) -> GroupPairs:
        """Return what the loop slices of a shared adapter."""
        if self._adapter is None or not self._is_shared:
            return {}
        if isinstance(self._adapter, CutAdapter):
            return self._adapter.pairs[self._number]
        return _cut_group(self._group, self._find_target_layers, self._adapter.weights)

    def select_layer(self, place: int, repeat: Any, pairs: GroupPairs) -> LayerAdapters:
        """Return the adapters of one layer; `pairs` are those of this repeat."""
        adapter = self._adapter
        if adapter is None:
            return LayerAdapters()
        targets = self._group.stacks[place].block.targets()
        has_experts = any(target.num_experts is not None for target in targets.values())
        if self._is_shared:
            rows = {
                name: RowAdapter(self._get_pair(name, place, pairs), adapter.scale, joins=self._joins)
                for name in targets
            }
            return LayerAdapters(rows, get_expert_adapters(rows, EXPERT_PREFIX) if has_experts else None)
        assert isinstance(adapter, Adapter), "an adapter of all rows is shared"
        assert self._slots is not None, "an adapter with slots needs the slots of the rows"
        rows = {
            name: select_rows(adapter, name, self._slots, self._get_layer_index(name, place, repeat))
            for name, target in targets.items()
            if target.num_experts is None
        }
        if not has_experts:
            return LayerAdapters(rows)
        first = next(name for name, target in targets.items() if target.num_experts is not None)
        experts = get_pooled_expert_adapters(
            adapter, EXPERT_PREFIX, self._slots, self._get_layer_index(first, place, repeat)
        )
        return LayerAdapters(rows, experts)

    def _get_pair(self, name: str, place: int, pairs: GroupPairs) -> LoraPair:
        return pairs[name][self._find_target_layers[name].cycle_positions.index(place)]

    def _get_layer_index(self, name: str, place: int, repeat: Any) -> Any:
        each = self._find_target_layers[name]
        return each.first + each.get_index(place, repeat)


def _find_target_layers(config: ModelConfig, group: Group) -> dict[str, _TargetLayers]:
    """Return the maps of a group's layers."""
    earlier = config.groups[: config.groups.index(group)]
    by_place = [stack.block.targets() for stack in group.stacks]
    found: dict[str, _TargetLayers] = {}
    for name in dict.fromkeys(name for targets in by_place for name in targets):
        first = sum(each.num_repeats for each in earlier for stack in each.stacks if name in stack.block.targets())
        found[name] = _TargetLayers(first, tuple(place for place, targets in enumerate(by_place) if name in targets))
    return found
