"""A complete backend in numpy, for tests and as an example. Its numbers can be checked by hand."""

from skyrl_tx.contract.backend import AbstractBackend, BackendSpec
from skyrl_tx.testing.fake.config import FakeConfig


def _load() -> type[AbstractBackend]:
    from skyrl_tx.testing.fake.backend import FakeBackend

    return FakeBackend


BACKEND = BackendSpec(config=FakeConfig, load=_load)
