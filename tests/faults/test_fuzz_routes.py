"""Whatever is sent to whichever route, the answer comes soon and is no 5xx. New routes take part by themselves.

An engine works behind the routes: what is acknowledged reaches it, and must not end it either.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given

from skyrl_tx.api.proto import wire_pb2
from skyrl_tx.testing.fuzz_routes import Attempt, attempts, call, fitting, known_ids, recorded, routes
from skyrl_tx.testing.fuzzing import ServerError, Tally, examples
from skyrl_tx.testing.live_api import Server
from skyrl_tx.testing.live_house import live_house

CORPUS = Path(__file__).parent / "corpus.jsonl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with live_house("fake", tmp_path_factory.mktemp("house"), retrieve_hold_s=0.01) as house:
        yield house.server


def fuzz(server: Server, examples_a_route: int) -> Tally:
    tally = Tally()
    for route in routes(server):

        @examples(examples_a_route)
        @given(attempts(route, known_ids(server)))
        def check(attempt: Attempt) -> None:
            call(server, tally, route, attempt)  # noqa: B023 - called before the next route

        check()
    assert server.client.get("/api/v1/healthz").status_code == 200
    return tally


def test_no_call_is_a_5xx(server: Server) -> None:
    tally = fuzz(server, 4)
    assert tally.statuses[200] > 20 and tally.statuses[400] > 20 and tally.statuses[404] > 5, "from all walks of life"


@pytest.mark.slow
def test_no_call_of_many_is_a_5xx(server: Server) -> None:
    fuzz(server, 60)


def test_what_was_found_once_stays_mended(server: Server) -> None:
    lines = [line for line in CORPUS.read_text().splitlines() if "path" in json.loads(line)]
    assert len(lines) >= 8
    for line in lines:
        call(server, Tally(), *recorded(line, known_ids(server)))
    assert server.client.get("/api/v1/healthz").status_code == 200


def test_numbers_that_are_none_are_named(server: Server) -> None:
    body = '{"target": {"sampling_session_id": "s"}, "timeout": NaN}'
    answer = server.client.post("/api/v1/retrieve_futures", content=body)
    assert (answer.status_code, answer.json()["detail"]) == (400, "timeout nan: must be a finite number")


def test_a_tensor_that_lies_does_not_end_the_server(server: Server) -> None:
    message = wire_pb2.ForwardBackwardRequest(model_id=server.model(), seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0"
    datum.loss_fn_inputs["weights"].dtype = wire_pb2.DTYPE_FLOAT32
    datum.loss_fn_inputs["weights"].shape.extend([0, 2**62])
    answer = server.client.post(
        "/api/v1/forward_backward",
        content=message.SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
    )
    assert "too large" in str(server.result(answer)["error"])


def test_the_fuzzer_reaches_the_routes_and_tells(server: Server) -> None:
    paths = {route.path for route in routes(server)}
    assert {"/api/v1/create_model", "/api/v1/forward_backward", "/api/v1/asample", "/api/v1/training_runs"} <= paths
    assert [schema.__name__ for schema in fitting("/api/v1/create_model")] == ["CreateModelRequest"]
    broken, _ = recorded('{"path": "/broken"}', {})

    async def fail() -> None:
        raise OSError("broken")

    server.api.app.add_api_route("/broken", fail, methods=["POST"])
    with pytest.raises(ServerError, match="500"):
        call(server, Tally(), broken, Attempt("/broken", {}, b"", {}))
