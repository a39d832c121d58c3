"""The adapters of the layers of one group, as its loop reads them.

Legend: n repeats of a cycle, m layers of a cycle that have a map, I inputs, R rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from skyrl_tx.layers.lora import Adapter, LoraPair, RowAdapter, RowSlots, select_rows
from skyrl_tx.layers.moe import pool_experts, share_experts
from skyrl_tx.models.config import Group, ModelConfig
from skyrl_tx.models.parts.base import LayerAdapters
from skyrl_tx.models.parts.mixture import EXPERT_PREFIX


@dataclass(frozen=True, slots=True)
class _Map:
    """The place of a group's layers among all layers that have a map."""

    first: int
    places: tuple[int, ...]  # in the cycle, of the layers that have the map

    def index(self, place: int, repeat: Any) -> Any:
        """Return which of the map's layers in this group one layer is."""
        num = len(self.places)
        return repeat if num == 1 else repeat * num + self.places.index(place)


class GroupAdapters:
    """The adapters of one group.

    A shared adapter is sliced by the loop like the parameters, so its gradient is stacked; from slots each layer
    gathers those of its rows.
    """

    def __init__(
        self, config: ModelConfig, group: Group, adapter: Adapter | None, slots: RowSlots | None, joins: bool
    ) -> None:
        self._group = group
        self._joins = joins
        self._adapter = adapter
        self._slots = slots
        self._is_shared = adapter is not None and adapter.scale.ndim == 0
        self._maps = {} if adapter is None else _maps(config, group)

    @classmethod
    def of_all(
        cls, config: ModelConfig, adapter: Adapter | None, slots: RowSlots | None, *, joins: bool = False
    ) -> "Iterator[GroupAdapters]":
        """Yield the adapters of every group; `joins` is that of `RowAdapter`."""
        return (cls(config, group, adapter, slots, joins) for group in config.groups)

    def pairs(self) -> dict[str, LoraPair]:
        """Return what the loop slices of a shared adapter: [n, ...], or [n, m, ...] if m > 1 layers have the map."""
        if self._adapter is None or not self._is_shared:
            return {}
        weights, repeats = self._adapter.weights, self._group.num_repeats

        def cut(leaf: jax.Array, each: _Map) -> jax.Array:
            num = len(each.places) * repeats
            own = leaf if leaf.shape[0] == num else leaf[each.first : each.first + num]
            return own if num == repeats else own.reshape(repeats, -1, *own.shape[1:])

        return {
            name: jax.tree.map(lambda leaf, each=each: cut(leaf, each), weights[name])
            for name, each in self._maps.items()
        }

    def of_layer(self, place: int, repeat: Any, pairs: dict[str, LoraPair]) -> LayerAdapters:
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

    def _pair(self, name: str, place: int, pairs: dict[str, LoraPair]) -> LoraPair:
        places = self._maps[name].places
        if len(places) == 1:
            return pairs[name]
        return jax.tree.map(lambda leaf: leaf[places.index(place)], pairs[name])

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
