"""Clipped policy gradient: Schulman et al. 2017, arXiv:1707.06347, eq. 7.

The thresholds bound the ratio itself (0.8 and 1.2), not its distance from 1. Source: Tinker's
losses page.
"""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.losses.base import Loss, LossArrays, LossConfig, clip, minimum


def ppo(x: LossArrays, config: LossConfig) -> jax.Array:
    """Return -min(r * A, clip(r) * A)."""
    ratio = jnp.exp(x.log_ratio())
    clipped = clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    return -minimum(ratio * x.advantages, clipped * x.advantages)


LOSS = Loss(spec=LOSS_SPECS["ppo"], function=ppo)
