"""Policy gradient with importance weights: -r * A.

Source: Tinker's losses page; Williams 1992, REINFORCE.
"""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.losses.base import Loss, LossArrays, LossConfig


def importance_sampling(x: LossArrays, config: LossConfig) -> jax.Array:
    """Return -r * A."""
    return -jnp.exp(x.log_ratio()) * x.advantages


LOSS = Loss(spec=LOSS_SPECS["importance_sampling"], function=importance_sampling)
