"""The state of one model, its optimizer step, and its files."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from typing_extensions import override

from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.backend import Snapshot, StatePart
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams
from skyrl_tx.contract.state_files import (
    CONFIG_FILE,
    FILES,
    PREFIX,
    STEP,
    adapter_config,
)
from skyrl_tx.testing.fake.bigram import Floats, Pair, fresh_adapter

_MODULE = f"{PREFIX}table"
_FIRST, _SECOND = "first.", "second."
"""Prefixes of moments in files.

They differ from `state_files`, because stored data has these prefixes.
"""
_FORMER_GRADIENT = "gradient."
"""The prefix of gradients in files of releases up to 0.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The optimizer state of AdamW: first and second moments, and the number of steps."""

    first: Pair
    second: Pair
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a model. It is immutable, so every change creates a new state."""

    weights: Pair
    moments: Moments
    gradient: Pair | None = None

    @classmethod
    def fresh(cls, spec: ModelSpec, vocab_size: int) -> "State":
        """Return the state of a fresh model."""
        return cls.untrained(fresh_adapter(spec.lora, vocab_size))

    @classmethod
    def untrained(cls, weights: Pair) -> "State":
        """Return a state with these weights, a fresh optimizer and no gradient."""
        zeros = Pair.zeros_like(weights)
        return cls(weights=weights, moments=Moments(first=zeros, second=zeros, step=0))

    def stepped(self, params: OptimizerParams) -> tuple["State", float]:
        """Take one AdamW step as torch does. Returns the new state and the norm before clipping."""
        gradient = self.gradient or Pair.zeros_like(self.weights)
        norm = gradient.norm
        clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
        step = self.moments.step + 1

        def update(weight: Floats, gradient: Floats, first: Floats, second: Floats) -> tuple[Floats, Floats, Floats]:
            gradient = gradient * clip
            first = params.beta1 * first + (1 - params.beta1) * gradient
            second = params.beta2 * second + (1 - params.beta2) * gradient**2
            scale = np.sqrt(second / (1 - params.beta2**step)) + params.eps
            decayed = weight * (1 - params.learning_rate * params.weight_decay)
            return decayed - params.learning_rate * (first / (1 - params.beta1**step)) / scale, first, second

        first, second = self.moments.first, self.moments.second
        a, first_a, second_a = update(self.weights.a_RV, gradient.a_RV, first.a_RV, second.a_RV)
        b, first_b, second_b = update(self.weights.b_VR, gradient.b_VR, first.b_VR, second.b_VR)
        moments = Moments(first=Pair(first_a, first_b), second=Pair(second_a, second_b), step=step)
        return State(weights=Pair(a, b), moments=moments), norm


@dataclass(frozen=True, slots=True)
class FakeSnapshot(Snapshot):
    """A state, and which of its parts were captured."""

    state: State
    parts: frozenset[StatePart]

    @override
    def write(self, directory: Path) -> None:
        state = self.state
        config = adapter_config("table", len(state.weights.a_RV), ["table"])
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))
        _write(directory, StatePart.WEIGHTS, _name_arrays(state.weights))
        if StatePart.OPTIMIZER in self.parts:
            moments = state.moments
            arrays = _name_arrays(moments.first, _FIRST) | _name_arrays(moments.second, _SECOND)
            _write(directory, StatePart.OPTIMIZER, arrays | {STEP: np.array([moments.step])})
        if StatePart.GRADIENT in self.parts:
            arrays = {} if state.gradient is None else _name_arrays(state.gradient)
            _write(directory, StatePart.GRADIENT, arrays)

    @classmethod
    def read(cls, directory: Path, vocab_size: int) -> "FakeSnapshot":
        """Read the files of `write`. Raises UserError for other files."""
        parts = frozenset(part for part, name in FILES.items() if (directory / name).exists())
        try:
            weights = _make_pair(_read(directory, StatePart.WEIGHTS))
            if weights.a_RV.shape[1] != vocab_size:
                raise UserError(
                    f"weights are of a vocabulary of {weights.a_RV.shape[1]} tokens; the base model has {vocab_size}"
                )
            state = State.untrained(weights)

            # Read the optimizer and the gradient if the snapshot has them.
            if StatePart.OPTIMIZER in parts:
                arrays = _read(directory, StatePart.OPTIMIZER)
                first, second = _make_pair(arrays, _FIRST), _make_pair(arrays, _SECOND)
                state = replace(state, moments=Moments(first=first, second=second, step=int(arrays[STEP][0])))
            if StatePart.GRADIENT in parts and (arrays := _read(directory, StatePart.GRADIENT)):
                is_former = all(name.startswith(_FORMER_GRADIENT) for name in arrays)
                state = replace(
                    state, gradient=_make_pair(arrays, _FORMER_GRADIENT) if is_former else _make_pair(arrays)
                )
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"weights cannot be read: {error}") from error
        return cls(state, parts)

    def merged(self, spec: ModelSpec, parts: Collection[StatePart]) -> State:
        """Return the state of a model restored from `parts`.

        Raises UserError if a part is missing.
        """
        missing = [part.value for part in StatePart if part in parts and part not in self.parts]
        if missing:
            raise UserError(f"the checkpoint holds no {' and no '.join(missing)}")
        rank = len(self.state.weights.a_RV)
        if rank != spec.lora.rank:
            raise UserError(f"the checkpoint is of rank {rank}, the model of rank {spec.lora.rank}")
        if StatePart.WEIGHTS not in parts:
            return State.fresh(spec, self.state.weights.a_RV.shape[1])
        state = State.untrained(self.state.weights)
        if StatePart.OPTIMIZER in parts:
            state = replace(state, moments=self.state.moments)
        return replace(state, gradient=self.state.gradient if StatePart.GRADIENT in parts else None)


def _name_arrays(pair: Pair, prefix: str = f"{_MODULE}.") -> dict[str, Floats]:
    return {f"{prefix}lora_A.weight": pair.a_RV, f"{prefix}lora_B.weight": pair.b_VR}


def _make_pair(arrays: dict[str, Floats], prefix: str = f"{_MODULE}.") -> Pair:
    return Pair(arrays[f"{prefix}lora_A.weight"], arrays[f"{prefix}lora_B.weight"])


def _write(directory: Path, part: StatePart, arrays: Mapping[str, NumberArray]) -> None:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(contiguous, directory / FILES[part])


def _read(directory: Path, part: StatePart) -> dict[str, Floats]:
    return load_file(directory / FILES[part])
