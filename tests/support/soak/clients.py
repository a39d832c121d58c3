"""Thousands of clients on one event loop and plain sockets. Each polls one future after another."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from skyrl_tx.server.http.body import PROTOBUF
from skyrl_tx.server.submission import wire_pb2

_PAUSE_S = 1.0
_HEARTBEAT_S = 10.0
_CONNECTING = 50
"""Number of connections that open concurrently."""
_TOKENS = [5, 6, 7]
_NEW_TOKENS = 16
TOKENS_PER_SAMPLE = len(_TOKENS) + _NEW_TOKENS
_PROMPT = {"chunks": [{"type": "encoded_text", "tokens": _TOKENS}]}
_JSON = "application/json"


def _one_pass(num_tokens: int) -> wire_pb2.ForwardBackwardRequest:
    """Return a pass of one datum, encoded like the SDK does, without a model id."""
    tokens = np.arange(num_tokens + 1) % 250 + 1
    request = wire_pb2.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = tokens[:-1].astype(np.int32).tobytes()
    for name, values, dtype in (
        ("target_tokens", tokens[1:].astype(np.int64), wire_pb2.DTYPE_INT64),
        ("weights", np.ones(num_tokens, np.float32), wire_pb2.DTYPE_FLOAT32),
    ):
        tensor = wire_pb2.Tensor(dense=values.tobytes(), dtype=dtype, shape=[num_tokens])
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    return request


@dataclass(frozen=True, slots=True)
class Arrival:
    """A result that arrived through a poll, with the times of poll and arrival."""

    request_id: str
    polled_at: float
    arrived_at: float


@dataclass(slots=True)
class Measurements:
    """Measurements of all clients."""

    statuses: Counter[int] = field(default_factory=Counter[int])
    num_done: int = 0
    failures: list[str] = field(default_factory=list[str])
    arrivals: list[Arrival] = field(default_factory=list[Arrival])
    num_pending: int = 0
    """Number of futures that are polled at the moment."""

    def take_arrivals(self) -> list[Arrival]:
        """Return the arrivals since the last call."""
        taken, self.arrivals = self.arrivals, []
        return taken


class Connection:
    """One HTTP/1.1 connection, reopened when the server closes it."""

    def __init__(self, url: str, measurements: Measurements, opening: asyncio.Semaphore) -> None:
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), address.port or 80
        self._measurements = measurements
        self._opening = opening
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Send JSON and return status and JSON of the response; retries on 429, 5xx and lost connections."""
        return await self.send(path, json.dumps(body).encode(), _JSON)

    async def send(self, path: str, data: bytes, content_type: str) -> tuple[int, dict[str, Any]]:
        """Send encoded data like `post`. Returns {} for a protobuf response, which is never a failure."""
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nhost: localhost\r\naccept: {PROTOBUF}\r\ncontent-type: {content_type}\r\n"
        )
        while True:
            try:
                status, answer = await self._call(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            except (OSError, asyncio.IncompleteReadError):
                await self.close()
                self._streams, status, answer = None, 0, b""
            self._measurements.statuses[status] += 1
            if status in (200, 408):
                return status, json.loads(answer) if answer.startswith(b"{") else {}
            if 400 <= status < 500 and status != 429:
                raise AssertionError(f"{path}: {status} {answer!r}")
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(OSError):
                await self._streams[1].wait_closed()

    async def _call(self, request: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            async with self._opening:
                self._streams = await asyncio.open_connection(self._host, self._port, limit=2**18)
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        return int(head[9:12]), await reader.readexactly(int(length or 0))

    async def result(self, request_id: str) -> dict[str, Any]:
        """Poll until the result exists."""
        self._measurements.num_pending += 1
        try:
            while True:
                polled_at = time.time()
                status, answer = await self.post("retrieve_future", request_id=request_id, allow_metadata_only=True)
                if status != 200:
                    continue
                if "error" in answer:
                    self._measurements.failures.append(str(answer["error"]))
                self._measurements.num_done += 1
                self._measurements.arrivals.append(Arrival(request_id, polled_at, time.time()))
                return answer
        finally:
            self._measurements.num_pending -= 1


@dataclass(slots=True)
class Clients:
    """Sessions with one model and one sampler each, and a constant number of pending futures."""

    url: str
    base_model: str
    num_sessions: int
    num_futures: int
    datum_tokens: int
    measurements: Measurements = field(default_factory=Measurements)
    _connections: list[Connection] = field(default_factory=list[Connection])
    _opening: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CONNECTING))

    async def run(self) -> None:
        """Train and sample until cancelled, with half of the futures each."""
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self.num_sessions):
                    share = (number + 1) * self.num_futures // self.num_sessions
                    group.create_task(self._session(share - number * self.num_futures // self.num_sessions))
        finally:
            await asyncio.gather(*(connection.close() for connection in self._connections))

    def _connection(self) -> Connection:
        self._connections.append(Connection(self.url, self.measurements, self._opening))
        return self._connections[-1]

    async def _session(self, num_futures: int) -> None:
        connection = self._connection()
        _, created = await connection.post("create_session", tags=[], sdk_version="0.38.0")
        session_id = created["session_id"]
        common = {"session_id": session_id, "base_model": self.base_model}
        _, created = await connection.post("create_model", model_seq_id=0, lora_config={"rank": 4}, **common)
        model_id = created["model_id"]
        await connection.result(created["request_id"])
        _, created = await connection.post("create_sampling_session", sampling_session_seq_id=0, **common)
        turn, seq_ids, prompts = asyncio.Lock(), count(1), count()

        async with asyncio.TaskGroup() as group:
            for number in range(num_futures):
                if number % 2:
                    group.create_task(self._sample(created["sampling_session_id"], prompts))
                else:
                    group.create_task(self._train(model_id, turn, seq_ids))
            while True:
                await asyncio.sleep(_HEARTBEAT_S)
                await connection.post("session_heartbeat", session_id=session_id)

    async def _train(self, model_id: str, turn: asyncio.Lock, seq_ids: Iterator[int]) -> None:
        """Send passes and optimizer steps alternately, and wait for each result."""
        connection, request = self._connection(), _one_pass(self.datum_tokens)
        while True:
            async with turn:  # requests of a model are sent in order
                seq_id = next(seq_ids)
                common = {"model_id": model_id, "seq_id": seq_id}
                if seq_id % 2:
                    request.model_id, request.seq_id = model_id, seq_id
                    _, created = await connection.send("forward_backward", request.SerializeToString(), PROTOBUF)
                else:
                    _, created = await connection.post("optim_step", **common, adam_params={"learning_rate": 1e-3})
            await connection.result(created["request_id"])

    async def _sample(self, sampling_session_id: str, seq_ids: Iterator[int]) -> None:
        connection = self._connection()
        params = {"max_tokens": _NEW_TOKENS, "temperature": 1.0}
        while True:
            _, created = await connection.post(
                "asample",
                sampling_session_id=sampling_session_id,
                seq_id=next(seq_ids),
                prompt=_PROMPT,
                num_samples=1,
                sampling_params=params,
            )
            await connection.result(created["request_id"])
