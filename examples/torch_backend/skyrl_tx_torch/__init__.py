"""A reference backend of skyrl_tx on torch; importing this module is fast, because `--help` imports it."""

from skyrl_tx.contract.backend import AbstractBackend, BackendSpec
from skyrl_tx_torch.config import TorchConfig


def _load() -> type[AbstractBackend]:
    from skyrl_tx_torch.backend import TorchBackend

    return TorchBackend


BACKEND = BackendSpec(config=TorchConfig, load=_load)
