"""The training state of one model, its AdamW step, and its files. All records are immutable.

`skyrl_tx.contract.state_files` defines the files.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from skyrl_tx.contract.backend import Snapshot, StatePart
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams
from skyrl_tx.contract.state_files import (
    ALPHA,
    CONFIG_FILE,
    FILES,
    FIRST_MOMENT,
    LORA_A,
    SECOND_MOMENT,
    STEP,
    adapter_config,
)
from skyrl_tx_torch.model import Target


class Tree(dict[str, Tensor]):
    """Tensors of one adapter (weights, gradients or moments) by their names in files. Never changed in place."""

    def map(self, function: Callable[..., Tensor], *others: "Tree") -> "Tree":
        """Call a function with the tensors of each name, and return the results as a tree."""
        return Tree({name: function(tensor, *(other[name] for other in others)) for name, tensor in self.items()})

    def __add__(self, other: "Tree") -> "Tree":
        return self.map(torch.add, other)

    def norm(self) -> float:
        """Return the L2 norm over all tensors together."""
        return float(torch.stack([tensor.square().sum() for tensor in self.values()]).sum().sqrt())


@dataclass(frozen=True, kw_only=True)
class State:
    """A model in training: adapter weights, AdamW moments, step, and the accumulated gradient."""

    weights: Tree
    first: Tree
    second: Tree
    step: int = 0
    gradient: Tree | None = None

    @classmethod
    def from_weights(cls, weights: Tree) -> "State":
        """Return a state with the given weights and a new optimizer."""
        return cls(weights=weights, first=weights.map(torch.zeros_like), second=weights.map(torch.zeros_like))

    @classmethod
    def fresh(cls, lora: LoraSpec, targets: Iterable[Target], device: torch.device) -> "State":
        """Return the state of a new model.

        A is drawn uniformly from ±1/sqrt(inputs), from the seed and the name of the tensor. B is zero.
        """
        weights = Tree()
        for name, (rows, columns) in (pair for target in targets for pair in target.shapes(lora.rank).items()):
            array = np.zeros((rows, columns), np.float32)
            if name.endswith(LORA_A):
                key = int.from_bytes(hashlib.sha256(f"{lora.seed}:{name}".encode()).digest()[:16], "little")
                bound = columns**-0.5
                array[...] = np.random.Generator(np.random.Philox(key=key)).uniform(-bound, bound, array.shape)
            weights[name] = torch.from_numpy(array).to(device)
        return cls.from_weights(weights)

    @property
    def rank(self) -> int:
        """The rank of the adapter."""
        return next(len(weight) for name, weight in self.weights.items() if name.endswith(LORA_A))

    def take_step(self, params: OptimizerParams) -> tuple["State", float]:
        """Return the state after one AdamW step, and the norm of the gradient before clipping."""
        # Clip the gradient.
        gradient = self.gradient or self.weights.map(torch.zeros_like)
        norm, step = gradient.norm(), self.step + 1
        clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
        gradient = gradient.map(lambda g: g * clip)

        # Update the moments and the weights.
        first = self.first.map(lambda m, g: m + (g - m) * (1 - params.beta1), gradient)
        second = self.second.map(lambda v, g: v * params.beta2 + g * g * (1 - params.beta2), gradient)
        step_size, root = params.learning_rate / (1 - params.beta1**step), (1 - params.beta2**step) ** 0.5
        decay = 1 - params.learning_rate * params.weight_decay

        def update(weight: Tensor, m: Tensor, v: Tensor) -> Tensor:
            change = step_size * m / (v.sqrt() / root + params.eps)
            return weight * decay - torch.where(m == 0, 0.0, change)

        return State(weights=self.weights.map(update, first, second), first=first, second=second, step=step), norm


@dataclass(frozen=True, kw_only=True)
class TorchSnapshot(Snapshot):
    """A state, and which of its parts belong to the snapshot."""

    base_model: str
    state: State
    parts: frozenset[StatePart]

    @override
    def write(self, directory: Path) -> None:
        # The configuration of the adapter.
        state = self.state
        modules = [name.removesuffix(LORA_A) for name in state.weights if name.endswith(LORA_A)]
        config = adapter_config(self.base_model, state.rank, (name.rpartition(".")[2] for name in modules))
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))

        # One file for each part.
        moments = _add_prefix(state.first, FIRST_MOMENT) | _add_prefix(state.second, SECOND_MOMENT)
        content: Mapping[StatePart, dict[str, Tensor]] = {
            StatePart.WEIGHTS: state.weights,
            StatePart.OPTIMIZER: moments | {STEP: torch.tensor(state.step, dtype=torch.int32)},
            StatePart.GRADIENT: state.gradient or {},
        }
        for part in self.parts | {StatePart.WEIGHTS}:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in content[part].items()}
            save_file(tensors, directory / FILES[part], metadata={"format": "pt"})

    @classmethod
    def read(
        cls, directory: Path, base_model: str, targets: Collection[Target], device: torch.device
    ) -> "TorchSnapshot":
        """Read the files of a snapshot. Raises UserError if they are damaged or belong to another base model."""
        # Read the files.
        try:
            config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
            found = {part: load_file(directory / name) for part, name in FILES.items() if (directory / name).is_file()}
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"adapter: {error}") from error

        # Which tensors must they have?
        rank, leaves = config.get("r"), config.get("target_modules") or ()
        if config.get("lora_alpha") != ALPHA:
            raise UserError(f"adapter: {CONFIG_FILE} has lora_alpha = {config.get('lora_alpha')!r}, not {ALPHA}")
        named = [target for target in targets if target.name.rpartition(".")[2] in leaves]
        shapes = {name: shape for target in named for name, shape in target.shapes(rank).items()}

        def tree(part: StatePart, prefix: str = "") -> Tree:
            tensors = {
                name.removeprefix(prefix): t for name, t in found.get(part, {}).items() if name.startswith(prefix)
            }
            for name in shapes.keys() | (tensors.keys() - {STEP}):
                if name not in tensors or tuple(tensors[name].shape) != shapes.get(name):
                    raise UserError(
                        f"adapter: {FILES[part]} lacks tensor {prefix + name!r}, or it does not fit the base"
                    )
            return Tree({name: tensors[name].to(device) for name in shapes})

        if not shapes:
            raise UserError(f"adapter: {CONFIG_FILE} names no module of the base model in target_modules")

        # Build the state.
        state = State.from_weights(tree(StatePart.WEIGHTS))
        if StatePart.OPTIMIZER in found:
            first, second = tree(StatePart.OPTIMIZER, FIRST_MOMENT), tree(StatePart.OPTIMIZER, SECOND_MOMENT)
            if STEP not in found[StatePart.OPTIMIZER]:
                raise UserError(f"adapter: {FILES[StatePart.OPTIMIZER]} lacks tensor {STEP!r}")
            state = replace(state, first=first, second=second, step=int(found[StatePart.OPTIMIZER][STEP]))
        if found.get(StatePart.GRADIENT):
            state = replace(state, gradient=tree(StatePart.GRADIENT))
        return cls(base_model=base_model, state=state, parts=frozenset(found))

    def restore_into(self, fresh: State, spec: ModelSpec, parts: Collection[StatePart]) -> State:
        """Return `fresh` with `parts` of this snapshot. Raises UserError if a part is missing or does not fit."""
        if absent := sorted(set(parts) - self.parts):
            raise UserError(f"checkpoint: it has no {', no '.join(absent)}")
        if self.state.rank != spec.lora.rank or self.state.weights.keys() != fresh.weights.keys():
            raise UserError(
                f"checkpoint: it has rank {self.state.rank} and {len(self.state.weights)} tensors; the model has rank "
                f"{spec.lora.rank} and {len(fresh.weights)} tensors"
            )
        state = State.from_weights(self.state.weights) if StatePart.WEIGHTS in parts else fresh
        if StatePart.OPTIMIZER in parts:
            state = replace(state, first=self.state.first, second=self.state.second, step=self.state.step)
        return replace(state, gradient=self.state.gradient if StatePart.GRADIENT in parts else None)


def _add_prefix(tree: Tree, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tree.items()}
