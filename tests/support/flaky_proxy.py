"""A proxy between clients and a server that drops, truncates, repeats, delays and throttles HTTP messages."""

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

Fault = Literal["drop", "lose answer", "repeat", "delay", "cut request", "cut answer", "slow answer", "refuse", "stall"]
"""Kinds of faults.

- drop: the request does not arrive
- lose answer: the server executes the request, and the response is dropped
- repeat: the request arrives three times, the last time late
- delay: the request arrives late
- cut request, cut answer: request or response end in the middle of the body
- slow answer: the response arrives in small pieces
- refuse: the response is 503
- stall: there is no response while the proxy runs
"""
FAULTS: tuple[Fault, ...] = get_args(Fault)[:7]
"""The network faults that `seeded` chooses from."""
Schedule = Callable[[str, int], Fault | None]
"""Returns the fault of the n-th call of a path, counted from 1. Paths exclude the query and `/api/v1/`."""

_EXEMPT = ("session_heartbeat", "telemetry")
_PREFIX = "/api/v1/"
_LATE_S = 0.3
_MAX_HEAD_BYTES = 2**20
_NUM_PIECES = 20
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class _Message:
    """One HTTP/1.1 message, unparsed."""

    head: bytes
    body: bytes

    @property
    def path(self) -> str:
        target = self.head.split(b" ", 2)[1].decode()
        return target.partition("?")[0].removeprefix(_PREFIX)

    @property
    def raw(self) -> bytes:
        return self.head + self.body

    @property
    def half(self) -> bytes:
        """The head and the first half of the body."""
        return self.head + self.body[: len(self.body) // 2]


def make_random_schedule(seed: int, share: float, max_in_a_row: int = 2) -> Schedule:
    """Return a random schedule that disturbs a share of the calls, at most `max_in_a_row` in succession per path."""

    def decide(path: str, nth: int) -> Fault | None:
        if all(_is_hit(seed, share, path, nth - back) for back in range(1, max_in_a_row + 1)):
            return None
        return _dice(seed, path, nth).choice(FAULTS) if _is_hit(seed, share, path, nth) else None

    return decide


def _is_hit(seed: int, share: float, path: str, nth: int) -> bool:
    return nth > 0 and _dice(seed, path, nth).random() < share


def _dice(seed: int, path: str, nth: int) -> random.Random:
    return random.Random(f"{seed} {path} {nth}")


@dataclass(slots=True)
class FlakyProxy:
    """The proxy; it listens at `url` while the context of `flaky_proxy` is open."""

    target: str
    schedule: Schedule
    late_s: float = _LATE_S
    """Delay of late requests."""
    url: str = ""
    done: Counter[tuple[Fault, str]] = field(default_factory=Counter[tuple[Fault, str]])
    """Faults that happened, by kind and path."""
    _calls: Counter[str] = field(default_factory=Counter[str])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        """Listen until `stop` is set."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_MAX_HEAD_BYTES)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._start(self._connection(reader, writer))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward requests until client, server or a fault ends the connection."""
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._forward(await _read(reader), writer):
                    pass
        finally:
            writer.close()

    async def _forward(self, request: _Message, writer: asyncio.StreamWriter) -> bool:
        """Forward one request and its response, or inject a fault; return whether the connection stays open."""
        fault = self._fault(request.path)
        if fault == "drop":
            return False
        if fault == "stall":
            await asyncio.Event().wait()
        if fault == "refuse":
            writer.write(_REFUSAL)
            await writer.drain()
            return True
        if fault == "cut request":
            await self._send_half(request)
            return False
        if fault == "delay":
            await asyncio.sleep(self.late_s)
        if fault == "repeat":
            self._start(self._send_late(request))
            answer, _ = await asyncio.gather(self._send(request), self._send(request))
        else:
            answer = await self._send(request)
        if fault == "lose answer":
            return False
        if fault == "cut answer":
            writer.write(answer.half)
            await writer.drain()
            return False
        await _write(writer, answer.raw, is_slow=fault == "slow answer")
        return True

    def _fault(self, path: str) -> Fault | None:
        if path.endswith(_EXEMPT):
            return None
        self._calls[path] += 1
        fault = self.schedule(path, self._calls[path])
        if fault is not None:
            self.done[fault, path] += 1
        return fault

    async def _send(self, request: _Message) -> _Message:
        address = urlsplit(self.target)
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=_MAX_HEAD_BYTES)
        try:
            writer.write(request.raw)
            await writer.drain()
            return await _read(reader, has_body=not request.head.startswith(b"HEAD "))
        finally:
            writer.close()

    async def _send_late(self, request: _Message) -> None:
        await asyncio.sleep(self.late_s)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._send(request)

    async def _send_half(self, request: _Message) -> None:
        address = urlsplit(self.target)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(request.half)
        await writer.drain()
        writer.close()


@contextmanager
def flaky_proxy(target: str, schedule: Schedule, late_s: float = _LATE_S) -> Generator[FlakyProxy]:
    """Run a proxy for the server at `target` on a thread, until the context is left."""
    proxy = FlakyProxy(target, schedule, late_s)
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(proxy.serve(started, stop)))
    thread.start()
    assert started.wait(10), "the proxy did not start"
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _read(reader: asyncio.StreamReader, *, has_body: bool = True) -> _Message:
    """Read one message; raises IncompleteReadError at the end of the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not has_body:
        return _Message(head, b"")
    headers = {
        name.lower(): value.strip()
        for line in head.split(b"\r\n")[1:]
        for name, is_header, value in [line.partition(b":")]
        if is_header
    }
    if headers.get(b"transfer-encoding", b"").lower() != b"chunked":
        return _Message(head, await reader.readexactly(int(headers.get(b"content-length", 0))))
    pieces: list[bytes] = []
    while not pieces or pieces[-1] != b"0\r\n\r\n":
        size = await reader.readuntil(b"\r\n")
        pieces.append(size + await reader.readexactly(int(size.partition(b";")[0], 16) + 2))
    return _Message(head, b"".join(pieces))


async def _write(writer: asyncio.StreamWriter, data: bytes, *, is_slow: bool) -> None:
    step = max(len(data) // _NUM_PIECES, 1) if is_slow else len(data)
    for start in range(0, len(data), step):
        writer.write(data[start : start + step])
        await writer.drain()
        if is_slow:
            await asyncio.sleep(_LATE_S / _NUM_PIECES)
