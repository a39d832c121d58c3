"""The entry point of the JAX backend. Importing this module does not import JAX."""

from skyrl_tx.backends.jax.config import JaxFlags
from skyrl_tx.contract.backend import AbstractBackend, BackendSpec


def _load() -> type[AbstractBackend]:
    from skyrl_tx.backends.jax.backend import JaxBackend

    return JaxBackend


BACKEND = BackendSpec(config=JaxFlags, load=_load, flags={"load_format": "load_format"})
