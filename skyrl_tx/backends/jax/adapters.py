"""The models in training: one record per model, taken whole and put back whole.

Not a stacked pool: a micro-batch holds one request, so one adapter, and nothing is ever gathered from several. A tree
of its own per model makes work and memory follow the models in use and their ranks, keeps one model's step away from
every other's arrays, and makes a snapshot as cheap as keeping a reference, since arrays are immutable.
"""

from dataclasses import dataclass, replace

import jax
import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax.buckets import bucket
from skyrl_tx.backends.jax.mesh import Place
from skyrl_tx.backends.jax.optimizer import OptimizerState, adamw, coefficients, fresh_state
from skyrl_tx.backends.jax.training import zeros_like
from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec, OptimizerParams
from skyrl_tx.layers.lora import Adapter, AdapterWeights, LoraPair

SMALLEST_RANK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """One model. Trees have ranks padded to `padded_rank`; `gradient` None: nothing was added since the last step."""

    lora: LoraSpec
    adapter: Adapter
    optimizer: OptimizerState
    gradient: AdapterWeights | None = None

    def with_gradient(self, gradient: AdapterWeights | None) -> "TrainingState":
        """Return the same model with another summed gradient."""
        return replace(self, gradient=gradient)


class AdapterPool:
    """Training states by model, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._states: dict[ModelId, TrainingState] = {}

    def take(self, model_id: ModelId) -> TrainingState:
        """Return a model's state; raises UserError when there is no such model."""
        if model_id not in self._states:
            raise UserError(f"model_id {model_id!r}: no such model here")
        return self._states[model_id]

    def put(self, model_id: ModelId, state: TrainingState) -> None:
        """Make or overwrite a model; raises CapacityError when it is new and all places are taken."""
        self.check_room(model_id)
        self._states[model_id] = state

    def check_room(self, model_id: ModelId) -> None:
        """Raise CapacityError unless `put` of this model would succeed."""
        if model_id not in self._states and len(self._states) >= self._capacity:
            raise CapacityError(f"all {self._capacity} places for models in training are taken")

    def drop(self, model_id: ModelId) -> None:
        """Forget a model; of no effect when there is none."""
        self._states.pop(model_id, None)


def padded_rank(rank: int) -> int:
    """Return the rank that arrays are given, so that ranks of all clients share a few compiled programs."""
    return bucket(rank, SMALLEST_RANK)


def adapter_spec(lora: LoraSpec) -> models.AdapterSpec:
    """Return what the model package makes an adapter from."""
    return models.AdapterSpec(
        rank=lora.rank,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def fresh_training_state(config: models.ModelConfig, lora: LoraSpec) -> TrainingState:
    """Return a new model, on the host: A from the seed, B zero, no gradient, no step taken."""
    adapter = models.init_adapter(config, adapter_spec(lora), padded_rank(lora.rank))
    return TrainingState(lora=lora, adapter=adapter, optimizer=fresh_state(adapter.weights))


def placed(state: TrainingState, place: Place) -> TrainingState:
    """Return a state that lies on the devices: what they cannot hold is raised here, and no later."""
    parts = {name: place(getattr(state, name)) for name in ("adapter", "optimizer", "gradient")}
    return replace(state, **jax.block_until_ready(parts))


def apply_gradient(state: TrainingState, params: OptimizerParams) -> tuple[TrainingState, jax.Array]:
    """Take one optimizer step: return the new state, without gradient, and the norm of the one applied.

    Without any gradient, a step with a gradient of zeros, as in torch: moments and weights decay.
    """
    weights = state.adapter.weights
    gradient = zeros_like(weights) if state.gradient is None else state.gradient
    numbers = coefficients(params, step=int(state.optimizer.step) + 1)
    weights, optimizer, norm = adamw(weights, state.optimizer, gradient, numbers)
    adapter = Adapter(weights=weights, scale=state.adapter.scale)
    return TrainingState(lora=state.lora, adapter=adapter, optimizer=optimizer), norm


def resize_rank(weights: AdapterWeights, rank: int) -> AdapterWeights:
    """Return host arrays cut, or padded with zeros, to another rank; what is cut off must be padding."""

    def resize(array: np.ndarray, axis: int) -> np.ndarray:
        array = np.asarray(array)
        missing = rank - array.shape[axis]
        if missing <= 0:
            return np.take(array, range(rank), axis) if missing else array
        width = [(0, 0)] * array.ndim
        width[axis] = (0, missing)
        return np.pad(array, width)

    return {
        name: LoraPair(a=resize(pair.a, -1), b=resize(pair.b, -2))  # type: ignore[arg-type]
        for name, pair in weights.items()
    }
