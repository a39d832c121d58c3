"""Render a conversation with the chat template of a model.

Some templates cannot render the form of the client. For example, some accept only one system
message, and some concatenate the arguments of a tool call with other text, so the arguments must
be a string. `_iterate_forms` yields other forms: lists of messages with the same content, written
in another way.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl_tx.contract.errors import FieldError, ServerError

_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARK = "\ue000end of the text\ue001 "
"""Appended to the last message, to find the end of the message in the rendered prompt.

The mark ends with a space. If the space is missing in the rendered prompt, the template strips the
texts of messages, and `_cut_at_mark` strips the end of the prompt too.
"""

_PARTS = ("\ue000first part\ue001", "\ue000second part\ue001")
"""Texts of two content parts, to find out whether a template reads parts."""
_PROBES: Mapping[str, Sequence[str]] = {
    "system": ("system", "user"),
    "user": ("user",),
    "assistant": ("user", "assistant"),
    "tool": ("user", "assistant", "tool"),
}
"""The roles of a short conversation for each role that a message can have."""

Message = Mapping[str, object]
Tool = Mapping[str, object]


class _GenerationBlock(Extension):
    """The block `{% generation %}`. transformers uses it to mask the assistant's tokens.

    Here it has no effect.
    """

    tags = {"generation"}  # noqa: RUF012  # declared by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements in the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _format_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON. Unlike Jinja's own filter, this does not escape characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=4)
def _compile(source: str) -> Callable[..., str]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    cast(dict[str, object], environment.globals).update(raise_exception=_raise, strftime_now=_format_now)
    try:
        return environment.from_string(source).render
    except TemplateSyntaxError as error:
        raise ServerError(f"the chat template is malformed: line {error.lineno}: {error.message}") from error


def read_template(path: Path) -> str:
    """Return the source code of a template. Raises ServerError with the path if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ServerError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ServerError(f"{path}: not a text in UTF-8") from error


def read_checked_template(path: Path) -> str:
    """Return the source code like `read_template`. Raises ServerError also if it is malformed."""
    source = read_template(path)
    try:
        _compile(source)
    except ServerError as error:
        raise ServerError(f"{path}: {error}") from error
    return source


@lru_cache(maxsize=64)
def _find_forms(source: str, role: str) -> tuple[bool, bool]:
    """Return whether a template renders a role's content as text, and as multiple parts.

    A template that does not expect parts may fail, drop the parts, or write them as Python objects.
    """

    def render(content: object) -> str:
        messages = [{"role": name, "content": content if name == role else "text"} for name in _PROBES[role]]
        try:
            return _compile(source)(messages=messages, tools=None, documents=None, add_generation_prompt=False)
        except Exception:  # a template is a program, so it can raise anything
            return ""

    first, second = _PARTS
    _, found, after = render([{"type": "text", "text": text} for text in _PARTS]).partition(first)
    between, found_too, _ = after.partition(second)
    return first in render(first), bool(found and found_too) and "type" not in between


def _choose_form(source: str, message: Message) -> dict[str, object]:
    """Return a message whose content has the form that a template reads, text or parts."""
    prepared = _rename_reasoning(message)
    content = prepared.get("content")
    if content is None:
        return prepared
    reads_text, reads_parts = _find_forms(source, str(message["role"]))
    if isinstance(content, list) and not reads_parts:
        return prepared | {"content": read_text(prepared)}
    if isinstance(content, str) and reads_parts and not reads_text:
        return prepared | {"content": [{"type": "text", "text": content}]}
    return prepared


class ChatTemplate:
    """A model's chat template."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        """Create a template from its source code.

        `sources` are templates by name: "default", and possibly "tool_use" for prompts with tools.
        `tokens` are the special tokens as variables of the template, for example `{"eos_token":
        "<|im_end|>"}`.
        """
        self._sources = sources
        self._tokens = tokens

    @property
    def source(self) -> str:
        """The source code of all templates, joined."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render a prompt as text.

        With `continue_final_message`, the prompt ends with the text of the last message, so that
        the model continues this text. If the template fails, other forms of the messages are tried.
        Raises UserError if the template fails for all forms, and ServerError if it is malformed.
        """
        source = self._sources["tool_use" if tools and "tool_use" in self._sources else "default"]
        prepared = [_choose_form(source, message) for message in messages]
        if continue_final_message:
            prepared[-1:] = [_mark_end(message) for message in prepared[-1:]]
        template_variables: dict[str, Any] = {
            **self._tokens,
            **(variables or {}),
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

        # Try the forms of the messages
        render, failure = _compile(source), None
        for form in _iterate_forms(prepared):
            try:
                text = render(**template_variables, messages=form)
            except Exception as error:  # a template is a program, so it can raise anything
                failure = failure or error
            else:
                return _cut_at_mark(text) if continue_final_message else text
        raise FieldError(f"messages: the model's chat template failed with: {failure}", "messages") from failure


def _mark_end(message: Message) -> dict[str, object]:
    """Append `_MARK` to the text of a message. Raises UserError if the message has no text."""
    if not read_text(message).strip():
        field = "continue_final_message"
        raise FieldError(f"{field}: the last message has no text that could be continued", field)
    content = message["content"]
    if not isinstance(content, list):
        return {**message, "content": f"{content}{_MARK}"}
    *parts, last = cast(list[Mapping[str, object]], content)
    return {**message, "content": [*parts, {**last, "text": f"{last['text']}{_MARK}"}]}


def _cut_at_mark(text: str) -> str:
    """Return the prompt up to the mark.

    Raises UserError if the template dropped the last message.
    """
    trimmed = _MARK.rstrip()
    if trimmed not in text:
        field = "continue_final_message"
        raise FieldError(
            f"{field}: cannot continue the last message, because the model's chat template drops its text", field
        )
    end = text.rindex(trimmed)
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


def _rename_reasoning(message: Message) -> dict[str, object]:
    """Copy a message's reasoning to the fields that templates read.

    Clients and templates use different names: `reasoning_content`, `thinking` or `reasoning`.
    """
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


class ToolArguments(dict[str, object]):
    """The arguments of a tool call, with the JSON text that the client sent."""

    def __init__(self, values: Mapping[str, object], sent: str) -> None:
        super().__init__(values)
        self._sent = sent

    @property
    def text(self) -> str:
        """The arguments as JSON text."""
        return self._sent


def read_text(message: Message) -> str:
    """Return the content of a message as one text. Parts are joined with line breaks."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in cast(list[Mapping[str, object]], content))
    return str(content or "")


def _iterate_forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield a conversation as it is, then in other forms, with as few changes as possible."""
    seen: list[Sequence[Message]] = []
    for size in range(len(_CHANGES) + 1):
        for changes in combinations(_CHANGES, size):
            form = messages
            for change in changes:
                form = change(form)
            if form not in seen:
                seen.append(form)
                yield form


def _join_parts(messages: Sequence[Message]) -> Sequence[Message]:
    """Make the content of every message one text. A message without content gets an empty text."""
    return [{**message, "content": read_text(message)} for message in messages]


def _write_arguments(messages: Sequence[Message]) -> Sequence[Message]:
    """Write the arguments of tool calls as JSON text."""

    def convert(call: Mapping[str, object]) -> Mapping[str, object]:
        function = cast(Mapping[str, object], call["function"])
        arguments = function["arguments"]
        sent = arguments.text if isinstance(arguments, ToolArguments) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": sent}}

    return [
        {**message, "tool_calls": [convert(call) for call in cast(list[Mapping[str, object]], message["tool_calls"])]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _merge_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Merge all system messages into one at the beginning."""
    texts = [read_text(message) for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else messages


def _merge_turns(messages: Sequence[Message]) -> Sequence[Message]:
    """Merge consecutive messages of the user, and of the assistant."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else {}
        is_same = message["role"] in ("user", "assistant") and message["role"] == last.get("role")
        if is_same and "tool_calls" not in last:
            text = f"{read_text(last)}\n\n{read_text(message)}"
            merged[-1] = {**last, **message, "content": text}
        else:
            merged.append(message)
    return merged


_CHANGES = (_join_parts, _write_arguments, _merge_system, _merge_turns)
