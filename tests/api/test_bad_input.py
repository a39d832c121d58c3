"""Bad input over HTTP that the API refuses: the future fails with category `user` and names the field.

`tests/unit/engine/test_validate.py` tests the rules that depend on the backend.
"""

import json
from typing import Any

import numpy as np
import pytest

from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.server.submission.tensors import to_proto
from tests.support.live_api import Server
from tests.support.scripted_engine import ScriptedEngine

HEADERS = {"content-type": "application/x-protobuf"}
NAN = float("nan")
pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture(scope="module")
def model(server: Server, engine: ScriptedEngine) -> str:
    return server.model()


@pytest.fixture(scope="module")
def sampler(server: Server) -> str:
    answer = server.post(
        "create_sampling_session", session_id=server.session(), sampling_session_seq_id=0, base_model="Qwen/Qwen3-8B"
    )
    return answer.json()["sampling_session_id"]


def refusal(result: dict[str, Any]) -> str:
    assert result["category"] == "user", result
    return result["error"]


def chunk(*tokens: int) -> wire_pb2.Chunk:
    return wire_pb2.Chunk(encoded_text={"tokens": np.array(tokens, np.int32).tobytes()})


def datum(**inputs: Any) -> wire_pb2.Datum:
    arrays = {"target_tokens": np.array([1, 2]), "weights": np.ones(2, np.float32)} | inputs
    return wire_pb2.Datum(
        model_input=[chunk(0, 1)], loss_fn_inputs={name: to_proto(array) for name, array in arrays.items()}
    )


def config(**values: float) -> dict[str, wire_pb2.LossConfigValue]:
    return {name: wire_pb2.LossConfigValue(number=value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("request_parts", "text"),
    [
        ({}, "data: holds no datum"),
        ({"data": [wire_pb2.Datum()]}, "data[0]: holds no tokens"),
        ({"data": [datum(), wire_pb2.Datum(model_input=[chunk()])]}, "data[1]: holds no tokens"),
        ({"data": [wire_pb2.Datum(model_input=[{"encoded_text": {"tokens": b"123"}}])]}, "3 bytes"),
        ({"data": [wire_pb2.Datum(model_input=[{"image": {"data": b"x", "format": "png"}}])]}, "type 'image'"),
        ({"data": [wire_pb2.Datum(model_input=[{"dmel": {"dmel": b"x"}}])]}, "type 'dmel'"),
        ({"data": [wire_pb2.Datum(model_input=[{}])]}, "type 'unknown'"),
        ({"data": [datum(weights=np.array([1, NAN], np.float32))]}, "loss_fn_inputs['weights'][1] nan"),
        ({"data": [datum(logprobs=np.array([1, -np.inf], np.float32))]}, "loss_fn_inputs['logprobs'][1] -inf"),
        ({"data": [datum()], "loss_fn_config_v2": config(clip_low_threshold=NAN)}, "'clip_low_threshold'] nan"),
    ],
)
def test_bad_pass_fails_its_future(server: Server, model: str, request_parts: dict[str, Any], text: str) -> None:
    message = wire_pb2.ForwardBackwardRequest(model_id=model, loss_fn="cross_entropy", **request_parts)
    answer = server.client.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=HEADERS)
    assert text in refusal(server.result(answer))


@pytest.mark.parametrize(
    ("adam_params", "text"),
    [
        ({"learning_rate": NAN}, "adam_params.learning_rate nan"),
        ({"learning_rate": float("inf")}, "adam_params.learning_rate inf"),
        ({"learning_rate": "much"}, "adam_params.learning_rate"),
        ({"learning_rate": 10**400}, "adam_params.learning_rate"),
        ({"nesterov": True}, "adam_params.nesterov True"),
        (None, "adam_params: missing"),
    ],
)
def test_bad_optimizer_step_fails_its_future(server: Server, model: str, adam_params: Any, text: str) -> None:
    content = json.dumps({"model_id": model, "adam_params": adam_params})  # httpx refuses to write NaN as JSON
    assert text in refusal(server.result(server.client.post("/api/v1/optim_step", content=content)))


def test_other_optimizer_fails_its_future(server: Server, model: str) -> None:
    params = {"type": "dimuon", "learning_rate": 0.1}
    assert "'dimuon'" in refusal(server.result(server.post("optim_step", model_id=model, optimizer_params=params)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lora_config": {"rank": "big"}}, "lora_config.rank"),
        ({"lora_config": {"rank": 2**70}}, f"lora_config.rank: Input should be less than {2**64}, not {2**70}"),
        ({"lora_config": {"rank": 8, "seed": 2**64}}, "lora_config.seed"),
        ({"lora_config": {"rank": 8, "alpha": 3}}, "lora_config.alpha 3"),
        ({"lora_config": None}, "lora_config: missing"),
        ({"base_model": "gpt-5"}, "base_model 'gpt-5'"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "'dimuon'"),
    ],
)
def test_bad_model_fails_its_future(server: Server, changes: dict[str, Any], text: str) -> None:
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B"}
    answer = server.post("create_model", **(body | {"lora_config": {"rank": 8}} | changes))
    assert text in refusal(server.result(answer))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": {"chunks": []}}, "prompt: holds no tokens"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": []}]}}, "prompt: holds no tokens"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "'image'"),
        ({"prompt": {"chunks": [{"location": "x", "format": "png"}]}}, "'image_asset_pointer'"),
        ({"prompt": {"chunks": [{"tokens": [2**31]}]}}, "prompt.chunks[0].tokens"),
        ({"num_samples": 0}, "num_samples 0"),
        ({"num_samples": 10**12}, "num_samples 1000000000000"),
        ({"sampling_params": {"max_tokens": 2**70}}, f"sampling_params.max_tokens: Input should be less than {2**64}"),
        ({"sampling_params": {"max_tokens": -(2**64)}}, "sampling_params.max_tokens: Input should be greater"),
        ({"sampling_params": {"top_k": 2**70}}, "sampling_params.top_k"),
        ({"sampling_params": {"top_k": 2**31}}, "sampling_params.top_k 2147483648"),
        ({"sampling_params": {"stop": [2**70]}}, f"sampling_params.stop[0] {2**70}"),
        ({"sampling_params": {"temperature": 10**400}}, "sampling_params.temperature"),
        ({"sampling_params": {"stop": [-1]}}, "sampling_params.stop[0] -1"),
        ({"sampling_params": {"seed": 2**64}}, "sampling_params.seed"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p 0.1"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n 1"),
        (
            {"prompt_logprobs_last_n": 2**64, "prompt_logprobs": True},
            "prompt_logprobs_last_n: Input should be less than",
        ),
        ({"topk_sample_logprobs": 2**70}, "topk_sample_logprobs: Input should be less than"),
        ({"prompt_alt_tokens_k": 2**70}, "prompt_alt_tokens_k: Input should be less than"),
        ({"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64"}}, "target_prompt_logprobs"),
        (
            {"target_prompt_logprobs": {"data": [1, 1.7], "dtype": "int64", "shape": [1, 2]}},
            "target_prompt_logprobs[1] 1.7 must be from",
        ),
    ],
)
def test_bad_sample_fails_its_future(server: Server, sampler: str, changes: dict[str, Any], text: str) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    body = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 2}} | changes
    answer = server.post("asample", **body)
    assert answer.json()["sample_sequence_ids"] == [] or len(answer.json()["sample_sequence_ids"]) == 1
    assert text in refusal(server.result(answer))


@pytest.mark.parametrize("name", ["a/b", "..", "a\x01b", "x" * 300, "", ".hidden", "a b", "ü"])
def test_bad_checkpoint_name_fails_its_future(server: Server, model: str, name: str) -> None:
    for path in ("save_weights", "save_weights_for_sampler"):
        assert "checkpoint name" in refusal(server.result(server.post(path, model_id=model, path=name)))


@pytest.mark.parametrize(
    ("path", "changes", "text"),
    [
        ("save_weights", {}, "path: missing"),
        ("save_weights", {"path": "a", "ttl_seconds": 60}, "ttl_seconds 60"),
        ("save_weights", {"path": "a", "ttl_seconds": 10**10}, "ttl_seconds 10000000000"),
        ("save_weights", {"path": "a", "ttl_seconds": 2**70}, "ttl_seconds: Input should be less than"),
        ("save_weights_for_sampler", {}, "path: missing"),
        ("save_weights_for_sampler", {"path": "a", "kind": "inflight"}, "kind 'inflight'"),
    ],
)
def test_bad_save_fails_its_future(server: Server, model: str, path: str, changes: dict[str, Any], text: str) -> None:
    assert text in refusal(server.result(server.post(path, model_id=model, **changes)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tinker://{model}/weights/nothing", "there is no such checkpoint"),
        ("tinker://other:train:0/weights/a", "there is no such checkpoint"),
        ("tinker://{model}/sampler_weights/a", "save_state"),
        ("tinker://{model}/weights/a/b", "not of the form"),
        ("/etc/passwd", "not of the form"),
        ("tinker://{model}/weights/..", "checkpoint name"),
    ],
)
def test_bad_path_fails_the_future_of_a_load(server: Server, model: str, path: str, text: str) -> None:
    path = path.format(model=model)
    assert text in refusal(server.result(server.post("load_weights", model_id=model, path=path, optimizer=False)))
    create = server.post("load_weights", session_id=server.session(), model_seq_id=0, path=path, optimizer=True)
    assert text in refusal(server.result(create))
    assert server.post("get_info", model_id=create.json()["model_id"]).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"model_path": "tinker://x:train:0/weights/a"}, 400, "save_weights_for_sampler"),
        ({"model_path": "tinker://x:train:0/sampler_weights/a"}, 404, "there is no such checkpoint"),
        ({"model_path": "somewhere"}, 400, "not of the form"),
        ({"base_model": "gpt-5"}, 400, "base_model 'gpt-5'"),
        ({}, 400, "base_model: missing"),
    ],
)
def test_bad_sampling_session_returns_4xx(server: Server, body: dict[str, Any], status: int, text: str) -> None:
    answer = server.post("create_sampling_session", session_id=server.session(), sampling_session_seq_id=0, **body)
    assert answer.status_code == status and text in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("optim_step", {"model_id": "no:train:0", "adam_params": {}}, "model 'no:train:0'"),
        ("get_info", {"model_id": "no:train:0"}, "model 'no:train:0'"),
        ("save_weights_for_sampler", {"model_id": "no", "path": "a"}, "model 'no'"),
        ("create_model", {"session_id": "no", "model_seq_id": 0, "base_model": "x"}, "session 'no'"),
        ("session_heartbeat", {"session_id": "no"}, "session 'no'"),
        ("asample", {"sampling_session_id": "no", "prompt": {}, "sampling_params": {}}, "sampling session 'no'"),
        ("retrieve_future", {"request_id": "no"}, "request_id 'no'"),
        ("retrieve_future", {"request_id": "1" * 30}, "request_id '111111"),
        ("weights_info", {"tinker_path": "tinker://no/weights/a"}, "there is no such checkpoint"),
        ("create_custom_loss", {}, "this server does not evaluate custom losses"),
    ],
)
def test_unknown_id_returns_404(server: Server, path: str, body: dict[str, Any], text: str) -> None:
    answer = server.post(path, **body)
    assert answer.status_code == 404 and text in answer.json()["detail"]
    assert server.client.get("/api/v1/samplers/no").status_code == 404
