"""Clipped importance weights without a gradient: MiniMax 2025, arXiv:2506.13585, eq. 4.

The thresholds bound the ratio itself. Their defaults, 0 and 4, are from Tinker's losses page.
"""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.losses.base import Loss, LossArrays, LossConfig


def cispo(x: LossArrays, config: LossConfig) -> jax.Array:
    """Return -stopgrad(clip(r)) * l * A.

    Every token has a gradient, even if its ratio is clipped.
    """
    ratio = jnp.exp(x.log_ratio())
    clipped = jnp.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    return -jax.lax.stop_gradient(clipped) * jnp.where(x.counts, x.target_logprobs, 0.0) * x.advantages


LOSS = Loss(spec=LOSS_SPECS["cispo"], function=cispo)
