"""Off-policy direct reward optimisation per token: Richemond et al. 2024, arXiv:2405.19107.

The form and the default of beta are from Tinker's losses page.
"""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.losses.base import Loss, LossArrays, LossConfig


def dro(x: LossArrays, config: LossConfig) -> jax.Array:
    """Return -(l * A - beta / 2 * (l - q)^2).

    The penalty applies where A = 0 too, unless the weight is 0.
    """
    target = jnp.where(x.counts, x.target_logprobs, 0.0)
    difference = x.difference(x.weights != 0)
    return -(target * x.advantages - 0.5 * config["beta"] * jnp.square(difference))


LOSS = Loss(spec=LOSS_SPECS["dro"], function=dro)
