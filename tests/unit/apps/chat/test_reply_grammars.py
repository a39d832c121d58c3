"""Grammars of tool calls allow exactly the calls that the parser of the same form reads."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from skyrl_tx.apps.chat.grammar_checks import check_constraint
from skyrl_tx.apps.chat.message import FORMATS
from skyrl_tx.apps.chat.prompts import ChatPrompt
from skyrl_tx.apps.chat.reply_grammars import (
    CALL_FORMATS,
    ForcedCall,
    GrammarWriter,
    constrain_reply,
    read_tools,
    write_calls,
)
from skyrl_tx.apps.chat.service import ChatService
from skyrl_tx.apps.chat.tool_calls import ToolCall
from skyrl_tx.contract.errors import FieldError
from skyrl_tx.contract.requests import Constraint, SamplingParams
from skyrl_tx.grammars import make_limits
from tests.support.tiny_tokenizer import PACKAGED

TOKENIZER = Tokenizer.from_file(str(PACKAGED / "tokenizer.json"))
LIBRARY = LLTokenizer(TOKENIZER.to_str(), n_vocab=TOKENIZER.get_vocab_size())
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Zürich"]},
        "note": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "find", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
ANY_CALL = ForcedCall(None, "function.parameters", has_one_call=False)
FIND = {"city": "Oslo", "note": "a </b>\nc", "days": 3}
JSON, XML_NOTE = json.dumps(FIND), "<parameter=note>\na </b>\nc\n</parameter>\n"
CALLS = {
    "hermes": (f'<tool_call>\n{{"name": "find", "arguments": {JSON}}}\n</tool_call>', ""),
    "llama3": (f'{{"name": "find", "parameters": {JSON}}}', ""),
    "harmony": (f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{JSON}", ""),
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
    "deepseek V3": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "```json",
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
        "",
    ),
    "mistral": (f"[TOOL_CALLS]find[ARGS]{JSON}", "[ARGS]"),
    "mistral old": (f'[TOOL_CALLS][{{"name": "find", "arguments": {JSON}}}]', ""),
    "qwen3_coder": (
        f"<tool_call>\n<function=find>\n<parameter=city>\nOslo\n</parameter>\n{XML_NOTE}<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
    ),
    "glm": (
        "<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>note</arg_key>\n"
        "<arg_value>a </b>\nc</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "",
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="note" string="true">a </b>\nc</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "",
    ),
    "llama4": ('[find(city="Oslo", note="a </b>\\nc", days=3)]', ""),
}
"""By form: one call, and a part of the chat template."""


def write(form: str, template: str, tools: list[dict[str, Any]] = TOOLS, *, has_one_call: bool = False) -> str:
    writer = GrammarWriter(TOKENIZER.token_to_id)
    chosen = read_tools(tools, ANY_CALL, "ann")
    calls = write_calls(writer, form, chosen, template, has_one_call=has_one_call)
    return writer.join(calls)


def accepts(grammar: str, text: str) -> bool:
    """Whether a grammar matches a whole text."""
    matcher = LLMatcher(LIBRARY, grammar, log_level=0, limits=make_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(TOKENIZER.encode(text, add_special_tokens=False).ids) and matcher.is_accepting()


def test_every_form_with_tool_calls_has_a_grammar() -> None:
    assert set(CALL_FORMATS) == {name for name, form in FORMATS.items() if form.has_calls}


def test_a_form_without_a_grammar_refuses_forced_calls_by_name() -> None:
    form = next(name for name, form in FORMATS.items() if not form.has_calls)
    text = SimpleNamespace(template=SimpleNamespace(source=""), tokenizer=TOKENIZER)
    prompt = ChatPrompt("", [], FORMATS[form], TOOLS)
    service = cast(ChatService, SimpleNamespace(text=text))
    with pytest.raises(FieldError, match=f"in the format of this model, {form}; use 'auto'") as caught:
        constrain_reply(service, prompt, SamplingParams(seed=1), "ann", None, ANY_CALL)
    assert caught.value.field == "tool_choice"


@pytest.mark.parametrize("name", CALLS)
def test_the_grammar_allows_what_the_parser_reads(name: str) -> None:
    text, template = CALLS[name]
    form = name.split()[0]
    grammar = write(form, template)

    assert accepts(grammar, text)
    parser = FORMATS[form].create_parser("", TOOLS, separates_reasoning=True)
    [call] = parser.feed(text, is_last=True)
    assert isinstance(call, ToolCall)
    assert (call.name, json.loads(call.arguments)) == ("find", FIND)


@pytest.mark.parametrize("name", CALLS)
def test_a_name_may_be_the_beginning_of_another(name: str) -> None:
    call, template = CALLS[name]
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"name": tool}} for tool in ("find", "find:all")]
    grammar = write(name.split()[0], template, tools)
    assert accepts(grammar, call) and accepts(grammar, call.replace("find", "find:all"))


@pytest.mark.parametrize("form", ["deepseek_v32", "llama4"])
def test_optional_parameters_and_values_of_all_types(form: str) -> None:
    """The reader gets the values that the grammar allows, with any of the optional parameters left out."""
    kinds = {"flag": {"type": "boolean"}, "no": {"type": "null"}, "x": {"type": "number"}, "s": {"type": "string"}}
    kinds |= {"list": {"type": "array", "items": {"type": "integer"}}, "o": {"type": "object"}}
    schema = {"type": "object", "properties": kinds, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = write(form, "", tools)
    values = {"flag": True, "no": None, "x": -1.5, "s": 'a "b", (c)]', "list": [1, 2], "o": {"k": [True, None]}}
    names = list(kinds)

    for chosen in ([*names], ["x"], ["flag", "x"], ["x", "o"], ["no", "x", "s"]):
        given = {name: values[name] for name in chosen}
        text = _write_call(form, given)
        assert accepts(grammar, text), text
        [call] = FORMATS[form].create_parser("", tools, separates_reasoning=True).feed(text, is_last=True)
        assert isinstance(call, ToolCall) and json.loads(call.arguments) == given
    for chosen in (["flag"], [], ["s", "x"]):  # without the required one, and in another order
        assert not accepts(grammar, _write_call(form, {name: values[name] for name in chosen}))


def test_the_mark_of_deepseek_v32_may_be_a_token() -> None:
    """Its tokenizer has a token for a part of the marks. The same characters as text are not a mark."""
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_special_tokens(["｜DSML｜"])
    writer = GrammarWriter(tokenizer.token_to_id)
    tools = read_tools(TOOLS, ANY_CALL, "ann")
    grammar = writer.join(write_calls(writer, "deepseek_v32", tools, "", has_one_call=False))
    library = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size())

    text, _ = CALLS["deepseek_v32"]
    for encode, is_call in ((tokenizer, True), (TOKENIZER, False)):
        for call in (text, text.replace("Oslo", "Bern")):
            matcher = LLMatcher(library, grammar, log_level=0, limits=make_limits())
            assert not matcher.is_error(), matcher.get_error()
            tokens = encode.encode(call, add_special_tokens=False).ids
            accepted = matcher.consume_tokens(tokens) and matcher.is_accepting()
            assert accepted == (is_call and call == text)


def _write_call(form: str, arguments: dict[str, object]) -> str:
    if form == "llama4":
        return f"[f({', '.join(f'{name}={json.dumps(value)}' for name, value in arguments.items())})]"
    parameters = "".join(
        f'<｜DSML｜parameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for name, value in arguments.items()
    )
    return (
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{parameters}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    )


@pytest.mark.parametrize("name", [name for name in CALLS if name != "harmony"])
def test_a_call_that_is_cut_off_has_all_arguments_or_stays_text(name: str) -> None:
    """In harmony, a call without arguments has no text either, so its beginning is such a call."""
    text, _ = CALLS[name]
    form = FORMATS[name.split()[0]]
    for cut in range(len(text)):
        parts = form.create_parser("", TOOLS, separates_reasoning=True).feed(text[:cut], is_last=True)
        calls = [part for part in parts if isinstance(part, ToolCall)]
        assert all((call.name, json.loads(call.arguments)) == ("find", FIND) for call in calls), text[:cut]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("old, new", [("Oslo", "Bern"), ("3", "77"), ("find", "seek"), ("city", "town")])
def test_the_grammar_refuses_other_names_and_arguments(name: str, old: str, new: str) -> None:
    text, template = CALLS[name]
    assert not accepts(write(name.split()[0], template), text.replace(old, new))


def test_several_calls_are_allowed_unless_the_client_wants_one() -> None:
    text, template = CALLS["hermes"]
    in_list = CALLS["mistral old"][0].removesuffix("]")
    for form, twice in (("hermes", f"{text}\n{text}"), ("mistral", f"{in_list}, {in_list.partition('][')[2]}]")):
        assert accepts(write(form, template), twice)
        assert not accepts(write(form, template, has_one_call=True), twice)


@pytest.mark.parametrize(
    "schema, message",
    {
        "pattern": (
            {"properties": {"city": {"type": "string", "pattern": "^A"}}},
            "properties.city.pattern: the format",
        ),
        "mixed": ({"properties": {"n": {"type": "string", "enum": ["a", 1]}}}, "properties.n.enum: all values"),
        "missing": ({"properties": {}, "required": ["n"]}, "required: 'n' is not in `properties`"),
        "alternatives": ({"anyOf": [{"properties": {}}]}, "parameters.anyOf: the format"),
        "name": ({"properties": {"a>b": {"type": "string"}}}, "properties.a>b: the format"),
    }.values(),
)
def test_a_schema_that_a_form_cannot_enforce_is_refused(schema: dict[str, Any], message: str) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", **schema}}}]
    with pytest.raises(FieldError) as caught:
        write("qwen3_coder", "", tools)
    assert caught.value.field == "tools[0].function.parameters"
    assert message in caught.value.message


def make_tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def make_multiples(*numbers: int) -> list[dict[str, Any]]:
    """Return a tool for each number, with an argument that must be a multiple of it."""
    schemas = ({"properties": {"n": {"type": "integer", "multipleOf": number}}} for number in numbers)
    return [make_tool(f"f{n}", schema) for n, schema in enumerate(schemas)]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([make_tool(f"f{n}", {"description": "x" * 60_000}) for n in range(5)], "tools: the schemas have 3"),
        (
            [make_tool(f"f{n}", {"properties": {"x": {"pattern": "a" * 3000, "type": "string"}}}) for n in range(5)],
            "tools: its patterns have 15000 characters",
        ),
        (make_multiples(7919, 7907), "tools: its values of multipleOf"),
        ([make_tool("same", {"type": "object"})] * 2, "tools: 'same' is the name of two tools"),
    ],
)
def test_tools_that_are_too_large_together_are_refused(tools: list[dict[str, Any]], message: str) -> None:
    """Each of the tools is allowed alone."""
    for tool in tools:
        write("hermes", "", [tool])
    with pytest.raises(FieldError, match=message) as caught:
        write("hermes", "", tools)
    assert caught.value.field == "tools"


def test_a_call_has_values_of_multiple_of_from_one_tool_only() -> None:
    write("hermes", "", make_multiples(7, 11, 13, 17))  # their least common multiple would be too large
    write("hermes", "", make_multiples(7919, 7919))


def test_the_parameters_of_a_tool_may_be_nested_as_deeply_as_other_schemas() -> None:
    schemas: list[dict[str, Any]] = [{"type": "string"}]
    for _ in range(1000):
        schemas.append({"type": "object", "properties": {"x": schemas[-1]}})

    check_constraint(Constraint(kind="json_schema", text=json.dumps(schemas[62])), "schema", "ann")
    write("hermes", "", [make_tool("f", schemas[62])])
    with pytest.raises(FieldError, match="is nested deeper than 64 levels"):
        check_constraint(Constraint(kind="json_schema", text=json.dumps(schemas[63])), "schema", "ann")
    for depth in (63, 1000):
        with pytest.raises(FieldError, match="is nested deeper than 64 levels") as caught:
            write("hermes", "", [make_tool("f", schemas[depth])])
        assert caught.value.field == "tools[0].function.parameters"


def test_parameters_with_references_are_resolved() -> None:
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/few"}}, "required": ["n"]}
    schema["$defs"] = {"few": {"type": "integer", "minimum": 1, "maximum": 3}}
    grammar = write("qwen3_coder", "", [{"type": "function", "function": {"name": "f", "parameters": schema}}])
    text = "<tool_call>\n<function=f>\n<parameter=n>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert accepts(grammar, text.format(2))
    assert not accepts(grammar, text.format(5))
