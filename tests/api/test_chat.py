"""The OpenAI and Anthropic endpoints over HTTP: formats, streams, errors, owners and cancellation."""

import json
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tokenizers import Tokenizer

from skyrl_tx.store import completions, futures, keys, sessions
from skyrl_tx.store.tables import KeyScope
from tests.support.live_stack import CONTEXT, PUBLIC_NAME, LiveStack, live_stack
from tests.support.polling import until
from tests.support.tiny_tokenizer import PACKAGED

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/oai/api/v1/chat/completions", "/anthropic/api/v1/messages"
TALK = [{"role": "user", "content": "What is 2 + 2?"}]
TOKENIZER = Tokenizer.from_file(str(PACKAGED / "tokenizer.json"))
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack("fake", tmp_path_factory.mktemp("stack"), has_tokenizer=True, max_streams=2) as stack:
        yield stack


@pytest.fixture(scope="module")
def slow_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack("fake", tmp_path_factory.mktemp("slow"), has_tokenizer=True, token_delay_s=0.05) as stack:
        yield stack


def post(stack: LiveStack, path: str, /, **body: Any) -> httpx.Response:
    return stack.server.client.post(path, json={"model": PUBLIC_NAME, "seed": 1, "max_tokens": 12} | body)


def answer(stack: LiveStack, path: str, /, **body: Any) -> dict[str, Any]:
    response = post(stack, path, **body)
    assert response.status_code == HTTPStatus.OK, response.text
    return response.json()


def stream_events(stack: LiveStack, path: str, /, **body: Any) -> Events:
    """Return the events of a streamed response."""
    response = post(stack, path, **body, stream=True)
    assert response.status_code == HTTPStatus.OK, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    if path != MESSAGES:
        assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def completion_text(events: Events) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def chat_text(events: Events) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def sample_text(stack: LiveStack, tokens: list[int], **params: Any) -> str:
    """Sample with the SDK and return the decoded tokens."""
    with tinker.ServiceClient(base_url=stack.url, api_key="tml-local") as service:
        client = service.create_sampling_client(base_model=PUBLIC_NAME).result()
        params = {"seed": 1, "max_tokens": 12} | params
        prompt = tinker.ModelInput.from_ints(tokens)
        result = client.sample(prompt, num_samples=1, sampling_params=tinker.SamplingParams(**params)).result()
    return TOKENIZER.decode(list(result.sequences[0].tokens))


def test_completion_equals_the_sdks_sample_streamed_or_not(stack: LiveStack) -> None:
    made = answer(stack, COMPLETIONS, prompt="Hello there", return_token_ids=True)
    choice = made["choices"][0]
    tokens = TOKENIZER.encode("Hello there").ids
    assert choice["prompt_token_ids"] == tokens and choice["finish_reason"] == "length"
    assert choice["text"] == TOKENIZER.decode(choice["token_ids"]) == sample_text(stack, tokens) != ""

    assert made["usage"] == {
        "prompt_tokens": len(tokens),
        "completion_tokens": 12,
        "total_tokens": len(tokens) + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }

    options = {"include_usage": True}
    events = stream_events(stack, COMPLETIONS, prompt="Hello there", stream_options=options, return_token_ids=True)
    assert completion_text(events) == choice["text"]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == made["usage"] and events[0]["usage"] is None
    assert [token for event in events for part in event["choices"] for token in part["token_ids"]] == choice[
        "token_ids"
    ]
    assert [part["finish_reason"] for event in events for part in event["choices"]][-1] == "length"


def test_prompts_and_samples_make_choices_in_order(stack: LiveStack) -> None:
    made = answer(stack, COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=3)
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    alone = [answer(stack, COMPLETIONS, prompt=prompt, n=2, max_tokens=3)["choices"] for prompt in ("a", "b")]
    assert [choice["text"] for choice in made["choices"]] == [choice["text"] for choices in alone for choice in choices]
    events = stream_events(stack, COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=3)
    for index, choice in enumerate(made["choices"]):
        own = [part for event in events for part in event["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in own) == choice["text"]


def test_chat_and_messages_render_the_template(stack: LiveStack) -> None:
    tokens = TOKENIZER.encode("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n").ids
    text = sample_text(stack, tokens)
    made = answer(stack, CHAT, messages=TALK, return_token_ids=True)
    assert made["prompt_token_ids"] == tokens
    assert made["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert chat_text(stream_events(stack, CHAT, messages=TALK)) == text

    parts = [{"type": "text", "text": "What is 2 + 2?", "cache_control": {"type": "ephemeral"}}]
    blocks = answer(stack, MESSAGES, messages=[{"role": "user", "content": parts}])
    assert blocks["content"] == [{"type": "text", "text": text}]
    assert blocks["stop_reason"] == "max_tokens" and blocks["usage"]["input_tokens"] == len(tokens)

    counted = stack.server.client.post(f"{MESSAGES}/count_tokens", json={"model": PUBLIC_NAME, "messages": TALK})
    assert counted.json() == {"input_tokens": len(tokens)}
    events = stream_events(stack, MESSAGES, messages=TALK)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == text
    assert events[-2]["usage"]["output_tokens"] == 12 and events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_prompt_of_one_token_list_or_several(stack: LiveStack) -> None:
    one = answer(stack, COMPLETIONS, prompt=[5, 6, 7])["choices"][0]["text"]
    two = answer(stack, COMPLETIONS, prompt=[[5, 6, 7], [5, 6, 7]])["choices"]
    assert [choice["text"] for choice in two] == [one, one]


def test_tokens_come_while_the_sample_is_decoded(slow_stack: LiveStack) -> None:
    body = {"model": PUBLIC_NAME, "prompt": "Hello", "max_tokens": 12, "seed": 1, "stream": True}
    times: list[float] = []
    with slow_stack.server.client.stream("POST", COMPLETIONS, json=body) as response:
        times += [time.monotonic() for line in response.iter_lines() if line.startswith("data: {")]
    assert len(times) > 6 and times[-1] - times[0] > 0.2
    assert slow_stack.server.store.read(lambda tx: completions.list_partials(tx, 0)) == [], "deleted with the result"


def test_streams_above_the_limit_get_one_chunk(stack: LiveStack) -> None:
    service = stack.server.api.app.state.chat
    opened = service.streams._open
    opened.update({f"other-{number}": None for number in range(2)})
    try:
        events = stream_events(stack, COMPLETIONS, prompt="Hello there")
    finally:
        opened.clear()
    assert completion_text(events) == answer(stack, COMPLETIONS, prompt="Hello there")["choices"][0]["text"]
    assert len(events) == 1


def open_samples(stack: LiveStack) -> int:
    return len(stack.server.store.read(lambda tx: futures.list_pending(tx, 0, 100)))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
def test_disconnect_cancels_the_sample(slow_stack: LiveStack, path: str, stream: bool) -> None:
    body = {"model": PUBLIC_NAME, "max_tokens": 90, "stream": stream, "ignore_eos": True} | (
        {"prompt": "Hello"} if path == COMPLETIONS else {"messages": TALK}
    )
    if path == MESSAGES:  # it has no `ignore_eos`, and a random sample could end at once
        del body["ignore_eos"]
        body["temperature"] = 0

    with (
        httpx.Client(base_url=slow_stack.url, timeout=0.5) as client,
        pytest.raises(httpx.ReadTimeout),
        client.stream("POST", path, json=body) as response,
    ):
        assert open_samples(slow_stack) == 1
        started = time.monotonic()
        for _ in response.iter_raw():
            if time.monotonic() - started > 0.3:
                raise httpx.ReadTimeout("enough")
    until(lambda: open_samples(slow_stack) == 0, within_s=3.0)


ERRORS: dict[str, tuple[str, dict[str, Any], HTTPStatus, str]] = {
    "model": (CHAT, {"messages": TALK, "model": "gpt-9"}, HTTPStatus.NOT_FOUND, "model 'gpt-9' does not exist"),
    "base of a path": (COMPLETIONS, {"prompt": "a", "model": "x;tinker://y"}, HTTPStatus.NOT_FOUND, "does not exist"),
    "unknown run": (COMPLETIONS, {"prompt": "a", "model": "session-1:train:0"}, HTTPStatus.NOT_FOUND, "does not exist"),
    "unknown field": (CHAT, {"messages": TALK, "frob": 1}, HTTPStatus.BAD_REQUEST, "frob 1: this server does not"),
    "unknown switch": (COMPLETIONS, {"prompt": "a", "enable_thinking": False}, HTTPStatus.BAD_REQUEST, "enable_think"),
    "unknown zero": (MESSAGES, {"messages": TALK, "min_p": 0}, HTTPStatus.BAD_REQUEST, "min_p 0: this server does not"),
    "unknown option": (
        CHAT,
        {"messages": TALK, "stream_options": {"frob": []}},
        HTTPStatus.BAD_REQUEST,
        "stream_options.frob []: this",
    ),
    "unknown field of a message": (
        CHAT,
        {"messages": [*TALK, {"role": "assistant", "content": "4", "prefix": False}]},
        HTTPStatus.BAD_REQUEST,
        "messages[1].prefix False: this",
    ),
    "unknown field of a block": (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "frob": ""}]}]},
        HTTPStatus.BAD_REQUEST,
        "messages[0].content[0].frob '': this",
    ),
    "contradiction": (
        CHAT,
        {"messages": TALK, "enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
        HTTPStatus.BAD_REQUEST,
        "enable_thinking: sets enable_thinking of the chat template to False",
    ),
    "penalty": (COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, HTTPStatus.BAD_REQUEST, "presence_penalty 3.0"),
    "frequency": (
        CHAT,
        {"messages": TALK, "frequency_penalty": -2.1},
        HTTPStatus.BAD_REQUEST,
        "frequency_penalty -2.1",
    ),
    "repetition": (CHAT, {"messages": TALK, "repetition_penalty": 0}, HTTPStatus.BAD_REQUEST, "repetition_penalty 0"),
    "min_p": (CHAT, {"messages": TALK, "min_p": 1.5}, HTTPStatus.BAD_REQUEST, "min_p 1.5 must be from 0 to 1"),
    "min_tokens": (COMPLETIONS, {"prompt": "a", "min_tokens": -1}, HTTPStatus.BAD_REQUEST, "min_tokens -1 must"),
    "many min_tokens": (
        CHAT,
        {"messages": TALK, "min_tokens": 9, "max_completion_tokens": 8},
        HTTPStatus.BAD_REQUEST,
        "min_tokens 9: must not be greater than max_completion_tokens, which is 8",
    ),
    "bias": (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, HTTPStatus.BAD_REQUEST, "logit_bias[5] 101.0"),
    "bias of a word": (
        CHAT,
        {"messages": TALK, "logit_bias": {"05": 1}},
        HTTPStatus.BAD_REQUEST,
        "logit_bias: the key '05' must be a token id",
    ),
    "bias of a negative token": (
        CHAT,
        {"messages": TALK, "logit_bias": {"-5": 1}},
        HTTPStatus.BAD_REQUEST,
        "'-5' must",
    ),
    "much bias": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {str(token): 1 for token in range(1025)}},
        HTTPStatus.BAD_REQUEST,
        "logit_bias has 1025 entries: must have at most 1024",
    ),
    "best_of": (COMPLETIONS, {"prompt": "a", "best_of": 3}, HTTPStatus.BAD_REQUEST, "best_of 3: must be equal to n"),
    "suffix": (COMPLETIONS, {"prompt": "a", "suffix": "b"}, HTTPStatus.BAD_REQUEST, "suffix 'b'"),
    "no prompt": (COMPLETIONS, {"prompt": []}, HTTPStatus.BAD_REQUEST, "prompt"),
    "temperature": (COMPLETIONS, {"prompt": "a", "temperature": -1}, HTTPStatus.BAD_REQUEST, "temperature -1"),
    "top_p": (MESSAGES, {"messages": TALK, "top_p": 2}, HTTPStatus.BAD_REQUEST, "top_p 2"),
    "max_tokens": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 0},
        HTTPStatus.BAD_REQUEST,
        "max_tokens 0: needs `echo` true",
    ),
    "n": (CHAT, {"messages": TALK, "n": 0}, HTTPStatus.BAD_REQUEST, "n 0"),
    "logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 99}, HTTPStatus.BAD_REQUEST, "logprobs 99 must be from 0 to"),
    "tool choice": (
        CHAT,
        {"messages": TALK, "tool_choice": "required"},
        HTTPStatus.BAD_REQUEST,
        "tool_choice: needs `t",
    ),
    "any tool": (
        MESSAGES,
        {"messages": TALK, "tool_choice": {"type": "any"}},
        HTTPStatus.BAD_REQUEST,
        "tool_choice: needs `t",
    ),
    "tools": (
        CHAT,
        {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]},
        HTTPStatus.BAD_REQUEST,
        "--tool-parser",
    ),
    "schema": (
        CHAT,
        {"messages": TALK, "response_format": {"type": "json_object"}},
        HTTPStatus.BAD_REQUEST,
        "this backend has no tokenizer, so samples cannot be constrained",
    ),
    "image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        HTTPStatus.BAD_REQUEST,
        "messages[0].content[0].type 'image_url'",
    ),
    "picture": (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        HTTPStatus.BAD_REQUEST,
        "messages[0].content[0].type 'image'",
    ),
    "length": (
        CHAT,
        {"messages": TALK, "max_tokens": CONTEXT},
        HTTPStatus.BAD_REQUEST,
        f"maximum context length is {CONTEXT} tokens",
    ),
    "long prompt": (
        MESSAGES,
        {"messages": [{"role": "user", "content": "ha" * CONTEXT}]},
        HTTPStatus.BAD_REQUEST,
        f"tokens > {CONTEXT} maximum",
    ),
    "log-probabilities": (
        COMPLETIONS,
        {"prompt": "a", "n": 4096, "max_tokens": 100, "logprobs": 2},
        HTTPStatus.BAD_REQUEST,
        "logprobs: the response could have 1228800 log-probabilities",
    ),
    "vocabulary": (COMPLETIONS, {"prompt": [10**6]}, HTTPStatus.BAD_REQUEST, "token 1000000 is outside"),
    "embeddings": ("/v1/embeddings", {}, HTTPStatus.NOT_FOUND, "/v1/chat/completions"),
    "batches": ("/anthropic/api/v1/messages/batches", {}, HTTPStatus.NOT_FOUND, "not offered"),
}


WITHOUT_FIELD = "model", "base of a path", "unknown run", "length", "vocabulary", "schema", "embeddings"
OF_ENGINE = "vocabulary", "schema"
"""Errors that the engine finds, after the response of a stream has begun."""


@pytest.mark.parametrize("case", ERRORS)
def test_errors_have_the_form_of_the_api(stack: LiveStack, case: str) -> None:
    path, body, status, text = ERRORS[case]
    for stream in (False, True) if status == HTTPStatus.BAD_REQUEST and case not in OF_ENGINE else (False,):
        response = post(stack, path, **body, stream=stream)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert text in error["message"]
        if path.startswith("/anthropic"):
            assert response.json()["type"] == "error" and error["type"].endswith("_error")
        else:
            assert error["type"] == "invalid_request_error"
            assert (error["code"] == "context_length_exceeded") == (case == "length")
            assert error["message"].startswith(error["param"] or "")
            assert (error["param"] is None) == (case in WITHOUT_FIELD)


def test_error_within_a_stream_is_its_last_event(stack: LiveStack) -> None:
    events = stream_events(stack, COMPLETIONS, prompt=[10**6])
    assert "outside the vocabulary" in events[-1]["error"]["message"]


def test_bias_beyond_the_vocabulary(stack: LiveStack) -> None:
    response = post(stack, COMPLETIONS, prompt="a", logit_bias={"999999999": 1})
    assert response.status_code == HTTPStatus.BAD_REQUEST
    assert "logit_bias: token 999999999 is outside the vocabulary" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_controls_change_the_distribution(stack: LiveStack, path: str) -> None:
    """A high bias forces a token until it was drawn too often; neutral values change nothing."""
    prompt = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": TALK}
    body = {**prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "stop_token_ids": [70]}
    neutral = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}}
    plain = answer(stack, path, **body)["choices"]
    assert answer(stack, path, **body, **neutral, min_tokens=0)["choices"][0]["token_ids"] == plain[0]["token_ids"]

    forced = {**body, "n": 2, "logit_bias": {"70": 100, "71": 99}}
    assert [made["token_ids"] for made in answer(stack, path, **forced)["choices"]] == [[70]] * 2
    biased = answer(stack, path, **forced, min_tokens=4)["choices"]
    assert [made["token_ids"] for made in biased] == [[71] * 4 + [70]] * 2
    penalized = answer(stack, path, **forced, min_tokens=4, presence_penalty=2, min_p=0.5)["choices"]
    assert [made["token_ids"] for made in penalized] == [[71] * 4 + [70]] * 2

    events = stream_events(stack, path, **forced, min_tokens=4)
    streamed = [
        [
            token
            for event in events
            for choice in event["choices"]
            if choice["index"] == index
            for token in choice.get("token_ids") or []
        ]
        for index in range(2)
    ]
    assert streamed == [[71] * 4 + [70]] * 2


def test_echo_without_new_tokens_scores_a_prompt(stack: LiveStack) -> None:
    made = answer(stack, COMPLETIONS, prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=1)
    scored = made["choices"][0]["logprobs"]
    assert made["usage"]["completion_tokens"] == 0 and made["choices"][0]["text"] == TOKENIZER.decode([5, 6, 7])
    assert scored["tokens"] == [TOKENIZER.decode([token]) for token in (5, 6, 7)]
    assert scored["token_logprobs"][0] is None and scored["top_logprobs"][0] is None
    for token, logprob, top in list(
        zip(*(scored[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert top[token] == logprob < 0


@pytest.mark.parametrize(
    "path", ["/api/v1/healthz", "/api/v1/livez", "/metrics", "/v1/models", f"/v1/models/{PUBLIC_NAME}"]
)
def test_head_is_answered_like_get_without_a_body(stack: LiveStack, path: str) -> None:
    client = stack.server.client
    head, got = client.head(path), client.get(path)
    assert (head.status_code, head.headers["content-type"]) == (got.status_code, got.headers["content-type"])
    assert head.status_code == HTTPStatus.OK and head.content == b"" != got.content


def test_models_are_the_names_that_may_be_sent(stack: LiveStack) -> None:
    with tinker.ServiceClient(base_url=stack.url, api_key="tml-local") as service:
        training = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
        assert post(stack, COMPLETIONS, prompt="a", model=training.model_id).status_code == HTTPStatus.NOT_FOUND
        path = training.save_weights_for_sampler("one").result().path
        newest = training.save_weights_for_sampler("two").result().path
    listed = [model["id"] for model in stack.server.client.get("/v1/models").json()["data"]]
    assert listed[0] == PUBLIC_NAME and listed[1:3] == [newest, path]

    for name in (PUBLIC_NAME, path, f"{PUBLIC_NAME};{path}", training.model_id):
        made = answer(stack, COMPLETIONS, prompt="Hello", model=name)
        assert made["model"] == name
        described = stack.server.client.get(f"/oai/api/v1/models/{name}").json()
        assert described["id"] == name and described.get("root") == {PUBLIC_NAME: None, training.model_id: newest}.get(
            name, path
        )


def test_samples_of_an_endpoint_share_one_session(stack: LiveStack) -> None:
    for _ in range(3):
        answer(stack, MESSAGES, messages=TALK, max_tokens=1)
    rows = stack.server.store.read(lambda tx: [*sessions.iterate(tx, None, None, None, None)])
    assert sum(row.display_name == sessions.ANTHROPIC for row in rows) == 1
    assert sum(row.display_name == sessions.OPENAI for row in rows) <= 1


def test_keys_come_in_either_header_and_owners_are_separate(tmp_path: Path) -> None:
    with live_stack("fake", tmp_path, has_tokenizer=True) as stack:

        def create_key(owner: str, scope: KeyScope = "user") -> str:
            return stack.server.store.write(
                lambda tx: keys.create(tx, owner=owner, scope=scope, name=owner, note="", now=1.0)
            )[0]

        ann, bob, reader = create_key("ann"), create_key("bob", "sample"), create_key("eve", "read")
        with tinker.ServiceClient(base_url=stack.url, api_key=ann) as service:
            training = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
            path = training.save_weights_for_sampler("one").result().path
        client = stack.server.client

        def call(headers: dict[str, str], model: str) -> httpx.Response:
            body = {"model": model, "messages": TALK, "max_tokens": 2}
            return client.post(CHAT, json=body, headers=headers)

        for headers in ({"X-API-Key": ann}, {"Authorization": f"Bearer {ann}"}):
            assert call(headers, path).status_code == HTTPStatus.OK
        assert call({"Authorization": f"bearer {bob}"}, PUBLIC_NAME).status_code == HTTPStatus.OK
        for name in (path, training.model_id):
            assert call({"Authorization": f"Bearer {bob}"}, name).status_code == HTTPStatus.NOT_FOUND
        listed = client.get("/v1/models", headers={"Authorization": f"Bearer {bob}"}).json()["data"]
        assert [model["id"] for model in listed] == [PUBLIC_NAME]

        refused = call({"Authorization": f"Bearer {reader}"}, PUBLIC_NAME)
        assert refused.status_code == HTTPStatus.FORBIDDEN and "scope read" in refused.json()["error"]["message"]
        for headers in ({}, {"Authorization": "Bearer tml-wrong"}):
            unknown = call(headers, PUBLIC_NAME)
            assert unknown.status_code == HTTPStatus.UNAUTHORIZED
            assert unknown.json()["error"]["code"] == "invalid_api_key"
        body = {"model": PUBLIC_NAME, "messages": TALK, "max_tokens": 2}
        unknown = client.post(MESSAGES, json=body, headers={"X-Api-Key": "wrong"})
        assert unknown.json()["error"]["type"] == "authentication_error"


def test_web_page_of_another_site_is_refused(stack: LiveStack) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        body = {"model": PUBLIC_NAME, "messages": TALK}
        response = stack.server.client.post(CHAT, json=body, headers=headers)
        assert response.status_code == HTTPStatus.FORBIDDEN and response.json()["error"]["code"]


def test_model_without_a_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    with live_stack("fake", tmp_path) as stack:
        for path, body in ((CHAT, {"messages": TALK}), (MESSAGES, {"messages": TALK}), (COMPLETIONS, {"prompt": "a"})):
            response = post(stack, path, **body)
            assert response.status_code == HTTPStatus.BAD_REQUEST, response.text
            assert "has no tokenizer.json" in response.json()["error"]["message"]
        choice = answer(stack, COMPLETIONS, prompt=[5, 6], return_token_ids=True)["choices"][0]
        assert len(choice["token_ids"]) == 12 and choice["text"] == ""
