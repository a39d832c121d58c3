"""The first run of SDK 0.38, request by request: its requests follow the protocol and get the expected answers.

The calls of each step are compared as a set, because the SDK polls for results in its own threads.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx.server.http.body import PROTOBUF, Body, BodyLimits
from skyrl_tx.server.submission import wire_pb2
from tests.support.live_stack import CONTEXT, LiveStack, both_backends
from tests.support.live_stack import PUBLIC_NAME as BASE_MODEL
from tests.support.recording_middleware import Call

PROMPT = types.ModelInput.from_ints([1, 2, 3])
JSON = "application/json"
HELLO = ["POST client/config", "POST auth/token", "POST client/dynamic_config"]
POLL = "POST retrieve_future"
NEWS = "POST retrieve_futures"  # sent from a separate thread, any number of times
# Some of these features are deprecated, and the SDK warns about them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]


def datum(length: int = 5) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))),
        loss_fn_inputs={
            "target_tokens": np.arange(2, length + 2, dtype=np.int64),
            "weights": np.ones(length, dtype=np.float32),
        },
    )


@contextmanager
def expect_calls(stack: LiveStack, *expected: str) -> Iterator[list[Call]]:
    """Assert that exactly these calls are made in the context, and that they succeed.

    Polls for news are ignored.
    """
    with stack.recorder.recording() as calls:
        yield calls
    assert sorted(call for call in map(str, calls) if call != NEWS) == sorted(expected)
    assert {call.status for call in calls} == {HTTPStatus.OK}


def body(calls: list[Call], path: str) -> dict[str, object]:
    """Return the JSON that was sent to a path, without the ids of the model and the session."""
    (call,) = (call for call in calls if call.path == path)
    return {key: value for key, value in json.loads(call.body).items() if key not in ("model_id", "session_id", "type")}


def proto(calls: list[Call]) -> wire_pb2.ForwardBackwardRequest:
    (call,) = (call for call in calls if call.path == "forward_backward")
    assert call.headers["content-type"] == PROTOBUF and call.headers["accept"] == JSON
    assert call.headers["content-encoding"] == "zstd"
    sent = Body(raw=call.body, content_type=PROTOBUF, encoding="zstd", limits=BodyLimits(2**20))
    return sent.parse_message(wire_pb2.ForwardBackwardRequest)


def get_result_types(calls: list[Call]) -> dict[str, str]:
    """Return the content type of each result, by the kind of its request.

    For samples, the poll for news has announced the size already. For other requests, the server
    may answer with the size instead of a large result.
    """
    polls = [call for call in calls if str(call) == POLL]
    for call in polls:
        is_sample = call.headers["x-tinker-request-type"] == "Sample"
        assert json.loads(call.body)["allow_metadata_only"] is not is_sample
    return {call.headers["x-tinker-request-type"]: call.response_type for call in polls}


@both_backends
def test_first_run_follows_the_protocol(stack: LiveStack) -> None:
    service = tinker.ServiceClient(base_url=stack.url, user_metadata={"a": "b"})
    with expect_calls(stack, *HELLO, "GET get_server_capabilities") as calls:
        (served,) = service.get_server_capabilities().supported_models
    assert body(calls, "client/config") == {"sdk_version": tinker.__version__}
    assert served.model_name == BASE_MODEL and served.max_context_length == CONTEXT

    training = create(stack, service)
    train(stack, training)
    named = save_for_sampler(stack, training)
    sample(stack, service, named)
    sample_unnamed(stack, training)
    with expect_calls(stack, "POST create_sampling_session") as calls:
        service.create_sampling_client(base_model=BASE_MODEL).result()
    assert body(calls, "create_sampling_session") == {"sampling_session_seq_id": 2, "base_model": BASE_MODEL}
    state = save_and_load(stack, training)
    create_from_state(stack, service, state)
    manage(stack, service, training.model_id)
    with expect_calls(stack, f"POST sessions/{get_session_id(training)}/finish"):
        service.close("success").result()


def get_session_id(training: tinker.TrainingClient) -> str:
    return training.model_id.partition(":")[0]


def create(stack: LiveStack, service: tinker.ServiceClient) -> tinker.TrainingClient:
    with expect_calls(stack, *HELLO, "POST create_session", "POST create_model", POLL, "POST get_info") as calls:
        training = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result()
    assert training.model_id.endswith(":train:0")

    asked = body(calls, "create_session")
    assert asked == {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": tinker.__version__}
    assert body(calls, "create_model") == {
        "model_seq_id": 0,
        "base_model": BASE_MODEL,
        "lora_config": {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
    }
    assert get_result_types(calls) == {"CreateModel": JSON}

    info = training.get_info()
    assert info.model_data.model_name == BASE_MODEL and info.lora_rank == 8
    return training


def train(stack: LiveStack, training: tinker.TrainingClient) -> None:
    with expect_calls(stack, "POST forward_backward", "POST optim_step", POLL, POLL) as calls:
        passed = training.forward_backward([datum(), datum()], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-4))
        assert [output["logprobs"].shape for output in passed.result().loss_fn_outputs] == [[5], [5]]
        assert "loss:sum" in passed.result().metrics and stepped.result().metrics
    sent = proto(calls)
    assert (sent.model_id, sent.seq_id, len(sent.data)) == (training.model_id, 1, 2)
    assert (sent.loss_fn, sent.forward_only) == ("cross_entropy", False)

    adam = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
    assert body(calls, "optim_step") == {"seq_id": 2, "adam_params": {"learning_rate": 1e-4, **adam}}
    assert get_result_types(calls) == {"ForwardBackward": PROTOBUF, "OptimStep": JSON}
    with expect_calls(stack, "POST forward_backward", POLL) as calls:
        assert training.forward([datum()], "cross_entropy").result().metrics["loss:sum"] > 0
    assert proto(calls).forward_only and proto(calls).seq_id == 3
    assert get_result_types(calls) == {"Forward": PROTOBUF}


def save_for_sampler(stack: LiveStack, training: tinker.TrainingClient) -> str:
    with expect_calls(stack, "POST save_weights_for_sampler", POLL) as calls:
        path = training.save_weights_for_sampler("s1").result().path
    assert path == f"tinker://{training.model_id}/sampler_weights/s1"
    assert body(calls, "save_weights_for_sampler") == {"path": "s1", "kind": "snapshot", "seq_id": 4}
    assert get_result_types(calls) == {"SaveWeightsForSampler": JSON}
    return path


def sample(stack: LiveStack, service: tinker.ServiceClient, path: str) -> None:
    session_id = path.removeprefix("tinker://").partition(":")[0]
    with expect_calls(stack, "POST create_sampling_session", f"GET samplers/{session_id}:sample:0") as calls:
        sampling = service.create_sampling_client(model_path=path).result()
        assert sampling.get_base_model() == BASE_MODEL
    assert body(calls, "create_sampling_session") == {"sampling_session_seq_id": 0, "model_path": path}

    with expect_calls(stack, "POST asample", POLL) as calls:
        params = types.SamplingParams(max_tokens=4, stop=["\n"])
        sampled = sampling.sample(PROMPT, num_samples=2, sampling_params=params).result()
    assert len({sequence.sequence_id for sequence in sampled.sequences}) == 2
    assert all(1 <= len(sequence.tokens) <= 4 for sequence in sampled.sequences)

    asked = body(calls, "asample")
    assert asked["sampling_params"] == {
        "max_tokens": 4,
        "stop": ["\n"],
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    }
    assert (asked["sampling_session_id"], asked["seq_id"], asked["num_samples"]) == (f"{session_id}:sample:0", 0, 2)
    assert get_result_types(calls) == {"Sample": PROTOBUF}

    with expect_calls(stack, "POST asample", POLL) as calls:
        logprobs = sampling.compute_logprobs(PROMPT).result()
    assert logprobs[0] is None and len(logprobs) == 3
    asked = body(calls, "asample")
    assert asked["seq_id"] == 1 and asked["prompt_logprobs"] is True


def sample_unnamed(stack: LiveStack, training: tinker.TrainingClient) -> None:
    with expect_calls(stack, "POST save_weights_for_sampler", POLL) as calls:
        unnamed = training.save_weights_and_get_sampling_client().result()
    assert body(calls, "save_weights_for_sampler") == {"sampling_session_seq_id": 1, "kind": "snapshot", "seq_id": 5}

    with expect_calls(stack, "POST asample", POLL) as calls:
        sampled = unnamed.sample(
            PROMPT,
            num_samples=1,
            sampling_params=types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
        ).result()
    assert sampled.topk_prompt_logprobs is not None and len(sampled.topk_prompt_logprobs) == 3

    asked = body(calls, "asample")
    assert asked["sampling_session_id"] == f"{get_session_id(training)}:sample:1"
    assert (asked["seq_id"], asked["topk_prompt_logprobs"]) == (0, 2)


def save_and_load(stack: LiveStack, training: tinker.TrainingClient) -> str:
    with expect_calls(stack, "POST save_weights", POLL) as calls:
        path = training.save_state("st1", ttl_seconds=3600).result().path
    assert path == f"tinker://{training.model_id}/weights/st1"
    assert body(calls, "save_weights") == {"path": "st1", "seq_id": 6, "ttl_seconds": 3600, "overwrite": False}
    assert get_result_types(calls) == {"SaveWeights": JSON}
    for seq_id, load in ((7, training.load_state), (8, training.load_state_with_optimizer)):
        with expect_calls(stack, "POST load_weights", POLL) as calls:
            load(path).result()
        assert body(calls, "load_weights") == {"path": path, "seq_id": seq_id, "optimizer": seq_id == 8}
        assert get_result_types(calls) == {"LoadWeights": JSON}
    return path


def create_from_state(stack: LiveStack, service: tinker.ServiceClient, path: str) -> None:
    makers = (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    )
    for index, make in enumerate(makers, start=1):
        with expect_calls(stack, "POST load_weights", POLL, "POST get_info") as calls:
            made = make(path).result()
            assert made.get_info().lora_rank == 8
        assert made.model_id.endswith(f":train:{index}")
        assert body(calls, "load_weights") == {"model_seq_id": index, "path": path, "optimizer": index == 2}


def manage(stack: LiveStack, service: tinker.ServiceClient, model_id: str) -> None:
    with expect_calls(stack, *HELLO, "GET training_runs?limit=20&offset=0&access_scope=owned"):
        # The SDK keeps one client per key, and this key is new.
        rest = tinker.RestClient(base_url=stack.url, api_key="tml-replay")
        runs = rest.list_training_runs().result().training_runs
    assert model_id in {run.training_run_id for run in runs}

    with expect_calls(stack, f"GET training_runs/{model_id}/checkpoints"):
        checkpoints = rest.list_checkpoints(model_id).result().checkpoints
    assert {checkpoint.checkpoint_id for checkpoint in checkpoints} == {"sampler_weights/s1", "weights/st1"}
    with expect_calls(stack, "GET checkpoints?limit=100&offset=0"):
        listed = rest.list_user_checkpoints().result().checkpoints
    assert {checkpoint.tinker_path for checkpoint in checkpoints} <= {checkpoint.tinker_path for checkpoint in listed}

    session_id = model_id.partition(":")[0]
    with expect_calls(stack, "GET sessions?limit=20&offset=0&access_scope=owned"):
        assert session_id == rest.list_sessions().result().sessions[0], "the newest first"
    with expect_calls(stack, f"GET sessions/{session_id}?access_scope=owned"):
        session = rest.get_session(session_id).result()
    assert session.training_run_ids == [f"{session_id}:train:{index}" for index in range(3)]
    assert session.sampler_ids == [f"{session_id}:sample:{index}" for index in range(3)]
    assert session.user_metadata == {"a": "b"}
