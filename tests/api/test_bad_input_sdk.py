"""Bad input to the API and an engine with each backend, from the SDK or, if the SDK would not send it, as raw HTTP.

Each error names the field and the value, and no other client is affected. After every test, the
loss of another client is bitwise unchanged, and the client that sent the bad input can still train.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import zstandard
from tinker import types

from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.server.submission.tensors import to_proto
from tests.support.live_stack import CONTEXT, MAX_RANK, VOCAB_SIZE, LiveStack
from tests.support.live_stack import PUBLIC_NAME as BASE_MODEL

NAN = float("nan")
PROMPT = types.ModelInput.from_ints([1, 2])
IMAGE = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=3)])
PROTOBUF = {"content-type": "application/x-protobuf"}
MB = 2**20
NOTHING = types.TensorData(
    data=[], dtype="int64", shape=[1, 33_000_000], sparse_crow_indices=[0, 0], sparse_col_indices=[]
)
"""A tensor of a few bytes that has 264 MB in dense form, and 25 GB if it is padded in a pass."""
WIDE = types.TensorData(
    data=[], dtype="int64", shape=[1, VOCAB_SIZE + 1], sparse_crow_indices=[0, 0], sparse_col_indices=[]
)
# Some of these features are deprecated, and the SDK warns about them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]


def datum(tokens: list[int] | types.ModelInput | None = None, **inputs: Any) -> types.Datum:
    """Return a valid datum of two tokens.

    Arguments replace its inputs; an input of None is left out.
    """
    model_input = tokens if isinstance(tokens, types.ModelInput) else types.ModelInput.from_ints(tokens or [1, 2])
    length = model_input.length
    arrays = {"target_tokens": np.full(length, 2, np.int64), "weights": np.ones(length, np.float32)} | inputs
    return types.Datum(
        model_input=model_input,
        loss_fn_inputs={
            name: np.asarray(array, np.int64 if name == "target_tokens" else np.float32)
            for name, array in arrays.items()
            if array is not None
        },
    )


def make_rl_datum(**inputs: Any) -> types.Datum:
    """Return a valid datum for reinforcement learning. Arguments replace its inputs."""
    arrays = {"weights": None, "logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
    return datum(**(arrays | inputs))


@pytest.fixture(scope="module")
def culprit(stack: LiveStack) -> Iterator[tinker.TrainingClient]:
    """The client that sends the bad input."""
    with connect(stack) as service:
        yield service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result()


@pytest.fixture(scope="module")
def bystander(stack: LiveStack) -> Iterator[tinker.TrainingClient]:
    with connect(stack) as service:
        yield service.create_lora_training_client(BASE_MODEL, rank=8, seed=2).result()


@pytest.fixture(scope="module")
def sampling(culprit: tinker.TrainingClient) -> tinker.SamplingClient:
    return culprit.save_weights_and_get_sampling_client().result()


@pytest.fixture(autouse=True)
def _check_other_client(culprit: tinker.TrainingClient, bystander: tinker.TrainingClient) -> Iterator[None]:
    before = get_loss(bystander)
    yield
    assert get_loss(bystander) == before
    with contextlib.suppress(tinker.RequestFailedError):  # the step may report the failed pass
        culprit.optim_step(types.AdamParams(learning_rate=0.0)).result()
    culprit.forward_backward([datum()], "cross_entropy").result()
    assert culprit.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics


def connect(stack: LiveStack) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=stack.url, api_key="tml-local")


def get_loss(client: tinker.TrainingClient) -> float:
    return client.forward([datum([1, 2, 3])], "cross_entropy").result().metrics["loss:sum"]


def assert_fails_with(call: Callable[[], Any], *parts: str) -> None:
    """Assert that the future of a call fails with category `user` and a message that contains all parts."""
    with pytest.raises(tinker.RequestFailedError) as failure:
        call().result()
    assert failure.value.category == types.RequestErrorCategory.User
    for part in parts:
        assert part in str(failure.value)


@pytest.mark.parametrize(
    ("data", "loss", "config", "parts"),
    [
        ([datum(), datum(types.ModelInput.from_ints([]))], "cross_entropy", None, ["data[1]", "no tokens"]),
        ([datum(weights=[1.0])], "cross_entropy", None, ["data[0].loss_fn_inputs['weights']", "1", "2"]),
        ([datum([1, VOCAB_SIZE])], "cross_entropy", None, ["data[0].model_input", str(VOCAB_SIZE)]),
        ([datum(IMAGE, target_tokens=[1] * 3, weights=[1] * 3)], "cross_entropy", None, ["data[0]", "'image'"]),
        ([datum(weights=[1, NAN])], "cross_entropy", None, ["['weights']", "nan"]),
        ([make_rl_datum(logprobs=None)], "importance_sampling", None, ["['logprobs']", "missing"]),
        (
            [types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": NOTHING})],
            "cross_entropy",
            None,
            ["data[0].loss_fn_inputs['target_tokens']", "[1, 33000000]", "at most 524288 columns"],
        ),
        (
            [types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": WIDE})],
            "cross_entropy",
            None,
            ["data[0].loss_fn_inputs['target_tokens']", "[1, 1025]", "at most 1024 targets", "vocabulary"],
        ),
        ([datum()], "mse", None, ["loss_fn", "'mse'"]),
        ([make_rl_datum()], "ppo", {"clip_low_threshold": NAN}, ["loss_fn_config", "clip_low_threshold", "nan"]),
    ],
)
def test_bad_pass(
    culprit: tinker.TrainingClient,
    data: list[types.Datum],
    loss: Any,
    config: dict[str, float] | None,
    parts: list[str],
) -> None:
    assert_fails_with(lambda: culprit.forward_backward(data, loss, config), *parts)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("learning_rate", NAN, "null"),  # as the SDK serializes it
        ("learning_rate", -1.0, "-1.0"),
    ],
)
def test_bad_optimizer_step(culprit: tinker.TrainingClient, name: str, value: float, shown: str) -> None:
    assert_fails_with(lambda: culprit.optim_step(types.AdamParams(**{name: value})), f"adam_params.{name} {shown}")


@pytest.mark.parametrize("rank", [0, MAX_RANK + 1])
def test_bad_rank(stack: LiveStack, rank: int) -> None:
    with connect(stack) as service:
        assert_fails_with(
            lambda: service.create_lora_training_client(BASE_MODEL, rank=rank), "lora_config.rank", str(rank)
        )


def test_unknown_base_model(stack: LiveStack) -> None:
    with connect(stack) as service:
        assert_fails_with(lambda: service.create_lora_training_client("gpt-5", rank=8), "base_model", "'gpt-5'")
        with pytest.raises(tinker.BadRequestError, match="base_model 'gpt-5'"):
            service.create_sampling_client(base_model="gpt-5").result()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"prompt": types.ModelInput.from_ints([])}, ["prompt", "no tokens"]),
        ({"prompt": types.ModelInput.from_ints([1, VOCAB_SIZE])}, ["prompt", str(VOCAB_SIZE)]),
        ({"prompt": IMAGE}, ["prompt", "'image'"]),
        ({"num_samples": 0}, ["num_samples 0"]),
        ({"max_tokens": CONTEXT - 1}, ["max_tokens", str(CONTEXT - 1), str(CONTEXT)]),
        ({"max_tokens": 2**70}, ["sampling_params.max_tokens", str(2**64), str(2**70)]),
        ({"prompt": types.ModelInput.from_ints([1] * (CONTEXT + 1))}, [str(CONTEXT + 1), "max_tokens 4", str(CONTEXT)]),
        ({"target_prompt_logprobs": NOTHING}, ["target_prompt_logprobs", "[1, 33000000]", "at most 524288 columns"]),
        ({"target_prompt_logprobs": WIDE}, ["target_prompt_logprobs", "[1, 1025]", "at most 1024 targets"]),
        ({"temperature": -0.5}, ["temperature -0.5"]),
        ({"stop": ["a", ""]}, ["stop", "empty string"]),
        ({"topk_prompt_logprobs": 10**6}, ["topk_prompt_logprobs 1000000"]),
    ],
)
def test_bad_sample(sampling: tinker.SamplingClient, changes: dict[str, Any], parts: list[str]) -> None:
    own_names = ("prompt", "num_samples", "topk_prompt_logprobs", "target_prompt_logprobs")
    own = {name: changes[name] for name in changes if name in own_names}
    params = types.SamplingParams(**({"max_tokens": 4} | {name: changes[name] for name in changes if name not in own}))
    call = {"prompt": PROMPT, "num_samples": 1, "sampling_params": params} | own
    assert_fails_with(lambda: sampling.sample(**call), *parts)


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_nan_in_sampling_params(stack: LiveStack, sampling: tinker.SamplingClient, name: str) -> None:
    """The SDK refuses to serialize such a value and continues to work; the server refuses it as well."""
    with pytest.raises(ValueError, match="JSON"):
        sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, **{name: NAN})).result()

    session_id = stack.server.session()
    made = stack.server.post(
        "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=BASE_MODEL
    )
    body = {
        "sampling_session_id": made.json()["sampling_session_id"],
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2, name: NAN},
    }
    failure = stack.server.result(stack.server.client.post("/api/v1/asample", content=json.dumps(body)))
    assert failure["category"] == "user" and f"sampling_params.{name} nan" in str(failure["error"])


@pytest.mark.parametrize("name", ["a/b", "..", "a\x01b", "x" * 300])
def test_bad_checkpoint_name(culprit: tinker.TrainingClient, name: str) -> None:
    for save in (culprit.save_state, culprit.save_weights_for_sampler):
        assert_fails_with(lambda save=save: save(name), "checkpoint name", repr(name)[:20])


def test_path_of_another_kind_or_a_missing_checkpoint(stack: LiveStack, culprit: tinker.TrainingClient) -> None:
    weights = f"tinker://{culprit.model_id}/weights/none"
    sampler = culprit.save_weights_for_sampler("kind").result().path
    with connect(stack) as service:
        for path in (weights, sampler, "tinker://no:train:0/weights/a", "/etc/passwd"):
            assert_fails_with(lambda path=path: culprit.load_state(path), path)
            assert_fails_with(lambda path=path: culprit.load_state_with_optimizer(path), path)
        with pytest.raises(tinker.NotFoundError, match=f"{culprit.model_id}/sampler_weights/none"):
            service.create_sampling_client(model_path=sampler.replace("/kind", "/none")).result()
        with pytest.raises(tinker.BadRequestError, match=weights):
            service.create_sampling_client(model_path=weights).result()


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("create_model", {"session_id": "no", "model_seq_id": 0, "base_model": BASE_MODEL}, "session 'no'"),
        ("optim_step", {"model_id": "no:train:0", "adam_params": {}}, "model 'no:train:0'"),
        ("asample", {"sampling_session_id": "no", "prompt": {}, "sampling_params": {}}, "sampling session 'no'"),
        ("retrieve_future", {"request_id": "no"}, "request_id 'no'"),
        ("retrieve_future", {"request_id": "1" * 30}, f"request_id '{'1' * 30}'"),
    ],
)
def test_unknown_id(stack: LiveStack, path: str, body: dict[str, Any], named: str) -> None:
    answer = stack.server.post(path, **body)
    assert answer.status_code == HTTPStatus.NOT_FOUND and named in answer.json()["detail"]


def good_pass(model_id: str) -> bytes:
    arrays = {"target_tokens": np.array([1, 2]), "weights": np.ones(2, np.float32)}
    chunk = wire_pb2.Chunk(encoded_text={"tokens": np.array([1, 2], np.int32).tobytes()})
    inputs = {name: to_proto(array) for name, array in arrays.items()}
    data = [wire_pb2.Datum(model_input=[chunk], loss_fn_inputs=inputs)]
    message = wire_pb2.ForwardBackwardRequest(model_id=model_id, data=data, loss_fn="cross_entropy", forward_only=True)
    return message.SerializeToString()


def post_pass(stack: LiveStack, content: Any, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return stack.server.client.post("/api/v1/forward_backward", content=content, headers=PROTOBUF | named)


def test_pass_without_data(stack: LiveStack, culprit: tinker.TrainingClient) -> None:
    message = wire_pb2.ForwardBackwardRequest(model_id=culprit.model_id, loss_fn="cross_entropy")
    failure = stack.server.result(post_pass(stack, message.SerializeToString()))
    assert failure == {"error": "data: holds no datum", "category": "user"}


def test_truncated_protobuf(stack: LiveStack, culprit: tinker.TrainingClient) -> None:
    whole = good_pass(culprit.model_id)
    assert "error" not in stack.server.result(post_pass(stack, whole))
    for cut in (1, 7, len(whole) // 2):
        answer = post_pass(stack, whole[:-cut])
        assert answer.status_code == HTTPStatus.BAD_REQUEST and "protobuf" in answer.json()["detail"]


def test_truncated_zstd(stack: LiveStack, culprit: tinker.TrainingClient) -> None:
    packed = zstandard.compress(good_pass(culprit.model_id))
    answer = post_pass(stack, packed[:-3], content_encoding="zstd")
    assert answer.status_code == HTTPStatus.BAD_REQUEST and "zstd" in answer.json()["detail"]


@pytest.mark.parametrize("is_stated", [True, False])
def test_zstd_bomb(stack: LiveStack, is_stated: bool) -> None:
    size = stack.server.settings.max_request_bytes + 1
    packer = zstandard.ZstdCompressor(write_content_size=is_stated).compressobj(size=size if is_stated else -1)
    zeros = bytes(MB)
    pieces = [packer.compress(zeros) for _ in range(size // MB)]
    bomb = b"".join((*pieces, packer.compress(b"\0"), packer.flush()))
    assert len(bomb) < MB
    answer = post_pass(stack, bomb, content_encoding="zstd")
    assert answer.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE and "decompresses" in answer.json()["detail"]


def test_body_over_the_limit(stack: LiveStack) -> None:
    piece = bytes(MB)
    answer = post_pass(stack, (piece for _ in range(300)))
    assert answer.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE and str(300 * MB) in answer.json()["detail"]
