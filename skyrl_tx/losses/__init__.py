"""The losses of `contract.losses.LOSS_SPECS` in JAX. Each is `LOSS` in the module of its name."""

from collections.abc import Mapping
from importlib import import_module

from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.losses.base import MEANS, Loss, LossOutput

LOSSES: Mapping[str, Loss] = {name: import_module(f"{__name__}.{name}").LOSS for name in LOSS_SPECS}
"""Every loss by its name in requests."""

__all__ = ["LOSSES", "MEANS", "Loss", "LossOutput"]
