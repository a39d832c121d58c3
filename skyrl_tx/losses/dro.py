"""Direct reward optimisation, off-policy: Richemond et al. 2024, arXiv:2405.19107, token by token.

Source of the form and of beta: Tinker's losses page.
"""

import jax
import jax.numpy as jnp

from skyrl_tx.contract.capabilities import LossSpec
from skyrl_tx.losses.base import POLICY_INPUTS, Loss, LossConfig, LossInputs


def dro(x: LossInputs, config: LossConfig) -> jax.Array:
    """Return -(l * A - beta / 2 * (l - q)^2). The penalty holds where A = 0 too; a weight of 0 switches it off."""
    target = jnp.where(x.counts, x.target_logprobs, 0.0)
    distance = x.distance(x.weights != 0)
    return -(target * x.advantages - 0.5 * config["beta"] * jnp.square(distance))


DRO = Loss(spec=LossSpec(name="dro", inputs=POLICY_INPUTS, config={"beta": 0.05}), function=dro)
