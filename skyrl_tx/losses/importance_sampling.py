"""Policy gradient with importance weights: -r * A. Source: Tinker's losses page; Williams 1992, REINFORCE."""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.capabilities import LossSpec
from skyrl_tx.losses.base import POLICY_INPUTS, Loss, LossConfig, LossInputs


def importance_sampling(x: LossInputs, config: LossConfig) -> jax.Array:
    """Return -r * A."""
    return -jnp.exp(x.log_ratio(x.counts)) * x.advantages


IMPORTANCE_SAMPLING = Loss(
    spec=LossSpec(name="importance_sampling", inputs=POLICY_INPUTS), function=importance_sampling
)
