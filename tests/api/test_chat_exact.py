"""On JAX, the OpenAI and Anthropic endpoints return the text and the logprobs that the SDK returns."""

import json
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest
import tinker
from tokenizers import Tokenizer

from tests.support.live_stack import PUBLIC_NAME, LiveStack
from tests.support.tiny_tokenizer import PACKAGED

pytestmark = pytest.mark.parametrize("stack", ["jax"], indirect=True, scope="package")
TOKENIZER = Tokenizer.from_file(str(PACKAGED / "tokenizer.json"))
PROMPT = "Natalia sold 48 clips"
TOKENS = TOKENIZER.encode(PROMPT).ids
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/anthropic/api/v1/messages"
TALK = [{"role": "user", "content": "How many clips?"}]


def answer(stack: LiveStack, path: str, /, **body: Any) -> dict[str, Any]:
    response = stack.server.client.post(path, json={"model": PUBLIC_NAME, "seed": 5, "max_tokens": 40} | body)
    assert response.status_code == HTTPStatus.OK, response.text
    return response.json()


def events(stack: LiveStack, path: str, /, **body: Any) -> list[dict[str, Any]]:
    body = {"model": PUBLIC_NAME, "seed": 5, "max_tokens": 40, "stream": True} | body
    response = stack.server.client.post(path, json=body)
    assert response.status_code == HTTPStatus.OK, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def sample_sequences(stack: LiveStack, **params: Any) -> list[tinker.SampledSequence]:
    with tinker.ServiceClient(base_url=stack.url, api_key="tml-local") as service:
        client = service.create_sampling_client(base_model=PUBLIC_NAME).result()
        params = {"seed": 5, "max_tokens": 40} | params
        prompt = tinker.ModelInput.from_ints(TOKENS)
        return list(
            client.sample(prompt, num_samples=2, sampling_params=tinker.SamplingParams(**params)).result().sequences
        )


def test_streamed_text_is_the_unstreamed_and_the_sdks(stack: LiveStack) -> None:
    expected = sample_sequences(stack)
    made = answer(stack, COMPLETIONS, prompt=PROMPT, n=2, logprobs=0, return_token_ids=True)["choices"]
    parts = events(stack, COMPLETIONS, prompt=PROMPT, n=2, logprobs=0)

    for index, (choice, sequence) in enumerate(zip(made, expected, strict=True)):
        assert choice["token_ids"] == list(sequence.tokens)
        assert choice["logprobs"]["token_logprobs"] == list(sequence.logprobs or [])
        assert choice["text"] == TOKENIZER.decode(list(sequence.tokens))
        own = [part for event in parts for part in event["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in own) == choice["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for part in own for value in part["logprobs"][name]] == choice["logprobs"][name]
    assert len(parts) > 2


def test_stop_string_cuts_the_text_in_every_form(stack: LiveStack) -> None:
    whole = answer(stack, COMPLETIONS, prompt=PROMPT)["choices"][0]["text"]
    stop = whole[12:16]
    assert "\ufffd" not in stop and whole.find(stop) == 12
    for more, expected in (({}, whole[:12]), ({"include_stop_str_in_output": True}, whole[:16])):
        body = {"prompt": PROMPT, "stop": [stop, "no such text"], **more}
        choice = answer(stack, COMPLETIONS, **body)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        parts = [part for event in events(stack, COMPLETIONS, **body) for part in event["choices"]]
        assert "".join(part["text"] for part in parts) == expected
        assert parts[-1]["finish_reason"] == "stop"


def test_stop_sequence_of_anthropic_is_named(stack: LiveStack) -> None:
    whole = answer(stack, MESSAGES, messages=TALK)["content"][0]["text"]
    stop = whole[8:11]
    end = whole.find(stop)
    made = answer(stack, MESSAGES, messages=TALK, stop_sequences=[stop])
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(block["text"] for block in made["content"]) == whole[:end]
    last = events(stack, MESSAGES, messages=TALK, stop_sequences=[stop])[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_echoed_log_probabilities_are_those_of_compute_logprobs(stack: LiveStack) -> None:
    prompts = [TOKENS, list(range(40, 100))]
    with tinker.ServiceClient(base_url=stack.url, api_key="tml-local") as service:
        client = service.create_sampling_client(base_model=PUBLIC_NAME).result()
        expected = [client.compute_logprobs(tinker.ModelInput.from_ints(prompt)).result() for prompt in prompts]
    made = answer(stack, COMPLETIONS, prompt=prompts, max_tokens=1, temperature=0, echo=True, logprobs=1)["choices"]
    for choice, reference in zip(made, expected, strict=True):
        scored = choice["logprobs"]
        assert scored["token_logprobs"][0] is None
        np.testing.assert_allclose(scored["token_logprobs"][1:-1], reference[1:], atol=1e-5, rtol=0)
        for logprob, top in zip(scored["token_logprobs"][1:], scored["top_logprobs"][1:], strict=True):
            assert logprob in top.values() and logprob <= max(top.values())


def test_top_log_probabilities_of_chat_have_the_token_itself(stack: LiveStack) -> None:
    body = {"messages": TALK, "logprobs": True, "top_logprobs": 3, "max_tokens": 8}
    content = answer(stack, CHAT, **body)["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for token in content:
        assert 3 <= len(token["top_logprobs"]) <= 4
        assert (token["token"], token["logprob"]) in [(top["token"], top["logprob"]) for top in token["top_logprobs"]]
        assert sum(np.exp(top["logprob"]) for top in token["top_logprobs"]) <= 1 + 1e-5
    chunks = [choice["logprobs"] for event in events(stack, CHAT, **body) for choice in event["choices"]]
    assert [token for chunk in chunks if chunk for token in chunk["content"]] == content


def test_prompt_log_probabilities_in_the_form_of_vllm(stack: LiveStack) -> None:
    made = answer(stack, COMPLETIONS, prompt=PROMPT, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert made[0] is None and len(made) == len(TOKENS)
    for token, scored in zip(TOKENS[1:], made[1:], strict=True):
        assert str(token) in scored and {1, 2} <= {entry["rank"] for entry in scored.values()}
        assert scored[str(token)]["decoded_token"] == TOKENIZER.decode([token])
