"""A server whose engine runs on two nodes of a real Ray cluster: `kill -9` of a host's processes changes no bit."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.serve.test_kill import KILL_AFTER, make_server, train
from tests.support.client_environments import RAY, ClientEnvironment, PreparedEnvironment
from tests.support.live_server import LiveServer
from tests.support.polling import until
from tests.support.ray_cluster import ROOT, running_cluster, with_ray
from tests.support.with_constants import constants

FAKE = ("--backend", "fake", "--backend-config.vocab-size", "2048")
MESH = ("--backend-config.mesh.fsdp", "2", "--backend-config.micro-batch-tokens", "512")
STARTED = re.compile(r"host (\d+): engine process (\d+) started on \S+ \(([\d.]+)\)")
SERVES = re.compile(r"vllm: stub of vLLM (\d+) serves")
JOINED = re.compile(r"(2 hosts have started)")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(client_environment: Callable[[ClientEnvironment], PreparedEnvironment]) -> dict[str, str]:
    """Environment variables of programs that use Ray. With JAX, each host has one device."""
    one_device = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    return {**with_ray(client_environment(RAY)), **one_device}


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[str]:
    with running_cluster(environment) as address:
        yield address


def make_ray_server(data_dir: Path, cluster: str, environment: dict[str, str], *flags: str) -> LiveServer:
    launcher = ("--launcher", "ray", "--ray.address", cluster, "--hosts.size", "2")
    return LiveServer(
        data_dir, flags=("--base-model", "tiny", *launcher, *flags), environment=environment, ready_within_s=300
    )


def get_engine_pids(server: LiveServer) -> dict[int, int]:
    """Return the newest engine process of each rank."""
    return {int(rank): int(pid) for rank, pid, _ in STARTED.findall(server.log)[-2:]}


def get_state_and_parent(pid: int) -> tuple[str, int]:
    """Return the state of a process (proc(5)), which is Z if it has ended, and its parent."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "Z", 0
    return state, int(parent)


def wait_until_gone(pids: Iterable[int]) -> None:
    for pid in pids:
        until(lambda pid=pid: get_state_and_parent(pid)[0] == "Z")


def train_and_kill(server: LiveServer) -> list[float]:
    """Train, kill the engine process of rank 1, then the actor of rank 0.

    All processes of the old hosts end.
    """

    def kill(step: int) -> None:
        if step not in KILL_AFTER:
            return
        num_started = KILL_AFTER.index(step) + 1
        server.wait_for(JOINED, times=num_started, within_s=300)
        before = get_engine_pids(server)
        os.kill(before[1] if step == KILL_AFTER[0] else get_state_and_parent(before[0])[1], signal.SIGKILL)
        server.wait_for(JOINED, times=num_started + 1, within_s=300)
        assert {get_state_and_parent(pid)[0] for pid in before.values()} == {"Z"}

    return train(server.url, kill)


def test_killed_hosts_change_nothing_and_none_is_left(
    tmp_path: Path, cluster: str, environment: dict[str, str]
) -> None:
    with make_ray_server(tmp_path / "ray", cluster, environment, *FAKE) as server:
        disturbed = train_and_kill(server)
        log, last = server.log, list(get_engine_pids(server).values())
        assert "engine exited: host 1: killed by SIGKILL; restarting" in log
        assert "engine exited: host 0: its actor has ended" in log
        assert re.search(r"\(host 1 pid=\d+\) \S+ INFO engine waiting for host 0", log), "logs of the actors"
        actors = {get_state_and_parent(pid)[1] for pid in last}
        assert len(actors) == 2
        assert server.stop() == 0
        wait_until_gone([*last, *actors])

    with make_server(tmp_path / "alone", *FAKE) as server:
        assert train(server.url, lambda _: None) == disturbed


def test_vllm_has_a_node_of_its_own_and_ends_with_the_engine(
    tmp_path: Path, cluster: str, environment: dict[str, str]
) -> None:
    """Kills vLLM's actor: vLLM ends and starts again, and the sample is the same."""
    stub = f"env PYTHONPATH={ROOT} {sys.executable} -m tests.support.vllm_command"
    flags = ["--base-model", "tiny", "--backend", "fake", "--launcher", "ray", "--ray.address", cluster]
    flags += ["--sampler", "vllm", "--vllm-command", stub, "--sampler-config.ray-resources", '{"CPU": 1}']
    flags += [*constants("sampler", lost_after_s=0.5), "--sampler-config.adapter-dir", str(tmp_path / "adapters")]
    with LiveServer(tmp_path / "data", flags=flags, environment=environment, ready_within_s=300) as server:
        service = tinker.ServiceClient(base_url=server.url)
        training = service.create_lora_training_client("tiny", rank=4, train_unembed=False).result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        sampling = training.save_weights_and_get_sampling_client().result()

        def draw() -> list[int]:
            params = types.SamplingParams(max_tokens=8, seed=3)
            [sequence] = sampling.sample(types.ModelInput.from_ints([3, 1, 2]), 1, params).result().sequences
            return list(sequence.tokens)

        before = draw()
        first = int(server.wait_for(SERVES))
        assert "vllm: vLLM runs on " in server.log
        guard = get_state_and_parent(first)[1]
        os.kill(get_state_and_parent(guard)[1], signal.SIGKILL)
        assert draw() == before
        second = int(server.wait_for(SERVES, times=2))
        assert "the Ray actor of vLLM ended" in server.log
        assert server.stop() == 0
    wait_until_gone([first, second])


@pytest.mark.exhaustive
def test_hosts_end_with_the_command(tmp_path: Path, cluster: str, environment: dict[str, str]) -> None:
    """A killed command leaves no process behind, and the next command finds free nodes."""
    with make_ray_server(tmp_path, cluster, environment, *FAKE) as server:
        server.wait_for(JOINED)
        first = list(get_engine_pids(server).values())
        server.kill()
    wait_until_gone(first)
    with make_ray_server(tmp_path, cluster, environment, *FAKE) as server:
        server.wait_for(JOINED)


@pytest.mark.exhaustive
def test_hosts_end_when_the_head_of_the_cluster_is_lost(tmp_path: Path, environment: dict[str, str]) -> None:
    with running_cluster(environment) as address, make_ray_server(tmp_path, address, environment, *FAKE) as server:
        server.wait_for(JOINED)
        first = list(get_engine_pids(server).values())
        [control] = [pid for pid in find_pids("gcs_server") if os.getpid() in list_ancestors(pid)]
        os.kill(control, signal.SIGKILL)
        assert server.wait(150) == 1
        until(lambda: all(get_state_and_parent(pid)[0] == "Z" for pid in first), within_s=150)


@pytest.mark.exhaustive
def test_the_command_ends_when_its_own_node_is_lost(tmp_path: Path, environment: dict[str, str]) -> None:
    with running_cluster(environment) as address, make_ray_server(tmp_path, address, environment, *FAKE) as server:
        server.wait_for(JOINED)
        for raylet in [pid for pid in find_pids("raylet") if os.getpid() in list_ancestors(pid)]:
            os.kill(raylet, signal.SIGKILL)
        assert server.wait(150) == 1
        assert "Ray on this machine has ended" in server.log and "Traceback" not in server.log


def find_pids(program: str) -> Iterator[int]:
    """Yield the process ids of a program."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if path.read_text().partition("\0")[0].endswith(f"/{program}"):
                yield int(path.parent.name)


def list_ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, its grandparent, and so on."""
    while (pid := get_state_and_parent(pid)[1]) > 0:
        yield pid


@pytest.mark.exhaustive
def test_killed_hosts_change_no_bit_on_jax(tmp_path: Path, cluster: str, environment: dict[str, str]) -> None:
    with make_ray_server(tmp_path / "calm", cluster, environment, *MESH) as server:
        calm = train(server.url, lambda _: None)
    with make_ray_server(tmp_path / "killed", cluster, environment, *MESH) as server:
        assert train_and_kill(server) == calm
