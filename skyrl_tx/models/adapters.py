"""The adapters of a model: the linear maps they change, their shapes, and their initial values.

A *target* is a linear map that adapters can change, by our name of it.

Legend: L layers, E experts, I inputs and O outputs of a linear map, R rank, V vocab, D embed.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.contract.state_files import ALPHA
from skyrl_tx.layers.experts import get_expert_adapters, get_pooled_expert_adapters
from skyrl_tx.layers.lora import Adapter, AdapterWeights, LoraPair, RowAdapter, RowSlots, select_rows
from skyrl_tx.layers.parameter import Axis, flatten
from skyrl_tx.models.config import ExpertLora, Group, ModelConfig
from skyrl_tx.models.params import describe_params
from skyrl_tx.models.parts.base import LayerAdapters, Target
from skyrl_tx.models.parts.feed_forward import EXPERT_PREFIX
from skyrl_tx.weights.peft import AdapterFiles, AdapterFormat, TargetModule, find_stack, split_modules
from skyrl_tx.weights.weight_map import (
    TIED_UNEMBED_MODULE,
    WeightMap,
    bind_rows,
    find_fused_modules,
    name_adapter_modules,
)

UNEMBED = "unembed"
"""The target that is no part of a block."""


def get_targets(config: ModelConfig) -> dict[str, Target]:
    """Return every linear map that adapters change: those of dense blocks, of experts, and the unembedding."""
    found: dict[str, Target] = {}
    for stack in config.stacks:
        found |= stack.block.targets()
    found = dict(sorted(found.items(), key=lambda item: item[1].num_experts is not None))
    axes: tuple[Axis, Axis] = ("embed", "vocab")
    return found | {UNEMBED: Target(inputs=config.hidden_size, outputs=config.vocab_size, axes=axes, group="unembed")}


def get_trained_targets(config: ModelConfig, lora: LoraSpec) -> tuple[str, ...]:
    """Return the targets that are trained. The pairs of others are zero and stay zero."""
    trained = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    return tuple(name for name, target in get_targets(config).items() if trained[target.group])


def get_adapter_axes(config: ModelConfig) -> dict[str, tuple[tuple[Axis | None, ...], tuple[Axis | None, ...]]]:
    """Return the logical axes of A and B of each target: those of the map that it changes; ranks are not sharded."""
    stacks: tuple[Axis, ...] = ("layers", "expert")
    return {
        name: ((*stack, target.axes[0], None), (*stack, None, target.axes[1]))
        for name, target in get_targets(config).items()
        for stack in [stacks[: len(get_target_dims(config, name)[0])]]
    }


def get_target_layers(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the layers that have a target; none for the unembedding."""
    layers = (stack.layers for stack in config.stacks if name in stack.block.targets())
    return tuple(sorted(itertools.chain.from_iterable(layers)))


def get_target_dims(config: ModelConfig, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the leading dimensions of A and of B: [L], [L, E] for experts, none for the unembedding.

    E is 1 of a factor that all experts share.
    """
    target = get_targets(config)[name]
    if name == UNEMBED:
        return (), ()
    num_layers = len(get_target_layers(config, name))
    if target.num_experts is None:
        return (num_layers,), (num_layers,)
    a, b = (
        (num_layers, 1 if config.expert_lora == "shared" and axis == "embed" else target.num_experts)
        for axis in target.axes
    )
    return a, b


def describe_adapter(config: ModelConfig, rank: int) -> Adapter:
    """Return the tree of one adapter, without a slot axis, as float32 `jax.ShapeDtypeStruct`s."""

    def make_shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, np.float32)

    weights: dict[str, LoraPair] = {}
    for name, target in get_targets(config).items():
        stack_of_a, stack_of_b = get_target_dims(config, name)
        a, b = make_shape(*stack_of_a, target.inputs, rank), make_shape(*stack_of_b, rank, target.outputs)
        weights[name] = LoraPair(a=a, b=b)  # type: ignore[arg-type]
    return Adapter(weights=weights, scale=make_shape())  # type: ignore[arg-type]


def init_adapter(config: ModelConfig, lora: LoraSpec, max_rank: int | None = None) -> Adapter:
    """Return a new adapter as numpy arrays: A drawn from the seed, B zero, both padded with zeros to `max_rank`.

    A is uniform on ±1/sqrt(I), as PEFT's kaiming-uniform with a = sqrt(5). Each target draws on the host from its own
    generator, keyed by seed and name. So its values do not depend on devices, `max_rank` or other targets.
    """
    assert 1 <= lora.rank <= (max_rank or lora.rank), f"rank {lora.rank}, padded to {max_rank}"
    shapes = describe_adapter(config, max_rank or lora.rank)
    adapter: Adapter = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    for name in get_trained_targets(config, lora):
        a = adapter.weights[name].a
        bound = a.shape[-2] ** -0.5
        key = hashlib.sha256(f"{lora.seed}:{name}".encode()).digest()[:16]
        draw = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        np.asarray(a)[..., : lora.rank] = draw.uniform(-bound, bound, (*a.shape[:-1], lora.rank))
    return adapter.replace(scale=np.float32(ALPHA / lora.rank))  # type: ignore[attr-defined]


def make_adapter_format(config: ModelConfig, weights: WeightMap, base_model: str) -> AdapterFormat:
    """Return the format of this model's adapter files."""
    names = name_adapter_modules(weights, tied_embeddings=config.tied_embeddings)
    modules = {
        name: TargetModule(
            module=names[name],
            stacks=get_target_dims(config, name),
            layers=get_target_layers(config, name) or None,
            inputs=target.inputs,
            outputs=target.outputs,
        )
        for name, target in get_targets(config).items()
    }
    bound = bind_rows(weights, flatten(describe_params(config)))
    return AdapterFormat(base_model=base_model, modules=modules, fused=find_fused_modules(bound))


def choose_expert_lora(config: ModelConfig, adapter: AdapterFiles) -> ExpertLora:
    """Return the form that has room for an adapter's factors of experts: "shared", if these are equal."""
    numbers = {target.num_experts for target in get_targets(config).values()} - {None}
    return "shared" if all(adapter.has_shared_factors(number or 0) for number in numbers) else "own"


def fit_adapter(config: ModelConfig, format: AdapterFormat, adapter: AdapterFiles) -> tuple[LoraSpec, AdapterWeights]:
    """Return an adapter as one that this server trains: whole groups of modules, with our alpha.

    The update of each module stays the same. Modules of a trained group that the adapter lacks get the values of a
    fresh model, whose update is zero. Raises AdapterError if the adapter does not fit the model.
    """
    factors = split_modules(adapter.factors, format.fused, adapter.rank)
    if config.tied_embeddings and "lm_head" in factors:
        factors[TIED_UNEMBED_MODULE] = factors.pop("lm_head")
    leaves = {find_stack(module)[0].rpartition(".")[2] for module in factors}
    changed = {get_targets(config)[name].group for name, module in format.modules.items() if module.leaf in leaves}
    lora = LoraSpec(
        rank=adapter.rank,
        seed=0,
        train_attn="attn" in changed,
        train_mlp="mlp" in changed,
        train_unembed="unembed" in changed,
    )
    fresh = init_adapter(config, lora).weights
    trained: AdapterWeights = {name: fresh[name] for name in get_trained_targets(config, lora)}
    return lora, format.with_factors(trained, factors, adapter.scale * lora.rank / ALPHA)


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
