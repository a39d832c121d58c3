"""The JAX backend's entry point. Importing it imports no JAX."""

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import AbstractBackend, BackendSpec


def _load() -> type[AbstractBackend]:
    from skyrl_tx.backends.jax.backend import JaxBackend

    return JaxBackend


BACKEND = BackendSpec(config=JaxConfig, load=_load)
