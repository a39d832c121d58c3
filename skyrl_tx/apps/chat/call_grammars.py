"""Grammars of tool calls, in the format of each model family.

A grammar allows calls of given tools whose arguments match the JSON schemas of the tools. The
module `tool_calls` reads the same formats.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from skyrl_tx.apps.chat.tool_calls import list_types
from skyrl_tx.contract.errors import FieldError
from skyrl_tx.grammars.grammar import check_schemas, make_grammar, write_json_rule, write_text
from skyrl_tx.server.submission.validation import quote_value, require

Schema = Mapping[str, object]
_NAME = re.compile(r"[\w.:/-]+")
_PARAMETER = re.compile(r"[\w.:/ -]+")
_NOTES = frozenset({"title", "description", "default", "examples", "type", "enum", "const", "anyOf", "oneOf"})
"""Keywords of a text parameter. The formats that write text without quotes enforce no further keywords."""
_OBJECT_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
) | {"title", "description"}
"""Keywords of the parameters of a tool in the formats that name each parameter."""
_LINE, _JSON_BLOCK, _FUNCTION = "\n", "\n```json\n", "<function={}>\n"
_DSML = "｜DSML｜"
"""A part of the marks of DeepSeek V3.2. It is one token there."""
ANY_TEXT = "/(?s:.*)/"


class GrammarWriter:
    """Collects the rules of a grammar."""

    def __init__(self, find_token: Callable[[str], int | None]) -> None:
        """`find_token` returns the token that is a mark, for example `<tool_call>`, or None."""
        self._find_token = find_token
        self._rules: dict[str, str] = {"SPACE": r"/[ \t\r\n]{1,8}/"}

    def add(self, rule: str) -> str:
        """Add a rule and return its name. `rule` is its right side."""
        name = f"r{len(self._rules)}"
        self._rules[name] = rule
        return name

    def mark(self, mark: str) -> str:
        """Return an expression for a mark: its token, or its text if it is no single token.

        A token inside of the mark is also possible.
        """
        token = self._find_token(mark)
        if token is None and _DSML in mark and self._find_token(_DSML) is not None:
            before, _, after = mark.partition(_DSML)
            return f"{write_text(before)} {self.mark(_DSML)} {write_text(after)}"
        return write_text(mark) if token is None else f"<[{token}]>"

    def text_until(self, mark: str, after: str = "") -> str:
        """Return an expression for any text that ends with a mark, followed by the text `after`."""
        token = self._find_token(mark)
        before, inner, rest = mark.partition(_DSML)
        if token is None and inner and self._find_token(inner) is not None:
            # The token ends the text, so the text must end with the beginning of the mark
            text = self.add(f"/(?s:.*){re.escape(before).replace('/', chr(92) + '/')}/")
            return f"{text} {self.mark(inner)} {write_text(rest + after)}"
        if token is None:
            name = f"r{len(self._rules)}"
            self._rules[f"{name}[suffix={write_text(mark + after)}]"] = ANY_TEXT
            return name
        return f"{self.add(ANY_TEXT)} <[{token}]>" + (f" {write_text(after)}" if after else "")

    def join(self, start: str) -> str:
        """Return the grammar whose first rule has the right side `start`."""
        return make_grammar(start, self._rules)


class Tools:
    """The tools of a request that the model may call."""

    def __init__(self, tools: Sequence[Mapping[str, object]], where: Sequence[str], owner: str) -> None:
        """Check the schemas of the tools of an owner. `where` has the field of the schema of each tool.

        Raises FieldError if a schema is not supported, the schemas are too large together, or two tools
        have the same name.
        """
        self._tools: list[tuple[str, Schema, str]] = []
        for tool, field in zip(tools, where, strict=True):
            function = cast(Mapping[str, object], tool["function"])
            parameters = cast(Schema, function.get("parameters") or {})
            schema, name = {"type": "object", **parameters}, str(function["name"])
            if any(name == other for other, _, _ in self._tools):
                raise FieldError(f"tools: {quote_value(name)} is the name of two tools", "tools")
            self._tools.append((name, schema, field))
        check_schemas([schema for _, schema, _ in self._tools], where, "tools", owner)

    def __iter__(self) -> Iterator[tuple[str, Schema, str]]:
        """Yield the name, the schema and the field of each tool. Raises FieldError for a name with other signs."""
        for name, schema, field in self._tools:
            if _NAME.fullmatch(name) is None:
                raise FieldError(
                    f"tools: the name {quote_value(name)} must have only letters, digits and _.:/-", "tools"
                )
            yield name, schema, field

    def write(self, make: Callable[[str, str], str]) -> str:
        """Return an expression for one call.

        `make` gets the name of a tool and the expression for its arguments as JSON, and returns an
        expression for a call of the tool.
        """
        return " | ".join(f"({make(name, write_json_rule(schema))})" for name, schema, _ in self)


CallWriter = Callable[[GrammarWriter, Tools, str], tuple[str, str]]
"""Returns the expression of one call, and of the text between two calls. The last argument is the chat template."""


def _write_json_call(key: str) -> Callable[[str, str], str]:
    """Return a function that writes a call as an object with the fields `name` and `key`."""

    def write(name: str, arguments: str) -> str:
        head = f'{{"name": {json.dumps(name)}, "{key}": '
        return f'{write_text(head)} {arguments} "}}"'

    return write


def _write_hermes(writer: GrammarWriter, tools: Tools, template: str) -> tuple[str, str]:
    call = writer.add(tools.write(_write_json_call("arguments")))
    return f'{writer.mark("<tool_call>")} "\\n" {call} "\\n" {writer.mark("</tool_call>")}', '"\\n"'


def _write_llama3(writer: GrammarWriter, tools: Tools, template: str) -> tuple[str, str]:
    return writer.add(tools.write(_write_json_call("parameters"))), '"; "'


def _write_harmony(writer: GrammarWriter, tools: Tools, template: str) -> tuple[str, str]:
    channel, constrain, message = (writer.mark(mark) for mark in ("<|channel|>", "<|constrain|>", "<|message|>"))
    call = writer.add(
        tools.write(
            lambda name, arguments: (
                f'{channel} {write_text(f"commentary to=functions.{name} ")} {constrain} "json" {message} {arguments}'
            )
        )
    )
    return call, ""  # a call ends the message


def _write_deepseek(writer: GrammarWriter, tools: Tools, template: str) -> tuple[str, str]:
    start, separator, end = (writer.mark(f"<｜tool▁{name}｜>") for name in ("call▁begin", "sep", "call▁end"))
    if "```json" in template:  # V3 and R1
        return writer.add(
            tools.write(
                lambda name, arguments: (
                    f'{start} "function" {separator} {write_text(name + _JSON_BLOCK)} {arguments} "\\n```" {end}'
                )
            )
        ), '"\\n"'
    return writer.add(
        tools.write(lambda name, arguments: f"{start} {write_text(name)} {separator} {arguments} {end}")
    ), ""


def _write_kimi(writer: GrammarWriter, tools: Tools, template: str) -> tuple[str, str]:
    start, middle, end = (writer.mark(f"<|tool_call{name}|>") for name in ("_begin", "_argument_begin", "_end"))
    return writer.add(
        tools.write(
            lambda name, arguments: (
                f"{start} {write_text(f'functions.{name}:')} /[0-9]{{1,3}}/ {middle} {arguments} {end}"
            )
        )
    ), ""


def _write_mistral(writer: GrammarWriter, tools: Tools, template: str) -> tuple[str, str]:
    start = writer.mark("[TOOL_CALLS]")
    if "[ARGS]" in template:
        arguments_mark = writer.mark("[ARGS]")
        return writer.add(
            tools.write(lambda name, arguments: f"{start} {write_text(name)} {arguments_mark} {arguments}")
        ), ""
    call = writer.add(tools.write(_write_json_call("arguments")))
    return f'{start} "[" {call} ("," " " {call})* "]"', ""


def _write_xml(writer: GrammarWriter, tools: Tools, template: str) -> tuple[str, str]:
    calls = [
        f"{write_text(_FUNCTION.format(name))} "
        + _write_parameters(
            writer, schema, field, lambda key, _: write_text(f"<parameter={key}>{_LINE}"), "\n</parameter>"
        )
        + ' "</function>"'
        for name, schema, field in tools
    ]
    call = writer.add(" | ".join(f"({call})" for call in calls))
    return f'{writer.mark("<tool_call>")} "\\n" {call} "\\n" {writer.mark("</tool_call>")}', '"\\n"'


def _write_glm(writer: GrammarWriter, tools: Tools, template: str) -> tuple[str, str]:
    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")
    start, end, key_start, key_end, value_start = map(writer.mark, marks)

    def open_parameter(key: str, is_text: bool) -> str:
        return f'{key_start} {write_text(key)} {key_end} "\\n" {value_start}'

    calls = [
        f"{write_text(name + _LINE)} {_write_parameters(writer, schema, field, open_parameter, '</arg_value>')}"
        for name, schema, field in tools
    ]
    return f"{start} {writer.add(' | '.join(f'({call})' for call in calls))} {end}", '"\\n"'


def _write_dsml(writer: GrammarWriter, tools: Tools, template: str) -> tuple[str, str]:
    start, parameter = writer.mark(f"<{_DSML}invoke"), writer.mark(f"<{_DSML}parameter")

    def open_parameter(key: str, is_text: bool) -> str:
        attributes = f' name="{key}" string="{str(is_text).lower()}">'
        return f"{parameter} {write_text(attributes)}"

    calls: list[str] = []
    for name, schema, field in tools:
        head = write_text(f' name="{name}">\n')
        parameters = _write_parameters(writer, schema, field, open_parameter, f"</{_DSML}parameter>")
        calls.append(f"{start} {head} {parameters}")
    call = writer.add(" | ".join(f"({call})" for call in calls))
    return f'{call} {writer.mark(f"</{_DSML}invoke>")} "\\n"', ""


def _write_pythonic(writer: GrammarWriter, tools: Tools, template: str) -> tuple[str, str]:
    calls: list[str] = []
    for name, schema, field in tools:
        # From the last parameter to the first: the expression after another parameter, and at the beginning
        following, beginning, shared = "", '""', _get_shared(schema)
        for key, parameter, is_required, _ in reversed(list(_list_parameters(schema, field))):
            value = writer.add(f"{write_text(f'{key}=')} {write_json_rule({**parameter, **shared})}")
            beginning = writer.add(f"{value} {following}" + ("" if is_required else f" | {beginning}"))
            following = writer.add((f'", " {value}' if is_required else f'(", " {value})?') + f" {following}")
        calls.append(f'({write_text(f"{name}(")} {beginning} ")")')
    return " | ".join(calls), '", "'


WRITERS: Mapping[str, tuple[CallWriter, str, str]] = {
    "hermes": (_write_hermes, "", ""),
    "llama3": (_write_llama3, "", ""),
    "harmony": (_write_harmony, "", ""),
    "deepseek": (_write_deepseek, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "kimi": (_write_kimi, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "mistral": (_write_mistral, "", ""),
    "qwen3_coder": (_write_xml, "", ""),
    "glm": (_write_glm, "", ""),
    "deepseek_v32": (_write_dsml, f"<{_DSML}function_calls>\n", f"</{_DSML}function_calls>"),
    "llama4": (_write_pythonic, "[", "]"),
}
"""By the name of a form: the function that writes a call, and the marks around all calls."""


def write_calls(writer: GrammarWriter, form: str, tools: Tools, template: str, *, has_one_call: bool) -> str:
    """Return an expression for one or multiple calls in the form of a model family."""
    write, start, end = WRITERS[form]
    call, between = write(writer, tools, template)
    name = writer.add(call)
    is_single = has_one_call or form == "harmony"
    calls = name if is_single else f"{name} ({f'{between} {name}'.strip()})*"
    if len(start) == 1:  # a sign that is also a part of other tokens
        return f"{write_text(start)} {calls} {write_text(end)}"
    return f"{writer.mark(start)} {calls} {writer.mark(end)}" if start else calls


_UNENFORCED = "the format in which this model writes tool calls cannot enforce this; use tool_choice 'auto'"


def _write_parameters(
    writer: GrammarWriter, schema: Schema, field: str, open_parameter: Callable[[str, bool], str], end: str
) -> str:
    """Return an expression for the parameters of a tool, in the order of the schema.

    `open_parameter` returns the expression before the value of a parameter; it gets the name, and
    whether the value is text without quotes. The text `end` and a line break follow the value.
    Raises FieldError for a schema that this form cannot enforce.
    """
    shared = _get_shared(schema)
    rules: list[str] = []
    for name, parameter, is_required, where in _list_parameters(schema, field):
        is_text = _is_text(parameter)
        value = _write_value(writer, parameter, shared, where, field, end)
        rule = writer.add(f"{open_parameter(name, is_text)} {value}")
        rules.append(rule if is_required else f"{rule}?")
    return " ".join(rules)


def _list_parameters(schema: Schema, field: str) -> Iterator[tuple[str, Schema, bool, str]]:
    """Yield the name and the schema of each parameter, whether it is required, and the path of its schema.

    Raises FieldError for a schema of the tool that forms with named parameters cannot enforce.
    """
    for keyword in schema:
        require(keyword in _OBJECT_KEYWORDS, f"{field}.{keyword}: {_UNENFORCED}", field=field)
    properties = cast(Mapping[str, Schema], schema.get("properties") or {})
    required = cast(list[str], schema.get("required") or [])
    for name in required:
        require(name in properties, f"{field}.required: {quote_value(name)} is not in `properties`", field=field)

    for name, inner in properties.items():
        where = f"{field}.properties.{name}"
        require(_PARAMETER.fullmatch(name) is not None, f"{where}: {_UNENFORCED}", field=field)
        parameter: Schema = inner if isinstance(cast(object, inner), dict) else {}
        yield name, parameter, name in required, where


def _get_shared(schema: Schema) -> Schema:
    """Return the definitions that the schemas of all parameters may use."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _list_constants(schema: Schema) -> list[object]:
    return cast(list[object], schema["enum"] if "enum" in schema else [schema[n] for n in ("const",) if n in schema])


def _is_text(schema: Schema) -> bool:
    """Whether a value of a schema is written without quotes."""
    return "string" in list_types(schema) or any(isinstance(constant, str) for constant in _list_constants(schema))


def _write_value(writer: GrammarWriter, schema: Schema, shared: Schema, where: str, field: str, end: str) -> str:
    """Return an expression for the value of a parameter, the text `end` and a line break."""
    constants = _list_constants(schema)
    texts = [constant for constant in constants if isinstance(constant, str)]
    before, mark = ('"\\n"', end[1:]) if end.startswith("\n") else ("", end)
    closing = f'{before} {writer.mark(mark)} "\\n"'
    if not _is_text(schema):
        return f"{write_json_rule({**schema, **shared})} {closing}"

    # Text is written without quotes
    for keyword in schema:
        require(keyword in _NOTES, f"{where}.{keyword}: {_UNENFORCED}", field=field)
    if not constants:
        return writer.text_until(end, "\n")
    is_text = len(texts) == len(constants) and "string" in list_types(schema)
    require(is_text, f'{where}.enum: all values must be texts, with "type": "string"; {_UNENFORCED}', field=field)
    return f"({' | '.join(map(write_text, texts))}) {closing}"
