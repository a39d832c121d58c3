"""The models in training: one immutable record per model.

Each model has its own tree of arrays, not a slot in a stacked pool, because a micro-batch holds the examples of one
request and so needs one adapter. Memory then follows the number and the ranks of the models, a step of one model cannot
reach another's arrays, and a snapshot only keeps a reference.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax.mesh import Placement
from skyrl_tx.backends.jax.shapes import round_up_to_bucket
from skyrl_tx.backends.jax.train.optimizer import OptimizerState, adamw_step, compute_coefficients, init_state
from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec, OptimizerParams
from skyrl_tx.layers.lora import Adapter, AdapterWeights, LoraPair

SMALLEST_RANK = 8
"""The smallest padded rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """One model. The trees have padded ranks. `gradient` is None if nothing was accumulated since the last step."""

    lora: LoraSpec
    targets: tuple[str, ...]
    adapter: Adapter
    optimizer: OptimizerState
    gradient: AdapterWeights | None = None

    def with_gradient(self, gradient: AdapterWeights | None) -> "TrainingState":
        """Return the same model with another accumulated gradient."""
        return replace(self, gradient=gradient)


class TrainingStates:
    """Training states by model, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._states: dict[ModelId, TrainingState] = {}

    def get(self, model_id: ModelId) -> TrainingState:
        """Return a model's state. Raises UserError if there is no such model."""
        if model_id not in self._states:
            raise UserError(f"model_id {model_id!r}: no such model here")
        return self._states[model_id]

    def put(self, model_id: ModelId, state: TrainingState) -> None:
        """Add or replace a model. Raises CapacityError if it is new and the pool is full."""
        self.check_capacity(model_id)
        self._states[model_id] = state

    def check_capacity(self, model_id: ModelId) -> None:
        """Raise CapacityError unless `put` of this model would succeed."""
        if model_id not in self._states and len(self._states) >= self._capacity:
            raise CapacityError(f"all {self._capacity} adapter slots for training are taken")

    def drop(self, model_id: ModelId) -> None:
        """Remove a model, if it exists."""
        self._states.pop(model_id, None)


def pad_rank(rank: int) -> int:
    """Return the rank of the arrays, so that adapters of all ranks share a few compiled programs."""
    return round_up_to_bucket(rank, SMALLEST_RANK)


def make_training_state(config: models.ModelConfig, lora: LoraSpec) -> TrainingState:
    """Return a new model as host arrays: A drawn from the seed, B zero, no gradient, no optimizer step."""
    adapter = models.init_adapter(config, lora, pad_rank(lora.rank))
    return TrainingState(
        lora=lora,
        targets=models.get_trained_targets(config, lora),
        adapter=adapter,
        optimizer=init_state(adapter.weights),
    )


def put_on_devices(state: TrainingState, place: Placement) -> TrainingState:
    """Return the state on the devices. Waits, so that an out-of-memory error is raised here and not later."""
    parts = {name: place(getattr(state, name)) for name in ("adapter", "optimizer", "gradient")}
    return replace(state, **jax.block_until_ready(parts))


def make_zero_gradient(weights: AdapterWeights) -> AdapterWeights:
    """Return a gradient of zeros, placed as the weights: another placement would compile `accumulate` again."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, device=leaf.sharding), weights)


def apply_gradient(state: TrainingState, params: OptimizerParams) -> tuple[TrainingState, jax.Array]:
    """Take one optimizer step. Return the new state, without gradient, and the gradient's norm before clipping.

    Without a gradient, take a step with zeros, as torch does: moments and weights decay.
    """
    weights = state.adapter.weights
    gradient = make_zero_gradient(weights) if state.gradient is None else state.gradient
    factors = compute_coefficients(params, step=int(state.optimizer.step) + 1)
    weights, optimizer, norm = adamw_step(weights, state.optimizer, gradient, factors)
    adapter = Adapter(weights=weights, scale=state.adapter.scale)
    return replace(state, adapter=adapter, optimizer=optimizer, gradient=None), norm


def resize_rank(weights: AdapterWeights, rank: int) -> AdapterWeights:
    """Return host arrays cut or padded with zeros to another rank. Only padding may be cut off."""

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
