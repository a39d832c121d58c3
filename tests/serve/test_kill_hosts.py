"""One server on two hosts, which are processes on this machine: `kill -9` of either host's engine changes no bit."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.serve.test_kill import KILL_AFTER, make_server, train
from tests.support.free_ports import free_ports
from tests.support.live_server import LiveServer

MESH = (
    "--backend-config.mesh.fsdp",
    "2",
    "--backend-config.mesh.tp",
    "2",
    "--backend-config.micro-batch-tokens",
    "512",
)
JOINED = re.compile(r"(2 hosts have started)")
pytestmark = pytest.mark.slow


@contextmanager
def run_two_hosts(directory: Path, *flags: str, num_devices: int) -> Iterator[tuple[LiveServer, LiveServer]]:
    """Start rank 1, then the server on rank 0."""
    variables = f"--xla_force_host_platform_device_count={num_devices}"
    environment = {**os.environ, "XLA_FLAGS": variables, "JAX_PLATFORMS": "cpu", "SKYRL_TX_HOSTS__KEY": "secret"}
    hosts = (*flags, "--hosts.size", "2", "--hosts.address", f"127.0.0.1:{free_ports()}")
    one = LiveServer(directory / "1", command="engine", flags=(*hosts, "--hosts.rank", "1"), environment=environment)
    with one, LiveServer(directory / "0", flags=hosts, environment=environment, ready_within_s=300) as zero:
        yield zero, one


def kill_engine(server: LiveServer) -> None:
    os.kill(server.engine_pid, signal.SIGKILL)


def train_and_kill(directory: Path, *flags: str, num_devices: int = 1) -> list[float]:
    """Train on two hosts and kill the engine of each host once.

    Returns the losses and a sample's logprobs.
    """
    with run_two_hosts(directory, *flags, num_devices=num_devices) as (zero, one):

        def kill_one_after_the_other(step: int) -> None:
            if step in KILL_AFTER:
                kill_engine(zero if step == KILL_AFTER[0] else one)

        found = train(zero.url, kill_one_after_the_other)
        zero.wait_for(JOINED, times=3, within_s=300)
        assert "host 1 has ended" in zero.log and "rank 0 has ended" in one.log
        return found


def test_a_killed_engine_of_either_host_changes_nothing_on_the_fake_backend(tmp_path: Path) -> None:
    fake = ("--backend", "fake", "--backend-config.vocab-size", "2048")
    disturbed = train_and_kill(tmp_path, "--base-model", "tiny", *fake)
    with make_server(tmp_path / "alone", *fake) as server:
        assert train(server.url, lambda _: None) == disturbed


def test_hosts_that_are_stopped_together_stop_in_order(tmp_path: Path) -> None:
    """The hosts are stopped together, like the pods of a group. Rank 0 takes its snapshots first."""
    fake = ("--base-model", "fake", "--backend", "fake")
    with run_two_hosts(tmp_path, *fake, num_devices=1) as (zero, one):
        service = tinker.ServiceClient(base_url=zero.url)
        training = service.create_lora_training_client("fake", rank=4).result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        one.signal(signal.SIGTERM)
        assert training.optim_step(types.AdamParams(learning_rate=0.1)).result() is not None
        assert zero.stop() == one.wait() == 0
        assert "host 1 has ended" not in zero.log and "restarting" not in one.log


@pytest.mark.exhaustive
def test_a_killed_engine_of_either_host_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and a sample have the bits of one process with all four devices."""
    disturbed = train_and_kill(tmp_path, "--base-model", "tiny", *MESH, num_devices=2)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with make_server(tmp_path / "alone", *MESH) as server:
        assert train(server.url, lambda _: None) == disturbed
