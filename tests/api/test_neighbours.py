"""Large calls of one owner do not block the event loop or keep memory. No test looks at a clock."""

import socket
import sys
import time
from asyncio import Handle
from collections.abc import Iterator
from types import FrameType
from typing import Any

import httpx
import numpy as np
import pytest
from sqlmodel import Session
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tx.apps.history.logged_metrics import LoggedRun, NewLoggedPoint, add_points, open_run
from skyrl_tx.contract import codec, requests, results
from skyrl_tx.contract.ids import ModelId, SessionId, model_id
from skyrl_tx.server.context import ApiContext
from skyrl_tx.server.http import connections
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.shares import OwnerBudget
from skyrl_tx.store import futures, models, sessions
from skyrl_tx.store.tables import ModelRow
from tests.support.live_api import Server, live_api
from tests.support.polling import until

SIZES = (1, 10, 100)
REPEATS = 3
"""A callback counts at its shortest, because garbage collection may run in any of them."""
NUMBERS = 1000
"""Numbers in a result of size 1."""
ENCODERS = frozenset({"SchemaSerializer.to_json", "SchemaSerializer.to_python", "encode"})
"""The C functions that encode a response in one call."""
OWNER = "local"


class LoopRecorder:
    """Counts the function calls of each callback of the event loop, which blocks all other callbacks."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.largest = 0
        """The most function calls in one callback."""
        self.encoders: set[str] = set()
        """The encoders that were called on the event loop."""

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Install the recorder in the thread of the event loop."""

        async def record(scope: Scope, receive: Receive, send: Send) -> None:
            sys.setprofile(self._observe)
            await app(scope, receive, send)

        return record

    def clear(self) -> None:
        """Start to count again."""
        self.largest = 0
        self.encoders.clear()

    def _observe(self, frame: FrameType, event: str, function: Any) -> None:
        if event not in ("call", "c_call"):
            return
        self.num_calls = 0 if frame.f_code is Handle._run.__code__ and event == "call" else self.num_calls + 1
        self.largest = max(self.largest, self.num_calls)
        if event == "c_call" and (name := getattr(function, "__qualname__", "")) in ENCODERS:
            self.encoders.add(name)


@pytest.fixture(scope="module")
def recorder() -> LoopRecorder:
    return LoopRecorder()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, recorder: LoopRecorder) -> Iterator[Server]:
    settings = ApiSettings(port=0, data_dir=tmp_path_factory.mktemp("data"), base_model="fake", retrieve_hold_s=0.5)
    with live_api(settings, recorder.wrap) as server:
        yield server


@pytest.fixture(scope="module")
def run_id(server: Server) -> ModelId:
    """Write as many sessions, runs and logged points as the largest size."""
    spec = codec.encode(requests.ModelSpec(lora=requests.LoraSpec(rank=8, seed=1)))
    points = [NewLoggedPoint(log_id=str(step), step=step, values={"reward": 1.0}) for step in range(SIZES[-1])]

    def write(tx: Session) -> ModelId:
        session_id = sessions.create(tx, owner=OWNER, now=1.0)
        for number in range(SIZES[-1]):
            sessions.create(tx, owner=OWNER, now=1.0)
            name = model_id(session_id, number)
            row = ModelRow(
                model_id=name, session_id=session_id, base_model="fake", spec=spec, created_at=1.0, last_request_at=1.0
            )
            models.create(tx, row)
        tx.flush()
        name = model_id(session_id, 0)
        run = LoggedRun(owner=OWNER, project="", key="k", name="n", model_id=name)
        add_points(tx, open_run(tx, run, time.time()), points, time.time())
        return name

    return server.store.write(write)


def store_result(server: Server, run_id: ModelId, result: results.Result) -> str:
    """Complete a request with a result, and return its id."""
    encoded, session_id = codec.encode(result), SessionId(run_id.partition(":")[0])
    new = futures.NewRequest(
        key="", kind="model_pass", owner=OWNER, session_id=session_id, model_id=run_id, body=b"request"
    )

    def write(tx: Session) -> str:
        request_id = futures.submit(tx, new, 1.0).request_id
        futures.complete(tx, request_id, encoded, failed=False, effect_order=None, now=1.0)
        return request_id

    return server.store.write(write)


@pytest.mark.parametrize(
    "route",
    ["training_runs?limit={size}", "training_runs/{run_id}/metrics?limit={size}", "sessions?limit={size}", "search"],
)
def test_a_long_list_does_not_block_the_event_loop(
    server: Server, recorder: LoopRecorder, run_id: ModelId, route: str
) -> None:
    def fetch(size: int) -> dict[str, Any]:
        if route == "search":
            return server.post("sessions/search", limit=size).json()
        return server.client.get(f"/api/v1/{route.format(size=size, run_id=run_id)}").json()

    fetch(1)  # imports and caches
    largest: list[int] = []
    for size in SIZES:
        counts: list[int] = []
        for _ in range(REPEATS):
            recorder.clear()
            rows = max((value for value in fetch(size).values() if isinstance(value, list)), key=len)
            counts.append(recorder.largest)
            assert len(rows) == size
            assert route.startswith("sessions?") or not recorder.encoders
        largest.append(min(counts))
    assert max(largest) <= 2 * min(largest), f"function calls in the longest callback, by size: {largest}"


def test_a_long_result_does_not_block_the_event_loop(server: Server, recorder: LoopRecorder, run_id: ModelId) -> None:
    largest: list[int] = []
    for size in (1, *SIZES):
        logprobs = np.linspace(-1, 0, size * NUMBERS, dtype=np.float32)
        request_id = store_result(server, run_id, results.ForwardBackwardOutput(logprobs=(logprobs,), metrics={}))
        counts: list[int] = []
        for _ in range(REPEATS):
            recorder.clear()
            answer = server.post("retrieve_future", request_id=request_id).json()
            counts.append(recorder.largest)
            assert len(answer["loss_fn_outputs"][0]["logprobs"]["data"]) == size * NUMBERS
            assert not recorder.encoders
        largest.append(min(counts))
    assert max(largest[1:]) <= 2 * min(largest[1:]), f"function calls in the longest callback, by size: {largest}"


def test_the_size_of_a_large_result_is_told_without_encoding_it(
    server: Server, run_id: ModelId, monkeypatch: pytest.MonkeyPatch
) -> None:
    logprobs = np.zeros(2**20, np.float32)
    request_id = store_result(server, run_id, results.ForwardBackwardOutput(logprobs=(logprobs,), metrics={}))
    with monkeypatch.context() as patch:
        patch.setattr("skyrl_tx.server.routes.futures.make_result_response", None)
        announced = server.post("retrieve_future", request_id=request_id, allow_metadata_only=True).json()
    whole = server.post("retrieve_future", request_id=request_id).content
    assert announced["status"] == "complete_metadata" and announced["response_payload_size"] >= len(whole)


def test_a_client_that_does_not_read_is_disconnected_and_holds_no_memory(
    server: Server, run_id: ModelId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_MAX_UNREAD_S", 0.6)
    context: ApiContext = server.api.app.state.context
    held = context.shares.result_bytes
    request_id = store_result(server, run_id, results.OptimStepOutput(metrics={"x" * 16 * 2**20: 1.0}))
    url, body = httpx.URL(server.url), f'{{"request_id":"{request_id}"}}'

    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((url.host, url.port))
        client.sendall(
            b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body.encode())
        )
        until(lambda: held.num_reserved)
        until(lambda: not held.num_reserved)
    assert server.post("session_heartbeat", session_id=server.session()).status_code == 200


@pytest.mark.parametrize(("num_tokens", "is_heavy"), [(2000, False), (400_000, True)])
def test_only_large_bodies_share_the_few_threads_for_computing(
    server: Server, monkeypatch: pytest.MonkeyPatch, num_tokens: int, is_heavy: bool
) -> None:
    """Prompts of usual length wait for their commits together."""
    context: ApiContext = server.api.app.state.context
    reserved: list[OwnerBudget] = []
    reserve = OwnerBudget.reserve
    monkeypatch.setattr(
        OwnerBudget, "reserve", lambda self, *values: (reserved.append(self), reserve(self, *values))[1]
    )
    server.post("asample", base_model="fake", prompt={"chunks": [{"tokens": [1] * num_tokens}]}, sampling_params={})
    assert (context.shares.heavy_calls in reserved, context.shares.calls in reserved) == (is_heavy, not is_heavy)
