"""Clipped policy gradient with the ratio of whole sequences.

Source: GSPO-token, Zheng et al. 2025, arXiv:2507.18071, eq. 14. The inputs follow Tinker's losses
page, which gives no default thresholds. The defaults are the same as for ppo.
"""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.loss_reference import MAX_LOG_RATIO
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.losses.base import Loss, LossArrays, LossConfig, clip, minimum


def sequence_log_ratio(x: LossArrays) -> jax.Array:
    """Return the mean of l - q over the masked positions of a sequence, or 0 for an empty mask.

    The result has no gradient. Only the mean is limited, because only the mean is exponentiated. A
    single token with a large l - q counts in full.
    """
    mask = x.sequence_ratio_mask
    total = x.sum_sequences(x.difference(mask != 0) * mask)
    count = x.sum_sequences(mask)
    mean = jnp.where(count != 0, total / jnp.where(count != 0, count, 1.0), 0.0)
    return jax.lax.stop_gradient(clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def gspo(x: LossArrays, config: LossConfig) -> jax.Array:
    """Return -min(s * A, clip(s) * A), where s is the ratio of the sequence.

    The gradient of s is s times the gradient of the token's log-probability.
    """
    target = jnp.where(x.counts, x.target_logprobs, 0.0)
    ratio = jnp.exp(sequence_log_ratio(x)) * jnp.exp(target - jax.lax.stop_gradient(target))
    clipped = clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    return -minimum(ratio * x.advantages, clipped * x.advantages)


LOSS = Loss(spec=LOSS_SPECS["gspo"], function=gspo, is_local=False, clipped_log_ratio=sequence_log_ratio)
