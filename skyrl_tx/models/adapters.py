"""The adapters of a model: the linear maps they change, their shapes, and their initial values.

A *target* is a linear map that adapters can change. Its name is the name of the parameter, for
example "q_proj".

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
from skyrl_tx.models.config import ExpertLora, Group, ModelConfig, describe_params
from skyrl_tx.models.parts.base import LayerAdapters, Target
from skyrl_tx.models.parts.feed_forward import EXPERT_PREFIX
from skyrl_tx.weights.adapter_factors import AdapterError, find_stack, split_modules
from skyrl_tx.weights.peft import AdapterFiles, AdapterFormat, TargetModule
from skyrl_tx.weights.weight_map import (
    TIED_UNEMBED_MODULE,
    WeightMap,
    bind_rows,
    find_fused_modules,
    name_adapter_modules,
)

UNEMBED = "unembed"
"""The target that does not belong to a block."""
_GROUPS = "attn", "mlp", "unembed"
"""The groups of targets, each with a field `train_<group>` of `LoraSpec`."""


def get_targets(config: ModelConfig) -> dict[str, Target]:
    """Return all targets: maps of dense blocks, then maps of experts, then the unembedding."""
    targets: dict[str, Target] = {}
    for stack in config.stacks:
        targets |= stack.block.targets()
    targets = dict(sorted(targets.items(), key=lambda item: item[1].num_experts is not None))
    axes: tuple[Axis, Axis] = ("embed", "vocab")
    unembed = Target(inputs=config.hidden_size, outputs=config.vocab_size, axes=axes, group="unembed")
    return targets | {UNEMBED: unembed}


def get_trained_targets(config: ModelConfig, lora: LoraSpec) -> tuple[str, ...]:
    """Return the targets that are trained.

    The factors of all other targets are zero and stay zero.
    """
    trained = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    return tuple(name for name, target in get_targets(config).items() if trained[target.group])


def get_adapter_axes(config: ModelConfig) -> dict[str, tuple[tuple[Axis | None, ...], tuple[Axis | None, ...]]]:
    """Return the logical axes of A and B of each target.

    They equal the axes of the map; ranks are not sharded.
    """
    stacks: tuple[Axis, ...] = ("layers", "expert")
    return {
        name: ((*stack, target.axes[0], None), (*stack, None, target.axes[1]))
        for name, target in get_targets(config).items()
        for stack in [stacks[: len(get_target_dims(config, name)[0])]]
    }


def get_target_layers(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the layers that have this target. The unembedding belongs to no layer."""
    layers = (stack.layers for stack in config.stacks if name in stack.block.targets())
    return tuple(sorted(itertools.chain.from_iterable(layers)))


def get_target_dims(config: ModelConfig, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the leading dimensions of A and of B.

    They are [L], or [L, E] for experts. The unembedding has none. If all experts share a factor,
    its E is 1.
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
    """Return the shapes of one adapter, without a slot axis, as `jax.ShapeDtypeStruct`s."""

    def make_shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, np.float32)

    weights: dict[str, LoraPair] = {}
    for name, target in get_targets(config).items():
        dims_a, dims_b = get_target_dims(config, name)
        a, b = make_shape(*dims_a, target.inputs, rank), make_shape(*dims_b, rank, target.outputs)
        weights[name] = LoraPair(a=a, b=b)  # type: ignore[arg-type]
    return Adapter(weights=weights, scale=make_shape())  # type: ignore[arg-type]


def init_adapter(config: ModelConfig, lora: LoraSpec, max_rank: int | None = None, *, alpha: float = ALPHA) -> Adapter:
    """Return a new adapter as numpy arrays. A is drawn from the seed and B is zero.

    Both are padded with zeros to `max_rank`. A is uniform on ±1/sqrt(I), like PEFT's
    kaiming-uniform with a = sqrt(5). Each target is drawn on the host by its own generator, whose
    key is a hash of seed and name. So the values do not depend on devices, on `max_rank` or on
    other targets.
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
    return adapter.replace(scale=np.float32(alpha / lora.rank))  # type: ignore[attr-defined]


def make_adapter_format(config: ModelConfig, weights: WeightMap, base_model: str) -> AdapterFormat:
    """Return the format of the adapter files of this model."""
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
    """Return the form of an adapter's experts: "shared" if they share factors, else "own"."""
    numbers = {target.num_experts for target in get_targets(config).values()} - {None}
    return "shared" if all(adapter.has_shared_factors(number or 0) for number in numbers) else "own"


def fit_adapter(
    config: ModelConfig, format: AdapterFormat, adapter: AdapterFiles, lora: LoraSpec | None = None
) -> tuple[LoraSpec, AdapterWeights]:
    """Convert an adapter to the form that this server trains: whole groups of modules, alpha 32.

    The update of each module stays the same. If the adapter lacks a module of a trained group, the
    module gets the factors of a fresh model, whose update is zero. Without `lora`, the trained
    groups are those in which the adapter changes a module. Raises AdapterError if the adapter does
    not fit the model or `lora`.
    """
    factors = split_modules(adapter.factors, format.fused, adapter.rank)
    if config.tied_embeddings and "lm_head" in factors:
        factors[TIED_UNEMBED_MODULE] = factors.pop("lm_head")
    leaves = {find_stack(module)[0].rpartition(".")[2] for module in factors}
    changed = {get_targets(config)[name].group for name, module in format.modules.items() if module.leaf in leaves}

    # Train every group that has a changed module.
    if lora is None:
        lora = LoraSpec(rank=adapter.rank, seed=0, **{f"train_{group}": group in changed for group in _GROUPS})
    for group in sorted(changed):
        if not getattr(lora, f"train_{group}"):
            raise AdapterError(f"it has modules of the group {group}, but lora_config has train_{group} = false")
    fresh = init_adapter(config, lora).weights
    trained: AdapterWeights = {name: fresh[name] for name in get_trained_targets(config, lora)}
    return lora, format.with_factors(trained, factors, adapter.scale * lora.rank / ALPHA)


@dataclass(frozen=True, slots=True)
class _TargetLayers:
    """The layers of a group that have a target, as a part of all layers that have it."""

    first: int
    cycle_positions: tuple[int, ...]  # of the layers in the cycle that have the target

    def get_index(self, position: int, repeat: Any) -> Any:
        """Return the index of a layer among the layers of this group that have the target."""
        num = len(self.cycle_positions)
        return repeat if num == 1 else repeat * num + self.cycle_positions.index(position)


GroupPairs = dict[str, tuple[LoraPair, ...]]
"""The factors of a shared adapter that the loop over a group slices.

For each target, there is a pair [n, ...] per layer of the cycle.
"""


@struct.dataclass
class SplitAdapter:
    """One adapter for all rows, split into the arrays that the loops over groups slice.

    Gradients are added to sums that are split in the same way. JAX can add to such a sum inside the
    loop only if the loop slices the array directly.
    """

    pairs: tuple[GroupPairs, ...]  # by group
    scale: jax.Array


def cut_pairs(config: ModelConfig, weights: AdapterWeights) -> tuple[GroupPairs, ...]:
    """Cut the factors of all layers, [L, ...], into the arrays that the loops over groups slice."""
    return tuple(_cut_group(group, _find_target_layers(config, group), weights) for group in config.groups)


def _cut_group(group: Group, targets: "dict[str, _TargetLayers]", weights: AdapterWeights) -> GroupPairs:
    def cut_leaf(leaf: jax.Array, layers: _TargetLayers, index: int) -> jax.Array:
        num = len(layers.cycle_positions)
        last = layers.first + num * group.num_repeats
        if num == 1:
            return leaf if leaf.shape[0] == group.num_repeats else leaf[layers.first : last]
        return leaf[layers.first + index : last : num]

    return {
        name: tuple(
            jax.tree.map(lambda leaf, layers=layers, index=index: cut_leaf(leaf, layers, index), weights[name])
            for index in range(len(layers.cycle_positions))
        )
        for name, layers in targets.items()
    }


def join_pairs(config: ModelConfig, pairs: tuple[GroupPairs, ...]) -> AdapterWeights:
    """Join what `cut_pairs` cut."""

    def join_factors(*parts: tuple[jax.Array, ...]) -> jax.Array:
        by_group = [
            leaves[0] if len(leaves) == 1 else jnp.stack(leaves, axis=1).reshape(-1, *leaves[0].shape[1:])
            for leaves in parts
        ]
        return by_group[0] if len(by_group) == 1 else jnp.concatenate(by_group)

    names = dict.fromkeys(name for group in pairs for name in group)
    joined: AdapterWeights = {}
    for name in names:
        by_group = [group[name] for group in pairs if name in group]
        joined[name] = LoraPair(
            a=join_factors(*(tuple(pair.a for pair in group) for group in by_group)),
            b=join_factors(*(tuple(pair.b for pair in group) for group in by_group)),
        )
    return joined


@dataclass(frozen=True, slots=True)
class GroupAdapters:
    """The adapters of one group of layers.

    A shared adapter is sliced by the loop over layers like the parameters, and its gradient is
    stacked. With slots, each layer gathers the adapters of its rows from the pool.
    """

    group: Group
    number: int  # of the group
    adapter: Adapter | SplitAdapter | None
    slots: RowSlots | None
    may_concatenate: bool
    targets: "dict[str, _TargetLayers]"

    @classmethod
    def from_adapter(
        cls,
        config: ModelConfig,
        adapter: Adapter | SplitAdapter | None,
        slots: RowSlots | None,
        *,
        may_concatenate: bool = False,
    ) -> "Iterator[GroupAdapters]":
        """Yield the adapters of each group. `may_concatenate` is passed to `RowAdapter`."""
        for number, group in enumerate(config.groups):
            yield cls(group, number, adapter, slots, may_concatenate, _find_target_layers(config, group))

    @property
    def _is_shared(self) -> bool:
        return self.adapter is not None and self.adapter.scale.ndim == 0

    def get_pairs(self) -> GroupPairs:
        """Return the arrays of a shared adapter that the loop slices.

        Empty for slots and for the base model.
        """
        if self.adapter is None or not self._is_shared:
            return {}
        if isinstance(self.adapter, SplitAdapter):
            return self.adapter.pairs[self.number]
        return _cut_group(self.group, self.targets, self.adapter.weights)

    def select_layer(self, position: int, repeat: Any, pairs: GroupPairs) -> LayerAdapters:
        """Return the adapters of the layer at a position of the cycle.

        `pairs` are the slices that belong to this repeat of the cycle.
        """
        adapter = self.adapter
        if adapter is None:
            return LayerAdapters()
        targets = self.group.stacks[position].block.targets()
        has_experts = any(target.num_experts is not None for target in targets.values())
        if self._is_shared:
            rows = {
                name: RowAdapter(
                    self._get_pair(name, position, pairs), adapter.scale, may_concatenate=self.may_concatenate
                )
                for name in targets
            }
            return LayerAdapters(rows, get_expert_adapters(rows, EXPERT_PREFIX) if has_experts else None)

        # The rows use different adapters of the pool.
        assert isinstance(adapter, Adapter), "an adapter for all rows is shared"
        assert self.slots is not None, "an adapter with slots needs the slots of the rows"
        rows = {
            name: select_rows(adapter, name, self.slots, self._get_layer_index(name, position, repeat))
            for name, target in targets.items()
            if target.num_experts is None
        }

        if not has_experts:
            return LayerAdapters(rows)
        first = next(name for name, target in targets.items() if target.num_experts is not None)
        experts = get_pooled_expert_adapters(
            adapter, EXPERT_PREFIX, self.slots, self._get_layer_index(first, position, repeat)
        )
        return LayerAdapters(rows, experts)

    def _get_pair(self, name: str, position: int, pairs: GroupPairs) -> LoraPair:
        return pairs[name][self.targets[name].cycle_positions.index(position)]

    def _get_layer_index(self, name: str, position: int, repeat: Any) -> Any:
        layers = self.targets[name]
        return layers.first + layers.get_index(position, repeat)


def _find_target_layers(config: ModelConfig, group: Group) -> dict[str, _TargetLayers]:
    """Return where the layers of a group are, for each target that they have."""
    earlier = config.groups[: config.groups.index(group)]
    by_position = [stack.block.targets() for stack in group.stacks]
    layers: dict[str, _TargetLayers] = {}
    for name in dict.fromkeys(name for targets in by_position for name in targets):
        first = sum(other.num_repeats for other in earlier for stack in other.stacks if name in stack.block.targets())
        positions = tuple(position for position, targets in enumerate(by_position) if name in targets)
        layers[name] = _TargetLayers(first, positions)
    return layers
