"""A model's state as files, and back: PEFT's adapter layout, and our own beside it for what PEFT does not keep.

    adapter_config.json           always
    adapter_model.safetensors     weights: base_model.model.<module>.lora_A.weight [R, I] and .lora_B.weight [O, R]
    optimizer.safetensors         the same names under first_moment. and second_moment., and step
    gradient.safetensors          the same names; no tensors when nothing was pending

Legend: L layers, I inputs and O outputs of a linear map, R the adapter's own rank, without padding.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from skyrl_tx.backends.jax.adapters import TrainingState, adapter_spec, padded_rank, resize_rank
from skyrl_tx.backends.jax.optimizer import OptimizerState
from skyrl_tx.contract.backend import Snapshot, StatePart
from skyrl_tx.contract.errors import UserError
from skyrl_tx.layers.lora import Adapter, AdapterWeights, LoraPair
from skyrl_tx.models import ALPHA, ModelConfig, adapter_shapes, target_layers
from skyrl_tx.weights.weight_map import expand

CONFIG_FILE = "adapter_config.json"
FILES: Mapping[StatePart, str] = {
    StatePart.WEIGHTS: "adapter_model.safetensors",
    StatePart.OPTIMIZER: "optimizer.safetensors",
    StatePart.GRADIENT: "gradient.safetensors",
}
FIRST, SECOND, STEP = "first_moment.", "second_moment.", "step"

Tensors = Mapping[str, np.ndarray]
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFormat:
    """How adapters of one base model are named and shaped in files."""

    base_model: str
    config: ModelConfig
    modules: Mapping[str, str]
    """Module in adapter files, with `{layer}` where there are many, by our name of the linear map."""

    def tensors(self, weights: AdapterWeights, targets: tuple[str, ...], rank: int, prefix: str = "") -> Tensors:
        """Return host arrays by their names in files."""
        trained = resize_rank({name: weights[name] for name in targets}, rank)
        return {
            f"{prefix}{name}": np.ascontiguousarray(_transposed(array))
            for target in targets
            for name, array in self._slices(target, trained[target])
        }

    def weights(self, tensors: Tensors, targets: tuple[str, ...], rank: int, prefix: str = "") -> AdapterWeights:
        """Return the tree that such arrays were made of, padded; raises UserError for one that does not fit."""
        shapes = adapter_shapes(self.config, rank).weights
        tree: AdapterWeights = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
        expected: set[str] = set()
        for target in targets:
            for name, into in self._slices(target, tree[target]):
                found = tensors.get(prefix + name)
                if found is None:
                    raise UserError(f"adapter: lacks tensor {prefix + name!r}")
                wanted = _transposed(into).shape
                if found.shape != wanted:
                    raise UserError(f"adapter: tensor {prefix + name!r} is {found.shape}, this base needs {wanted}")
                into[...] = _transposed(found)
                expected.add(prefix + name)
        unexpected = sorted(name for name in tensors.keys() - expected if name.startswith(prefix))
        if unexpected:
            raise UserError(f"adapter: unexpected tensor {unexpected[0]!r}")
        return resize_rank(tree, padded_rank(rank))

    def targets(self, target_modules: list[str]) -> tuple[str, ...]:
        """Return our names of what an adapter_config.json lists; raises UserError for what we have not."""
        present = adapter_shapes(self.config, 1).weights
        ours = {name: module.rpartition(".")[2] for name, module in self.modules.items() if name in present}
        unknown = sorted(set(target_modules) - set(ours.values()))
        if unknown:
            known = ", ".join(dict.fromkeys(ours.values()))
            raise UserError(f"adapter: target_modules has {unknown[0]!r}; this base model has {known}")
        return tuple(name for name, module in ours.items() if module in target_modules)

    def peft_config(self, targets: tuple[str, ...], rank: int, alpha: float) -> dict[str, Any]:
        """Return the content of adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "r": rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": 0.0,
            "target_modules": list(dict.fromkeys(self.modules[name].rpartition(".")[2] for name in targets)),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
            "rank_pattern": {},
            "alpha_pattern": {},
            "use_dora": False,
            "use_rslora": False,
        }

    def _slices(self, target: str, pair: LoraPair) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and view [I, R] or [R, O] of each tensor of a linear map; experts lie in one, [E, ...]."""
        layers = target_layers(self.config, target)
        for factor, array in (("lora_A", np.asarray(pair.a)), ("lora_B", np.asarray(pair.b))):
            for index, module in expand(self.modules[target], array.shape, layers):
                yield f"base_model.model.{module}.{factor}.weight", array[index]


def _transposed(array: np.ndarray) -> np.ndarray:
    return array.swapaxes(-1, -2)


@dataclass(frozen=True, kw_only=True)
class AdapterSnapshot(Snapshot):
    """One model's state: trees with padded ranks, on the device or on the host. `parts` says which of them count."""

    format: AdapterFormat
    rank: int
    alpha: float
    targets: tuple[str, ...]
    parts: frozenset[StatePart]
    weights: AdapterWeights | None = None
    optimizer: OptimizerState | None = None
    gradient: AdapterWeights | None = None

    def adapter(self, rank: int) -> Adapter:
        """Return the weights as host arrays of another padded rank, to sample from."""
        weights = resize_rank(self._need(StatePart.WEIGHTS, self.weights), rank)
        return Adapter(weights=weights, scale=np.float32(self.alpha / self.rank))  # type: ignore[arg-type]

    def write(self, directory: Path) -> None:
        """See Snapshot."""
        config = self.format.peft_config(self.targets, self.rank, self.alpha)
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))
        for part in self.parts:
            save_file(dict(self._tensors(part)), directory / FILES[part], metadata={"format": "pt"})

    def _tensors(self, part: StatePart) -> Tensors:
        match part:
            case StatePart.WEIGHTS:
                return self._named(self._need(part, self.weights))
            case StatePart.OPTIMIZER:
                state = self._need(part, self.optimizer)
                moments = {**self._named(state.first, FIRST), **self._named(state.second, SECOND)}
                return {**moments, STEP: np.asarray(state.step, np.int32)}
            case StatePart.GRADIENT:
                return {} if self.gradient is None else self._named(self.gradient)

    def _need(self, part: StatePart, value: Part | None) -> Part:
        if value is None:
            raise UserError(f"checkpoint: holds no {part}")
        return value

    def _named(self, tree: AdapterWeights, prefix: str = "") -> Tensors:
        return self.format.tensors(tree, self.targets, self.rank, prefix)


def capture(state: TrainingState, parts: Collection[StatePart], format: AdapterFormat) -> AdapterSnapshot:
    """Keep references to the arrays, which never change, and begin to copy them to the host.

    Nothing may donate an array of a training state to a compiled function: a snapshot may hold it.
    """
    snapshot = AdapterSnapshot(
        format=format,
        rank=state.lora.rank,
        alpha=ALPHA,
        targets=adapter_spec(state.lora).targets(format.config),
        parts=frozenset(parts),
        weights=state.adapter.weights if StatePart.WEIGHTS in parts else None,
        optimizer=state.optimizer if StatePart.OPTIMIZER in parts else None,
        gradient=state.gradient if StatePart.GRADIENT in parts else None,
    )
    for leaf in jax.tree.leaves((snapshot.weights, snapshot.optimizer, snapshot.gradient)):
        leaf.copy_to_host_async()
    return snapshot


def restore(fresh: TrainingState, source: AdapterSnapshot, parts: Collection[StatePart]) -> TrainingState:
    """Return a fresh state with `parts` of a snapshot in it, not placed yet; raises UserError when they do not fit."""
    targets = adapter_spec(fresh.lora).targets(source.format.config)
    for name, found, wanted in (
        ("rank", source.rank, fresh.lora.rank),
        ("lora_alpha", source.alpha, ALPHA),
        ("targets", sorted(source.targets), sorted(targets)),
    ):
        if found != wanted:
            raise UserError(f"checkpoint: its {name} is {found!r}, the model's {wanted!r}")
    absent = set(parts) - source.parts
    if absent:
        raise UserError(f"checkpoint: holds no {', no '.join(sorted(absent))}")
    state = fresh
    if StatePart.WEIGHTS in parts:
        state = replace(state, adapter=replace(state.adapter, weights=source.weights))
    if StatePart.OPTIMIZER in parts:
        state = replace(state, optimizer=source.optimizer)
    return state.with_gradient(source.gradient) if StatePart.GRADIENT in parts else state


def open_snapshot(directory: Path, format: AdapterFormat) -> AdapterSnapshot:
    """Read a snapshot's files; raises UserError for those that do not fit the base model."""
    content = _read_config(directory / CONFIG_FILE)
    targets, rank = format.targets(content["target_modules"]), content["r"]
    parts = frozenset(part for part, name in FILES.items() if (directory / name).is_file())
    tensors = {part: _read_tensors(directory / FILES[part]) for part in parts}

    def tree(part: StatePart, prefix: str = "") -> AdapterWeights:
        return format.weights(tensors[part], targets, rank, prefix)

    weights = tree(StatePart.WEIGHTS) if StatePart.WEIGHTS in parts else None
    gradient = tree(StatePart.GRADIENT) if tensors.get(StatePart.GRADIENT) else None
    optimizer = None
    if StatePart.OPTIMIZER in parts:
        step = tensors[StatePart.OPTIMIZER].get(STEP)
        if step is None:
            raise UserError(f"adapter: {FILES[StatePart.OPTIMIZER]} lacks tensor {STEP!r}")
        first, second = tree(StatePart.OPTIMIZER, FIRST), tree(StatePart.OPTIMIZER, SECOND)
        optimizer = OptimizerState(first=first, second=second, step=np.int32(step))
    return AdapterSnapshot(
        format=format,
        rank=rank,
        alpha=content["lora_alpha"],
        targets=targets,
        parts=parts,
        weights=weights,
        optimizer=optimizer,
        gradient=gradient,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"adapter: {CONFIG_FILE}: {error}") from error
    for key, kind in (("r", int), ("lora_alpha", (int, float)), ("target_modules", list)):
        value = content.get(key) if isinstance(content, dict) else None
        if not isinstance(value, kind) or value in (0, []):
            raise UserError(f"adapter: {CONFIG_FILE} has {key} = {value!r}")
    return content


def _read_tensors(path: Path) -> Tensors:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"adapter: {path.name}: {error}") from error
