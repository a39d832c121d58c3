"""Read tool calls from sampled text, in the format of each model family.

A reader gets the text of one block of a message, for example `<tool_call>{"name": …}`, without the
mark that ends the block. Readers raise ValueError or RecursionError if the text is malformed.
"""

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

_MAX_DEPTH = 100
"""How deep the lists and objects of a tool call may be nested."""
_PYTHON_WORDS: Mapping[str, object] = {"True": True, "False": False, "None": None}
_NAME = re.compile(r"[\w.:/-]+")
_MISTRAL_CALL = re.compile(
    r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\s*(\[CALL_ID\]\s*(?P<id>\w+)\s*)?(\[ARGS\]\s*)?(?P<arguments>\{.*)", re.DOTALL
)
_MAX_PYTHON = 2**17
"""Maximum number of characters of calls in Python."""
_PYTHON_TOKEN = re.compile(
    r"""(?P<text>"(?!"")(?:[^"\\]|\\.)*"|'(?!'')(?:[^'\\]|\\.)*')"""
    r"""|-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])|[^\W\d][\w./-]{0,127}(?![\w./'"-])"""
    r"""|[\[\](){},:=]|(?P<space>\s+)""",
    re.DOTALL,
)
"""A text, a number, a name or a sign of a Python literal."""
_PYTHON_ESCAPE = re.compile(
    r"""(?P<pair>\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})"""
    r"""|(?P<valid>\\(?:[\\'"abfnrtv\n]|x[\da-fA-F]{2}|u[\da-fA-F]{4}))|\\/?|[\n\r]"""
)
_DSML_ATTRIBUTES = re.compile(r"""\s*name="(?P<name>[^"]*)"(?:\s+string="(?P<string>true|false)")?\s*""")
_OPENING, _CLOSING = frozenset("[({"), frozenset("])}")
_JSON_WORDS: Mapping[str, str] = {"true": "True", "false": "False", "null": "None"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. `arguments` is a JSON object as text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


Schemas = Mapping[str, Mapping[str, object]]
"""The JSON schema of each parameter, by the names of the tool and of the parameter."""
Reader = Callable[[str, Schemas], Iterator[ToolCall]]


def read_calls(read: Reader, text: str, schemas: Schemas) -> list[ToolCall] | None:
    """Return the tool calls in the text of a block, or None if the text is malformed."""
    try:
        return list(read(text, schemas)) or None
    except (ValueError, RecursionError):
        return None


def collect_schemas(tools: Sequence[Mapping[str, object]]) -> Schemas:
    """Return the schemas of the parameters of tools. Parts of a tool that are not objects are left out."""
    schemas: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        function = cast(Mapping[str, object], tool["function"])
        parameters = function.get("parameters")
        properties = cast(Mapping[str, object], parameters).get("properties") if isinstance(parameters, dict) else None
        schemas[str(function["name"])] = cast(Mapping[str, object], properties) if isinstance(properties, dict) else {}
    return schemas


def make_call(name: object, arguments: object, call_id: object = None) -> ToolCall:
    """Return a tool call.

    Raises ValueError if `name` is not a text or `arguments` not an object, and for arguments that
    responses cannot contain. These are NaN, lone surrogates, and values that are nested deeper than
    JSON parsers accept.
    """
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not _is_flat(arguments):
        raise ValueError("not a tool call")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{name}{text}{call_id}".encode()  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
    return ToolCall(name, text) if call_id is None else ToolCall(name, text, str(call_id))


def _is_flat(value: object) -> bool:
    """Return whether lists and objects are nested at most `_MAX_DEPTH` deep."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        objects = [part.values() for part in level if isinstance(part, dict)]
        level = [inner for part in (*objects, *(part for part in level if isinstance(part, list))) for inner in part]
    return not level


def _read_object(value: object, *keys: str, call_id: object = None) -> ToolCall:
    """Read an object with a name, and with arguments under one of `keys`."""
    if not isinstance(value, dict):
        raise ValueError("not an object")
    call = cast(dict[str, object], value)
    arguments = next((call[key] for key in keys if key in call), dict[str, object]())
    return make_call(call.get("name"), arguments, call_id)


def _read_name(text: str) -> str:
    name = text.strip()
    if _NAME.fullmatch(name) is None:
        raise ValueError("not the name of a tool")
    return name


def read_hermes(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Read `<tool_call>{"name": …, "arguments": {…}}`."""
    yield _read_object(json.loads(text.removeprefix("<tool_call>")), "arguments")


def read_llama3(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Read `{"name": …, "parameters": {…}}`. Multiple calls are separated by semicolons."""
    text = text.removeprefix("<|python_tag|>").strip()
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        yield _read_object(value, "parameters", "arguments")
        while position < len(text) and text[position] in "; \n\t\r":
            position += 1


def read_xml(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Read `<function=name><parameter=key>value</parameter></function>`, for example of Qwen3-Coder.

    Line breaks at the beginning and end of a value are not part of it. A call that is cut off between
    two parameters is malformed. Without `<tool_call>`, the caller has removed `</function>`.
    """
    has_ends = text.startswith("<tool_call>")
    for piece in text.split("<function=")[1:]:
        name, mark, body = piece.partition(">")
        if not mark or (has_ends and "</function>" not in body.rpartition("</parameter>")[2]):
            raise ValueError("the call is cut off")
        pairs = _split_pairs(body, "<parameter=", ">", "</parameter>")
        values = {key: value.removeprefix("\n").removesuffix("\n") for key, value in pairs}
        yield _convert_call(_read_name(name), values, schemas)


def read_glm(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Read `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>`."""
    name, mark, rest = text.removeprefix("<tool_call>").partition("<arg_key>")
    pairs = _split_pairs(mark + rest, "<arg_key>", "<arg_value>", "</arg_value>")
    values = {key.removesuffix("</arg_key>").strip(): value for key, value in pairs}
    yield _convert_call(_read_name(name), values, schemas)


def _split_pairs(text: str, start: str, middle: str, end: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of arguments, in time that is linear in the length of the text."""
    for piece in text.split(start)[1:]:
        key, _, rest = piece.partition(middle)
        value, mark, _ = rest.rpartition(end)
        if not mark:
            raise ValueError("a value is cut off")
        yield key.strip(), value


def _convert_call(name: str, values: Mapping[str, str], schemas: Schemas) -> ToolCall:
    """Make a call of arguments that are written as text."""
    properties = schemas.get(name, {})
    return make_call(name, {key: _convert_value(value, properties.get(key)) for key, value in values.items()})


def _convert_value(text: str, schema: object) -> object:
    """Convert an argument from text to the type that its schema names, or by its looks if there is none.

    For example, `12` becomes a number unless the schema says that it is a string.
    """
    types = list_types(schema)
    is_null = "null" in types and text.strip() in ("null", "None")
    if "string" in types and not is_null:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return _PYTHON_WORDS.get(text.strip(), text)


def _allows_text(schema: object) -> bool:
    """Return whether a schema allows strings, or names no types."""
    types = [name for name in list_types(schema) if name is not None]
    return not types or "string" in types


def list_types(schema: object) -> list[object]:
    """Return the types that a schema allows, directly or as one of its alternatives."""
    types: list[object] = []
    alternatives = [schema]
    if isinstance(schema, dict):
        for name in ("anyOf", "oneOf"):
            inner = cast(Mapping[str, object], schema).get(name)
            alternatives += cast(list[object], inner) if isinstance(inner, list) else []

    for alternative in alternatives:
        named = cast(Mapping[str, object], alternative).get("type") if isinstance(alternative, dict) else None
        types += cast(list[object], named) if isinstance(named, list) else [named]
    return types


def read_harmony(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Read a message of gpt-oss, for example `<|channel|>commentary to=functions.find<|message|>{…}`."""
    header, _, body = text.partition("<|message|>")
    _, _, recipient = header.partition("to=functions.")
    name = _NAME.match(recipient)
    yield make_call(name and name[0], json.loads(body.strip() or "{}"))


def read_deepseek(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Read `name<｜tool▁sep｜>{…}` of V3.1, or `function<｜tool▁sep｜>name` and a block of JSON of V3."""
    head, _, rest = text.removeprefix("<｜tool▁call▁begin｜>").partition("<｜tool▁sep｜>")
    if not rest.lstrip().startswith("{"):
        head, _, rest = rest.partition("```json")
        rest, _, _ = rest.rpartition("```")
    yield make_call(_read_name(head), json.loads(rest))


def read_kimi(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Read `functions.name:index<|tool_call_argument_begin|>{…}`.

    The part before the arguments is also the id of the call, which the chat template writes into
    later prompts.
    """
    head, _, rest = text.removeprefix("<|tool_call_begin|>").partition("<|tool_call_argument_begin|>")
    call_id = _read_name(head)
    yield make_call(call_id.removeprefix("functions.").partition(":")[0], json.loads(rest), call_id)


def read_mistral(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Read `[TOOL_CALLS]name[ARGS]{…}` or, from older models, `[TOOL_CALLS]` and a list of objects.

    The chat templates of older models only accept ids of nine letters and digits.
    """
    match = _MISTRAL_CALL.fullmatch(text)
    if match is not None:
        yield make_call(match["name"], json.loads(match["arguments"]), match["id"] or secrets.token_hex(5)[:9])
        return
    values = json.loads(text.removeprefix("[TOOL_CALLS]"))
    for value in values if isinstance(values, list) else [values]:
        yield _read_object(value, "arguments", call_id=secrets.token_hex(5)[:9])


def read_dsml(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Read `<｜DSML｜invoke name="…">` and its `<｜DSML｜parameter name="…" string="true">value</｜DSML｜parameter>`.

    A value with `string="false"` is JSON.
    """
    head, _, body = text.removeprefix("<｜DSML｜invoke").partition(">")
    name, values = _read_attributes(head)[0], dict[str, object]()
    for parameter, value in _split_pairs(body, "<｜DSML｜parameter", ">", "</｜DSML｜parameter>"):
        key, kind = _read_attributes(parameter)
        schema = schemas.get(name, {}).get(key)
        if kind == "true" and _allows_text(schema):
            values[key] = value
        else:
            is_text = list_types(schema) == ["string"]
            values[key] = _convert_value(value, schema if is_text or kind != "false" else None)
    yield make_call(_read_name(name), values)


def _read_attributes(text: str) -> tuple[str, str]:
    """Return the attributes `name` and `string` of DSML. The second may be missing."""
    match = _DSML_ATTRIBUTES.fullmatch(text)
    if match is None:
        raise ValueError("the attributes are malformed")
    return match["name"], match["string"] or ""


def read_pythonic(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Read a list of calls in Python, `[name(key=value), name()]`, whose values are literals.

    A value in quotes is converted if the schema allows no string, because chat templates write all
    values of earlier calls in quotes.
    """
    text = text.removeprefix("<|python_start|>")
    if len(text) > _MAX_PYTHON:
        raise ValueError("too long")
    for name, *rest in _split_at_commas(_unwrap(_scan_python(text), "[", "]")):
        properties, arguments = schemas.get(name, {}), dict[str, object]()
        for key, sign, *value in _split_at_commas(_unwrap(rest, "(", ")")):
            if sign != "=" or _read_name(key) in arguments:
                raise ValueError("not a keyword argument")
            argument, schema = _evaluate(value), properties.get(key)
            is_converted = isinstance(argument, str) and not _allows_text(schema)
            arguments[key] = _convert_value(str(argument), schema) if is_converted else argument
        yield make_call(_read_name(name), arguments)


def _scan_python(text: str) -> list[str]:
    """Return the tokens of Python literals, without white space and invalid escapes."""
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _PYTHON_TOKEN.match(text, position)
        if match is None:
            raise ValueError("not a Python literal")
        position = match.end()
        if match["space"] is None:
            tokens.append(match[0] if match["text"] is None else _PYTHON_ESCAPE.sub(_repair_escape, match[0]))
    return tokens


def _repair_escape(match: re.Match[str]) -> str:
    """Return an escape that Python knows.

    The escapes of JSON differ, and models forget to escape backslashes and line breaks.
    """
    if match["pair"] is not None:
        return str(json.loads(f'"{match[0]}"'))
    return match["valid"] or {"\n": r"\n", "\r": r"\r", r"\/": "/"}.get(match[0], r"\\")


def _unwrap(tokens: Sequence[str], start: str, end: str) -> Sequence[str]:
    if len(tokens) < 2 or tokens[0] != start or tokens[-1] != end:
        raise ValueError(f"not in {start}{end}")
    return tokens[1:-1]


def _split_at_commas(tokens: Sequence[str]) -> Iterator[list[str]]:
    """Yield the tokens between commas that are not in brackets. Raises ValueError for unbalanced or deep brackets."""
    depth, part = 0, list[str]()
    for token in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if not 0 <= depth <= _MAX_DEPTH:
            raise ValueError("brackets are unbalanced or nested too deep")
        if token == "," and depth == 0:
            yield part
            part = []
        else:
            part.append(token)
    if part:
        yield part


def _evaluate(tokens: Sequence[str]) -> object:
    """Return the value of a literal. Raises ValueError if it is malformed.

    The depth of the syntax tree is limited, because brackets are, and other values never follow
    each other directly as in `f()()()` or `1 -1 -1`.
    """
    follows_value = False
    for token in tokens:
        if follows_value and token not in _CLOSING and token not in (",", ":"):
            raise ValueError("not a literal")
        follows_value = token not in _OPENING and token not in (",", ":")
    try:
        value = ast.literal_eval("".join(_JSON_WORDS.get(token, token) for token in tokens))
        json.dumps(value)  # raises TypeError for a set
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError("not a literal that JSON has") from error
    return value
