"""Reasoning and tool calls are found regardless of how the text is split."""

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from skyrl_tx.apps.chat.message import FORMATS, MessageParser, Part, TextPart, choose_format, find_prefilled
from skyrl_tx.apps.chat.response_template import ResponseTemplate, TemplateParser
from skyrl_tx.apps.chat.tool_calls import ToolCall
from skyrl_tx.contract.errors import UserError

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "n": {"type": "integer"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    }
]
CALL = '{"name": "find", "arguments": {"city": "Zürich", "n": 2}}'
LLAMA = '{"name": "find", "parameters": {"city": "Zürich", "n": 2}}'
ARGUMENTS = '{"city": "Zürich", "n": 2}'
FOUND = ("call", "find", {"city": "Zürich", "n": 2})


def split_everywhere(text: str) -> Iterator[list[str]]:
    """Yield a text whole, in two pieces with every cut, and in pieces of every small size."""
    yield [text]
    yield from ([text[:cut], text[cut:]] for cut in range(1, len(text)))
    for size in range(1, 8):
        yield [text[start : start + size] for start in range(0, len(text), size)]


def parse(pieces: list[str], form: str = "none", *, opening: str = "", calls: bool = True) -> list[Any]:
    """Parse text that arrives in pieces, and return the parts with adjacent parts of one kind joined."""
    parser = FORMATS[form].create_parser(opening, TOOLS if calls else [], separates_reasoning=True)
    return collect(parser, pieces)


def collect(parser: MessageParser | TemplateParser, pieces: list[str]) -> list[Any]:
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    parts += parser.feed("", is_last=True)

    joined: list[Any] = []
    for part in parts:
        if isinstance(part, ToolCall):
            joined.append(("call", part.name, json.loads(part.arguments)))
        elif joined and joined[-1][0] == part.kind:
            joined[-1] = part.kind, joined[-1][1] + part.text
        else:
            joined.append((part.kind, part.text))
    assert parser.has_calls == any(isinstance(part, ToolCall) for part in parts)
    return joined


REASONED = {
    "<think>\nhm, 1 < 2\n</think>\n\nYes.": [("reasoning", "hm, 1 < 2"), ("content", "Yes.")],
    "\n<think></think>Yes.": [("content", "Yes.")],
    "<think>\n\n</think>\n\nYes.": [("content", "Yes.")],
    "<thin is no tag": [("content", "<thin is no tag")],
    "<think>cut off </": [("reasoning", "cut off </")],
    "Yes <think>later</think>": [("content", "Yes <think>later</think>")],
    "[THINK]hm[/THINK]Yes.": [("reasoning", "hm"), ("content", "Yes.")],
    "": [],
}


@pytest.mark.parametrize("text", REASONED)
def test_reasoning_is_split(text: str) -> None:
    for pieces in split_everywhere(text):
        assert parse(pieces) == REASONED[text]


def test_template_may_open_the_reasoning() -> None:
    opening = find_prefilled(FORMATS["none"], "<|im_start|>assistant\n<think>\n")
    assert opening == "<think>" and find_prefilled(FORMATS["none"], "<think>\n\n</think>\n\n") == ""
    for pieces in split_everywhere("hm\n</think>\n\nYes."):
        assert parse(pieces, opening=opening) == [("reasoning", "hm"), ("content", "Yes.")]


HERMES: dict[str, list[Any]] = {
    f"<tool_call>\n{CALL}\n</tool_call>": [FOUND],
    f"Look:\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\n": [("content", "Look:"), FOUND, FOUND],
    f"<think>hm</think>\n\n<tool_call>{CALL}</tool_call>": [("reasoning", "hm"), FOUND],
    f"<tool_call>{CALL}</tool_call>\nThis is all.": [FOUND, ("content", "This is all.")],
    "<tool_call>nothing</tool_call>": [("content", "<tool_call>nothing</tool_call>")],
    f"<tool_call>{CALL}": [FOUND],
    "<tool_call>{": [("content", "<tool_call>{")],
    "a < b <tool": [("content", "a < b <tool")],
    "plain \n": [("content", "plain \n")],
}
LLAMA3: dict[str, list[Any]] = {
    LLAMA: [FOUND],
    f"<|python_tag|>{LLAMA}; {LLAMA}": [FOUND, FOUND],
    f"\n{LLAMA}": [FOUND],
    '{"no": "call"}': [("content", '{"no": "call"}')],
    "{ braces": [("content", "{ braces")],
    f"Look: {LLAMA}": [("content", f"Look: {LLAMA}")],
}
# Qwen3-Coder, Qwen3.5 and Nemotron 3
XML_CALL = (
    "<function=find>\n<parameter=city>\nZürich\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"
)
QWEN3_CODER: dict[str, list[Any]] = {
    f"<think>\nI look.\n</think>\n\nLook:\n\n<tool_call>\n{XML_CALL}\n<tool_call>\n{XML_CALL}": [
        *(("reasoning", "I look."), ("content", "Look:"), FOUND, FOUND),
    ],
    f"Look:\n{XML_CALL}": [("content", "Look:"), FOUND],
    "<tool_call>\n<function=now>\n</function>\n</tool_call>": [("call", "now", {})],
    "<tool_call>\n<function=find>\n<parameter=city>\n  12\n\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"
    '<parameter=other>\n{"a": [true]}\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n</function>\n</tool_call>': [
        ("call", "find", {"city": "  12\n", "note": None, "other": {"a": [True]}, "flag": True}),
    ],
    "<tool_call>\n<function=find>\n<parameter=city>\nif a</parameter> < b:\n</parameter>\n</function>\n</tool_call>": [
        ("call", "find", {"city": "if a</parameter> < b:"}),
    ],
    "<tool_call>\n<function=find>\n<parameter=city>\nZür": [
        ("content", "<tool_call>\n<function=find>\n<parameter=city>\nZür"),
    ],
}
GLM: dict[str, list[Any]] = {
    "\n<think>I look.</think>\nLook:\n<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>": [
        *(("reasoning", "I look."), ("content", "Look:"), FOUND),
    ],
    # GLM-4.7 has no line breaks
    "<tool_call>find<arg_key>city</arg_key><arg_value>12\n</arg_value></tool_call><tool_call>now</tool_call>": [
        *(("call", "find", {"city": "12\n"}), ("call", "now", {})),
    ],
    "<tool_call>no name</tool_call>": [("content", "<tool_call>no name</tool_call>")],
    "<tool_call>find<arg_key>city</arg_key>": [("content", "<tool_call>find<arg_key>city</arg_key>")],
}
ANALYSIS = "<|channel|>analysis<|message|>I look."
HARMONY: dict[str, list[Any]] = {
    f"{ANALYSIS}<|end|><|start|>assistant<|channel|>commentary to=functions.find "
    f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>": [("reasoning", "I look."), FOUND],
    f"{ANALYSIS}<|end|><|start|>assistant to=functions.find<|channel|>commentary json<|message|>{ARGUMENTS}": [
        *(("reasoning", "I look."), FOUND),
    ],
    f"{ANALYSIS}<|end|><|start|>assistant<|channel|>final<|message|>It is cold. \n<|return|>": [
        *(("reasoning", "I look."), ("content", "It is cold. \n")),
    ],
    f"<|channel|>commentary<|message|>Look:<|end|><|start|>assistant<|channel|>analysis to=functions.find code"
    f"<|message|>{ARGUMENTS}": [("content", "Look:"), FOUND],
    "<|channel|>commentary to=functions.find<|message|>{": [
        ("content", "<|channel|>commentary to=functions.find<|message|>{"),
    ],
    f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{ANALYSIS}<|end|><|start|>assistant"
    "<|channel|>final<|message|>It is cold.": [
        *(("content", "I look."), ("reasoning", "I look."), ("content", "\n\nIt is cold.")),
    ],
    f"{ANALYSIS}<|end|><|start|>assist": [("reasoning", "I look.")],
    ANALYSIS: [("reasoning", "I look.")],
    "no channels\n": [("content", "no channels\n")],
}
FENCED = f"function<｜tool▁sep｜>find\n```json\n{ARGUMENTS}\n```"
DEEPSEEK: dict[str, list[Any]] = {
    f"Look:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{FENCED}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>{FENCED}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>": [("content", "Look:"), FOUND, FOUND],
    # V3.1
    f"I look.</think>Look:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>": [("reasoning", "I look."), ("content", "Look:"), FOUND],
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁call▁end｜>": [
        ("content", "<｜tool▁call▁begin｜>find<｜tool▁call▁end｜>"),
    ],
}
KIMI: dict[str, list[Any]] = {
    "Look:<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_calls_section_end|>": [("content", "Look:"), FOUND, ("call", "now", {})],
}
MISTRAL: dict[str, list[Any]] = {
    f"[TOOL_CALLS] [{CALL}, {CALL}]": [FOUND, FOUND],
    f"[THINK]I look.[/THINK]Look:[TOOL_CALLS]find[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}": [
        *(("reasoning", "I look."), ("content", "Look:"), FOUND, ("call", "now", {})),
    ],
    f"[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{ARGUMENTS}": [FOUND],
    "[TOOL_CALLS]find[ARGS]{": [("content", "[TOOL_CALLS]find[ARGS]{")],
}
DSML_CALL = (
    '<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="city" string="true">Zürich</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
DEEPSEEK_V32: dict[str, list[Any]] = {
    f"I look.</think>Look:\n\n<｜DSML｜function_calls>\n{DSML_CALL}\n{DSML_CALL}\n</｜DSML｜function_calls>": [
        *(("reasoning", "I look."), ("content", "Look:"), FOUND, FOUND),
    ],
    # V4
    f"<think></think><｜DSML｜tool_calls>\n{DSML_CALL}\n</｜DSML｜tool_calls>": [FOUND],
    '<｜DSML｜function_calls><｜DSML｜invoke name="now"></｜DSML｜invoke></｜DSML｜function_calls>': [
        ("call", "now", {})
    ],
    # The schema decides, and otherwise the attribute `string`
    '<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="city" string="false">12</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="true">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="note" string="false">null</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="other" string="true">[1]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="more" string="false">{"a": [true]}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="last"> a\n</b> </｜DSML｜parameter>\n</｜DSML｜invoke>': [
        (
            "call",
            "find",
            {"city": "12", "n": 2, "note": None, "other": "[1]", "more": {"a": [True]}, "last": " a\n</b> "},
        ),
    ],
    # Malformed
    '<｜DSML｜invoke name="find">\n</｜DSML｜in': [("content", '<｜DSML｜invoke name="find">\n</｜DSML｜in')],
    "<｜DSML｜invoke find>\n</｜DSML｜invoke>": [("content", "<｜DSML｜invoke find>\n</｜DSML｜invoke>")],
    '<｜DSML｜invoke name="find"><｜DSML｜parameter string="true">2</｜DSML｜parameter></｜DSML｜invoke>': [
        (
            "content",
            '<｜DSML｜invoke name="find"><｜DSML｜parameter string="true">2</｜DSML｜parameter></｜DSML｜invoke>',
        ),
    ],
    '<｜DSML｜invoke name="find"><｜DSML｜parameter name="n" string="false">2</｜DSML｜invoke>': [
        ("content", '<｜DSML｜invoke name="find"><｜DSML｜parameter name="n" string="false">2</｜DSML｜invoke>'),
    ],
}
LLAMA4: dict[str, list[Any]] = {
    '[find(city="Zürich", n=2)]': [FOUND],
    "[find(city='Zürich', n=2), now()]": [FOUND, ("call", "now", {})],
    '\n<|python_start|>[find(n="2",\n  city="Zürich",)]<|python_end|>': [FOUND],
    'Look:<|python_start|>[find(city="Zürich", n=2)]<|python_end|>': [("content", "Look:"), FOUND],
    # Literals of Python and JSON, names with hyphens, and names that are words of Python
    '[get-it.all(from=\'it\\\'s "a"\', a=[1, -2.5e3, (True, None)], b={\'k\': {"l": false}, "m": null}, note=null)]': [
        (
            "call",
            "get-it.all",
            {"from": 'it\'s "a"', "a": [1, -2500.0, [True, None]], "b": {"k": {"l": False}, "m": None}, "note": None},
        ),
    ],
    # Escapes of Python and JSON, unknown escapes, and line breaks
    '[f(a="\\n\\u00fc\\ud83d\\ude00\\/", b="\\d+\\\\s\\0", c="x\ny", d=\'\\x41\')]': [
        ("call", "f", {"a": "\nü😀/", "b": "\\d+\\s\\0", "c": "x\ny", "d": "A"}),
    ],
    # The schema decides about values in quotes
    '[find(city="12", n="2", note="null", other="3")]': [
        ("call", "find", {"city": "12", "n": 2, "note": "null", "other": "3"}),
    ],
    "[1, 2] are numbers": [("content", "[1, 2] are numbers")],
    'Look: [find(city="Zürich")]': [("content", 'Look: [find(city="Zürich")]')],
    "[find(1)]": [("content", "[find(1)]")],
    "[find(n=1": [("content", "[find(n=1")],
    "[find(n=1, n=2)]": [("content", "[find(n=1, n=2)]")],
    "[find(n=print(1))]": [("content", "[find(n=print(1))]")],
    "[find(n={1, 2})]": [("content", "[find(n={1, 2})]")],
    "[find(n={[1]: 2})]": [("content", "[find(n={[1]: 2})]")],
    "[find(n=007)]": [("content", "[find(n=007)]")],
    "[find(n=1 -1)]": [("content", "[find(n=1 -1)]")],
    "[find(city=f'{n}')]": [("content", "[find(city=f'{n}')]")],
    '[find(city="""a""")]': [("content", '[find(city="""a""")]')],
    "[find(n=1)] and [find(n=2)]": [("content", "[find(n=1)] and [find(n=2)]")],
    "[]": [("content", "[]")],
}
MESSAGES = {
    "deepseek_v32": DEEPSEEK_V32,
    "llama4": LLAMA4,
    "hermes": HERMES,
    "llama3": LLAMA3,
    "qwen3_coder": QWEN3_CODER,
    "glm": GLM,
    "harmony": HARMONY,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "mistral": MISTRAL,
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in MESSAGES.items() for text in texts])
def test_messages_of_each_family_are_parsed(form: str, text: str) -> None:
    expected = MESSAGES[form][text]
    opening = "<think>" if text.startswith("I look.</think>") else ""
    for pieces in split_everywhere(text):
        assert parse(pieces, form, opening=opening) == expected, pieces


def test_long_text_is_the_same_whole_and_in_pieces() -> None:
    text = f"{'words ' * 2000}<tool_call>{CALL}</tool_call>" * 3
    content = "words " * 1999 + "words"
    assert parse([text], "hermes") == [("content", content), FOUND] * 3
    assert parse(["<｜tool▁calls▁begin｜>" * 50_000], "deepseek") == [], "takes minutes if it is not read in pieces"


def test_content_after_a_call_keeps_its_spaces() -> None:
    pieces = [f"<tool_call>{CALL}</tool_call>\n", "\nAll", " ", "done", " now."]
    assert parse(pieces, "hermes") == [FOUND, ("content", "All done now.")]


def test_without_tools_a_call_is_content() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    assert parse([text], "hermes", calls=False) == [("content", text)]
    assert parse([f"{ANALYSIS}<|end|>"], "harmony", calls=False) == [("reasoning", "I look.")]


def test_marks_of_calls_are_hidden_without_tools() -> None:
    assert FORMATS["llama3"].list_delimiters(has_tools=True) > FORMATS["llama3"].list_delimiters(has_tools=False)
    assert "[ARGS]" not in FORMATS["mistral"].list_delimiters(has_tools=False)
    assert {"[THINK]", "[/THINK]"} <= FORMATS["mistral"].list_delimiters(has_tools=False)
    assert "<|channel|>" in FORMATS["harmony"].list_delimiters(has_tools=False)


def test_reasoning_can_stay_in_the_content() -> None:
    text = "<think>\nhm\n</think>\n\nYes."
    parser = FORMATS["hermes"].create_parser("", [], separates_reasoning=False)
    assert parser.feed(text, is_last=True) == [TextPart("content", text)]


def test_harmony_continues_the_last_message_of_the_prompt() -> None:
    user = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    assert find_prefilled(FORMATS["harmony"], user) == ""
    prompt = f"{user}<|channel|>final<|message|>It is"
    assert parse([" cold."], "harmony", opening=prompt) == [("content", " cold.")]


def test_ids_of_calls_are_accepted_by_the_chat_templates() -> None:
    (text,) = KIMI
    kimi = [part.call_id for part in MessageParser(FORMATS["kimi"]).feed(text) if isinstance(part, ToolCall)]
    assert kimi == ["functions.find:0", "functions.now:1"]
    for text in list(MISTRAL)[:3]:
        ids = [
            part.call_id
            for part in MessageParser(FORMATS["mistral"]).feed(text, is_last=True)
            if isinstance(part, ToolCall)
        ]
        assert ids and all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("… <tool_call> …", "hermes"),
        ("… <tool_call>\n<function=example_function_name> …", "qwen3_coder"),
        ("… <tool_call>{{ tc.name }}<arg_key> …", "glm"),
        ("… <|start|>assistant<|channel|>analysis<|message|> …", "harmony"),
        ("… <｜tool▁calls▁begin｜><｜tool▁call▁begin｜> …", "deepseek"),
        ("… <|tool_calls_section_begin|><|tool_call_begin|> …", "kimi"),
        ("… [TOOL_CALLS] …", "mistral"),
        ("… <｜DSML｜function_calls> …", "deepseek_v32"),
        ("… [func_name1(param1=value1, …)] … role == 'ipython'", "llama4"),
        ("… <|python_tag|> …", "llama3"),
        ("role == 'ipython'", "llama3"),
        ("plain", "none"),
    ],
)
def test_form_follows_from_the_template(template: str, name: str) -> None:
    assert choose_format(template) == name


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
WRITTEN = {
    "hermes": '<tool_call>{"name": "find", "arguments": %s}</tool_call>',
    "llama3": '{"name": "find", "arguments": %s}',
    "harmony": "<|channel|>commentary to=functions.find<|message|>%s<|call|>",
    "deepseek": "<｜tool▁call▁begin｜>find<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
    "mistral": "[TOOL_CALLS]find[ARGS]%s",
    "deepseek_v32": '<｜DSML｜invoke name="find"><｜DSML｜parameter name="a" string="false">%s</｜DSML｜parameter>'
    "</｜DSML｜invoke>",
    "llama4": "[find(a=%s)]",
}


@pytest.mark.parametrize("arguments", HOSTILE_ARGUMENTS.values(), ids=HOSTILE_ARGUMENTS)
@pytest.mark.parametrize("form", WRITTEN)
def test_arguments_that_no_response_can_contain_are_text(form: str, arguments: str) -> None:
    written = WRITTEN[form] % arguments
    parser = MessageParser(FORMATS[form])
    parts = parser.feed(written, is_last=True)
    assert not parser.has_calls
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    assert text == written and json.loads(msgspec.json.encode(text)) == written


@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, "[" * 5000 + "]" * 5000, "NaN", "1e999"])
def test_values_that_no_response_can_contain_are_text(value: str) -> None:
    for form, written in (
        (
            "qwen3_coder",
            f"<tool_call>\n<function=find>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>",
        ),
        ("glm", f"<tool_call>find<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"),
    ):
        parser = MessageParser(FORMATS[form])
        assert "".join(part.text for part in parser.feed(written) if isinstance(part, TextPart)) == written


HOSTILE_PYTHON = {
    "deep lists": "[" * 5000 + "]" * 5000,
    "deep brackets": "(" * 100_000,
    "calls of calls": "f" + "()" * 50_000,
    "attributes": "a" + ".a" * 50_000,
    "attributes with spaces": "a" + " .a" * 50_000,
    "differences": "1" + " -1" * 50_000,
    "signs": "-" * 50_000 + "1",
    "digits": "1" * 100_000,
    "digits and a letter": "1" * 100_000 + "a",
    "texts": "''" * 50_000,
    "open text": '"' + "\\\\" * 50_000,
    "conditions": "1 if 1 else " * 10_000 + "1",
    "lambdas": "lambda:" * 10_000 + "1",
    "too long": "'" + "a" * 2**17 + "'",
    "surrogate": "'\\ud83d'",
    "null character": "'a\0b'",
    "infinity": "1e999",
    "deep conversion": "[" * 101 + "]" * 101,
}


@pytest.mark.parametrize("value", HOSTILE_PYTHON.values(), ids=HOSTILE_PYTHON)
def test_hostile_python_is_text(value: str) -> None:
    written = f"[find(a={value})]"
    started = time.process_time()
    parser = MessageParser(FORMATS["llama4"])
    parts = parser.feed(written, is_last=True)
    assert time.process_time() - started < 5.0
    assert not parser.has_calls and "".join(part.text for part in parts if isinstance(part, TextPart)) == written


def test_nested_arguments_are_a_call() -> None:
    arguments = '{"a": ' + "[" * 90 + "1" + "]" * 90 + "}"
    parser = MessageParser(FORMATS["llama3"])
    (call,) = parser.feed(f'{{"name": "find", "arguments": {arguments}}}', is_last=True)
    assert isinstance(call, ToolCall) and json.loads(call.arguments) == json.loads(arguments)


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<|tool_response>"], "content": "text"},
    },
}
"""The form of Gemma 4. Its tool calls are not JSON."""
GEMMA_CALL = '<|tool_call>call:find{city:<|"|>Zürich<|"|>,n:2}<tool_call|>'
GEMMA: dict[str, list[Any]] = {
    f"<|channel>thought\nI look.\n<channel|>\nLook:\n{GEMMA_CALL}{GEMMA_CALL}": [
        *(("reasoning", "I look."), ("content", "Look:"), FOUND, FOUND),
    ],
    "It is cold.\n\nVery.<turn|>\n": [("content", "It is cold.\n\nVery.")],
}


@pytest.mark.parametrize("text", GEMMA)
def test_response_template_of_the_model_is_used(text: str) -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    template = ResponseTemplate(RESPONSE_TEMPLATE, ["<|tool_call>"])
    assert template.has_calls and template.list_delimiters(has_tools=True) == ["<|tool_call>"]
    for pieces in split_everywhere(text):
        parser = template.create_parser("<|turn>user\nHi<turn|>\n<|turn>model\n", TOOLS, separates_reasoning=True)
        assert collect(parser, pieces) == GEMMA[text], pieces


def test_malformed_call_of_a_response_template_is_text() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    template = ResponseTemplate(RESPONSE_TEMPLATE, [])
    parser = template.create_parser("<|turn>model\n", TOOLS, separates_reasoning=True)
    pieces = ["Look:", "<|tool_call>call:find", "{city:", "?}", "<tool_call|>", " Done."]
    assert collect(parser, pieces) == [("content", "Look:{city:?}<tool_call|> Done.")]
    with pytest.raises(UserError, match="response template is malformed"):
        ResponseTemplate({"start_anchor": "x"}, [])
