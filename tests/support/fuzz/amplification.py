"""Amplification fuzzer (`make fuzz-amplification`): what a small or repetitive body costs the server and other clients.

Bodies of every route repeat one structure, plain or compressed, with and without an API key. Measured are the growth of
the resident memory of API and engine, and the longest time that a health check of another client takes meanwhile.
"""

import argparse
import http.client
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import zstandard

from skyrl_tx.compose import APPS
from skyrl_tx.launch.command import load_server_extensions
from skyrl_tx.server.app import create_app
from skyrl_tx.server.http.body import PROTOBUF
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.store.database import Store
from tests.support.fuzz.routes import Json, find_schemas
from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import PACKAGED
from tests.support.with_constants import constants

MAX_GROWTH_BYTES = 64 * 2**20
"""The most that a small body may cost the process."""
MAX_BYTES_PER_BYTE = 40
"""The most that each further byte on the wire may cost: numbers of JSON take four bytes and become 32 or 40, twice."""
SMALL_BYTES = 100_000
FEW_BYTES = 3000
"""A body so small that it should cost other clients at most `MAX_WAIT_S`."""
MAX_WAIT_S = 0.05
"""The most that a small body may cost another client, on an idle machine."""

FILLS = {
    "empty arrays": "[]",
    "empty objects": "{}",
    "objects": '{"a":0}',
    "strings": '"ab"',
    "floats": "0.1",
    "integers": "12345",
    "chunks": '{"tokens":[]}',
    "nulls": "null",
}
TEXT_ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/anthropic/api/v1/messages",
    "/anthropic/api/v1/messages/count_tokens",
)
"""Routes that tokenize a text."""
TEXTS = "a", " ", "How many clips? ", "é"
PLAIN_BYTES = 2**20 - 2000
COMPRESSED_BYTES = 2**17 - 2000


@dataclass(frozen=True, slots=True)
class Attack:
    """One call."""

    name: str
    method: str
    path: str
    build: Callable[[], bytes]
    """Returns the body, which takes longer than the call."""
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Cost:
    """The memory of API and engine that a call took, and the longest health check of another client."""

    status: int
    growth_bytes: int
    waited_s: float
    num_bytes: int

    @property
    def is_excessive(self) -> bool:
        """Whether the memory exceeds what a body of this size may take."""
        return self.growth_bytes > MAX_GROWTH_BYTES + MAX_BYTES_PER_BYTE * max(self.num_bytes - SMALL_BYTES, 0)


class Target:
    """A running server with an API key, a model and a sampling session."""

    def __init__(self, server: LiveServer, key: str) -> None:
        self.server, self.key = server, key
        self._host = server.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(self._host, timeout=60)
        self._next_seq_id = 0
        session = self.post("create_session", {})
        self.ids = {"session_id": session["session_id"], "base_model": "tiny"}
        model = self.post("create_model", self.ids | {"model_seq_id": 0, "lora_config": {"rank": 8}})
        sampler = self.post("create_sampling_session", self.ids | {"sampling_session_seq_id": 0})
        self.ids |= {"model_id": model["model_id"], "sampling_session_id": sampler["sampling_session_id"]}
        self.ids |= {"request_id": model["request_id"]}

    def post(self, endpoint: str, body: Json) -> Json:
        """Call an endpoint with the key."""
        status, text = self._call("POST", f"/api/v1/{endpoint}", json.dumps(body).encode(), {"X-API-Key": self.key})
        assert status == 200, text
        return cast(Json, json.loads(text))

    def seq_id(self) -> int:
        """Return a new sequence number."""
        self._next_seq_id += 1
        return self._next_seq_id

    def cost(self, attack: Attack, *, with_key: bool = True) -> Cost:
        """Make a call and measure it."""
        body = attack.build()
        pids = [self.server.pid, self.server.engine_pid]
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM counts from here
        before = sum(_memory(pid, "VmRSS") for pid in pids)
        headers = attack.headers | ({"X-API-Key": self.key} if with_key else {})
        with self._another_client() as longest:
            status, _ = self._call(attack.method, attack.path, body, headers)
            time.sleep(0.01)
        growth = sum(_memory(pid, "VmHWM") for pid in pids) - before
        return Cost(status, growth, longest[0], len(body))

    def _call(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, OSError):  # a server may close a connection whose body it does not read
            self._connection.close()
            return 0, b""

    @contextmanager
    def _another_client(self) -> Generator[list[float]]:
        """Check the server's health all the time on another connection; yield the longest time."""
        longest, is_over = [0.0], threading.Event()
        connection = http.client.HTTPConnection(self._host, timeout=60)
        connection.connect()

        def check() -> None:
            while not is_over.is_set():
                started = time.monotonic()
                connection.request("GET", "/api/v1/healthz")
                connection.getresponse().read()
                longest[0] = max(longest[0], time.monotonic() - started)
                time.sleep(0.002)

        thread = threading.Thread(target=check)
        thread.start()
        try:
            yield longest
        finally:
            is_over.set()
            thread.join()
            connection.close()


def _write_text(path: str, text: str, size: int) -> bytes:
    """Return a request whose prompt repeats a text."""
    whole = text * (size // len(text.encode()))
    takes_text = path == "/v1/completions"
    prompt: Json = {"prompt": whole} if takes_text else {"messages": [{"role": "user", "content": whole}]}
    counts = path.endswith("count_tokens")
    return json.dumps({"model": "tiny", **prompt} | ({} if counts else {"max_tokens": 1})).encode()


@contextmanager
def running_target() -> Generator[Target]:
    """Start a server on the fake backend, with one API key."""
    with tempfile.TemporaryDirectory(prefix="amplification-") as name:
        data_dir = Path(name)
        with LiveServer(
            data_dir,
            flags=(
                *("--base-model", "tiny", "--backend", "fake", "--tokenizer-id", str(PACKAGED)),
                *constants("api", retrieve_hold_s=0.01),
            ),
        ) as server:
            command = [sys.executable, "-m", "skyrl_tx", "keys", "create", "ann", "--data-dir", name]
            made = subprocess.run(command, capture_output=True, text=True, check=True)
            found = re.search(r"tml-\S+", made.stdout)
            assert found is not None, made.stdout
            time.sleep(1.1)  # until the server notices the key
            yield Target(server, found[0])


def iterate_attacks(target: Target) -> Iterator[Attack]:
    """Yield the calls: JSON of every route, then passes in protobuf."""
    for method, path in _routes():
        place = re.sub(r"\{(\w+)[^}]*\}", lambda found: target.ids.get(found[1], "weights"), path)
        for name, blank in _blanks(path, target):
            for fill, part in FILLS.items():
                for size, encoding in ((PLAIN_BYTES, ""), (COMPRESSED_BYTES, "zstd")):
                    body = partial(blank, part, size)
                    yield _attack(f"{name}: {fill}", method, place, body, encoding, "application/json")
    for path in TEXT_ROUTES:
        for text in TEXTS:
            body = partial(_write_text, path, text, PLAIN_BYTES)
            yield _attack(f"text for {path}: {text}", "POST", path, body, "", "application/json")
    for name, body in protobuf_bodies(8 * 2**20 - 4000).items():
        start = wire_pb2.ForwardBackwardRequest(model_id=target.ids["model_id"], seq_id=target.seq_id(), loss_fn="ppo")
        whole = start.SerializeToString() + body
        yield _attack(name, "POST", "/api/v1/forward_backward", partial(bytes, whole), "zstd", PROTOBUF)


def protobuf_bodies(size: int) -> dict[str, bytes]:
    """Return repetitive parts of a pass in protobuf, each of about `size` bytes, by name."""
    key = b"\x0a\x01k"
    crow = np.full(size // 40, 0, np.int64).tobytes()
    csr = (
        b"\x12"
        + _prefix_size(b"\x12" + _prefix_size(crow))
        + b"\x18\x01\x22"
        + _prefix_size(_varint(size // 40 - 1) + _varint(80))
    )
    return {
        "empty datums": _nest_messages(size, (3, b""), (0, b"")),
        "empty chunks": _nest_messages(size, (3, b""), (1, b""), (0, b"")),
        "two kinds of chunks in turn": _nest_messages(size, (3, b""), (1, b""), (1, b"\x12\0"), (0, b"")),
        "empty loss inputs": _nest_messages(size, (3, b""), (2, b""), (0, b"")),
        "empty spans": _nest_messages(size, (3, b""), (3, b""), (0, b"")),
        "two kinds of spans in turn": _nest_messages(size, (3, b""), (4, b""), (1, b"\x12\0"), (0, b"")),
        "two layouts of a tensor in turn": _nest_messages(size, (3, b""), (2, key), (2, b""), (1, b"\x12\0"), (0, b"")),
        "a packed shape": _nest_messages(size, (3, b""), (2, key), (2, b""), (4, b"\1" * (size - 40))),
        "a shape": _nest_messages(size, (3, b""), (2, key), (2, b""), (0, b"\x20\1")),
        "empty loss_fn_config": _nest_messages(size, (7, b""), (0, b"")),
        "long forms of numbers": b"\x9a\x80\x00\x80\x80\x00" * (size // 6),
        "groups": b"\x1b\x1c" * (size // 2),
        "tokens": _nest_messages(size, (3, b""), (1, b""), (1, b""), (1, b"\0" * (size - 40))),
        "a dense tensor": _nest_messages(
            size, (3, b"\x0a\x08\x0a\x06\x0a\x04\0\0\0\0"), (2, key), (2, b"\x18\1"), (1, b"\0" * (size - 60))
        ),
        "a sparse tensor": _nest_messages(size, (3, b"\x0a\x08\x0a\x06\x0a\x04\0\0\0\0"), (2, key), (2, csr)),
    }


def _nest_messages(size: int, *path: tuple[int, bytes]) -> bytes:
    """Return messages inside one another: field numbers, and what stands before the next message.

    A last field number of 0 repeats the message before it, or the given bytes, up to a size.
    """
    *outer, (last, data) = path
    if last:
        data = bytes([last << 3 | 2]) + _prefix_size(data)
    else:
        if not data:
            number, content = outer.pop()
            data = bytes([number << 3 | 2]) + _prefix_size(content)
        data *= size // len(data)
    for number, before in reversed(outer):
        data = bytes([number << 3 | 2]) + _prefix_size(before + data)
    return data


def _prefix_size(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(value: int) -> bytes:
    pieces: list[int] = []
    while value > 127:
        pieces.append(value & 127 | 128)
        value >>= 7
    return bytes([*pieces, value])


def _attack(name: str, method: str, path: str, build: Callable[[], bytes], encoding: str, content_type: str) -> Attack:
    headers = {"Content-Type": content_type}
    if encoding:
        headers["Content-Encoding"] = encoding
    compress = zstandard.ZstdCompressor().compress if encoding else bytes
    return Attack(f"{name} ({encoding or 'plain'})", method, path, lambda: compress(build()), headers)


Blank = Callable[[str, int], bytes]


def _blanks(path: str, target: Target) -> Iterator[tuple[str, Blank]]:
    """Yield functions that fill one place of a route's body with repetitions of a part, up to a size."""
    named: dict[str, Json] = {"an unknown field": {"x": _BLANK}}
    if len(fits := find_schemas(path)) == 1:
        named |= {field: target.ids | {field: _BLANK} for field in fits[0].model_fields}
    text = {"chunks": [{"tokens": [1, 2]}]}
    if path.endswith("/asample"):
        whole = target.ids | {"seq_id": 1, "num_samples": 1, "prompt": text, "sampling_params": {"max_tokens": 1}}
        named |= {f"sample {place}": cast(Json, value) for place, value in _with_blank(whole, "")}
        named["sample stop"] = whole | {"sampling_params": {"max_tokens": 1, "stop": _BLANK}}
    if path.endswith("/forward_backward"):
        tensor = {"data": [1, 2], "dtype": "int64", "shape": [2]}
        datum = {"model_input": text, "loss_fn_inputs": {"target_tokens": tensor}}
        inner = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {}}
        whole = target.ids | {"forward_backward_input": inner}
        named |= {f"pass {place}": cast(Json, value) for place, value in _with_blank(whole, "")}

    for name, value in named.items():
        for kind, (opening, closing) in {"": ("[", "]"), " by name": ("{", "}")}.items():
            start, end = json.dumps(value).split(json.dumps(_BLANK))

            def fill(
                part: str, size: int, start: str = start, end: str = end, opening: str = opening, closing: str = closing
            ) -> bytes:
                parts = (
                    [part] if opening == "[" else [f'"{index:x}":{part}' for index in range(size // (len(part) + 10))]
                )
                times = size // (len(part) + 1) if opening == "[" else 1
                return (start + opening + ",".join(parts * times) + closing + end).encode()

            yield name + kind, fill


_BLANK = "<blank>"


def _with_blank(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield copies of a JSON value with a blank in the place of each of its parts."""
    yield place, _BLANK
    if isinstance(value, dict):
        for name, part in cast(Json, value).items():
            for where, inner in _with_blank(part, f"{place}.{name}"):
                yield where, {**cast(Json, value), name: inner}
    elif isinstance(value, list):
        for where, inner in _with_blank(value[0], f"{place}[]"):
            yield where, [inner]


@cache
def _routes() -> list[tuple[str, str]]:
    """Return method and path of every route that takes a body."""
    with tempfile.TemporaryDirectory(prefix="amplification-") as name:
        settings = ApiSettings(data_dir=Path(name), base_model="tiny")
        store = Store.open(settings.data_dir, role="api", url=settings.store_url)
        try:
            paths: dict[str, Json] = create_app(settings, store, load_server_extensions(APPS)).openapi()["paths"]
        finally:
            store.close()
    return [
        (method.upper(), path) for path, methods in paths.items() for method in methods if method in ("post", "put")
    ]


def _memory(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Make all calls and print the costliest of each route."""
    parser = argparse.ArgumentParser(description="Measure what repetitive bodies cost the server and other clients.")
    parser.add_argument("--every", type=int, default=1, help="make every n-th call only")
    arguments = parser.parse_args()
    worst: dict[str, list[tuple[Attack, Cost]]] = {}
    num_found = num_calls = 0

    with running_target() as target:
        for number, attack in enumerate(iterate_attacks(target)):
            if number % arguments.every:
                continue
            num_calls += 2
            for with_key in (True, False):
                cost = target.cost(attack, with_key=with_key)
                worst.setdefault(attack.path if with_key else "without a key", []).append((attack, cost))
                if cost.is_excessive:
                    num_found += 1
                    print(f"{attack.name}: {cost}", flush=True)

    print(f"{num_calls} calls")
    print("| route | calls | peak memory | of | bytes | longest health check | of | bytes |")
    print("|---|---|---|---|---|---|---|---|")

    for path, made in worst.items():
        large, slow = (
            max(made, key=lambda measured: measured[1].growth_bytes),
            max(made, key=lambda measured: measured[1].waited_s),
        )
        print(
            f"| {path} | {len(made)} | {large[1].growth_bytes / 2**20:.0f} MiB | {large[0].name} "
            f"| {large[1].num_bytes:,} | {slow[1].waited_s * 1000:.0f} ms | {slow[0].name} | {slow[1].num_bytes:,} |"
        )

    of_size = [(attack, cost) for made in worst.values() for attack, cost in made if cost.num_bytes <= FEW_BYTES]
    slowest = sorted(of_size, key=lambda pair: pair[1].waited_s, reverse=True)[:3]
    print(f"{len(of_size)} calls of at most {FEW_BYTES:,} bytes; the longest health checks during them:")
    for attack, cost in slowest:
        print(f"  {cost.waited_s * 1000:.0f} ms: {attack.path}, {attack.name}, {cost.num_bytes:,} bytes")
    raise SystemExit(1 if num_found else 0)


if __name__ == "__main__":
    main()
