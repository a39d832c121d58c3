"""All losses by the name that requests use. To add one: a file beside these, and a row in the table."""

from collections.abc import Mapping

from skyrl_tx.losses.base import Loss, LossOutput, Mean
from skyrl_tx.losses.cispo import CISPO
from skyrl_tx.losses.cross_entropy import CROSS_ENTROPY
from skyrl_tx.losses.dro import DRO
from skyrl_tx.losses.gspo import GSPO
from skyrl_tx.losses.importance_sampling import IMPORTANCE_SAMPLING
from skyrl_tx.losses.ppo import PPO
from skyrl_tx.losses.stable_reinforce import STABLE_REINFORCE

LOSSES: Mapping[str, Loss] = {
    loss.spec.name: loss for loss in (CROSS_ENTROPY, IMPORTANCE_SAMPLING, PPO, CISPO, DRO, GSPO, STABLE_REINFORCE)
}

__all__ = ["LOSSES", "Loss", "LossOutput", "Mean"]
