"""No generated call of any route gets a 5xx or a late response.

The routes come from the OpenAPI document.

An engine executes the accepted requests and must not exit.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given

from skyrl_tx.server.submission import wire_pb2
from tests.support.fuzz.reports import ServerError, Tally, examples
from tests.support.fuzz.routes import Attempt, attempts, call, create_ids, find_schemas, list_routes, parse_attempt
from tests.support.live_api import Server, adapters_in_process
from tests.support.live_stack import live_stack

CORPUS = Path(__file__).parent / "corpus.jsonl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stack")
    with adapters_in_process(), live_stack("fake", folder, retrieve_hold_s=0.01, has_tokenizer=True) as stack:
        yield stack.server


def fuzz(server: Server, examples_per_route: int) -> Tally:
    tally = Tally()
    for route in list_routes(server):

        @examples(examples_per_route)
        @given(attempts(route, create_ids(server)))
        def check(attempt: Attempt) -> None:
            call(server, tally, route, attempt)  # noqa: B023 - called before the next route

        check()
    assert server.client.get("/api/v1/healthz").status_code == 200
    return tally


def test_no_call_gets_a_5xx(server: Server) -> None:
    tally = fuzz(server, 4)
    assert tally.statuses[200] > 20 and tally.statuses[400] > 20 and tally.statuses[404] > 5, (
        "calls of all kinds were made"
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_call_of_a_long_run_gets_a_5xx(server: Server) -> None:
    fuzz(server, 60)


def test_fuzz_corpus_regressions(server: Server) -> None:
    lines = [line for line in CORPUS.read_text().splitlines() if "path" in json.loads(line)]
    assert len(lines) >= 8
    for line in lines:
        call(server, Tally(), *parse_attempt(line, create_ids(server)))
    assert server.client.get("/api/v1/healthz").status_code == 200


def test_nan_is_refused_by_field_name(server: Server) -> None:
    body = '{"target": {"sampling_session_id": "s"}, "timeout": NaN}'
    answer = server.client.post("/api/v1/retrieve_futures", content=body)
    assert (answer.status_code, answer.json()["detail"]) == (400, "timeout nan: must be a finite number")


def test_a_tensor_with_a_false_shape_is_refused(server: Server) -> None:
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


def test_fuzzer_finds_routes_and_detects_a_5xx(server: Server) -> None:
    paths = {route.path for route in list_routes(server)}
    assert {"/api/v1/create_model", "/api/v1/forward_backward", "/api/v1/asample", "/api/v1/training_runs"} <= paths
    assert [schema.__name__ for schema in find_schemas("/api/v1/create_model")] == ["CreateModelRequest"]
    broken, _ = parse_attempt('{"path": "/broken"}', {})

    async def fail() -> None:
        raise OSError("broken")

    server.api.app.add_api_route("/broken", fail, methods=["POST"])
    with pytest.raises(ServerError, match="500"):
        call(server, Tally(), broken, Attempt("/broken", {}, b"", {}))
