"""Tool calls, reasoning, and streams during an engine restart, with scripted samples."""

import json
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlmodel import Session
from tokenizers import Tokenizer

from skyrl_tx.contract import codec, requests, results
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import completions, engine_state, futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause
from skyrl_tx.store.futures import PendingRequest
from skyrl_tx.store.tables import EngineStateRow
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.live_api import Server, live_api
from tests.support.polling import until
from tests.support.tiny_tokenizer import PACKAGED

CHAT, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/anthropic/api/v1/messages", "/v1/completions"
TEMPLATE = Path(__file__).parents[1] / "unit" / "apps" / "chat" / "templates" / "qwen3.jinja"
TOKENIZER = Tokenizer.from_file(str(PACKAGED / "tokenizer.json"))
TALK = [{"role": "user", "content": "Weather in Bern?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
OPENAI_TOOL = {"type": "function", "function": {"name": "find", "description": "Find it.", "parameters": SCHEMA}}
ANTHROPIC_TOOL = {"name": "find", "description": "Find it.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Bern"}}\n</tool_call>'
REPLY = f"<think>\nI look.\n</think>\n\nLet me see.\n{CALL}<|im_end|>"
Play = Callable[[Store, RequestId, requests.Sample], results.Result]


class ScriptedPlayer:
    """An engine that gets the result of each sample from `play`, which may stream tokens first."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.play: Play = reply(REPLY)
        self.seen: list[requests.Sample] = []
        self.is_stopped = False

    def run(self) -> None:
        self.store.write(self._publish)
        position = 0
        while not self.is_stopped:
            for pending in self.store.read(lambda tx, after=position: futures.list_pending(tx, after, 10)):
                position = pending.position
                self._answer(pending)
            self.store.wait(0.1)

    def _publish(self, tx: Any) -> None:
        capabilities = {"max_context_length": 1024, "max_topk_logprobs": 4, "eos_token_ids": []}
        now = time.time() + 3600  # valid for an hour, because this engine publishes only once
        row = EngineStateRow(
            boot_id="boot", pid=1, status="ready", capabilities=capabilities, base_models=[], updated_at=now
        )
        engine_state.publish(tx, row)

    def _answer(self, pending: PendingRequest) -> None:
        request = codec.decode(pending.body)
        assert isinstance(request, requests.Sample)
        self.seen.append(request)
        result = self.play(self.store, pending.request_id, request)
        data, failed = codec.encode(result), isinstance(result, results.Failure)
        self.store.write(
            lambda tx: futures.complete(tx, pending.request_id, data, failed=failed, effect_order=None, now=time.time())
        )


def output(tokens: list[int]) -> results.SampleOutput:
    logprobs = np.full(len(tokens), -1.0, np.float32)
    sequence = results.SampledSequence(tokens=np.array(tokens, np.int32), logprobs=logprobs, stop_reason="stop")
    return results.SampleOutput(sequences=(sequence,), prompt=results.PromptResult(cache_hit_tokens=2))


def reply(text: str, size: int = 3) -> Play:
    """Return a `play` that answers with a text and streams `size` tokens at a time."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids

    def play(store: Store, request_id: RequestId, request: requests.Sample) -> results.Result:
        for start in range(0, len(tokens) - size, size):
            put(store, request_id, start, tokens[start : start + size])
        return output(tokens)

    return play


def put(store: Store, request_id: RequestId, start: int, tokens: list[int]) -> None:
    """Write new tokens as the engine does, and give the API time to send them."""
    row = completions.Partial(
        request_id=request_id,
        sample_index=0,
        start=start,
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -1.0, np.float32),
    )
    store.write(lambda tx: completions.add_partials(tx, [row]))
    time.sleep(0.02)


@contextmanager
def run_player(data_dir: Path) -> Iterator[ScriptedPlayer]:
    store = Store.open(data_dir, role="engine")
    player = ScriptedPlayer(store)
    thread = threading.Thread(target=player.run)
    thread.start()
    try:
        yield player
    finally:
        player.is_stopped = True
        store.wake()
        thread.join()
        store.close()


@pytest.fixture(scope="module")
def server_and_player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, ScriptedPlayer]]:
    folder = tmp_path_factory.mktemp("scripted")
    settings = ApiSettings(
        port=0,
        data_dir=folder / "data",
        base_model=str(write_tiny_model(folder / "model")),
        served_model_name="tiny",
        chat_template=TEMPLATE,
    )
    with live_api(settings) as server, run_player(settings.data_dir) as player:
        while server.client.get("/api/v1/healthz").status_code != HTTPStatus.OK:
            time.sleep(0.02)
        yield server, player


def post(server: Server, path: str, /, **body: Any) -> httpx.Response:
    return server.client.post(path, json={"model": "tiny", "max_tokens": 99} | body)


def stream_events(server: Server, path: str, /, **body: Any) -> list[dict[str, Any]]:
    lines = post(server, path, stream=True, **body).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_openai_client_gets_calls_and_reasoning(server_and_player: tuple[Server, ScriptedPlayer]) -> None:
    server, player = server_and_player
    player.play = reply(REPLY)
    body = {"messages": TALK, "tools": [OPENAI_TOOL]}
    choice = post(server, CHAT, **body).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("Let me see.", "I look.")

    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "find", "arguments": '{"city": "Bern"}'} and call["type"] == "function"
    deltas = [choice["delta"] for event in stream_events(server, CHAT, **body) for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I look."
    (called,) = [tool_call for delta in deltas for tool_call in delta.get("tool_calls", [])]
    assert called["index"] == 0 and called["function"] == call["function"]
    prompt = TOKENIZER.decode(player.seen[-1].prompt.tolist(), skip_special_tokens=False)
    assert '"name": "find"' in prompt and prompt.endswith("<|im_start|>assistant\n")


def test_calls_and_results_of_earlier_turns_are_rendered(server_and_player: tuple[Server, ScriptedPlayer]) -> None:
    server, player = server_and_player
    player.play = reply("12 °C.<|im_end|>")
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"city": "Bern"}'}}
    openai = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
    ]

    anthropic = [
        *TALK,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "call_1", "name": "find", "input": {"city": "Bern"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "12"}]},
    ]
    first = post(server, CHAT, messages=openai, tools=[OPENAI_TOOL], reasoning_effort="none").json()
    assert first["choices"][0]["finish_reason"] == "stop"

    second = post(server, MESSAGES, messages=anthropic, tools=[ANTHROPIC_TOOL]).json()
    assert second["stop_reason"] == "end_turn"
    assert player.seen[-1].prompt.tolist() == player.seen[-2].prompt.tolist()
    prompt = TOKENIZER.decode(player.seen[-1].prompt.tolist(), skip_special_tokens=False)
    assert '{"name": "find", "arguments": {"city": "Bern"}}' in prompt and "<tool_response>\n12\n" in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n"), "reasoning is off"


def test_thinking_is_switched_by_each_of_its_fields(server_and_player: tuple[Server, ScriptedPlayer]) -> None:
    server, player = server_and_player
    player.play = reply("12.<|im_end|>")
    switches: list[tuple[str, dict[str, Any], bool]] = [
        (CHAT, {}, True),
        (CHAT, {"enable_thinking": False}, False),
        (CHAT, {"enable_thinking": True, "unknown": None}, True),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        (CHAT, {"reasoning_effort": "none"}, False),
        (MESSAGES, {}, False),
        (MESSAGES, {"enable_thinking": True}, True),
        (MESSAGES, {"chat_template_kwargs": {"enable_thinking": True}}, True),
        (MESSAGES, {"thinking": {"type": "enabled"}}, True),
    ]

    for path, fields, thinks in switches:
        response = post(server, path, messages=TALK, **fields)
        assert response.status_code == HTTPStatus.OK, response.text
        prompt = TOKENIZER.decode(player.seen[-1].prompt.tolist(), skip_special_tokens=False)
        assert prompt.endswith("<think>\n\n</think>\n\n") != thinks, (path, fields)


def test_seed_of_minus_one_is_random(server_and_player: tuple[Server, ScriptedPlayer]) -> None:
    server, player = server_and_player
    player.play = reply("12.")
    for seed in (-1, -1, None, 5):
        assert post(server, COMPLETIONS, prompt="x", seed=seed).status_code == HTTPStatus.OK
    *drawn, fixed = [request.params.seed for request in player.seen[-4:]]
    assert len({*drawn, -1}) == 4 and fixed == 5


def test_reply_ends_at_the_end_of_sequence_of_the_tokenizer(server_and_player: tuple[Server, ScriptedPlayer]) -> None:
    server, player = server_and_player
    player.play = reply("12.")
    end = TOKENIZER.token_to_id("<|im_end|>")
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": TALK}), (MESSAGES, {"messages": TALK})):
        assert post(server, path, **prompt).status_code == HTTPStatus.OK
        assert player.seen[-1].params.stop_token_ids == (end,)
    assert post(server, COMPLETIONS, prompt="x", ignore_eos=True).status_code == HTTPStatus.OK
    assert player.seen[-1].params.stop_token_ids == ()


def test_anthropic_client_gets_blocks(server_and_player: tuple[Server, ScriptedPlayer]) -> None:
    server, player = server_and_player
    player.play = reply(REPLY)
    body = {"messages": TALK, "tools": [ANTHROPIC_TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    made = post(server, MESSAGES, **body).json()
    assert made["stop_reason"] == "tool_use" and made["usage"]["cache_read_input_tokens"] == 2
    thinking, text, call = made["content"]
    assert (thinking["type"], thinking["thinking"], thinking["signature"]) == ("thinking", "I look.", "unsigned")
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "find", {"city": "Bern"})

    events = stream_events(server, MESSAGES, **body)
    opened = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert opened == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "I look."
    assert [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"] == ["unsigned"]
    assert "".join(delta.get("text", "") for delta in deltas) == "Let me see."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"city": "Bern"}
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2]


def test_client_can_ask_for_one_call_per_message(server_and_player: tuple[Server, ScriptedPlayer]) -> None:
    server, player = server_and_player
    player.play = reply(f"{CALL}\n{CALL}<|im_end|>")
    body = {"messages": TALK, "tools": [OPENAI_TOOL]}
    assert len(post(server, CHAT, **body).json()["choices"][0]["message"]["tool_calls"]) == 2
    choice = post(server, CHAT, **body, parallel_tool_calls=False).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"

    one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    events = stream_events(server, MESSAGES, messages=TALK, tools=[ANTHROPIC_TOOL], **one)
    opened = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert opened == ["tool_use"] and events[-2]["delta"]["stop_reason"] == "tool_use"


def test_calls_are_text_without_tools_and_reasoning_on_request(
    server_and_player: tuple[Server, ScriptedPlayer],
) -> None:
    server, player = server_and_player
    player.play = reply(REPLY)
    choice = post(server, CHAT, messages=TALK, separate_reasoning=False).json()["choices"][0]
    assert choice["message"]["content"] == REPLY.removesuffix("<|im_end|>") and choice["finish_reason"] == "stop"
    none = post(server, CHAT, messages=TALK, tools=[OPENAI_TOOL], tool_choice="none").json()["choices"][0]
    assert CALL in none["message"]["content"] and "tool_calls" not in none["message"]


TEXT = "Natalia sold 48 clips to her friends."
TOKENS = TOKENIZER.encode(TEXT).ids


def test_engine_that_starts_again_repeats_nothing(server_and_player: tuple[Server, ScriptedPlayer]) -> None:
    server, player = server_and_player

    def play(store: Store, request_id: RequestId, request: requests.Sample) -> results.Result:
        for start, end in ((0, 2), (2, 5), (0, 4), (4, 7), (9, 10)):  # two runs, then a missing slice
            put(store, request_id, start, TOKENS[start:end])
        return output(TOKENS)

    player.play = play
    events = stream_events(server, COMPLETIONS, prompt="x", return_token_ids=True, logprobs=0)
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["token_ids"] for choice in choices][:3] == [TOKENS[0:2], TOKENS[2:5], TOKENS[5:7]]
    assert [token for choice in choices for token in choice["token_ids"]] == TOKENS
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == len(TOKENS)


@pytest.mark.parametrize("changed", ["new tokens", "result", "shorter result"])
def test_sample_that_changed_ends_the_stream_with_an_error(
    server_and_player: tuple[Server, ScriptedPlayer], changed: str
) -> None:
    server, player = server_and_player

    def play(store: Store, request_id: RequestId, request: requests.Sample) -> results.Result:
        put(store, request_id, 0, TOKENS[:4])
        if changed == "new tokens":
            put(store, request_id, 0, [9, 9])
        return output(TOKENS[:2] if changed == "shorter result" else [9, *TOKENS[1:]])

    player.play = play
    *_, last = stream_events(server, COMPLETIONS, prompt="x")
    assert "sampled different tokens" in last["error"]["message"] and last["error"]["type"] == "server_error"


def test_failure_has_the_form_of_each_api(server_and_player: tuple[Server, ScriptedPlayer]) -> None:
    server, player = server_and_player
    player.play = lambda *_: results.Failure(message="out of memory", category=ErrorCategory.SERVER)
    response = post(server, CHAT, messages=TALK)
    assert response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert response.json()["error"] == {"message": "out of memory", "type": "server_error", "param": None, "code": None}
    assert post(server, MESSAGES, messages=TALK).json()["error"] == {"type": "api_error", "message": "out of memory"}
    *_, last = stream_events(server, MESSAGES, messages=TALK)
    assert last == {"type": "error", "error": {"type": "api_error", "message": "out of memory"}}


def test_full_queue_is_reported_with_retry_after(server_and_player: tuple[Server, ScriptedPlayer]) -> None:
    server, player = server_and_player

    def publish(load: engine_state.SampleLoad | None) -> None:
        def work(tx: Any) -> None:
            row = engine_state.get(tx)
            assert row is not None
            row.load = None if load is None else asdict(load)

        player.store.write(work)
        time.sleep(0.3)  # give the API time to read the load

    publish(engine_state.SampleLoad(position=0, num_bytes=10**6, max_bytes=10**6, by_owner={"local": 10**6}))
    try:
        for path, kind in ((CHAT, "rate_limit_error"), (MESSAGES, "rate_limit_error")):
            for stream in (False, True):
                response = post(server, path, messages=TALK, stream=stream)
                assert response.status_code == HTTPStatus.TOO_MANY_REQUESTS, response.text
                assert int(response.headers["retry-after"]) > 0 and response.json()["error"]["type"] == kind
    finally:
        publish(None)


@pytest.mark.parametrize("stream", [False, True])
def test_running_call_is_not_refused_when_a_quota_is_used_up(
    server_and_player: tuple[Server, ScriptedPlayer], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    server, player = server_and_player
    find_wait_reason, found = engine_state.find_wait_reason, list[str | None]()

    def find(tx: Session, request_id: RequestId, among: Collection[Pause]) -> str | None:
        found.append(find_wait_reason(tx, request_id, among))
        return found[-1]

    monkeypatch.setattr(engine_state, "find_wait_reason", find)
    monkeypatch.setattr("skyrl_tx.apps.chat.generation._CHECK_QUOTA_EVERY_S", 0.1)
    monkeypatch.setattr("skyrl_tx.server.engine_status._HEALTH_MAX_AGE_S", 0.0)

    def pause(tx: Session, *new: Pause) -> None:
        row = engine_state.get(tx)
        assert row is not None
        row.pauses = [asdict(pause) for pause in new] or None

    def play(store: Store, request_id: RequestId, request: requests.Sample) -> results.Result:
        used_up = Pause(subject_kind="owner", subject="local", limit="sample_tokens_per_day", reason="used up")
        store.write(lambda tx: futures.count_delivery_attempt(tx, [request_id], is_alone=False))
        store.write(lambda tx: pause(tx, used_up))
        until(lambda: found)
        return output(TOKENS)

    player.play = play
    try:
        response = post(server, COMPLETIONS, prompt="x", stream=stream)
    finally:
        player.store.write(pause)
    assert response.status_code == HTTPStatus.OK and TEXT in response.text
    assert found == [None], "the call was checked once, and it was running"

    player.play = reply("12.")
    assert post(server, COMPLETIONS, prompt="x").status_code == HTTPStatus.OK, "the pause is over"


def test_client_that_leaves_before_the_first_token_cancels_its_stream(
    server_and_player: tuple[Server, ScriptedPlayer],
) -> None:
    server, player = server_and_player
    cancelled: list[RequestId] = []

    def play(store: Store, request_id: RequestId, request: requests.Sample) -> results.Result:
        until(lambda: store.read(lambda tx: futures.get_state(tx, request_id, None)).status == "failed")
        cancelled.append(request_id)
        return output(TOKENS)

    player.play = play
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(COMPLETIONS, json={"model": "tiny", "prompt": "x", "stream": True}, timeout=0.5)
    until(lambda: cancelled, within_s=60.0)


def test_gpt_oss_writes_its_channels_with_special_tokens(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|pad|>"])
    tokenizer.save(str(model / "tokenizer.json"))
    text = (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.find "
        '<|constrain|>json<|message|>{"city": "Bern"}<|pad|>'
    )

    settings = ApiSettings(
        port=0,
        data_dir=tmp_path / "data",
        base_model=str(model),
        served_model_name="tiny",
        chat_template=TEMPLATE.with_name("gpt_oss.jinja"),
    )
    with live_api(settings) as server, run_player(settings.data_dir) as player:
        until(lambda: server.client.get("/api/v1/healthz").status_code == HTTPStatus.OK)
        player.play = lambda *_: output(tokenizer.encode(text).ids)
        body = {"messages": TALK, "tools": [ANTHROPIC_TOOL], "output_config": {"effort": "high"}}
        thinking, call = post(server, MESSAGES, **body).json()["content"]
        assert (thinking["thinking"], call["name"], call["input"]) == ("I look.", "find", {"city": "Bern"})
        assert "Reasoning: high" in tokenizer.decode(player.seen[-1].prompt.tolist())

        message = post(server, CHAT, messages=TALK, tools=[OPENAI_TOOL]).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == (None, "I look.")
        assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}'
        completion = post(server, COMPLETIONS, prompt="x").json()["choices"][0]["text"]
        assert completion.startswith("analysisI look.assistant"), "completions have no special tokens"


def test_engine_that_is_away_is_reported(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, data_dir=tmp_path / "data", base_model=str(write_tiny_model(tmp_path / "model")))
    with live_api(settings) as server:
        body = {"model": settings.base_model, "messages": TALK, "max_tokens": 2}
        for path, status in ((CHAT, HTTPStatus.SERVICE_UNAVAILABLE), (MESSAGES, 529)):
            response = server.client.post(path, json=body)
            assert response.status_code == status and int(response.headers["retry-after"]) > 0
            assert "engine has not started" in response.json()["error"]["message"]


def test_shutdown_ends_streams_with_an_error(tmp_path: Path) -> None:
    """Uses uvicorn's signal handler, which sse-starlette wraps.

    The next server of the process can stream again.
    """
    model = write_tiny_model(tmp_path / "model")
    for name in ("first", "second"):
        settings = ApiSettings(port=0, data_dir=tmp_path / name, base_model=str(model), served_model_name="tiny")
        with live_api(settings) as server, run_player(settings.data_dir) as player:
            until(lambda server=server: server.client.get("/api/v1/healthz").status_code == HTTPStatus.OK)
            is_over = threading.Event()

            def play(
                store: Store, request_id: RequestId, request: requests.Sample, is_over: threading.Event = is_over
            ) -> results.Result:
                put(store, request_id, 0, TOKENS[:4])
                is_over.wait(30)
                return output(TOKENS)

            player.play = play
            body = {"model": "tiny", "prompt": "x", "max_tokens": 99, "stream": True}
            with server.client.stream("POST", COMPLETIONS, json=body) as response:
                lines = response.iter_lines()
                assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
                server.api.handle_exit(signal.SIGTERM, None)
                rest = [line for line in lines if line]
            is_over.set()
            assert (
                rest[-1] == "data: [DONE]"
                and "shutting down" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
            )
