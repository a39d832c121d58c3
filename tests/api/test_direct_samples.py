"""Sampling requests that name their weights, without a sampling session, as direct callers send them."""

from http import HTTPStatus
from typing import Any

import pytest
import tinker

from tests.support.live_stack import PUBLIC_NAME, LiveStack

BODY: dict[str, Any] = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
    "sampling_params": {"max_tokens": 4, "stop": [], "seed": 3},
    "num_samples": 2,
}
pytestmark = pytest.mark.parametrize("stack", ["fake"], indirect=True, scope="package")


def draw(stack: LiveStack, **weights: str) -> list[list[int]]:
    answer = stack.server.post("asample", **BODY, **weights)
    assert answer.status_code == HTTPStatus.OK, answer.text
    assert len(answer.json()["sample_sequence_ids"]) == 2
    sequences = stack.server.result(answer)["sequences"]
    assert isinstance(sequences, list)
    return [sequence["tokens"] for sequence in sequences]


def test_direct_sample_equals_that_of_a_sampling_client(stack: LiveStack, training: tinker.TrainingClient) -> None:
    path = training.save_weights_for_sampler("direct").result().path
    with tinker.ServiceClient(base_url=stack.url, api_key="tml-local") as service:
        for weights in ({"base_model": PUBLIC_NAME}, {"model_path": path}):
            client = service.create_sampling_client(**weights).result()
            params = tinker.SamplingParams(max_tokens=4, stop=[], seed=3)
            prompt = tinker.ModelInput.from_ints([5, 6, 7])
            drawn = client.sample(prompt, num_samples=2, sampling_params=params).result().sequences
            assert draw(stack, **weights) == [list(sequence.tokens) for sequence in drawn]


def test_direct_sample_ignores_its_sequence_number(stack: LiveStack) -> None:
    first, second = (stack.server.post("asample", **BODY, base_model=PUBLIC_NAME, seq_id=0).json() for _ in range(2))
    assert first["request_id"] != second["request_id"]


@pytest.mark.parametrize(
    ("weights", "status", "text"),
    [
        ({}, HTTPStatus.BAD_REQUEST, "base_model: missing"),
        ({"base_model": "someone/else"}, HTTPStatus.BAD_REQUEST, "base_model 'someone/else'"),
        ({"model_path": "tinker://no:train:0/sampler_weights/x"}, HTTPStatus.NOT_FOUND, "no such checkpoint"),
        ({"model_path": "elsewhere"}, HTTPStatus.BAD_REQUEST, "is not of the form"),
    ],
)
def test_unknown_weights_return_4xx(stack: LiveStack, weights: dict[str, str], status: HTTPStatus, text: str) -> None:
    answer = stack.server.post("asample", **BODY, **weights)
    assert answer.status_code == status and text in answer.json()["detail"]
