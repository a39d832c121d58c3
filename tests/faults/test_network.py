"""Clients train over a line that drops, cuts, repeats, delays and dribbles: nothing is lost, nothing is done twice."""

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

from skyrl_tx.api.proto import wire_pb2
from skyrl_tx.api.schemas.service import ClientConfigAnswer
from skyrl_tx.api.wire import PROTOBUF, Body
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store import futures
from skyrl_tx.testing.chaos.runs import Line, Outcome, differences, fake_server, run
from skyrl_tx.testing.faulty_line import FAULTS, Fault, FaultyLine, Schedule, faulty_line, seeded
from skyrl_tx.testing.live_house import PUBLIC_NAME, House, live_house

EACH = {
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
def calm() -> Outcome:
    return run(fake_server(), 1, [])


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory: Path = tmp_path_factory.mktemp("house")
    with live_house("fake", directory) as house:
        yield house


def through(schedule: Schedule, lines: list[FaultyLine]) -> Line:
    """A line with faults; it is noted in `lines`."""

    @contextmanager
    def open_line(url: str) -> Generator[str]:
        with faulty_line(url, schedule) as line:
            lines.append(line)
            yield line.url

    return open_line


def test_each_fault_changes_no_bit(calm: Outcome) -> None:
    lines: list[FaultyLine] = []
    found = run(fake_server(), 1, [], through(lambda path, nth: EACH.get((path, nth)), lines))
    assert differences(found, calm) == []
    done = lines[0].done
    assert {fault for fault, _ in done} == set(FAULTS), done
    assert done.total() >= 16, done


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kind"), [(1, "sqlite"), (2, "sqlite"), (3, "postgresql")])
def test_a_bad_line_changes_no_bit(calm: Outcome, seed: int, kind: str, request: pytest.FixtureRequest) -> None:
    """Every sixth call is disturbed; the seed tells which and how."""
    lines: list[FaultyLine] = []
    url = request.getfixturevalue("postgresql_url") if kind == "postgresql" else None
    found = run(fake_server(url), 1, [], through(seeded(seed, 1 / 6), lines))
    assert differences(found, calm) == [], lines[0].done
    assert lines[0].done.total() >= 10, lines[0].done


def datum(number: int) -> types.Datum:
    inputs = {"target_tokens": np.array([1 + number % 200]), "weights": np.ones(1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints([number % 7]), loss_fn_inputs=inputs)


def train_in_chunks(url: str) -> tuple[dict[str, float], list[list[float]], dict[str, float]]:
    """A pass of three chunks and a step."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client(PUBLIC_NAME, rank=4, seed=3).result()
    passed = training.forward_backward(list(map(datum, range(2100))), "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=0.01)).result()
    outputs = passed.result()
    after = training.forward([datum(3)], "cross_entropy").result()
    logprobs = [output["logprobs"].tolist() for output in outputs.loss_fn_outputs]
    return outputs.metrics, logprobs, (stepped.metrics or {}) | after.metrics


@pytest.mark.parametrize("late", [1, 2])
def test_chunks_may_overtake_each_other(house: House, late: int) -> None:
    def schedule(path: str, nth: int) -> Fault | None:
        return "delay" if path == "forward_backward" and nth == late else None

    with faulty_line(house.url, schedule) as line, house.wiretap.listening() as calls:
        found = train_in_chunks(line.url)
    assert line.done == {("delay", "forward_backward"): 1}
    assert sum(call.path == "forward_backward" for call in calls) == 4
    assert found == train_in_chunks(house.url)


def test_an_answer_that_is_lost_twice_is_one_request(house: House) -> None:
    """The posts are the same, down to their key; the count of the retries tells them apart."""
    with (
        faulty_line(house.url, lambda path, nth: "lose answer" if path == "optim_step" and nth < 3 else None) as line,
        house.wiretap.listening() as calls,
    ):
        service = tinker.ServiceClient(base_url=line.url, api_key="tml-local")
        training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    first, second, third, other = [call for call in calls if call.path == "optim_step"]
    assert first.body == second.body == third.body != other.body
    assert len({call.headers["x-idempotency-key"] for call in (first, second, third)}) == 1
    assert [call.headers["x-stainless-retry-count"] for call in (first, second, third)] == ["0", "1", "2"]
    rows = house.server.store.read(lambda tx: futures.effects_since(tx, ModelId(training.model_id), 0))
    assert [row.kind for row in rows] == ["create_model", "optim_step", "optim_step"]


def test_what_a_proxy_says_in_our_place_is_asked_again(house: House) -> None:
    """An empty 400, a conflict and a row of failures: the request went through each time, and is done once."""
    house.wiretap.lose_answers("forward_backward", [HTTPStatus.BAD_REQUEST])
    house.wiretap.lose_answers("save_weights", [HTTPStatus.CONFLICT])
    house.wiretap.lose_answers("retrieve_future", [HTTPStatus.INTERNAL_SERVER_ERROR] * 5, "ForwardBackward")
    with house.wiretap.listening() as calls:
        service = tinker.ServiceClient(base_url=house.url, api_key="tml-local")
        training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        training.forward_backward([datum(1)], "cross_entropy").result()
        training.save_state("a").result()
    for path in ("forward_backward", "save_weights"):
        lost, answered = [call for call in calls if call.path == path]
        assert lost.body == answered.body
        assert lost.headers["x-idempotency-key"] != answered.headers["x-idempotency-key"]
    rows = house.server.store.read(lambda tx: futures.effects_since(tx, ModelId(training.model_id), 0))
    assert [row.kind for row in rows] == ["create_model", "model_pass"], "a save is no effect"


def test_smaller_chunks_one_after_the_other(house: House) -> None:
    """As with a server that sets no `parallel_fwdbwd_chunks` and another length."""
    before = train_in_chunks(house.url)
    flags = ClientConfigAnswer(parallel_fwdbwd_chunks=False).model_dump() | {"fwdbwd_max_chunk_len": 700}
    house.wiretap.answer("client/config", flags)
    with house.wiretap.listening() as calls:
        metrics, logprobs, after = train_in_chunks(house.url)
    house.wiretap.answer("client/config", ClientConfigAnswer().model_dump())
    bodies = [Body(call.body, PROTOBUF, "zstd", 2**24) for call in calls if call.path == "forward_backward"]
    passes = [body.message(wire_pb2.ForwardBackwardRequest) for body in bodies]
    assert [(each.seq_id, len(each.data)) for each in passes] == [(1, 700), (2, 700), (3, 700), (5, 1)]
    assert logprobs == before[1]
    assert metrics["loss:sum"] == pytest.approx(before[0]["loss:sum"])
    assert after == pytest.approx(before[2], rel=1e-4)


@pytest.mark.slow
def test_polls_that_are_held_for_long(house: House) -> None:
    """The SDK's own transport waits for 50 s; httpx' gives up after 45, and the SDK asks again. Both at once."""
    with contextlib.ExitStack() as lines:
        patient, impatient = Held(house, lines, own_transport=True), Held(house, lines, own_transport=False)
        house.wiretap.answer("client/config", ClientConfigAnswer().model_dump())
        waiting, asking = [held.training.forward_backward([datum(1)], "cross_entropy") for held in (patient, impatient)]
        asking.result()
        assert time.monotonic() - impatient.polls[1] < 55
        waiting.result()
        assert 50 <= time.monotonic() - patient.polls[1] < 60
    assert len(patient.polls) == 2
    assert len(impatient.polls) == 3 and 45 <= impatient.polls[2] - impatient.polls[1] < 50


class Held:
    """A client, over a line that holds the answer to its second poll for 50 s."""

    def __init__(self, house: House, lines: contextlib.ExitStack, *, own_transport: bool) -> None:
        self.polls: list[float] = []
        flags = ClientConfigAnswer().model_dump() | {"use_pyqwest_transport": own_transport}
        house.wiretap.answer("client/config", flags)
        line = lines.enter_context(faulty_line(house.url, self._fault, late_s=50.0))
        service = tinker.ServiceClient(base_url=line.url, api_key="tml-local")
        self.training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()

    def _fault(self, path: str, nth: int) -> Fault | None:
        if path != "retrieve_future":
            return None
        self.polls.append(time.monotonic())
        return "delay" if nth == 2 else None


def test_slow_readers_hold_up_nobody(house: House) -> None:
    """More of them than there are threads: each has asked for a large answer and takes a byte of it at a time."""
    service = tinker.ServiceClient(base_url=house.url, api_key="tml-local")
    training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()
    large = house.server.post("forward_backward", **large_pass(training.model_id))
    house.server.result(large)
    body = json.dumps({"request_id": large.json()["request_id"]}).encode()
    head = b"POST /api/v1/retrieve_future HTTP/1.1\r\nhost: x\r\naccept: %s\r\ncontent-length: %d\r\n\r\n" % (
        PROTOBUF.encode(),
        len(body),
    )
    half = head + body[: len(body) // 2]
    address = urlsplit(house.url)
    with contextlib.ExitStack() as readers:
        slow: list[socket.socket] = []
        for number in range(120):
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            reader.connect((address.hostname, address.port))
            slow.append(readers.enter_context(reader))
            reader.sendall(head + body if number < 100 else half)  # and some that never finish their request
        assert all(reader.recv(1) == b"H" for reader in slow[:100]), "each is being answered"
        started = time.monotonic()
        training.forward_backward([datum(1)], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        assert time.monotonic() - started < 10
        assert all(reader.recv(1) == b"T" for reader in slow[:100]), "and is still being answered"


def large_pass(model_id: str) -> dict[str, Any]:
    tokens = [1] * 120
    inputs = {"target_tokens": {"data": tokens, "dtype": "int64"}, "weights": {"data": [1.0] * 120, "dtype": "float32"}}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}, "loss_fn_inputs": inputs}
    asked = {"data": [datum] * 300, "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": 1000, "forward_backward_input": asked}
