"""AdamW with the arithmetic of torch, as an optax transformation.

Loshchilov & Hutter 2019, arXiv:1711.05101.

`optax.adamw` gives different numbers than torch (see docs/decisions/training.md). Its clipping has
no epsilon, float32 betas lose digits of 1 - beta, and `eps` 0 gives NaN for padded ranks.

To add another optimizer, write another function that returns an `optax.GradientTransformation`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from skyrl_tx.contract.requests import OptimizerParams
from skyrl_tx.layers.lora import AdapterWeights

_optax: Any = optax  # the type annotations of optax do not allow dataclasses
CLIP_EPSILON = 1e-6
"""Added to the norm that clipping divides by, as in torch.nn.utils.clip_grad_norm_."""


@struct.dataclass
class OptimizerState:
    """First and second moments in the shapes of the weights, and the number of steps (int32)."""

    first: AdapterWeights
    second: AdapterWeights
    step: Any


@struct.dataclass
class Coefficients:
    """The factors of one optimizer step, float32 scalars.

    The host computes them in float64, as torch does.
    """

    decay: Any  # 1 - learning rate * weight decay
    step_size: Any  # learning rate / (1 - beta1^t)
    root_correction: Any  # sqrt(1 - beta2^t)
    one_minus_beta1: Any
    beta2: Any
    one_minus_beta2: Any
    eps: Any
    max_norm: Any  # infinity disables clipping


def init_state(weights: Any) -> OptimizerState:
    """Return the state before the first step, as host arrays."""

    def zeros() -> AdapterWeights:
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), weights)

    return OptimizerState(first=zeros(), second=zeros(), step=np.int32(0))


def compute_coefficients(params: OptimizerParams, step: int) -> Coefficients:
    """Return the factors of an optimizer step. The first step has number 1."""
    assert 0 <= params.beta1 < 1 and 0 <= params.beta2 < 1, params
    assert min(params.learning_rate, params.eps, params.weight_decay, params.grad_clip_norm) >= 0, params
    with np.errstate(over="ignore"):  # a huge learning rate becomes infinite, which affects its own model only
        return Coefficients(
            decay=np.float32(1 - params.learning_rate * params.weight_decay),
            step_size=np.float32(params.learning_rate / (1 - params.beta1**step)),
            root_correction=np.float32((1 - params.beta2**step) ** 0.5),
            one_minus_beta1=np.float32(1 - params.beta1),
            beta2=np.float32(params.beta2),
            one_minus_beta2=np.float32(1 - params.beta2),
            eps=np.float32(params.eps),
            max_norm=np.float32(params.grad_clip_norm if params.grad_clip_norm > 0 else np.inf),
        )


def _compute_norm(gradient: AdapterWeights) -> jax.Array:
    """Return the global L2 norm of a gradient.

    The norm is infinite if the square of an element exceeds float32.
    """
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)))


global_norm = jax.jit(_compute_norm)


def clip_by_norm(max_norm: jax.Array, norm: jax.Array) -> optax.GradientTransformation:
    """Scale a gradient of norm `norm` to at most `max_norm`, as torch's clip_grad_norm_ does."""

    def update(gradient: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        clip = jnp.where(jnp.isinf(max_norm), 1.0, jnp.minimum(1.0, max_norm / (norm + CLIP_EPSILON)))
        return jax.tree.map(lambda g: g * clip, gradient), state

    return _optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def adam(c: Coefficients) -> optax.GradientTransformation:
    """Return Adam without weight decay, which turns gradients into changes of the weights.

    The weights and gradients of padded ranks are zero, and stay zero even with `eps` 0.
    """

    def update(gradient: Any, state: OptimizerState, params: Any = None) -> tuple[Any, OptimizerState]:
        first = jax.tree.map(lambda m, g: m + (g - m) * c.one_minus_beta1, state.first, gradient)
        second = jax.tree.map(lambda v, g: v * c.beta2 + g * g * c.one_minus_beta2, state.second, gradient)

        def change(m: jax.Array, v: jax.Array) -> jax.Array:
            step = c.step_size * m / (jnp.sqrt(v) / c.root_correction + c.eps)
            return -jnp.where(m == 0, 0.0, step)

        return jax.tree.map(change, first, second), OptimizerState(first=first, second=second, step=state.step + 1)

    return _optax.GradientTransformation(init_state, update)


@jax.jit
def adamw_step(
    weights: AdapterWeights, state: OptimizerState, gradient: AdapterWeights, c: Coefficients
) -> tuple[AdapterWeights, OptimizerState, jax.Array]:
    """Return new weights, new state, and the global L2 norm of the gradient before clipping."""
    norm = _compute_norm(gradient)
    optimizer = _optax.chain(clip_by_norm(c.max_norm, norm), adam(c))
    changes, (_, new_state) = optimizer.update(gradient, (optax.EmptyState(), state), weights)

    # Decoupled weight decay multiplies the weights before the change is added, as in torch.
    decayed = jax.tree.map(lambda weight: weight * c.decay, weights)
    new_weights = _optax.apply_updates(decayed, changes)
    return new_weights, new_state, norm
