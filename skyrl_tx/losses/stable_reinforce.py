"""Policy gradient with truncated importance weights and a penalty on the distance to the sampler.

Tinker offers a loss of this name but has not published its formula. This project's definition
combines two parts from the literature. The importance weights are truncated at a threshold and have
no gradient, like rho in IMPALA (Espeholt et al. 2018, arXiv:1802.01561, section 4.1). The penalty
is the quadratic estimator of the KL divergence, (l - q)^2 / 2 (k2 in Schulman 2020, "Approximating
KL divergence"). Both are summed over sampled positions, where q was recorded when the tokens were
sampled.
"""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.losses.base import Loss, LossArrays, LossConfig


def stable_reinforce(x: LossArrays, config: LossConfig) -> jax.Array:
    """Return -stopgrad(min(r, threshold)) * l * A + kl_coeff / 2 * (l - q)^2.

    The penalty also applies where A = 0.
    """
    is_sampled = x.sampled != 0
    has_gain = is_sampled & x.counts
    ratio = jnp.minimum(jnp.exp(x.log_ratio(has_gain)), config["clip_high_threshold"])
    gain = jax.lax.stop_gradient(ratio) * jnp.where(has_gain, x.target_logprobs, 0.0) * x.advantages
    has_penalty = is_sampled & (x.weights != 0) & (config["kl_coeff"] != 0)
    return -gain + 0.5 * config["kl_coeff"] * jnp.square(x.difference(has_penalty))


LOSS = Loss(spec=LOSS_SPECS["stable_reinforce"], function=stable_reinforce)
