"""Write the state of a model to files and read it. `contract.state_files` describes the format.

Files have the rank that the client chose. Arrays of training states have padded ranks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from typing_extensions import override

from skyrl_tx.backends.jax.devices import fetch_one_by_one, is_distributed
from skyrl_tx.backends.jax.train.optimizer import OptimizerState
from skyrl_tx.backends.jax.train.training_state import SMALLEST_RANK, TrainingState, pad_rank, resize_rank
from skyrl_tx.contract.backend import Snapshot, StatePart
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.state_files import FILES, FIRST_MOMENT, SECOND_MOMENT, STEP
from skyrl_tx.layers.lora import Adapter, AdapterWeights
from skyrl_tx.weights.peft import AdapterFormat, Tensors, read_config, read_tensors


@dataclass(frozen=True, kw_only=True)
class AdapterSnapshot(Snapshot):
    """The captured parts of one model, with padded ranks, on the device or on the host."""

    format: AdapterFormat
    rank: int
    alpha: float
    targets: tuple[str, ...]
    parts: Mapping[StatePart, Any]
    """Weights, optimizer state and gradient. The gradient may be None."""

    def make_adapter(self, rank: int) -> Adapter:
        """Return the adapter for sampling, as host arrays that are padded to `rank`.

        Raises UserError if the snapshot has no weights.
        """
        if StatePart.WEIGHTS not in self.parts:
            raise UserError(f"checkpoint: holds no {StatePart.WEIGHTS}, which sampling needs")
        weights = resize_rank(self.parts[StatePart.WEIGHTS], rank)
        return Adapter(weights=weights, scale=np.float32(self.alpha / self.rank))  # type: ignore[arg-type]

    @override
    def write(self, directory: Path) -> None:
        self.format.write_config(directory, self.targets, self.rank, self.alpha)
        for part, value in self.parts.items():
            save_file(dict(self._make_tensors(value)), directory / FILES[part], metadata={"format": "pt"})

    def _make_tensors(self, value: AdapterWeights | OptimizerState | None) -> Tensors:
        if isinstance(value, OptimizerState):
            moments = {
                **self._name_tensors(value.first, FIRST_MOMENT),
                **self._name_tensors(value.second, SECOND_MOMENT),
            }
            return {**moments, STEP: np.asarray(value.step, np.int32)}
        return {} if value is None else self._name_tensors(value)

    def _name_tensors(self, tree: AdapterWeights, prefix: str = "") -> Tensors:
        return self.format.to_tensors(resize_rank({name: tree[name] for name in self.targets}, self.rank), prefix)


def capture(state: TrainingState, parts: Collection[StatePart], format: AdapterFormat) -> AdapterSnapshot:
    """Return a snapshot that refers to the arrays of a state, and start to copy them to the host.

    Never donate the arrays of a training state to a compiled function, because a snapshot may refer
    to them. On multiple hosts the snapshot has copies on the host, because `write` must not
    communicate with other hosts.
    """
    state_parts: dict[StatePart, Any] = {
        StatePart.WEIGHTS: state.adapter.weights,
        StatePart.OPTIMIZER: state.optimizer,
        StatePart.GRADIENT: state.gradient,
    }
    snapshot = AdapterSnapshot(
        format=format,
        rank=state.lora.rank,
        alpha=state.alpha,
        targets=state.targets,
        parts={part: state_parts[part] for part in parts},
    )

    if is_distributed():
        return replace(snapshot, parts=fetch_one_by_one(dict(snapshot.parts)))
    for leaf in jax.tree.leaves(dict(snapshot.parts)):
        leaf.copy_to_host_async()
    return snapshot


def restore(fresh: TrainingState, source: AdapterSnapshot, parts: Collection[StatePart]) -> TrainingState:
    """Return the `fresh` state with `parts` of a snapshot. The arrays are not on the devices yet.

    Weights keep the alpha that they were trained with. Raises UserError if the snapshot does not
    fit the model, or lacks a part.
    """
    # Does the snapshot fit?
    for name, actual, expected in (
        ("rank", source.rank, fresh.lora.rank),
        ("lora_alpha", source.alpha, source.alpha if StatePart.WEIGHTS in parts else fresh.alpha),
        ("targets", sorted(source.targets), sorted(fresh.targets)),
    ):
        if actual != expected:
            raise UserError(f"checkpoint: its {name} is {actual!r}, but the {name} of the model is {expected!r}")
    if absent := set(parts) - source.parts.keys():
        raise UserError(f"checkpoint: holds no {', no '.join(sorted(absent))}")

    # Replace the parts.
    state = fresh
    if StatePart.WEIGHTS in parts:
        scale = np.float32(source.alpha / source.rank)
        adapter = replace(state.adapter, weights=source.parts[StatePart.WEIGHTS], scale=scale)
        state = replace(state, alpha=source.alpha, adapter=adapter)
    if StatePart.OPTIMIZER in parts:
        state = replace(state, optimizer=source.parts[StatePart.OPTIMIZER])
    return state.with_gradient(source.parts[StatePart.GRADIENT]) if StatePart.GRADIENT in parts else state


def open_snapshot(directory: Path, format: AdapterFormat, smallest_rank: int = SMALLEST_RANK) -> AdapterSnapshot:
    """Read the files of a snapshot. Raises UserError if they do not fit the base model."""
    config = read_config(directory)
    targets, rank = format.read_targets(config), config["r"]
    tensors = {part: read_tensors(directory / name) for part, name in FILES.items() if (directory / name).is_file()}
    # Weights of experts may have the other form of `expert_lora`; moments and gradients may not.
    any_form = tensors.keys() == {StatePart.WEIGHTS}

    def read_tree(part: StatePart, prefix: str = "") -> AdapterWeights:
        weights = format.to_weights(tensors[part], targets, rank, prefix, any_form=any_form)
        return resize_rank(weights, pad_rank(rank, smallest_rank))

    def read_part(part: StatePart) -> AdapterWeights | OptimizerState | None:
        if part is not StatePart.OPTIMIZER:
            return read_tree(part) if part is StatePart.WEIGHTS or tensors[part] else None
        step = tensors[part].get(STEP)
        if step is None:
            raise UserError(f"adapter: {FILES[part]} lacks tensor {STEP!r}")
        return OptimizerState(
            first=read_tree(part, FIRST_MOMENT), second=read_tree(part, SECOND_MOMENT), step=np.int32(step)
        )

    return AdapterSnapshot(
        format=format,
        rank=rank,
        alpha=config["lora_alpha"],
        targets=targets,
        parts={part: read_part(part) for part in tensors},
    )


def as_adapter_snapshot(source: Snapshot) -> AdapterSnapshot:
    """Return a snapshot of this backend with its type."""
    assert isinstance(source, AdapterSnapshot), "the snapshot was made by another backend"
    return source
