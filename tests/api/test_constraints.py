"""Constrained decoding over HTTP: the text of a reply has the form that the client asks for."""

import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import jsonschema
import pytest

from tests.api.test_chat import CHAT, COMPLETIONS, MESSAGES, TALK, answer, chat_text, post, stream_events
from tests.support.live_stack import LiveStack, live_stack

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
FUNCTION = {"name": "find", "description": "Find a thing", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "other"}}]
ANTHROPIC_TOOLS = [{"name": "find", "input_schema": SCHEMA}, {"name": "other", "input_schema": {"type": "object"}}]
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
MAX_TOKENS = 80


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack(
        "fake", tmp_path_factory.mktemp("stack"), has_tokenizer=True, constrains=True, tool_parser="hermes"
    ) as stack:
        yield stack


def chat(stack: LiveStack, **body: Any) -> dict[str, Any]:
    return answer(stack, CHAT, messages=TALK, **{"max_tokens": MAX_TOKENS, **NO_THINKING, **body})


def complete(stack: LiveStack, **body: Any) -> dict[str, Any]:
    return answer(stack, COMPLETIONS, prompt="Hello", **{"max_tokens": MAX_TOKENS, **body})


def refuse(stack: LiveStack, path: str, **body: Any) -> dict[str, Any]:
    response = post(stack, path, **body)
    assert response.status_code == HTTPStatus.BAD_REQUEST, response.text
    return response.json()["error"]


def test_json_schema_output_is_valid_for_every_sample(stack: LiveStack) -> None:
    made = chat(stack, response_format=JSON_SCHEMA, n=4, temperature=1.5)
    for choice in made["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_a_stream_has_the_same_text(stack: LiveStack) -> None:
    whole = chat(stack, response_format=JSON_SCHEMA)["choices"][0]["message"]["content"]
    events = stream_events(
        stack, CHAT, messages=TALK, max_tokens=MAX_TOKENS, response_format=JSON_SCHEMA, **NO_THINKING
    )
    assert chat_text(events) == whole


def test_json_object_output_is_an_object(stack: LiveStack) -> None:
    made = chat(stack, response_format={"type": "json_object"}, max_tokens=12)["choices"][0]
    assert made["message"]["content"].lstrip().startswith("{")
    assert made["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    "outputs, pattern",
    [
        ({"regex": "[0-9]{3}-[ab]{2}"}, "[0-9]{3}-[ab]{2}"),
        ({"choice": ["yes", 'no "way"\n']}, 'yes|no "way"\n'),
        ({"grammar": 'root ::= item ("," item)?\nitem ::= "x" [0-9]'}, "x[0-9](,x[0-9])?"),
        ({"grammar": 'start: "a" /[0-9]{2}/ B?\nB: "b"'}, "a[0-9]{2}b?"),
        ({"json": json.dumps({"enum": [1, 22]})}, "1|22"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_structured_outputs_match_in_chat_and_completions(
    stack: LiveStack, outputs: dict[str, Any], pattern: str, seed: int
) -> None:
    for choice in chat(stack, structured_outputs=outputs, seed=seed, n=2)["choices"]:
        assert re.fullmatch(pattern, choice["message"]["content"]), choice
        assert choice["finish_reason"] == "stop"
    for choice in complete(stack, structured_outputs=outputs, seed=seed)["choices"]:
        assert re.fullmatch(pattern, choice["text"]), choice


def test_a_sample_that_is_too_long_finishes_with_length(stack: LiveStack) -> None:
    made = complete(stack, structured_outputs={"regex": "(ab){40}"}, max_tokens=5)["choices"][0]
    assert made["finish_reason"] == "length"
    assert "(ab)" not in made["text"] and made["text"] != "ab" * 40


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_forced_tool_call_has_valid_arguments(stack: LiveStack, choice: Any) -> None:
    tools = TOOLS if choice != "required" else TOOLS[:1]
    made = chat(stack, tools=tools, tool_choice=choice, parallel_tool_calls=False, n=3)
    for part in made["choices"]:
        [call] = part["message"]["tool_calls"]
        assert call["function"]["name"] == "find"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert part["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "find"}]
)
def test_anthropic_clients_can_force_a_call(stack: LiveStack, choice: dict[str, Any]) -> None:
    tools = ANTHROPIC_TOOLS if choice["type"] == "tool" else ANTHROPIC_TOOLS[:1]
    made = answer(stack, MESSAGES, messages=TALK, tools=tools, tool_choice=choice, max_tokens=MAX_TOKENS)
    [block] = made["content"]
    assert (block["type"], block["name"], made["stop_reason"]) == ("tool_use", "find", "tool_use")
    jsonschema.validate(block["input"], SCHEMA)


def test_anthropic_output_format_is_enforced(stack: LiveStack) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    made = answer(stack, MESSAGES, messages=TALK, output_config=form, max_tokens=MAX_TOKENS)
    jsonschema.validate(json.loads(made["content"][0]["text"]), SCHEMA)


def test_equal_requests_give_equal_text_and_a_constraint_changes_no_other_request(stack: LiveStack) -> None:
    free = complete(stack, seed=7)["choices"][0]["text"]
    body: dict[str, Any] = {"structured_outputs": {"regex": "[a-z]{5,9}"}, "seed": 7, "n": 3}
    assert complete(stack, **body)["choices"] == complete(stack, **body)["choices"]
    assert complete(stack, seed=7)["choices"][0]["text"] == free


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}
FORMAT = "response_format.json_schema.schema"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown keyword": ({"not": {"type": "string"}}, FORMAT, 'the keywords ["not"]'),
    "ignored keyword": (
        {"properties": {"a": {"type": "string", "nullable": True}}},
        FORMAT,
        ".a.nullable: this server",
    ),
    "options": ({"x-guidance": {"lenient": True}}, FORMAT, "x-guidance: this server"),
    "remote": ({"$ref": "https://example.com/a.json"}, FORMAT, "a.json"),
    "missing": ({"$ref": "#/$defs/none"}, FORMAT, "does not exist"),
    "no value": ({"type": "integer", "minimum": 3, "maximum": 1}, FORMAT, "minimum (3) is greater"),
    "bad type": ({"type": "text"}, FORMAT, "Invalid type: text"),
    "bad pattern": ({"type": "string", "pattern": "("}, FORMAT, "unclosed group"),
    "lookahead": ({"type": "string", "pattern": "(?=a)b"}, FORMAT, "look-around"),
    "deep": (DEEP, FORMAT, "nested deeper"),
    "large": ({"enum": ["a" * 70_000]}, FORMAT, "must have at most 65536"),
    "patterns": ({"type": "string", "pattern": "a" * 9000}, FORMAT, "patterns have 9000"),
    "exponential": (
        {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in range(4)]} for n in range(12)]},
        FORMAT,
        "too large",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused(stack: LiveStack, name: str) -> None:
    schema, field, message = REFUSED[name]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    error = refuse(stack, CHAT, messages=TALK, response_format=form)
    assert error["param"] == field
    assert error["message"].startswith(field) and message in error["message"], error


@pytest.mark.parametrize(
    "path, body, param",
    {
        "form": (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        "no schema": (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        "regex": (COMPLETIONS, {"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        "long regex": (COMPLETIONS, {"structured_outputs": {"regex": "a" * 9000}}, "structured_outputs.regex"),
        "no choice": (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        "empty choice": (COMPLETIONS, {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        "grammar": (COMPLETIONS, {"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar"),
        "nested": (
            COMPLETIONS,
            {"structured_outputs": {"grammar": f"root ::= {'(' * 9000}"}},
            "structured_outputs.grammar",
        ),
        "token": (
            COMPLETIONS,
            {"structured_outputs": {"grammar": "start: <[5]> <|im_end|>"}},
            "structured_outputs.grammar",
        ),
        "no such token of the bias": (COMPLETIONS, {"logit_bias": {"99999999": 1}}, "logit_bias"),
        "no JSON": (COMPLETIONS, {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        "list": (COMPLETIONS, {"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        "two": (COMPLETIONS, {"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.regex"),
        "unknown": (COMPLETIONS, {"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        "endless": (CHAT, {"response_format": JSON_SCHEMA, "ignore_eos": True}, "ignore_eos"),
        "no tools": (CHAT, {"tool_choice": "required"}, "tool_choice"),
        "no such tool": (
            CHAT,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "seek"}}},
            "tool_choice",
        ),
        "odd choice": (CHAT, {"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
        "both": (CHAT, {"tools": TOOLS, "tool_choice": "required", "response_format": JSON_SCHEMA}, "response_format"),
        "tool schema": (
            CHAT,
            {"tools": [{"function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
    }.values(),
)
def test_a_wrong_field_is_named(stack: LiveStack, path: str, body: dict[str, Any], param: str) -> None:
    prompt: dict[str, Any] = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": TALK}
    assert refuse(stack, path, **prompt, **body)["param"] == param


@pytest.mark.parametrize(
    ("limits", "message"),
    [({"initial_lexer_fuel": 1}, "cannot be used with this model"), ({"max_lexer_states": 30}, "too complex")],
    ids=["compile", "sample"],
)
def test_a_field_that_fails_in_the_engine_is_named(
    stack: LiveStack, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], message: str
) -> None:
    from llguidance import LLParserLimits  # not on import of this module, see `check_imports`

    small = LLParserLimits(**limits, verbose_errors=False)
    monkeypatch.setattr("skyrl_tx.grammars.make_limits", lambda: small)
    body = {"structured_outputs": {"regex": "[ab]*a[ab]{14}c"}, "max_tokens": 80}
    for path, prompt in ((COMPLETIONS, {"prompt": "Hello"}), (CHAT, {"messages": TALK, **NO_THINKING})):
        error = refuse(stack, path, **prompt, **body)
        assert error["param"] == "structured_outputs" and message in error["message"], error
