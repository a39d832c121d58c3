"""The models in training on the device: one immutable record per model.

Each model has its own arrays instead of a slot in a stacked pool. A micro-batch needs only one
adapter, because it holds the examples of one request. So memory depends on the number and the ranks
of the models, an optimizer step of one model cannot touch another model's arrays, and a snapshot
only needs references.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.mesh import Placement
from skyrl_tx.backends.jax.shapes import round_up_to_bucket
from skyrl_tx.backends.jax.train.optimizer import OptimizerState, adamw_step, compute_coefficients, init_state
from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec, OptimizerParams
from skyrl_tx.contract.state_files import ALPHA
from skyrl_tx.layers.lora import Adapter, AdapterWeights, LoraPair

SMALLEST_RANK = 8
"""The smallest padded rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The state of one model. Its arrays have padded ranks."""

    lora: LoraSpec
    alpha: float
    """LoRA's alpha. The scale of `adapter` is alpha / rank."""
    targets: tuple[str, ...]
    """Names of the linear maps that are trained."""
    adapter: Adapter
    optimizer: OptimizerState
    gradient: AdapterWeights | None = None
    """The accumulated gradient. None if nothing was accumulated since the last optimizer step."""
    shares_prefixes: bool = False
    """Whether passes compute the common beginning of examples once, see `shared_prefixes`."""

    def with_gradient(self, gradient: AdapterWeights | None) -> "TrainingState":
        """Return the same model with another accumulated gradient."""
        return replace(self, gradient=gradient)


class TrainingStates:
    """The states of up to `capacity` models."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._states: dict[ModelId, TrainingState] = {}

    def get(self, model_id: ModelId) -> TrainingState:
        """Return the state of a model. Raises UserError if the model is not on the device."""
        if model_id not in self._states:
            raise UserError(f"model_id {model_id!r}: no such model here")
        return self._states[model_id]

    def put(self, model_id: ModelId, state: TrainingState) -> None:
        """Add or replace a model. Raises CapacityError if it is new and all slots are taken."""
        self.check_capacity(model_id)
        self._states[model_id] = state

    def check_capacity(self, model_id: ModelId) -> None:
        """Raise CapacityError if `put` would fail for this model."""
        if model_id not in self._states and len(self._states) >= self._capacity:
            raise CapacityError(f"all {self._capacity} adapter slots for training are taken")

    def drop(self, model_id: ModelId) -> None:
        """Remove a model, if it exists."""
        self._states.pop(model_id, None)


def pad_rank(rank: int, smallest: int = SMALLEST_RANK) -> int:
    """Return the padded rank, so that adapters of all ranks share a few compiled programs."""
    return round_up_to_bucket(rank, smallest)


def choose_smallest_rank(config: JaxConfig) -> int:
    """Return the smallest padded rank with these settings, which must have platform defaults."""
    return pad_rank(min(config.smallest_rank or SMALLEST_RANK, config.max_lora_rank))


def make_training_state(
    config: models.ModelConfig,
    lora: LoraSpec,
    smallest_rank: int = SMALLEST_RANK,
    alpha: float = ALPHA,
    *,
    shares_prefixes: bool = False,
) -> TrainingState:
    """Return a new model as host arrays: A drawn from the seed, B zero, and no gradient."""
    adapter = models.init_adapter(config, lora, pad_rank(lora.rank, smallest_rank), alpha=alpha)
    return TrainingState(
        lora=lora,
        alpha=alpha,
        targets=models.get_trained_targets(config, lora),
        adapter=adapter,
        optimizer=init_state(adapter.weights),
        shares_prefixes=shares_prefixes,
    )


def put_on_devices(state: TrainingState, place: Placement) -> TrainingState:
    """Put a state on the devices.

    Waits for the copies, so that an out-of-memory error is raised here.
    """
    parts = {name: place(getattr(state, name)) for name in ("adapter", "optimizer", "gradient")}
    return replace(state, **jax.block_until_ready(parts))


def make_zero_gradient(weights: AdapterWeights) -> AdapterWeights:
    """Return a gradient of zeros with the sharding of the weights.

    Another sharding would compile `accumulate` again.
    """
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, device=leaf.sharding), weights)


def apply_gradient(state: TrainingState, params: OptimizerParams) -> tuple[TrainingState, jax.Array]:
    """Take one optimizer step.

    Returns the new state without gradient, and the gradient's norm before clipping. If nothing was
    accumulated, the gradient is zero, and moments and weights decay, as in torch.
    """
    weights = state.adapter.weights
    gradient = make_zero_gradient(weights) if state.gradient is None else state.gradient
    factors = compute_coefficients(params, step=int(state.optimizer.step) + 1)
    weights, optimizer, norm = adamw_step(weights, state.optimizer, gradient, factors)
    adapter = Adapter(weights=weights, scale=state.adapter.scale)
    return replace(state, adapter=adapter, optimizer=optimizer, gradient=None), norm


def resize_rank(weights: AdapterWeights, rank: int) -> AdapterWeights:
    """Return host arrays with another rank, cut or padded with zeros.

    Callers cut off padding only.
    """

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
