"""The fake backend keeps every promise of the contract."""

from pathlib import Path

from skyrl_tx.backends.registry import find_backend
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.testing.backend_suite import BackendSuite


class TestFake(BackendSuite):
    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        spec = find_backend("fake")
        return spec.load()("tiny", spec.config(vocab_size=32, slice_tokens=3))
