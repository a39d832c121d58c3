"""Multiple hosts pass the backend suite: rank 0 in this process, and rank 1 in a second process."""

import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_tx.backends.hosts.leader import LeadingBackend
from skyrl_tx.backends.hosts.protocol import Welcome
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.testing.backend_driver import BackendDriver
from skyrl_tx.testing.backend_suite import BackendSuite
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.fast_jit import FAST_COMPILE_FLAGS
from tests.support.follower import follower_process
from tests.support.free_ports import free_ports

CONFIG = FakeConfig(vocab_size=32, slice_tokens=3)
JAX_SUITE = Path(__file__).with_name("jax_on_hosts.py")


def fail(reason: str) -> None:
    raise AssertionError(reason)


def make_leader(own: AbstractBackend, settings: HostsSettings, welcome: Welcome) -> LeadingBackend:
    return LeadingBackend(own, settings, welcome, on_lost=fail)


class TestFakeOnTwoHosts(BackendSuite):
    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        settings = HostsSettings(size=2, address=f"127.0.0.1:{free_ports()}")
        welcome = Welcome(backend="fake", base_model="tiny", config=CONFIG.model_dump_json().encode())
        cls.settings, cls.lost_file, cls.own = settings, directory / "lost", FakeBackend("tiny", CONFIG)
        return make_leader(cls.own, settings, welcome)

    @pytest.fixture(scope="class")
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendDriver]:
        backend = cls.make_backend(tmp_path_factory.mktemp("backend"))
        with follower_process(cls.settings, cls.lost_file) as process:
            yield BackendDriver(backend, backend.start(), tmp_path_factory.mktemp("snapshots"))
            backend.close()
            assert process.wait(30) == 0

    @contextmanager
    def lost_device(self, backend: AbstractBackend) -> Generator[None]:
        self.lost_file.touch()
        self.own.is_lost = True
        yield
        self.own.is_lost = False
        self.lost_file.unlink()


def run_jax_suite(*arguments: str) -> str:
    """Run the suite with JAX in processes of two devices each and return the summary line."""
    flags = f"--xla_force_host_platform_device_count=2 {FAST_COMPILE_FLAGS}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(JAX_SUITE)]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_jax_on_two_hosts_passes_the_suite() -> None:
    assert " passed" in run_jax_suite()


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 1])
def test_hosts_retry_with_less_memory_together_and_end_together(tmp_path: Path, alone: int) -> None:
    """Uses two processes with one device each."""
    environment = os.environ | {"XLA_FLAGS": FAST_COMPILE_FLAGS, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.contract.exhausted_hosts", str(tmp_path), str(alone)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["plans"] == ["128", "64", "64"] and seen["are_equal"]
    assert f"host {alone} raised MemoryExhausted" in seen["lost"] and "Out of memory" in seen["lost"]
