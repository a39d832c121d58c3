"""Reasoning and tool calls are found regardless of how the text is split."""

import json
from itertools import pairwise
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.apps.chat.message import (
    MessageParser,
    ParserName,
    Part,
    ReasoningSplit,
    TextPart,
    ToolCall,
    begins_inside,
    choose_parser,
)

CALL = '{"name": "find", "arguments": {"city": "Zürich", "n": 2}}'
LLAMA = '{"name": "find", "parameters": {"city": "Zürich", "n": 2}}'
ARGUMENTS = {"city": "Zürich", "n": 2}


def parse(text: str, cuts: list[int], *, inside: bool = False, tools: ParserName = "none") -> list[tuple[str, str]]:
    """Parse text that arrives in pieces, and return the parts with adjacent parts of one kind joined."""
    parser = MessageParser(ReasoningSplit(inside=inside), tools)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts: list[Part] = []
    for start, end in pairwise(edges):
        parts += parser.feed(text[start:end])
    parts += parser.feed("", is_last=True)
    joined: list[tuple[str, str]] = []

    for part in parts:
        kind, value = (part.kind, part.text) if isinstance(part, TextPart) else ("call", part.name)
        if isinstance(part, ToolCall):
            assert json.loads(part.arguments) == ARGUMENTS and part.call_id.startswith("call_")
        if joined and joined[-1][0] == kind != "call":
            joined[-1] = kind, joined[-1][1] + value
        else:
            joined.append((kind, value))

    assert parser.has_calls == any(isinstance(part, ToolCall) for part in parts)

    return joined


REASONED = {
    "<think>\nhm, 1 < 2\n</think>\n\nYes.": [("reasoning", "hm, 1 < 2"), ("content", "Yes.")],
    "\n<think></think>Yes.": [("content", "Yes.")],
    "<think>\n\n</think>\n\nYes.": [("content", "Yes.")],
    "<thin is no tag": [("content", "<thin is no tag")],
    "<think>cut off </": [("reasoning", "cut off </")],
    "Yes <think>later</think>": [("content", "Yes <think>later</think>")],
    "": [],
}


@pytest.mark.parametrize("text", REASONED)
@given(cuts=st.lists(st.integers(0, 100), max_size=30))
def test_reasoning_is_split(text: str, cuts: list[int]) -> None:
    assert parse(text, cuts) == REASONED[text]


@given(cuts=st.lists(st.integers(0, 100), max_size=30))
def test_template_may_open_the_reasoning(cuts: list[int]) -> None:
    assert begins_inside("<|im_start|>assistant\n<think>\n") and not begins_inside("<think>\n\n</think>\n\n")
    assert parse("hm\n</think>\n\nYes.", cuts, inside=True) == [("reasoning", "hm"), ("content", "Yes.")]


HERMES = {
    f"<tool_call>\n{CALL}\n</tool_call>": [("call", "find")],
    f"Look:\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\n": [
        *(("content", "Look:"), ("call", "find"), ("call", "find")),
    ],
    f"<think>hm</think>\n\n<tool_call>{CALL}</tool_call>": [("reasoning", "hm"), ("call", "find")],
    "<tool_call>nothing</tool_call>": [("content", "<tool_call>nothing</tool_call>")],
    f"<tool_call>{CALL}": [("call", "find")],
    "<tool_call>{": [("content", "<tool_call>{")],
    "a < b <tool": [("content", "a < b <tool")],
    "plain \n": [("content", "plain \n")],
}


@pytest.mark.parametrize("text", HERMES)
@given(cuts=st.lists(st.integers(0, 200), max_size=30))
def test_calls_of_hermes_and_qwen_are_found(text: str, cuts: list[int]) -> None:
    assert parse(text, cuts, tools="hermes") == HERMES[text]


LLAMA3 = {
    LLAMA: [("call", "find")],
    f"<|python_tag|>{LLAMA}; {LLAMA}": [("call", "find"), ("call", "find")],
    f"\n{LLAMA}": [("call", "find")],
    '{"no": "call"}': [("content", '{"no": "call"}')],
    "{ braces": [("content", "{ braces")],
    f"Look: {LLAMA}": [("content", f"Look: {LLAMA}")],
}


@pytest.mark.parametrize("text", LLAMA3)
@given(cuts=st.lists(st.integers(0, 200), max_size=30))
def test_calls_of_llama3_are_found(text: str, cuts: list[int]) -> None:
    assert parse(text, cuts, tools="llama3") == LLAMA3[text]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("… <tool_call> …", "hermes"),
        ("… <|python_tag|> …", "llama3"),
        ("role == 'ipython'", "llama3"),
        ("plain", "none"),
    ],
)
def test_parser_follows_from_the_template(template: str, name: str) -> None:
    assert choose_parser(template) == name


HOSTILE_ARGUMENTS = {
    "nested lists": '{"a": ' + "[" * 500 + "]" * 500 + "}",
    "nested too deep for the parser": '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
    "brackets": '{"a": ' + "[" * 5000,
    "lone surrogate": '{"a": "\\ud83d"}',
    "lone surrogate in a name": '{"\\udc00": 1}',
    "NaN": '{"a": NaN}',
    "infinity": '{"a": -Infinity}',
    "number above the range": '{"a": 1e999}',
}


@pytest.mark.parametrize("arguments", HOSTILE_ARGUMENTS.values(), ids=HOSTILE_ARGUMENTS)
@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_arguments_that_no_response_can_contain_are_text(form: Literal["hermes", "llama3"], arguments: str) -> None:
    written = f'{{"name": "find", "arguments": {arguments}}}'
    if form == "hermes":
        written = f"<tool_call>{written}</tool_call>"
    parser = MessageParser(None, form)
    parts = parser.feed(written, is_last=True)
    assert not parser.has_calls
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    assert text == written and json.loads(msgspec.json.encode(text)) == written


def test_nested_arguments_are_a_call() -> None:
    arguments = '{"a": ' + "[" * 90 + "1" + "]" * 90 + "}"
    parser = MessageParser(None, "llama3")
    (call,) = parser.feed(f'{{"name": "find", "arguments": {arguments}}}', is_last=True)
    assert isinstance(call, ToolCall) and json.loads(call.arguments) == json.loads(arguments)
