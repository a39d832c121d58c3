"""Text that a database refuses, or that is very long, in every string and key of a request.

The server refuses it or executes the request, on both kinds of databases, and its engine keeps running.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import httpx
import pytest

from skyrl_tx.server.submission import wire_pb2
from tests.support.live_api import Server, adapters_in_process
from tests.support.live_stack import PUBLIC_NAME, live_stack

Json = dict[str, Any]
MAX_MESSAGE = 2100
REFUSED = {"zero": "a\0b", "half": "a\ud800"}
"""Text that PostgreSQL or the driver of SQLite refuses."""
ACCEPTED = {"long": "x" * 100_000, "controls": "\x1b]0;a\x07\r\n\u202e", "astral": "\U0001f600"}
TOKENS = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3], "format": "t"}]}
SPAN = {"sampled_tokens": {"sequence_id": "s", "offset": 0, "length": 3}}
TARGETS = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
DATUM = {"model_input": TOKENS, "loss_fn_inputs": {"target_tokens": TARGETS}, "loss_fn_input_spans": [SPAN]}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy", "loss_fn_config": {"beta": 1.0, "text": "b"}}
SAMPLING = {"max_tokens": 2, "stop": ["e"], "seed": 1}
SCHEMA = {"type": "object", "properties": {"k": {"type": "string", "enum": ["e"]}}, "required": ["k"]}
CONTROLS = {
    **{"model": PUBLIC_NAME, "max_tokens": 8, "seed": 1, "min_p": 0.1, "min_tokens": 1, "presence_penalty": 0.5},
    **{"frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"7": 1.0}, "stop": ["e"]},
}
CALLS: Mapping[str, Json] = {
    "/api/v1/create_session": {
        "tags": ["t"],
        "user_metadata": {"k": "v"},
        "sdk_version": "1",
        "project_id": "p",
        "display_name": "d",
    },
    "/api/v1/session_heartbeat": {"session_id": "<session>"},
    "/api/v1/sessions/search": {"session_id": "s", "project_ids": ["p"], "user_metadata": {"k": "v"}},
    "/api/v1/checkpoints/search": {
        "project_ids": ["p"],
        "user_metadata": {"k": "v"},
        "base_models": ["m"],
        "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_checkpoint_uuid": "tinker://m/weights/a"},
    },
    "/api/v1/create_model": {
        "session_id": "<session>",
        "model_seq_id": 1,
        "base_model": PUBLIC_NAME,
        "lora_config": {"rank": 2},
        "user_metadata": {"k": "v"},
    },
    "/api/v1/forward_backward": {"model_id": "<model>", "forward_backward_input": PASS},
    "/api/v1/optim_step": {"model_id": "<model>", "adam_params": {"learning_rate": 1e-3}},
    "/api/v1/save_weights": {"model_id": "<model>", "path": "a", "overwrite": True, "user_metadata": {"k": "v"}},
    "/api/v1/save_weights_external": {"model_id": "<model>", "path": "b", "age_encryption_recipients": ["r"]},
    "/api/v1/load_weights": {"model_id": "<model>", "path": "tinker://m/weights/a", "weights_access_token": "t"},
    "/api/v1/external_weights_upload_start": {
        "base_model": PUBLIC_NAME,
        "lora_config": {"rank": 2},
        "destination_project_id": "p",
    },
    "/api/v1/external_weights_upload_finish": {"upload_id": "u"},
    "/api/v1/create_sampling_session": {
        "session_id": "<session>",
        "sampling_session_seq_id": 9,
        "base_model": PUBLIC_NAME,
        "model_path": "tinker://m/sampler_weights/a",
    },
    "/api/v1/asample": {"sampling_session_id": "<sampler>", "prompt": TOKENS, "sampling_params": SAMPLING},
    "/api/v1/retrieve_future": {"request_id": "r"},
    "/api/v1/retrieve_futures": {"target": {"type": "sampling_session", "sampling_session_id": "s"}, "timeout": 0.0},
    "/api/v1/cancel_future": {"request_id": "r"},
    "/api/v1/training_runs/<model>/metrics": {"points": [{"step": 1, "values": {"m": 1.0}}]},
    "/v1/completions": {**CONTROLS, "prompt": "p", "structured_outputs": {"grammar": 'root ::= "a"'}},
    "/v1/chat/completions": {
        **CONTROLS,
        "messages": [{"role": "user", "content": "c"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "tool_choice": "auto",
    },
    "/oai/api/v1/chat/completions": {  # the same route with another prefix, here with a call that is forced
        **{"model": PUBLIC_NAME, "max_tokens": 8, "messages": [{"role": "user", "content": "c"}]},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "/anthropic/api/v1/messages": {
        **{"model": PUBLIC_NAME, "max_tokens": 8, "messages": [{"role": "user", "content": "c"}]},
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
    },
    "/trackio/api/bulk_log": {
        "kwargs": {"logs": [{"project": "p", "run": "n", "metrics": {"m": 1.0}, "step": 1, "run_id": "r"}]}
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """A call with one text in one place of its body."""

    path: str
    body: Json

    def send(self, server: Server, ids: Mapping[str, str]) -> httpx.Response:
        text, path = json.dumps(self.body), self.path
        for name, known in ids.items():
            text, path = text.replace(f"<{name}>", known), path.replace(f"<{name}>", known)
        return server.client.post(path, content=text)


def replace_texts(value: Any, text: str) -> Iterator[Any]:
    """Yield copies of a value, each with another string or key replaced by `text`."""
    if isinstance(value, str):
        yield text
    elif isinstance(value, list):
        for index, part in enumerate(cast(list[Any], value)):
            for changed in replace_texts(part, text):
                yield [*value[:index], changed, *value[index + 1 :]]
    elif isinstance(value, dict):
        yield {**value, text: 1}
        for name, part in cast(Json, value).items():
            for changed in replace_texts(part, text):
                yield {**value, name: changed}


def make_cases(text: str) -> list[Case]:
    cases = [Case(path, body) for path, whole in CALLS.items() for body in replace_texts(whole, text)]
    for number, case in enumerate(cases, start=1):
        if "model_seq_id" in case.body:
            case.body["model_seq_id"] = number
    return cases


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engine executes requests. An engine that ends fails the tests."""
    url = None if request.param == "sqlite" else request.getfixturevalue("postgresql").new_database()
    directory = tmp_path_factory.mktemp(request.param)
    with (
        adapters_in_process(),
        live_stack(
            "fake",
            directory,
            retrieve_hold_s=0.1,
            database_url=url,
            has_tokenizer=True,
            constrains=True,
            tool_parser="hermes",
        ) as stack,
    ):
        yield stack.server


@pytest.fixture
def ids(server: Server) -> dict[str, str]:
    session = server.session()
    sampler = server.post(
        "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=PUBLIC_NAME
    )
    return {"session": session, "model": server.model(session), "sampler": sampler.json()["sampling_session_id"]}


def collect_refusals(server: Server, answers: list[httpx.Response]) -> list[str]:
    """Return the errors of the responses and of their futures. Every result could be stored."""
    refusals: list[str] = []
    for answer in answers:
        content = answer.json()
        assert answer.status_code < 500, answer.text
        if answer.status_code == 200 and "request_id" in content and "sample" not in content:
            content = server.result(answer)
        refusal = content.get("detail") or content.get("error")
        if isinstance(refusal, dict) and "param" in refusal:  # of the OpenAI endpoints
            assert len(str(refusal["param"])) < 250 and str(refusal["param"]).isprintable()
            refusal = refusal["message"]
        assert "internal error" not in str(refusal) and len(str(refusal)) < MAX_MESSAGE
        refusals.append(str(refusal))
    return refusals


def check_alive(server: Server, ids: Mapping[str, str]) -> None:
    """Train and save as usual."""
    good = {
        "data": [{"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": {"target_tokens": TARGETS}}]
    }
    model = {"model_id": server.model(ids["session"], 99)}
    passed = server.post("forward_backward", **model, forward_backward_input={**good, "loss_fn": "cross_entropy"})
    stepped = server.post("optim_step", **model, adam_params={"learning_rate": 1e-3})
    assert "metrics" in server.result(passed) and "error" not in server.result(stepped)


@pytest.mark.parametrize("name", ["zero", pytest.param("half", marks=pytest.mark.slow)])
def test_refused_text_is_named_in_every_place(server: Server, ids: dict[str, str], name: str) -> None:
    cases = make_cases(REFUSED[name])
    refusals = collect_refusals(server, [case.send(server, ids) for case in cases])
    for case, refusal in zip(cases, refusals, strict=True):
        is_named = "U+0000" in refusal or "does not exist" in refusal
        assert is_named or case.path.startswith("/trackio/"), (case.path, case.body, refusal)  # trackio ignores entries
    check_alive(server, ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTED)
def test_other_text_is_executed_or_refused(server: Server, ids: dict[str, str], name: str) -> None:
    collect_refusals(server, [case.send(server, ids) for case in make_cases(ACCEPTED[name])])
    check_alive(server, ids)


DEEP: Json = json.loads('{"a":[' * 400 + "1" + "]}" * 400)
NAMED: Json = {"type": "function", "function": {"name": "f"}}
TOOL_CHOICES: Mapping[str, object] = {
    "no such function": {"type": "function", "function": {"name": "g"}},
    "huge name": {"type": "function", "function": {"name": "f" * 2**20}},
    "huge type": {"type": "x" * 2**20, "function": {"name": "f"}},
    "empty name": {"type": "function", "function": {"name": ""}},
    "name with a line break": {"type": "function", "function": {"name": "f\n"}},
    "number as name": {"type": "function", "function": {"name": 5}},
    "list as name": {"type": "function", "function": {"name": ["f"]}},
    "no name": {"type": "function", "function": {}},
    "nested choice": {"type": "function", "function": NAMED},
    "nested deeply": {"type": "function", "function": {"name": DEEP}},
    "no type": {"function": {"name": "f"}},
    "form of another API": {"type": "tool", "name": "f"},
    "empty object": {},
    "list": [NAMED],
    "name alone": "f",
    "huge word": "required" * 2**17,
    "other case": "Required",
    "empty word": "",
    "number": 1,
    "zero": 0,
    "false": False,
    "true": True,
    "numbers": {"type": "function", "function": {"name": list(range(10_000))}},
}


@pytest.mark.parametrize("name", TOOL_CHOICES)
def test_a_hostile_tool_choice_is_refused_by_name(server: Server, name: str) -> None:
    body = {**CALLS["/oai/api/v1/chat/completions"], "tool_choice": TOOL_CHOICES[name]}
    check_refusal(server.client.post("/v1/chat/completions", json=body), "tool_choice")


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"type": "tool", "name": "g"}, "tool_choice"),
        ({"type": "tool", "name": "f" * 2**20}, "tool_choice"),
        ({"type": "tool"}, "tool_choice"),
        ({"type": "tool", "name": ""}, "tool_choice"),
        ({"type": "tool", "name": 5}, "tool_choice.name"),
        ({"type": "tool", "name": DEEP}, "tool_choice.name"),
        ({"type": "x" * 2**20}, "tool_choice"),
        ({"type": DEEP}, "tool_choice.type"),
        ({}, "tool_choice.type"),
        ([{"type": "any"}], "tool_choice"),
        ("any", "tool_choice"),
        (False, "tool_choice"),
        (0, "tool_choice"),
        (NAMED, "tool_choice"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_hostile_tool_choice_of_anthropic_clients_is_refused_by_name(
    server: Server, choice: object, field: str
) -> None:
    path = "/anthropic/api/v1/messages"
    check_refusal(server.client.post(path, json={**CALLS[path], "tool_choice": choice}), field)


def check_refusal(answer: httpx.Response, field: str) -> None:
    """Check that a request was refused with a short message that begins with a field."""
    error = answer.json()["error"]
    assert answer.status_code in (400, 422), answer.text
    assert error["message"].startswith(field) and len(error["message"]) < 500, error
    assert error.get("param", field) == field


ZERO = REFUSED["zero"]
TENSOR: Json = {"dense": bytes(8), "dtype": wire_pb2.DTYPE_INT64, "shape": [1]}
CHUNK: Json = {"encoded_text": {"tokens": bytes(4)}}


def datum(inputs: Json | None = None, **spans: Json) -> Json:
    return {"data": [{"model_input": [CHUNK], "loss_fn_inputs": {"target_tokens": TENSOR, **(inputs or {})}, **spans}]}


@pytest.mark.parametrize(
    "parts",
    [
        {"loss_fn": ZERO},
        {"loss_fn_config": {ZERO: 1.0}},
        {"loss_fn_config_v2": {ZERO: {"number": 1.0}}},
        {"loss_fn_config_v2": {"beta": {"text": ZERO}}},
        datum({ZERO: TENSOR}),
        datum(loss_fn_input_spans=[{"sampled_tokens": {"sequence_id": ZERO, "length": 1}}]),
        datum(loss_fn_input_spans=[{"prompt_tokens": {"sequence_id": ZERO, "length": 1}}]),
    ],
    ids=["loss", "key", "key v2", "text", "input", "sampled", "prompt"],
)
def test_refused_text_in_protobuf_is_named(server: Server, ids: dict[str, str], parts: Json) -> None:
    whole = {"model_id": ids["model"], "loss_fn": "cross_entropy", **datum(), **parts}
    content = wire_pb2.ForwardBackwardRequest(**whole).SerializeToString()
    headers = {"content-type": "application/x-protobuf"}
    answer = server.client.post("/api/v1/forward_backward", content=content, headers=headers)
    assert "U+0000" in str(server.result(answer)["error"])


def test_zero_character_in_an_address_is_refused(server: Server) -> None:
    for address in ("/api/v1/training_runs/a%00b", "/api/v1/logged_runs?project=a%00b", "/runs/%00?tab=x"):
        answer = server.client.get(address)
        assert answer.status_code == 400 and "%00" in answer.json()["detail"], address
    answer = server.client.post("/login", content="key=a%00b", headers={"sec-fetch-site": "same-origin"})
    assert answer.status_code == 400 and "U+0000" in answer.text
