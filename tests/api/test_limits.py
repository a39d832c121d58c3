"""Bodies, metadata and names have limits that depend on the route. An error names the field."""

import json
from typing import Any

import pytest

from skyrl_tx.server import shares
from skyrl_tx.server.app import ApiContext
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.store import StoreBlocked
from tests.support.live_api import Server

PAD = "x" * 2**20


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("user_metadata", {"a": "x" * 2**16}, "user_metadata: must have at most 65536 characters in all"),
        ("user_metadata", {f"name {index}": index for index in range(7000)}, "user_metadata: must have at most"),
        ("tags", ["t"] * 101, "tags: List should have at most 100 items"),
        ("tags", ["t" * 201], "tags.0: String should have at most 200 characters"),
        ("display_name", "d" * 1001, "display_name: String should have at most 1000 characters"),
        ("project_id", "p" * 201, "project_id: String should have at most 200 characters"),
        ("sdk_version", "v" * 201, "sdk_version: String should have at most 200 characters"),
    ],
)
def test_long_session_metadata_is_refused(server: Server, field: str, value: object, message: str) -> None:
    answer = server.post("create_session", **{field: value})
    assert answer.status_code == 400 and answer.json()["detail"].startswith(message)
    assert len(answer.json()["detail"]) < 300


def test_usual_session_metadata_is_stored(server: Server) -> None:
    metadata = {"config": json.dumps({f"option {index}": index for index in range(2000)}), "seed": 1}
    answer = server.post("create_session", user_metadata=metadata, tags=["a"] * 100, display_name="d" * 1000)
    session = server.client.get(f"/api/v1/sessions/{answer.json()['session_id']}").json()
    assert session["user_metadata"] == {**metadata, "seed": "1"}


def test_long_reason_of_an_end_is_refused(server: Server) -> None:
    body = {"reason": {"type": "errored"}, "detail": "d" * 10_001}
    answer = server.client.post(f"/api/v1/sessions/{server.session()}/finish", json=body)
    assert answer.status_code == 400 and answer.json()["detail"].startswith("detail: String should have at most 10000")


@pytest.mark.parametrize(
    ("endpoint", "status"),
    [("create_session", 413), ("create_model", 413), ("telemetry", 413), ("retrieve_future", 413), ("asample", 400)],
)
def test_other_bodies_than_data_have_a_mebibyte(server: Server, endpoint: str, status: int) -> None:
    size = len(PAD) - 100 if endpoint == "asample" else len(PAD)
    assert server.post(endpoint, seq_id="no number", pad="x" * size).status_code == status


def test_json_of_a_pass_has_a_quarter_of_the_limit(server: Server) -> None:
    quarter = server.settings.max_request_bytes // 4
    answer = server.client.post("/api/v1/forward_backward", content=b" " * (quarter + 1))
    assert answer.status_code == 413 and f"takes at most {quarter} for" in answer.json()["detail"]
    assert answer.json()["detail"].endswith("(a quarter of --max-request-bytes, because it is JSON)")


@pytest.mark.parametrize("num_names", [64, 65])
def test_a_datum_has_few_loss_inputs(server: Server, num_names: int) -> None:
    tensor = {"data": [1.0], "dtype": "float32", "shape": [1]}
    inputs = {f"n{index}": tensor for index in range(num_names)}
    datum = {"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": inputs}
    body = {"loss_fn": "cross_entropy", "data": [datum]}
    answer = server.post("forward_backward", model_id=server.model(), seq_id=1, forward_backward_input=body)
    stored: Any = server.read_request(answer.json()["request_id"])
    if num_names == 65:
        assert "loss_fn_inputs: must have at most 64 names" in stored.message
    else:
        assert len(stored.data[0].loss_inputs) == 64


def test_many_wrong_values_are_one_error(server: Server) -> None:
    body = {"loss_fn": "cross_entropy", "data": [{"model_input": {"chunks": [{"tokens": [0.5] * 200_000}]}}]}
    answer = server.post("forward_backward", model_id=server.model(), seq_id=1, forward_backward_input=body)
    stored: Any = server.read_request(answer.json()["request_id"])
    assert "data.0.model_input.chunks.0.tokens.0" in stored.message and len(stored.message) < 300


def test_a_small_body_claims_little_dense_memory(server: Server) -> None:
    message = wire_pb2.ForwardBackwardRequest(model_id=server.model(), seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0" * 32
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.shape[:] = wire_pb2.DTYPE_INT64, [32, 2**18]
    tensor.sparse_csr.crow_indices = b"\0" * 8 * 33
    headers = {"content-type": "application/x-protobuf"}
    answer = server.client.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=headers)
    stored: Any = server.read_request(answer.json()["request_id"])
    assert "exceeds the dense size that this server allows for one request" in stored.message


def test_no_bytes_are_held_after_a_call(server: Server) -> None:
    context: ApiContext = server.api.app.state.context
    for endpoint, body in (("create_session", {"pad": "x" * 500_000}), ("asample", {"pad": "x" * 900_000})):
        server.post(endpoint, **body)
    assert server.client.get("/api/v1/healthz").status_code in (200, 503)
    shares = context.shares
    budgets = shares.received_bodies, shares.decoded_bodies, shares.calls, shares.heavy_calls
    assert [budget.num_reserved for budget in budgets] == [0] * 4


def test_an_owner_that_stores_too_much_may_still_poll_and_send_heartbeats(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = server.session()
    model_id, name = server.model(session_id), server.settings.public_model_name
    for limit in ("_MIN_SHARE", "_MAX_SHARE"):
        monkeypatch.setattr(shares, limit, 0)
    monkeypatch.setattr(server.api.app.state.context.stored_bytes, "_share", 0)

    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    for answer in (
        server.post("create_session", tags=[], sdk_version="0.38.0"),
        server.post("create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=name),
        server.post("optim_step", model_id=model_id, seq_id=1, adam_params={"learning_rate": 1e-4}),
        server.post("asample", base_model=name, num_samples=1, prompt=prompt, sampling_params={}),
        server.client.post(f"/api/v1/training_runs/{model_id}/metrics", json={"step": 1, "metrics": {"loss": 1.0}}),
    ):
        assert answer.status_code == 429 and "an owner may store 0 bytes" in answer.json()["detail"], answer.text
    assert server.post("session_heartbeat", session_id=session_id).status_code == 200
    assert server.client.get(f"/api/v1/training_runs/{model_id}").status_code == 200


def test_a_full_database_is_logged_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise StoreBlocked("the test has filled the disk")

    monkeypatch.setattr(server.store, "write", fail)
    for _ in range(3):
        answer = server.post("create_session", tags=[], sdk_version="0.38.0")
        assert answer.status_code == 503 and "see the server's log" in answer.json()["detail"]
    assert len([record for record in caplog.records if "filled the disk" in record.getMessage()]) == 1
