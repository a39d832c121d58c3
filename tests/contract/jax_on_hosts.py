"""The backend suite for JAX on two hosts. `test_hosts.py` runs it in a new process."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_tx.backends.hosts.protocol import Welcome
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.testing.backend_driver import BackendDriver
from skyrl_tx.testing.backend_suite import BackendSuite
from tests.contract.test_hosts import make_leader
from tests.support.follower import follower_process
from tests.support.free_ports import free_ports
from tests.support.lost_jax_device import lost_jax_device
from tests.support.tiny import TINY_CONFIG, tiny_directory

CONFIG = TINY_CONFIG.model_copy(update={"mesh": MeshConfig(fsdp=2, tp=2)})


class TestJaxOnTwoHosts(BackendSuite):
    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        model = str(tiny_directory())
        settings = HostsSettings(size=2, address=f"127.0.0.1:{free_ports()}")
        welcome = Welcome(backend="jax", base_model=model, config=CONFIG.model_dump_json().encode())
        cls.settings, cls.lost_file = settings, directory / "lost"
        return make_leader(JaxBackend(model, CONFIG), settings, welcome)

    @pytest.fixture(scope="class")
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Generator[BackendDriver]:
        backend = cls.make_backend(tmp_path_factory.mktemp("backend"))
        with follower_process(cls.settings, cls.lost_file, variables={"TEST_FOLLOWER_LOSES": "jax"}) as process:
            yield BackendDriver(backend, backend.start(), tmp_path_factory.mktemp("snapshots"))
            backend.close()
            assert process.wait(60) == 0

    @contextmanager
    def lost_device(self, backend: AbstractBackend) -> Generator[None]:
        self.lost_file.touch()
        with lost_jax_device():
            yield
        self.lost_file.unlink()
