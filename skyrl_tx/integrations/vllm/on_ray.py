"""Runs vLLM as an actor of a Ray cluster, and forwards a port of this machine to it.

    python -m skyrl_tx.integrations.vllm.on_ray RESOURCES PORT ADAPTERS PROGRAM ARGUMENT...

`ManagedServer` runs this in place of the command, so that no engine process has Ray's threads and signal handlers. The
cluster ends the actor with this process, and the actor ends vLLM. A program of another node is reached at the same
address after each start, wherever that is.
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
"""Period in which the actor is called."""
SILENCE_S = 60.0
"""Time without a call after which the actor ends. Without the head of its cluster, Ray does not end it."""
_LOOK_S = 1.0
_START_S = 5.0
"""Time in which an actor starts on a node that has its resources free."""
_PASSED = ("HF_", "VLLM_")
"""Beginnings of the environment variables that vLLM gets from the engine: of models, and its own."""
_BUFFER_BYTES = 2**16


class NodeCannotServe(Exception):
    """The node that Ray chose cannot serve; the message says why."""


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """The node of the actor, and the address of vLLM there."""

    node: str
    ip: str
    port: int
    """A port that is reserved for vLLM until the actor ends."""

    def __str__(self) -> str:
        return f"{self.node} ({self.ip})"


class VllmHost:
    """The actor. vLLM ends with its process, however that ends; see `guard`."""

    def __init__(self) -> None:
        self._reserved: socket.socket | None = None
        self._called_at = time.monotonic()
        threading.Thread(target=self._end_without_engine, daemon=True).start()

    def place(self) -> NodeAddress:
        """Reserve a port, and say where this is."""
        ip = importlib.import_module("ray.util").get_node_ip_address()
        self._reserved = reserve_port(ip)
        return NodeAddress(socket.gethostname(), ip, self._reserved.getsockname()[1])

    def beat(self) -> None:
        """Note that the engine is there."""
        self._called_at = time.monotonic()

    def run(
        self, command: Sequence[str], place: NodeAddress, adapters: str, variables: Mapping[str, str]
    ) -> Generator[str, None, None]:
        """Run vLLM at the reserved port, and yield the lines of its log. Raises CannotServe also for its end."""
        if not Path(adapters).is_dir():
            raise NodeCannotServe(
                f"vLLM runs on {place}, where the engine's directory {adapters} is not: name one that all nodes share "
                "with --sampler-config.adapter-dir"
            )
        program, *arguments = command
        found = shutil.which(program, path=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]))
        if found is None:
            raise NodeCannotServe(f"--vllm-command: there is no program {program!r} on {place}, where vLLM is to run")
        own = [*arguments, "--host", place.ip, "--port", str(place.port)]  # the last ones count
        with subprocess.Popen(
            [sys.executable, "-P", guard.__file__, found, *own],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,  # which this process holds until its end
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

    def _end_without_engine(self) -> None:
        while time.monotonic() - self._called_at < SILENCE_S:
            time.sleep(_LOOK_S)
        os._exit(1)


async def forward(place: NodeAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy what a connection brings to the server and back, until one of both closes it."""
    try:
        there_reader, there_writer = await asyncio.open_connection(place.ip, place.port)
    except OSError:  # the client sees the end of its connection, as from a server that is gone
        writer.close()
        return
    copies = [asyncio.create_task(_copy(reader, there_writer)), asyncio.create_task(_copy(there_reader, writer))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in copies:
            each.cancel()
        for each in (writer, there_writer):
            each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):  # it ends the connection on the other side too
        while data := await reader.read(_BUFFER_BYTES):
            writer.write(data)
            await writer.drain()


async def serve(ray: Any, resources: Mapping[str, float], port: int, adapters: str, command: Sequence[str]) -> str:
    """Place the actor, run the command there, print its log, and return why it ended."""
    others = dict(resources)
    options = {"num_cpus": others.pop("CPU", 0), "num_gpus": others.pop("GPU", 0), "resources": others}
    actor = ray.remote(VllmHost).options(**options, max_restarts=0, max_concurrency=4).remote()
    beats: asyncio.Task[None] | None = None
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # in place of Ray's, which logs stacks
    try:
        place = await _wait_for_node(actor, resources)
        print(f"vLLM runs on {place}, port {place.port}", flush=True)
        beats = asyncio.create_task(_beat(actor))
        variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
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
            else f"the actor of vLLM ended: {' '.join(str(error).split())}"
        )
    except asyncio.CancelledError:
        return "vLLM ends with the engine"
    finally:
        if beats is not None:
            beats.cancel()
        ray.kill(actor)


async def _wait_for_node(actor: Any, resources: Mapping[str, float]) -> NodeAddress:
    """Wait until a node has the resources free, and return which it is."""

    async def get_node() -> NodeAddress:
        return await actor.place.remote()

    found = asyncio.create_task(get_node())
    if not (await asyncio.wait({found}, timeout=_START_S))[0]:
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
        print(f"waiting for a node of the Ray cluster with {amounts} free", flush=True)
    return await found


async def _beat(actor: Any) -> None:
    while True:
        actor.beat.remote()
        await asyncio.sleep(BEAT_S)


def main(arguments: Sequence[str]) -> int:
    """Run the command in the cluster of this machine until it ends, and return a status."""
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
        print(f"--sampler-config.ray-resources: this machine is in no Ray cluster: {reason}", flush=True)
        return 1
    print(asyncio.run(serve(ray, json.loads(resources), int(port), adapters, command)), flush=True)
    ray.shutdown()
    return 1


if __name__ == "__main__":
    from skyrl_tx.integrations.vllm import on_ray  # by the name under which other nodes find its classes

    sys.exit(on_ray.main(sys.argv[1:]))
