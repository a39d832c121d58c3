"""Weighted negative log-likelihood: -w * l; targets and weights may be [T, K].

Source: Tinker's losses page.
"""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.losses.base import Loss, LossArrays, LossConfig


def cross_entropy(x: LossArrays, config: LossConfig) -> jax.Array:
    """Return -l of every target whose weight is not 0."""
    return -jnp.where(x.weights != 0, x.target_logprobs, 0.0)


LOSS = Loss(spec=LOSS_SPECS["cross_entropy"], function=cross_entropy)
