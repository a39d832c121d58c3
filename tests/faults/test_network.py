"""On a network that drops, truncates, repeats, delays and throttles, each request takes effect exactly once."""

import contextlib
import json
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.server.http.body import PROTOBUF, Body, BodyLimits
from skyrl_tx.server.schemas.service import ClientConfigResponse
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.store import futures
from tests.support.chaos.runs import Network, Outcome, fake_server, find_differences, run
from tests.support.flaky_proxy import FAULTS, Fault, FlakyProxy, Schedule, flaky_proxy, make_random_schedule
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack

FAULTS_BY_CALL = {
    ("create_session", 1): "lose answer",
    ("create_model", 1): "lose answer",
    ("forward_backward", 1): "lose answer",
    ("forward_backward", 3): "repeat",
    ("forward_backward", 5): "cut request",
    ("forward_backward", 7): "drop",
    ("forward_backward", 9): "delay",
    ("optim_step", 1): "repeat",
    ("optim_step", 3): "cut answer",
    ("retrieve_future", 3): "cut answer",
    ("retrieve_future", 6): "slow answer",
    ("retrieve_future", 9): "lose answer",
    ("save_weights", 1): "repeat",
    ("save_weights_for_sampler", 1): "lose answer",
    ("save_weights_for_sampler", 3): "repeat",
    ("asample", 1): "lose answer",
    ("asample", 4): "repeat",
    ("load_weights", 1): "lose answer",
}


@pytest.fixture(scope="module")
def calm_outcome() -> Outcome:
    return run(fake_server(), 1, [])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    directory: Path = tmp_path_factory.mktemp("stack")
    with live_stack("fake", directory) as stack:
        yield stack


def make_flaky_network(schedule: Schedule, proxies: list[FlakyProxy]) -> Network:
    """Return a network with faults. Its proxy is appended to `proxies`."""

    @contextmanager
    def open_proxy(url: str) -> Generator[str]:
        with flaky_proxy(url, schedule) as proxy:
            proxies.append(proxy)
            yield proxy.url

    return open_proxy


def test_each_kind_of_fault_changes_no_bit(calm_outcome: Outcome) -> None:
    proxies: list[FlakyProxy] = []
    found = run(fake_server(), 1, [], make_flaky_network(lambda path, nth: FAULTS_BY_CALL.get((path, nth)), proxies))
    assert find_differences(found, calm_outcome) == []
    done = proxies[0].done
    assert {fault for fault, _ in done} == set(FAULTS), done
    assert done.total() >= 16, done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "kind"), [(1, "sqlite"), (3, "postgresql"), pytest.param(2, "sqlite", marks=pytest.mark.exhaustive)]
)
def test_random_faults_change_no_bit(
    calm_outcome: Outcome, seed: int, kind: str, request: pytest.FixtureRequest
) -> None:
    """One call in six is disturbed. The seed determines the calls and the faults."""
    proxies: list[FlakyProxy] = []
    url = request.getfixturevalue("postgresql_url") if kind == "postgresql" else None
    found = run(fake_server(url), 1, [], make_flaky_network(make_random_schedule(seed, 1 / 6), proxies))
    assert find_differences(found, calm_outcome) == [], proxies[0].done
    assert proxies[0].done.total() >= 10, proxies[0].done


def datum(number: int) -> types.Datum:
    inputs = {"target_tokens": np.array([1 + number % 200]), "weights": np.ones(1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints([number % 7]), loss_fn_inputs=inputs)


Chunked = tuple[dict[str, float], list[list[float]], dict[str, float]]


def train_in_chunks(url: str) -> Chunked:
    """Run a pass of three chunks and an optimizer step.

    Returns their results and the results of a later pass.
    """
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client(PUBLIC_NAME, rank=4, seed=3).result()
    passed = training.forward_backward(list(map(datum, range(210))), "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=0.01)).result()
    outputs = passed.result()
    after = training.forward([datum(3)], "cross_entropy").result()
    logprobs = [output["logprobs"].tolist() for output in outputs.loss_fn_outputs]
    return outputs.metrics, logprobs, (stepped.metrics or {}) | after.metrics


@contextmanager
def use_chunks(stack: LiveStack, length: int, **flags: bool) -> Generator[None]:
    """Let clients send chunks of `length` data, and use other flags of their configuration, in the context."""
    flags_of_clients = ClientConfigResponse(**flags).model_dump() | {"fwdbwd_max_chunk_len": length}
    stack.recorder.respond_with("client/config", flags_of_clients)
    try:
        yield
    finally:
        stack.recorder.respond_with("client/config", ClientConfigResponse().model_dump())


@pytest.fixture(scope="module")
def chunk_results(stack: LiveStack) -> Chunked:
    """The results of chunks without faults."""
    with use_chunks(stack, 100):
        return train_in_chunks(stack.url)


@pytest.mark.parametrize("late", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_reordered_chunks_give_equal_results(stack: LiveStack, chunk_results: Chunked, late: int) -> None:
    def schedule(path: str, nth: int) -> Fault | None:
        return "delay" if path == "forward_backward" and nth == late else None

    with flaky_proxy(stack.url, schedule) as proxy, stack.recorder.recording() as calls, use_chunks(stack, 100):
        found = train_in_chunks(proxy.url)
    assert proxy.done == {("delay", "forward_backward"): 1}
    assert sum(call.path == "forward_backward" for call in calls) == 4
    assert found == chunk_results


def test_a_request_whose_response_is_lost_twice_is_executed_once(stack: LiveStack) -> None:
    """Retries have equal bodies and idempotency keys. Only the retry count differs."""
    with (
        flaky_proxy(stack.url, lambda path, nth: "lose answer" if path == "optim_step" and nth < 3 else None) as proxy,
        stack.recorder.recording() as calls,
    ):
        service = tinker.ServiceClient(base_url=proxy.url, api_key="tml-local")
        training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()

    first, second, third, other = [call for call in calls if call.path == "optim_step"]
    assert first.body == second.body == third.body != other.body
    assert len({call.headers["x-idempotency-key"] for call in (first, second, third)}) == 1
    assert [call.headers["x-stainless-retry-count"] for call in (first, second, third)] == ["0", "1", "2"]
    rows = stack.server.store.read(lambda tx: futures.read_log(tx, ModelId(training.model_id), 0))
    assert [row.kind for row in rows] == ["create_model", "optim_step", "optim_step"]


def test_errors_of_a_reverse_proxy_are_retried(stack: LiveStack) -> None:
    """The client gets an empty 400, a 409 or multiple 500s and retries.

    The server executes the request once.
    """
    stack.recorder.replace_responses("forward_backward", [HTTPStatus.BAD_REQUEST])
    stack.recorder.replace_responses("save_weights", [HTTPStatus.CONFLICT])
    stack.recorder.replace_responses("retrieve_future", [HTTPStatus.INTERNAL_SERVER_ERROR] * 5, "ForwardBackward")
    with stack.recorder.recording() as calls:
        service = tinker.ServiceClient(base_url=stack.url, api_key="tml-local")
        training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        training.forward_backward([datum(1)], "cross_entropy").result()
        training.save_state("a").result()

    for path in ("forward_backward", "save_weights"):
        lost, retried = [call for call in calls if call.path == path]
        assert lost.body == retried.body
        assert lost.headers["x-idempotency-key"] != retried.headers["x-idempotency-key"]
    rows = stack.server.store.read(lambda tx: futures.read_log(tx, ModelId(training.model_id), 0))
    assert [row.kind for row in rows] == ["create_model", "model_pass"], "a save has no log record"


def test_sequential_smaller_chunks_give_equal_results(stack: LiveStack, chunk_results: Chunked) -> None:
    """Uses a client configuration without `parallel_fwdbwd_chunks` and with a shorter chunk length."""
    with stack.recorder.recording() as calls, use_chunks(stack, 70, parallel_fwdbwd_chunks=False):
        metrics, logprobs, after = train_in_chunks(stack.url)
    bodies = [Body(call.body, PROTOBUF, "zstd", BodyLimits(2**24)) for call in calls if call.path == "forward_backward"]
    passes = [body.parse_message(wire_pb2.ForwardBackwardRequest) for body in bodies]
    assert [(message.seq_id, len(message.data)) for message in passes] == [(1, 70), (2, 70), (3, 70), (5, 1)]
    assert logprobs == chunk_results[1]
    assert metrics["loss:sum"] == pytest.approx(chunk_results[0]["loss:sum"])
    assert after == pytest.approx(chunk_results[2], rel=1e-4)


@pytest.mark.slow
def test_late_responses_to_polls(stack: LiveStack) -> None:
    """The SDK's own transport waits for 50 s. With httpx it gives up after 45 s and polls again."""
    with contextlib.ExitStack() as proxies:
        patient, impatient = (
            DelayedClient(stack, proxies, own_transport=True),
            DelayedClient(stack, proxies, own_transport=False),
        )
        stack.recorder.respond_with("client/config", ClientConfigResponse().model_dump())
        waiting, retried = [
            client.training.forward_backward([datum(1)], "cross_entropy") for client in (patient, impatient)
        ]
        retried.result()
        assert time.monotonic() - impatient.polls[1] < 55
        waiting.result()
        assert 50 <= time.monotonic() - patient.polls[1] < 60

    assert len(patient.polls) == 2
    assert len(impatient.polls) == 3 and 45 <= impatient.polls[2] - impatient.polls[1] < 50


class DelayedClient:
    """A client whose proxy delays its second poll for 50 s."""

    def __init__(self, stack: LiveStack, proxies: contextlib.ExitStack, *, own_transport: bool) -> None:
        self.polls: list[float] = []
        flags = ClientConfigResponse().model_dump() | {"use_pyqwest_transport": own_transport}
        stack.recorder.respond_with("client/config", flags)
        proxy = proxies.enter_context(flaky_proxy(stack.url, self._fault, late_s=50.0))
        service = tinker.ServiceClient(base_url=proxy.url, api_key="tml-local")
        self.training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()

    def _fault(self, path: str, nth: int) -> Fault | None:
        if path != "retrieve_future":
            return None
        self.polls.append(time.monotonic())
        return "delay" if nth == 2 else None


def test_slow_readers_do_not_delay_other_clients(stack: LiveStack) -> None:
    """More clients than threads request a large response and read one byte at a time."""
    service = tinker.ServiceClient(base_url=stack.url, api_key="tml-local")
    training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()
    large = stack.server.post("forward_backward", **large_pass(stack.server.model()))
    stack.server.result(large)
    body = json.dumps({"request_id": large.json()["request_id"]}).encode()
    head = b"POST /api/v1/retrieve_future HTTP/1.1\r\nhost: localhost\r\naccept: %s\r\ncontent-length: %d\r\n\r\n" % (
        PROTOBUF.encode(),
        len(body),
    )
    half = head + body[: len(body) // 2]
    address = urlsplit(stack.url)

    with contextlib.ExitStack() as readers:
        slow: list[socket.socket] = []
        for number in range(120):
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            reader.connect((address.hostname, address.port))
            slow.append(readers.enter_context(reader))
            reader.sendall(head + body if number < 100 else half)  # some clients never complete their request
        assert all(reader.recv(1) == b"H" for reader in slow[:100]), "the responses have started"

        started = time.monotonic()
        training.forward_backward([datum(1)], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        assert time.monotonic() - started < 10
        assert all(reader.recv(1) == b"T" for reader in slow[:100]), "the responses are still being sent"


def large_pass(model_id: str) -> dict[str, Any]:
    tokens = [1] * 120
    inputs = {"target_tokens": {"data": tokens, "dtype": "int64"}, "weights": {"data": [1.0] * 120, "dtype": "float32"}}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}, "loss_fn_inputs": inputs}
    pass_input = {"data": [datum] * 300, "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": 1, "forward_backward_input": pass_input}
