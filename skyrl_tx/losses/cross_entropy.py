"""Weighted negative log-likelihood: -w * l; targets and weights may be [T, K]. Source: Tinker's losses page."""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.capabilities import LossInput, LossSpec
from skyrl_tx.losses.base import Loss, LossConfig, LossInputs


def cross_entropy(x: LossInputs, config: LossConfig) -> jax.Array:
    """Return -l of every target that has a weight."""
    return -jnp.where(x.weights != 0, x.target_logprobs, 0.0)


CROSS_ENTROPY = Loss(
    spec=LossSpec(
        name="cross_entropy",
        inputs={"target_tokens": LossInput(is_integer=True, max_ndim=2), "weights": LossInput(fill=1.0, max_ndim=2)},
    ),
    function=cross_entropy,
    is_policy_gradient=False,
)
