"""Runs vLLM in an actor of a Ray cluster, and forwards a port of this machine to it.

    python -m skyrl_tx.integrations.vllm.run_on_ray RESOURCES PORT ADAPTERS PROGRAM ARGUMENT...

`ManagedServer` runs this program instead of vLLM itself, so that the engine process does not get Ray's threads and
signal handlers. When this program ends, Ray ends the actor, and the actor ends vLLM. The forwarded port stays the same
when vLLM is started again, even on another node.
"""

import asyncio
import importlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_tx import DISTRIBUTION
from skyrl_tx.integrations.vllm import guard
from skyrl_tx.integrations.vllm.managed_server import reserve_port

BEAT_S = 5.0
"""How often this program calls the actor."""
SILENCE_S = 60.0
"""The actor ends when it has not been called for this long, because Ray cannot end it after the head node is lost."""
_LOOK_S = 1.0
_PLACEMENT_MESSAGE_S = 5.0
"""If the actor has not started after this time, no node has the resources free, and a message says so."""
_PASSED_PREFIXES = ("HF_", "VLLM_")
"""Prefixes of the environment variables that vLLM gets from the engine."""
_BUFFER_BYTES = 2**16


class NodeCannotServe(Exception):
    """The node that Ray chose cannot run vLLM. The message says why."""


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """The node of the actor, and the address of vLLM on it."""

    node: str
    ip: str
    port: int
    """The port that the actor reserves for vLLM until it ends."""

    def __str__(self) -> str:
        return f"{self.node} ({self.ip})"


class VllmHost:
    """The Ray actor that runs vLLM. vLLM ends with the process of the actor, even if Ray kills it; see `guard`."""

    def __init__(self) -> None:
        self._reserved: socket.socket | None = None
        self._last_beat_at = time.monotonic()
        threading.Thread(target=self._exit_when_engine_is_silent, daemon=True).start()

    def place(self) -> NodeAddress:
        """Reserve a port, and return it with the address of this node."""
        ip = importlib.import_module("ray.util").get_node_ip_address()
        self._reserved = reserve_port(ip)
        return NodeAddress(socket.gethostname(), ip, self._reserved.getsockname()[1])

    def beat(self) -> None:
        """Record that the engine is still running."""
        self._last_beat_at = time.monotonic()

    def run(
        self, command: Sequence[str], place: NodeAddress, adapters: str, variables: Mapping[str, str]
    ) -> Generator[str, None, None]:
        """Run vLLM on the reserved port and yield the lines of its log.

        Raises NodeCannotServe if vLLM cannot start here, and when it ends.
        """
        # Check that the node has the adapters and the program.
        if not Path(adapters).is_dir():
            raise NodeCannotServe(
                f"Ray placed vLLM on {place}, which does not have the engine's directory {adapters}: set "
                "--sampler-config.adapter-dir to a directory that all nodes share"
            )
        program, *arguments = command
        path = shutil.which(program, path=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]))
        if path is None:
            raise NodeCannotServe(f"--vllm-command: Ray placed vLLM on {place}, which has no program {program!r}")

        # Run it. `--host` and `--port` are repeated, and vLLM takes the last ones.
        arguments += ["--host", place.ip, "--port", str(place.port)]
        with subprocess.Popen(
            [sys.executable, "-P", guard.__file__, path, *arguments],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,  # stays open until this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield line.rstrip()
            status = process.wait()
        raise NodeCannotServe(f"vLLM on {place} ended with status {status}")

    def _exit_when_engine_is_silent(self) -> None:
        while time.monotonic() - self._last_beat_at < SILENCE_S:
            time.sleep(_LOOK_S)
        os._exit(1)


async def forward(place: NodeAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward one connection to vLLM, in both directions, until one side closes it."""
    try:
        server_reader, server_writer = await asyncio.open_connection(place.ip, place.port)
    except OSError:  # close the connection, as a server that is gone would
        writer.close()
        return
    copies = [asyncio.create_task(_copy(reader, server_writer)), asyncio.create_task(_copy(server_reader, writer))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in copies:
            task.cancel()
        writer.close()
        server_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):  # `forward` then closes the other side too
        while data := await reader.read(_BUFFER_BYTES):
            writer.write(data)
            await writer.drain()


async def serve(ray: Any, resources: Mapping[str, float], port: int, adapters: str, command: Sequence[str]) -> str:
    """Start the actor, run the command in it, print its log, and return why it ended."""
    custom = dict(resources)
    options = {"num_cpus": custom.pop("CPU", 0), "num_gpus": custom.pop("GPU", 0), "resources": custom}
    actor = ray.remote(VllmHost).options(**options, max_restarts=0, max_concurrency=4).remote()
    beats: asyncio.Task[None] | None = None
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # Ray's handler would log stack traces

    try:
        # Wait for the node, then run vLLM there while this process forwards its port.
        place = await _wait_for_node(actor, resources)
        print(f"vLLM runs on {place}, port {place.port}", flush=True)
        beats = asyncio.create_task(_beat(actor))
        variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_PREFIXES)}
        async with await asyncio.start_server(lambda *streams: forward(place, *streams), "127.0.0.1", port):
            lines = actor.run.options(num_returns="streaming").remote(list(command), place, adapters, variables)
            async for line in lines:
                print(await line, flush=True)
        return "vLLM ended"

    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        return (
            str(cause)
            if isinstance(cause, NodeCannotServe)
            else f"the Ray actor of vLLM ended: {' '.join(str(error).split())}"
        )
    except asyncio.CancelledError:
        return "the engine has stopped vLLM"
    finally:
        if beats is not None:
            beats.cancel()
        ray.kill(actor)


async def _wait_for_node(actor: Any, resources: Mapping[str, float]) -> NodeAddress:
    """Wait until a node has the resources free, and return its address."""

    async def get_node() -> NodeAddress:
        return await actor.place.remote()

    node = asyncio.create_task(get_node())
    if not (await asyncio.wait({node}, timeout=_PLACEMENT_MESSAGE_S))[0]:
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
        print(f"waiting for a node of the Ray cluster with {amounts} free", flush=True)
    return await node


async def _beat(actor: Any) -> None:
    while True:
        actor.beat.remote()
        await asyncio.sleep(BEAT_S)


def main(arguments: Sequence[str]) -> int:
    """Run the command in the Ray cluster of this machine until it ends. Returns the exit status 1."""
    resources, port, adapters, *command = arguments
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        print(f"--sampler-config.ray-resources: Ray is not installed: pip install '{DISTRIBUTION}[ray]'", flush=True)
        return 1
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level=logging.WARNING, log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        print(f"--sampler-config.ray-resources: this machine is not part of a Ray cluster: {reason}", flush=True)
        return 1
    print(asyncio.run(serve(ray, json.loads(resources), int(port), adapters, command)), flush=True)
    ray.shutdown()
    return 1


if __name__ == "__main__":
    # Imported by name, because other nodes cannot find classes of the module `__main__`.
    from skyrl_tx.integrations.vllm import run_on_ray

    sys.exit(run_on_ray.main(sys.argv[1:]))
