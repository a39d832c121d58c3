"""Idempotent requests, seeds that the server draws, and ids that the SDK constructs."""

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from skyrl_tx.contract import requests
from skyrl_tx.contract.ids import ModelId, SamplerId, SamplingSessionId, SessionId
from skyrl_tx.server.routes import sampling
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.server.submission.tensors import to_proto
from skyrl_tx.store import engine_state, sampling_sessions
from skyrl_tx.store.tables import EngineStateRow, SamplingSessionRow
from tests.support.live_api import Server
from tests.support.polling import until

PROTOBUF = {"content-type": "application/x-protobuf"}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]}


def pass_body(model_id: str, seq_id: int, token: int = 0, **changes: Any) -> bytes:
    datum = wire_pb2.Datum(
        model_input=[{"encoded_text": {"tokens": np.array([token, 1], np.int32).tobytes()}}],
        loss_fn_inputs={"target_tokens": to_proto(np.array([1, 2]))},
    )
    parts: dict[str, Any] = {"model_id": model_id, "seq_id": seq_id, "loss_fn": "cross_entropy", "data": [datum]}
    return wire_pb2.ForwardBackwardRequest(**parts | changes).SerializeToString()


def send_pass(server: Server, body: bytes) -> httpx.Response:
    return server.client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF)


def base_sampler(server: Server) -> str:
    answer = server.post(
        "create_sampling_session", session_id=server.session(), sampling_session_seq_id=3, base_model="Qwen/Qwen3-8B"
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["sampling_session_id"]


def test_ids_have_the_form_that_the_sdk_builds(server: Server) -> None:
    session_id = server.session()
    assert server.model(session_id, 4) == f"{session_id}:train:4"
    assert base_sampler(server).endswith(":sample:3")


def test_retried_pass_returns_the_same_future(server: Server) -> None:
    model_id = server.model()
    answers = [send_pass(server, pass_body(model_id, 2)).json() for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    other = send_pass(server, pass_body(model_id, 1))
    assert other.status_code == 200, "a lower id after a higher one is acknowledged at once"
    assert other.json()["request_id"] != answers[0]["request_id"]
    conflict = send_pass(server, pass_body(model_id, 2, token=9))
    assert conflict.status_code == 400 and "used for another request" in conflict.json()["detail"]


def test_requests_without_a_seq_id_are_distinct(server: Server) -> None:
    model_id = server.model()
    ids = {send_pass(server, pass_body(model_id, 0)).json()["request_id"] for _ in range(2)}
    steps = (server.post("optim_step", model_id=model_id, adam_params={}) for _ in range(2))
    assert len(ids | {step.json()["request_id"] for step in steps}) == 4


def test_retried_create_model_keeps_the_drawn_seed(server: Server) -> None:
    session_id = server.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B", "lora_config": {"rank": 8}}
    first, second = server.post("create_model", **body).json(), server.post("create_model", **body).json()
    assert first == second
    request = server.read_request(first["request_id"])
    assert isinstance(request, requests.CreateModel) and request.spec.lora.rank == 8 and request.spec.lora.seed > 0
    other = server.post("create_model", **body | {"lora_config": {"rank": 16}})
    assert other.status_code == 400


def test_samples_of_client_copies_are_distinct(server: Server) -> None:
    sampler = base_sampler(server)
    body = {"sampling_session_id": sampler, "prompt": PROMPT, "sampling_params": {"max_tokens": 4}, "num_samples": 2}
    ids = [server.post("asample", **body, seq_id=seq_id).json() for seq_id in (0, 0, 659393165000000000)]
    assert ids[0] == ids[1] != ids[2]
    sequence_ids = ids[0]["sample_sequence_ids"]
    assert len(set(sequence_ids)) == 2 and not set(sequence_ids) & set(ids[2]["sample_sequence_ids"])
    request = server.read_request(ids[0]["request_id"])
    assert isinstance(request, requests.Sample)
    assert request.prompt.tolist() == [1, 2, 3] and request.sampler is None
    assert request.params.seed > 0 and list(request.sequence_ids) == sequence_ids
    assert server.post("asample", **body | {"num_samples": 3}, seq_id=0).status_code == 400


def test_seq_id_above_64_bits_is_refused(server: Server) -> None:
    body = {"sampling_session_id": base_sampler(server), "prompt": PROMPT, "sampling_params": {}}
    answer = server.post("asample", **body, seq_id=2**63)
    assert answer.status_code == 400 and "seq_id" in answer.json()["detail"]


def test_retried_sampling_session_is_the_same(server: Server) -> None:
    body = {"session_id": server.session(), "sampling_session_seq_id": 0, "base_model": "Qwen/Qwen3-8B"}
    assert (
        server.post("create_sampling_session", **body).json() == server.post("create_sampling_session", **body).json()
    )


@pytest.mark.parametrize(
    ("stop", "strings", "token_ids", "eos_stops"),
    [
        (None, (), (), True),
        ([], (), (), False),
        ("\n", ("\n",), (), True),
        (["a", "b"], ("a", "b"), (), True),
        ([7, 8], (), (7, 8), True),
    ],
)
def test_stop_strings_and_stop_tokens_are_separated(
    server: Server, stop: Any, strings: tuple[str, ...], token_ids: tuple[int, ...], eos_stops: bool
) -> None:
    params = {"stop": stop, "temperature": 0, "top_k": 0, "seed": 2**64 - 1}
    body = {"sampling_session_id": base_sampler(server), "prompt": PROMPT, "sampling_params": params}
    request = server.read_request(server.post("asample", **body).json()["request_id"])
    assert isinstance(request, requests.Sample)

    assert request.params == requests.SamplingParams(
        seed=2**64 - 1,
        temperature=0.0,
        top_k=-1,
        stop_strings=strings,
        stop_token_ids=token_ids,
        eos_stops=eos_stops,
    )


def test_loss_config_is_read_from_its_newer_form(server: Server) -> None:
    body = pass_body(
        server.model(),
        1,
        loss_fn_config={"a": 1.0, "b": 2.0},
        loss_fn_config_v2={"b": {"number": 3.0}, "c": {"text": "x"}},
        forward_only=True,
    )
    request = server.read_request(send_pass(server, body).json()["request_id"])
    assert isinstance(request, requests.ModelPass)
    assert request.loss_config == {"a": 1.0, "b": 3.0, "c": "x"} and not request.backward


def test_oldest_sdk_requests_are_accepted(server: Server) -> None:
    """SDKs up to 0.16 send only the fields that were set, including nulls, and no types."""
    model_id = server.model()
    data = [
        {
            "model_input": {"chunks": [{"tokens": [1, 2]}]},
            "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64"}},
        }
    ]
    inputs = {"data": data, "loss_fn": "cross_entropy", "loss_fn_config": None}

    for path, name, backward in (
        ("forward_backward", "forward_backward_input", True),
        ("forward", "forward_input", False),
    ):
        answer = server.post(path, model_id=model_id, **{name: inputs})
        request = server.read_request(answer.json()["request_id"])
        assert isinstance(request, requests.ModelPass) and request.backward is backward
        assert request.data[0].tokens.tolist() == [1, 2]
        assert request.data[0].loss_inputs["target_tokens"].dtype == np.int64

    step = server.post("optim_step", model_id=model_id, adam_params={"learning_rate": 0.5})
    request = server.read_request(step.json()["request_id"])
    assert request == requests.OptimStep(params=requests.OptimizerParams(learning_rate=0.5))
    save = server.post("save_weights", model_id=model_id, path="a", ttl_seconds=None, user_metadata=None)
    assert server.read_request(save.json()["request_id"]) == requests.SaveWeights(kind="weights", name="a")


def test_unknown_field_is_refused_only_where_it_may_change_results(server: Server) -> None:
    model_id = server.model()
    harmless = server.post("optim_step", model_id=model_id, adam_params={"amsgrad": False, "x": None}, trace="yes")
    assert isinstance(server.read_request(harmless.json()["request_id"]), requests.OptimStep)
    harmful = server.post("optim_step", model_id=model_id, adam_params={"amsgrad": True})
    assert server.read_request(harmful.json()["request_id"]) == requests.Rejected(
        kind="optim_step", message="adam_params.amsgrad True: this server does not know the field"
    )


def test_rejected_pass_marks_the_gradient_as_incomplete(server: Server) -> None:
    model_id = server.model()
    for forward_only in (False, True):
        answer = send_pass(server, pass_body(model_id, 0, data=[], forward_only=forward_only))
        request = server.read_request(answer.json()["request_id"])
        assert isinstance(request, requests.Rejected) and request.backward is not forward_only


@pytest.mark.parametrize("body", [b"{", b"[]", json.dumps({"adam_params": {}}).encode(), b'{"model_id": 3}'])
def test_malformed_json_returns_400(server: Server, body: bytes) -> None:
    answer = server.client.post("/api/v1/optim_step", content=body)
    assert answer.status_code == 400 and answer.json()["detail"]


def test_truncated_protobuf_returns_400(server: Server) -> None:
    answer = send_pass(server, pass_body(server.model(), 1)[:-2])
    assert answer.status_code == 400 and "protobuf" in answer.json()["detail"]


def test_body_over_the_limit_returns_413(server: Server) -> None:
    answer = send_pass(server, b"\0" * (server.settings.max_request_bytes + 1))
    assert answer.status_code == 413 and "at most" in answer.json()["detail"]
    assert server.client.get("/api/v1/get_server_capabilities").status_code == 200


def test_retried_ephemeral_save_has_the_sampling_session_of_the_first(server: Server) -> None:
    """The SDK increments the number of its sampling session whenever it sends the same save again."""
    model_id = server.model()
    first = server.post("save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=0)
    again = server.post("save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=1)
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    request = server.read_request(first.json()["request_id"])
    assert isinstance(request, requests.SaveWeights) and str(request.sampling_session_id).endswith(":sample:0")


def test_incomplete_body_has_no_effect(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    model_id = server.model()
    address = urlsplit(server.url)
    half = f'{{"model_id": "{model_id}", "seq_id": 1, '.encode()
    head = b"POST /api/v1/optim_step HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n"
    caplog.set_level("INFO")
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head + half)
        time.sleep(0.1)

    until(lambda: "disconnected while sending the body" in caplog.text)
    assert "ERROR" not in caplog.text
    whole = server.post("optim_step", model_id=model_id, seq_id=1, adam_params={"learning_rate": 0.1})
    assert whole.status_code == 200


def test_sample_uses_the_weights_that_an_inflight_save_puts_there_meanwhile(server: Server, monkeypatch) -> None:
    model_id, old, new = ModelId(server.model()), SamplerId("art-old"), SamplerId("art-new")
    session_id = SessionId(model_id.split(":")[0])
    name = SamplingSessionId(f"{session_id}:sample:0")

    row = SamplingSessionRow(
        sampling_session_id=name,
        session_id=session_id,
        base_model="Qwen/Qwen3-8B",
        sampler_id=old,
        model_id=model_id,
        created_at=time.time(),
        last_used_at=time.time(),
        is_inflight=True,
    )

    server.store.write(lambda tx: sampling_sessions.create_session(tx, row))
    translate, translated = sampling.translate_sample, []

    def replace_while_translating(schema, sampler_id, *rest):
        translated.append(sampler_id)
        server.store.write(lambda tx: sampling_sessions.update_inflight(tx, model_id, new))
        return translate(schema, sampler_id, *rest)

    monkeypatch.setattr(sampling, "translate_sample", replace_while_translating)
    asked = {"sampling_session_id": name, "seq_id": 1, "prompt": PROMPT, "num_samples": 1}
    answer = server.post("asample", **asked, sampling_params={"max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert translated == [old, new]
    stored = server.read_request(answer.json()["request_id"])
    assert isinstance(stored, requests.Sample) and stored.sampler == new


def test_a_waiting_ephemeral_save_reserves_its_sampling_session(server: Server) -> None:
    """No engine runs here, so the save stays open."""
    session_id = server.session()
    model_id, base = server.model(session_id), server.settings.public_model_name
    save = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 7}
    assert server.post("save_weights_for_sampler", **save).status_code == 200
    taken, free = (
        server.post("create_sampling_session", session_id=session_id, sampling_session_seq_id=number, base_model=base)
        for number in (7, 8)
    )
    assert taken.status_code == 400 and "sampling_session_seq_id 7: is in use" in taken.json()["detail"]
    assert free.status_code == 200


def test_a_prompt_beyond_the_context_is_refused_before_it_is_stored(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_LARGE_BYTES", 2**10)
    row = EngineStateRow(
        boot_id="boot",
        pid=1,
        status="ready",
        capabilities={"max_context_length": 60_000},
        base_models=[],
        updated_at=time.time(),
    )
    server.store.write(lambda tx: engine_state.publish(tx, row))

    def send(length: int) -> requests.Request:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [7] * length}]}
        body = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {}, "num_samples": 1}
        answer = server.post("asample", **body)
        assert answer.status_code == 200, answer.text
        return server.read_request(answer.json()["request_id"])

    sampler = base_sampler(server)
    stored = send(60_000)
    assert isinstance(stored, requests.Sample) and stored.prompt.size == 60_000
    refused = send(60_001)
    assert isinstance(refused, requests.Rejected)
    assert refused.message.startswith("prompt has 60001 tokens, which exceeds the context of 60000 tokens")
