"""Grammars of replies: tool calls in the format of each model family, and constrained content after reasoning.

A grammar allows calls of given tools whose arguments match the JSON schemas of the tools. The
module `tool_calls` reads the same formats.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from skyrl_tx.apps.chat.grammar_checks import check_schemas
from skyrl_tx.apps.chat.message import FORMATS, MessageFormat, find_prefilled
from skyrl_tx.apps.chat.prompts import ChatPrompt
from skyrl_tx.apps.chat.sampling_fields import add_constraint
from skyrl_tx.apps.chat.service import ChatService
from skyrl_tx.apps.chat.tool_calls import list_types
from skyrl_tx.contract.errors import FieldError
from skyrl_tx.contract.requests import Constraint, SamplingParams
from skyrl_tx.grammars import make_grammar, write_grammar, write_json_rule, write_rule, write_text
from skyrl_tx.server.submission.validation import quote_value, require

Schema = Mapping[str, object]
Tool = tuple[str, Schema, str]
"""The name of a tool, the schema of its parameters, and the path of the schema in the request."""
_NAME = re.compile(r"[\w.:/-]+")
_PARAMETER = re.compile(r"[\w.:/ -]+")
_NOTES = frozenset({"title", "description", "default", "examples", "type", "enum", "const", "anyOf", "oneOf"})
"""Keywords of a text parameter. The formats that write text without quotes enforce no further keywords."""
_OBJECT_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
) | {"title", "description"}
"""Keywords of the parameters of a tool in the formats that name each parameter."""
_UNENFORCED = "the format in which this model writes tool calls cannot enforce this; use tool_choice 'auto'"
_ANY_TEXT = "(?s:.*)"
_MARK = re.compile(r"｜DSML｜|<(?!/?｜DSML)[^<>=\s]+>|\[/?[A-Z_]+\]")
"""A mark of a message format, which may be a token. `｜DSML｜` is the part of DeepSeek V3.2's marks that is one."""
_PIECE = re.compile(f"(NAME|ARGUMENTS|INDEX|PARAMETERS|KEY|IS_TEXT|{_MARK.pattern})")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family of models writes tool calls.

    The texts contain marks and these placeholders:

    - NAME is the name of the tool, and INDEX a number.
    - ARGUMENTS are the arguments as JSON. Instead, PARAMETERS are the arguments one by one.
    - KEY is the name of a parameter, and IS_TEXT tells whether its value is text without quotes.
    """

    call: str
    start: str = ""
    """The text before all calls."""
    between: str | None = ""
    """The text between two calls, or None if a call ends the message."""
    end: str = ""
    """The text after all calls."""
    parameter_start: str = ""
    """The text before the value of a parameter. Empty if parameters are written as in Python."""
    parameter_end: str = ""
    """The text after the value of a parameter. A line break follows."""
    marker: str = ""
    """A part of the chat templates that use this format."""


CALL_FORMATS: Mapping[str, tuple[CallFormat, ...]] = {
    "hermes": (CallFormat(call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', between="\n"),),
    "llama3": (CallFormat(call='{"name": "NAME", "parameters": ARGUMENTS}', between="; "),),
    "harmony": (
        CallFormat(call="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS", between=None),
    ),
    "deepseek": (
        # V3 and R1
        CallFormat(
            call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
            start="<｜tool▁calls▁begin｜>",
            between="\n",
            end="<｜tool▁calls▁end｜>",
            marker="```json",
        ),
        # V3.1
        CallFormat(
            call="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
            start="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    "kimi": (
        CallFormat(
            call="<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
            start="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    "mistral": (
        CallFormat(call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", marker="[ARGS]"),
        CallFormat(call='{"name": "NAME", "arguments": ARGUMENTS}', start="[TOOL_CALLS][", between=", ", end="]"),
    ),
    "qwen3_coder": (
        CallFormat(
            call="<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>",
            between="\n",
            parameter_start="<parameter=KEY>\n",
            parameter_end="\n</parameter>",
        ),
    ),
    "glm": (
        CallFormat(
            call="<tool_call>NAME\nPARAMETERS</tool_call>",
            between="\n",
            parameter_start="<arg_key>KEY</arg_key>\n<arg_value>",
            parameter_end="</arg_value>",
        ),
    ),
    "deepseek_v32": (
        CallFormat(
            call='<｜DSML｜invoke name="NAME">\nPARAMETERS</｜DSML｜invoke>\n',
            start="<｜DSML｜function_calls>\n",
            end="</｜DSML｜function_calls>",
            parameter_start='<｜DSML｜parameter name="KEY" string="IS_TEXT">',
            parameter_end="</｜DSML｜parameter>",
        ),
    ),
    "llama4": (CallFormat(call="NAME(PARAMETERS)", start="[", between=", ", end="]"),),
}
"""The formats of calls by the name of a message format. The first format with its marker in the template is used."""


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The tool calls that a reply has to make: one or multiple calls, of the tool `name` or of any tool."""

    name: str | None
    schema_field: str
    """The field of a tool that has the schema of its parameters."""
    has_one_call: bool


def constrain_reply(
    service: ChatService,
    prompt: ChatPrompt,
    params: SamplingParams,
    owner: str,
    content: Constraint | None,
    forced: ForcedCall | None,
) -> SamplingParams:
    """Add the constraint of an owner's reply, if it has one, to sampling parameters.

    It constrains the content after the reasoning, or the tool calls that the reply has to make.
    Raises FieldError if both are constrained, or if the constraint is not supported.
    """
    writer, template = GrammarWriter(service.text.tokenizer.token_to_id), service.text.template.source
    if forced is None:
        content = None if content is None else _constrain_content(writer, prompt, template, content)
        return add_constraint(service, params, content)

    # The calls that must be made
    if content is not None:
        raise FieldError(f"{content.field}: cannot be combined with a tool_choice that forces a call", content.field)
    tools = read_tools(prompt.tools, forced, owner)
    form = next((name for name, form in FORMATS.items() if form is prompt.form), "unknown")
    require(
        form in CALL_FORMATS,
        f"tool_choice: this server cannot force tool calls in the format of this model, {form}; use 'auto'",
        field="tool_choice",
    )
    start = _write_start(writer, prompt, template, is_call=True)
    calls = write_calls(writer, form, tools, template, has_one_call=forced.has_one_call)
    text = writer.join(f"{start} {calls}".strip())
    return add_constraint(service, params, Constraint(kind="lark", text=text, field="tool_choice"))


def _constrain_content(
    writer: "GrammarWriter", prompt: ChatPrompt, template: str, constraint: Constraint
) -> Constraint:
    """Return the constraint of a whole reply whose content, after the reasoning, has a constraint."""
    start = _write_start(writer, prompt, template, is_call=False)
    if not start:
        return constraint
    if constraint.kind != "grammar":
        content = writer.add(write_rule(constraint))
        return replace(constraint, kind="lark", text=writer.join(f"{start} {content}"))
    grammars = {"main": writer.join(f"{start} @content"), "content": write_grammar(constraint)}
    listed = [{"name": name, "lark_grammar": text} for name, text in grammars.items()]
    return replace(constraint, kind="lark", text=json.dumps({"grammars": listed}))


def _write_start(writer: "GrammarWriter", prompt: ChatPrompt, template: str, *, is_call: bool) -> str:
    """Return an expression for the reasoning and marks before the content or the calls, possibly empty."""
    form = prompt.form
    if not isinstance(form, MessageFormat):
        return ""
    prefilled = find_prefilled(form, prompt.text)
    if form.has_headers:
        require(not prefilled, "continue_final_message: the continued message cannot be constrained")
        thoughts = f"{writer.write('<|channel|>analysis<|message|>')} {writer.text_until('<|end|>')}"
        reasoning = writer.add(f"{thoughts} {writer.write('<|start|>assistant')}")
        return f"{reasoning}?" + ("" if is_call else f" {writer.write('<|channel|>final<|message|>')}")

    # Reasoning that the prompt has begun, or that the model may begin
    blocks = [block for block in form.blocks if block.kind == "reasoning"]
    for block in blocks:
        if prefilled == block.start:
            return f"{writer.text_until(block.ends[0])} SPACE?"
    for block in blocks:
        is_closed = prompt.text.rstrip().endswith(block.ends[0])
        if block.start in template and not is_closed:
            text = writer.add(f"{writer.write(block.start)} {writer.text_until(block.ends[0])} SPACE?")
            return f"{text}?"
    return ""


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

    def write(self, text: str, texts: Mapping[str, str] | None = None, rules: Mapping[str, str] | None = None) -> str:
        """Return an expression for a text. `texts` and `rules` are texts and expressions for its placeholders.

        A mark in the text is written as its token if it is a single token, else as text.
        """
        written: list[str] = []
        literal = ""  # in one piece up to the next expression, because the longest match of a piece alone is taken
        for piece in _PIECE.split(text):
            token = self._find_token(piece) if _MARK.fullmatch(piece) else None
            expression = (rules or {}).get(piece) if token is None else f"<[{token}]>"
            if expression is None:
                literal += (texts or {}).get(piece, piece)
            elif expression:
                written += [write_text(literal), expression] if literal else [expression]
                literal = ""
        if literal:
            written.append(write_text(literal))
        return " ".join(written)

    def text_until(self, end: str, after: str = "") -> str:
        """Return an expression for any text that ends with the text `end`, which may have a mark, and then `after`."""
        mark = _MARK.search(end)
        token = None if mark is None else self._find_token(mark[0])
        if mark is None or token is None:
            name = f"r{len(self._rules)}"
            self._rules[f"{name}[suffix={write_text(end + after)}]"] = f"/{_ANY_TEXT}/"
            return name
        # The token ends the text, so the text before it must end with the beginning of `end`
        before = re.escape(end[: mark.start()]).replace("/", r"\/")
        return f"{self.add(f'/{_ANY_TEXT}{before}/')} <[{token}]> {self.write(end[mark.end() :] + after)}".strip()

    def join(self, start: str) -> str:
        """Return the grammar whose first rule has the right side `start`."""
        return make_grammar(start, self._rules)


def read_tools(tools: Sequence[Mapping[str, object]], forced: ForcedCall, owner: str) -> list[Tool]:
    """Return the tools of an owner's request that a reply may call.

    Raises FieldError if there are none, if two have the same name, or if their schemas are not
    supported or too large together.
    """
    chosen: list[Tool] = []
    for index, tool in enumerate(tools):
        function = cast(Mapping[str, object], tool["function"])
        name, parameters = str(function["name"]), cast(Schema, function.get("parameters") or {})
        if forced.name not in (None, name):
            continue
        if any(name == other for other, _, _ in chosen):
            raise FieldError(f"tools: {quote_value(name)} is the name of two tools", "tools")
        if _NAME.fullmatch(name) is None:
            raise FieldError(f"tools: the name {quote_value(name)} must have only letters, digits and _.:/-", "tools")
        chosen.append((name, {"type": "object", **parameters}, f"tools[{index}].{forced.schema_field}"))

    missing = "needs `tools`" if forced.name is None else f"{quote_value(forced.name)} is not in `tools`"
    require(bool(chosen), f"tool_choice: {missing}", field="tool_choice")
    check_schemas([schema for _, schema, _ in chosen], [field for _, _, field in chosen], "tools", owner)
    return chosen


def write_calls(writer: GrammarWriter, form: str, tools: Sequence[Tool], template: str, *, has_one_call: bool) -> str:
    """Return an expression for one or multiple calls in the form of a model family."""
    written = next(written for written in CALL_FORMATS[form] if written.marker in template)
    call = calls = writer.add(" | ".join(f"({_write_call(writer, written, *tool)})" for tool in tools))
    if not has_one_call and written.between is not None:
        calls = f"{call} ({f'{writer.write(written.between)} {call}'.strip()})*"
    return f"{writer.write(written.start)} {calls} {writer.write(written.end)}".strip()


def _write_call(writer: GrammarWriter, form: CallFormat, name: str, schema: Schema, field: str) -> str:
    rules = {"INDEX": "/[0-9]{1,3}/"}
    if "ARGUMENTS" in form.call:
        rules["ARGUMENTS"] = write_json_rule(schema)
    else:
        write_parameters = _write_parameters if form.parameter_start else _write_keywords
        rules["PARAMETERS"] = write_parameters(writer, form, schema, field)
    return writer.write(form.call, {"NAME": name}, rules)


def _write_keywords(writer: GrammarWriter, form: CallFormat, schema: Schema, field: str) -> str:
    """Return an expression for the parameters of a tool as keyword arguments in Python, in the order of the schema."""
    # From the last parameter to the first: the expression after another parameter, and at the beginning
    following, beginning, shared = "", '""', _get_shared(schema)
    for key, parameter, is_required, _ in reversed(list(_list_parameters(schema, field))):
        value = writer.add(f"{write_text(f'{key}=')} {write_json_rule({**parameter, **shared})}")
        beginning = writer.add(f"{value} {following}" + ("" if is_required else f" | {beginning}"))
        following = writer.add((f'", " {value}' if is_required else f'(", " {value})?') + f" {following}")
    return beginning


def _write_parameters(writer: GrammarWriter, form: CallFormat, schema: Schema, field: str) -> str:
    """Return an expression for the parameters of a tool, in the order of the schema.

    Raises FieldError for a schema that this form cannot enforce.
    """
    shared = _get_shared(schema)
    rules: list[str] = []
    for key, parameter, is_required, where in _list_parameters(schema, field):
        is_text = "true" if _is_text(parameter) else "false"
        start = writer.write(form.parameter_start, {"KEY": key, "IS_TEXT": is_text})
        rule = writer.add(f"{start} {_write_value(writer, parameter, shared, where, field, form.parameter_end)}")
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
    closing = writer.write(f"{end}\n")
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
