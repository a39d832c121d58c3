"""HTTP server that replays recorded responses immediately; the lower bound of a client's latency.

While recording, it forwards each call to the upstream server and stores the response. While replaying, it returns the
stored response and does nothing else.
"""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

_KIND = "x-tinker-request-type"


@dataclass
class _Stub:
    upstream: tuple[str, int]
    replaying: bool = False
    responses: dict[tuple[str, str, str], bytes] = field(default_factory=dict)

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read_message(reader)) is not None:
                first_line, headers, _ = request
                method, path, _ = first_line.split(" ")
                key = (method, path, headers.get(_KIND, ""))
                if not (self.replaying and key in self.responses):
                    self.responses[key] = await self._forward(request)
                writer.write(self.responses[key])
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client or the benchmark has finished
        finally:
            writer.close()

    async def _forward(self, request: "_Message") -> bytes:
        reader, writer = await asyncio.open_connection(*self.upstream)
        writer.write(_write_message(request))
        response = await _read_message(reader)
        writer.close()
        assert response is not None, "the upstream server closed the connection"
        return _write_message(response)


_Message = tuple[str, dict[str, str], bytes]


async def _read_message(reader: asyncio.StreamReader) -> _Message | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first_line, *lines = head.rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    assert "transfer-encoding" not in headers, "neither the SDK nor the server sends chunked messages"
    return first_line, headers, await reader.readexactly(int(headers.get("content-length", 0)))


def _write_message(message: _Message) -> bytes:
    first_line, headers, body = message
    lines = [first_line, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def _run(stub: _Stub, control: Connection) -> None:
    server = await asyncio.start_server(stub.serve_connection, "127.0.0.1", 0)
    control.send(server.sockets[0].getsockname()[1])
    while await asyncio.to_thread(control.recv) == "replay":
        stub.replaying = True
        control.send("replaying")
    server.close()


def _run_child(upstream: tuple[str, int], control: Connection) -> None:
    asyncio.run(_run(_Stub(upstream), control))


@dataclass(frozen=True)
class RunningStub:
    url: str
    control: Connection

    def replay(self) -> None:
        """Stop forwarding and replay the stored responses."""
        self.control.send("replay")
        self.control.recv()


@contextmanager
def run_stub(upstream_url: str) -> Iterator[RunningStub]:
    """Run a recording stub in a separate process."""
    upstream = urlsplit(upstream_url)
    assert upstream.hostname is not None and upstream.port is not None
    spawn = multiprocessing.get_context("spawn")
    control, child_end = spawn.Pipe()
    process = spawn.Process(target=_run_child, args=((upstream.hostname, upstream.port), child_end), daemon=True)
    process.start()
    try:
        yield RunningStub(f"http://127.0.0.1:{control.recv()}", control)
    finally:
        control.send("stop")
        process.join(5)
        process.kill()
