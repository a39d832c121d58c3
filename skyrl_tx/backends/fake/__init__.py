"""FakeBackend: a model that counts, in numpy; every number can be checked by hand."""

from skyrl_tx.backends.fake.config import FakeConfig
from skyrl_tx.contract.backend import AbstractBackend, BackendSpec


def _load() -> type[AbstractBackend]:
    from skyrl_tx.backends.fake.backend import FakeBackend

    return FakeBackend


BACKEND = BackendSpec(config=FakeConfig, load=_load)
