"""Clipped importance weights that pass no gradient: MiniMax 2025, arXiv:2506.13585, eq. 4.

Thresholds bound the ratio itself; their defaults, 0 and 4, are those of Tinker's losses page.
"""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.losses.base import Loss, LossArrays, LossConfig


def cispo(x: LossArrays, config: LossConfig) -> jax.Array:
    """Return -stopgrad(clip(r)) * l * A: every token has a gradient, however large its ratio."""
    ratio = jnp.exp(x.log_ratio())
    clipped = jnp.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    return -jax.lax.stop_gradient(clipped) * jnp.where(x.counts, x.target_logprobs, 0.0) * x.advantages


LOSS = Loss(spec=LOSS_SPECS["cispo"], function=cispo)
