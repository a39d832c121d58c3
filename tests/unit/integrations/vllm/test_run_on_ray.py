"""Test `run_on_ray`, the program that starts vLLM in a Ray cluster, with a fake `ray` module.

The actors of the fake module are objects in this process. `tests/serve/test_ray.py` tests with a real cluster.
"""

import asyncio
import json
import queue
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from skyrl_tx.integrations.vllm import VllmConfig, VllmFlags, managed_server, run_on_ray
from skyrl_tx.tools.serve import read_settings

# Stands in for vLLM. `GET /` returns a body that does not fit one read of a socket; `GET /end` ends the process.
FAKE_VLLM_SCRIPT = """
import http.server, os, sys
host, port = sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            os._exit(3)
        body = os.environ["VLLM_API_KEY"].encode() * 100_000
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer((host, port), Handler)
print("serving", flush=True)
server.serve_forever()
"""


class RayError(Exception):
    """The only error of the fake `ray` module."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("a task failed")
        self.cause = cause


class LocalRay:
    """A fake `ray` module, with actors in this process."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, placed_after_s: float = 0.0) -> None:
        self.options: dict[str, Any] = {}
        self.killed: list[object] = []
        self._placed_after_s = placed_after_s

    def remote(self, actor: type[run_on_ray.VllmHost]) -> Any:
        def options(**given: Any) -> Any:
            self.options = given
            return SimpleNamespace(remote=lambda: self._handle(actor()))

        return SimpleNamespace(options=options)

    def kill(self, handle: object) -> None:
        self.killed.append(handle)

    def _handle(self, host: run_on_ray.VllmHost) -> Any:
        async def place() -> run_on_ray.NodeAddress:
            await asyncio.sleep(self._placed_after_s)
            return host.place()

        run = SimpleNamespace(remote=lambda *given: _refs(host.run(*given)))
        return SimpleNamespace(
            place=SimpleNamespace(remote=place),
            beat=SimpleNamespace(remote=host.beat),
            run=SimpleNamespace(options=lambda **_: run),
        )


async def _refs(lines: Iterator[str]) -> AsyncIterator[Awaitable[str]]:
    """Yield an awaitable for each line of an actor's generator, as Ray does.

    If the generator fails, the last awaitable raises the error.
    """

    def next_line() -> str | None:
        try:
            return next(lines, None)
        except run_on_ray.NodeCannotServe as error:
            raise RayError(error) from error

    while True:
        line = asyncio.ensure_future(asyncio.to_thread(next_line))
        await asyncio.wait({line})
        if line.exception() is None and line.result() is None:
            return
        yield line


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use this machine as the node, with actors that do not end the test process."""
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    monkeypatch.setattr(run_on_ray.VllmHost, "_exit_when_engine_is_silent", lambda _: None)
    monkeypatch.setattr(run_on_ray, "socket", SimpleNamespace(gethostname=lambda: "node7"))


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def serve(ray: LocalRay, adapters: Path, *command: str, resources: dict[str, float] | None = None) -> str:
    """Run vLLM and return the message that says why it ended."""
    return asyncio.run(run_on_ray.serve(ray, resources or {"CPU": 1}, free_port(), str(adapters), command))


def test_run_on_ray_forwards_a_local_port_to_the_node_of_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run_on_ray` prints the log of vLLM and exits when vLLM exits.

    It closes connections that arrive before vLLM is ready.
    """
    monkeypatch.setattr(run_on_ray, "_PLACEMENT_MESSAGE_S", 0.01)  # print at once that no node is free
    monkeypatch.setenv("VLLM_API_KEY", "key")
    ray, port = LocalRay(placed_after_s=0.1), free_port()
    resources = {"CPU": 2.0, "GPU": 0.5, "fast": 1.0}

    async def work() -> str:
        serving = run_on_ray.serve(ray, resources, port, str(tmp_path), [sys.executable, "-c", FAKE_VLLM_SCRIPT])
        task = asyncio.create_task(serving)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            while True:
                try:
                    response = await client.get("/")
                    break
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                    await asyncio.sleep(0.02)
            assert response.content == b"key" * 100_000
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                await client.get("/end")
        return await task

    assert asyncio.run(work()) == "vLLM on node7 (127.0.0.1) ended with status 3"
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "waiting for a node of the Ray cluster with 2 CPU, 0.5 GPU, 1 fast free"
    assert printed[1].startswith("vLLM runs on node7 (127.0.0.1), port ") and printed[2] == "serving"
    actor_options = {name: ray.options[name] for name in ("num_cpus", "num_gpus", "resources", "max_restarts")}
    assert actor_options == {"num_cpus": 2, "num_gpus": 0.5, "resources": {"fast": 1}, "max_restarts": 0}
    assert len(ray.killed) == 1


def test_error_names_the_node_that_lacks_the_adapters_or_the_executable(tmp_path: Path) -> None:
    message = serve(LocalRay(), tmp_path / "not-shared", "true")
    assert message.startswith("Ray placed vLLM on node7 (127.0.0.1), which does not have the engine's directory ")
    assert message.endswith("set --sampler-config.adapter-dir to a directory that all nodes share")
    message = serve(LocalRay(), tmp_path, "no-such-vllm", "serve")
    assert message == ("--vllm-command: Ray placed vLLM on node7 (127.0.0.1), which has no program 'no-such-vllm'")


def test_sigterm_from_the_engine_stops_run_on_ray_and_kills_the_actor(tmp_path: Path) -> None:
    """To stop vLLM, the engine sends SIGTERM to the process of `run_on_ray`."""
    ray = LocalRay(placed_after_s=60)

    async def work() -> str:
        task = asyncio.create_task(run_on_ray.serve(ray, {"CPU": 1}, free_port(), str(tmp_path), ["true"]))
        await asyncio.sleep(0.05)
        run_on_ray.signal.raise_signal(run_on_ray.signal.SIGTERM)
        return await task

    assert asyncio.run(work()) == "the engine has stopped vLLM"
    assert len(ray.killed) == 1


def test_an_actor_exits_when_heartbeats_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now, exits = [100.0], queue.Queue[int]()
    monkeypatch.setattr(run_on_ray, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Ended(BaseException):
        pass

    def leave(status: int) -> None:
        exits.put(status)
        raise Ended

    monkeypatch.setattr(run_on_ray, "os", SimpleNamespace(_exit=leave))
    monkeypatch.setattr(run_on_ray.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    host = run_on_ray.VllmHost()
    now[0] += 59
    host.beat()
    now[0] += 59
    assert now[0] - host._last_beat_at < run_on_ray.SILENCE_S
    now[0] += 2
    with pytest.raises(Ended):
        host._exit_when_engine_is_silent()
    assert exits.get_nowait() == 1


def test_run_on_ray_reports_that_ray_or_the_cluster_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ['{"GPU": 1}', "8100", "adapters", "vllm"]
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run_on_ray.main(arguments) == 1
    assert "--sampler-config.ray-resources: Ray is not installed: pip install" in capsys.readouterr().out

    def init(**_: object) -> None:
        raise ConnectionError("no address\nmore")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    assert run_on_ray.main(arguments) == 1
    assert capsys.readouterr().out.endswith("this machine is not part of a Ray cluster: no address\n")


def test_command_of_the_engine_runs_vllm_on_ray() -> None:
    config = VllmConfig(ray_resources={"GPU": 2})
    assert managed_server.find_command(config) == ["vllm"], "vllm need not exist here: it runs on another node"
    assert managed_server.find_command(config.model_copy(update={"command": "env A=1 /opt/vllm"}))[-1] == "/opt/vllm"
    command = managed_server.wrap_for_ray({"GPU": 2.0}, 8100, Path("adapters"), ["vllm", "serve"])
    assert command[1:3] == ["-m", "skyrl_tx.integrations.vllm.run_on_ray"]
    assert json.loads(command[3]) == {"GPU": 2} and command[4:] == ["8100", "adapters", "vllm", "serve"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--launcher", "ray"], {"GPU": 1}),
        (["--launcher", "ray", "--sampler-config.ray-resources", '{"CPU": 2}'], {"CPU": 2}),
        (["--launcher", "ray", "--vllm-url", "http://a"], None),
        ([], None),
    ],
)
def test_vllm_requests_one_gpu_by_default_under_the_ray_launcher(
    tmp_path: Path, flags: list[str], expected: dict[str, float] | None
) -> None:
    common = ["--base-model", "tiny", "--backend", "fake", "--data-dir", str(tmp_path), "--sampler", "vllm"]
    config = read_settings("serve", [*common, *flags]).sampler_config
    assert isinstance(config, VllmFlags) and config.ray_resources == expected
