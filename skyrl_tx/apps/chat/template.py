"""Render a conversation with the chat template of a model."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl_tx.contract.errors import UserError

_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARK = "\ue000end of the text\ue001 "
"""Marks the end of the last message while the template runs. Its space is missing where the template trims texts."""

Message = Mapping[str, object]
Tool = Mapping[str, object]


class _Generation(Extension):
    """The block `{% generation %}`, which marks an assistant's tokens for transformers: its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  # declared by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the content of the block."""
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
    """Write JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=4)
def _compile(source: str) -> Callable[..., str]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    cast(dict[str, object], environment.globals).update(raise_exception=_raise, strftime_now=_format_now)
    try:
        return environment.from_string(source).render
    except TemplateError as error:
        raise UserError(f"the model's chat template is malformed: {error}") from error


class ChatTemplate:
    """A model's chat template."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        """`sources` has the template "default", and perhaps "tool_use" for prompts with tools.

        `tokens` are the special tokens under the names by which templates know them, for example "eos_token".
        """
        self._sources = sources
        self._tokens = tokens

    @property
    def source(self) -> str:
        """The text of all its templates."""
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
        """Return the prompt as text. With `continue_final_message` it ends inside the last message.

        Raises UserError if the template refuses the messages.
        """
        prepared = [_rename_reasoning(message) for message in messages]
        if continue_final_message:
            content = prepared[-1].get("content") if prepared else None
            if not isinstance(content, str) or not content.strip():
                raise UserError("continue_final_message: the last message has no text to continue")
            prepared[-1] = {**prepared[-1], "content": content + _MARK}

        source = self._sources["tool_use" if tools and "tool_use" in self._sources else "default"]
        given: dict[str, Any] = {
            **self._tokens,
            **(variables or {}),
            "messages": prepared,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _compile(source)(**given)
        except Exception as error:  # a template is a program, and may fail in any way
            raise UserError(f"messages: the model's chat template refuses them: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text


def _cut_at_mark(text: str) -> str:
    """Return a prompt up to the end of its last message. Raises UserError if the template dropped that message."""
    trimmed = _MARK.rstrip()
    if trimmed not in text:
        raise UserError("continue_final_message: the model's chat template drops the text of the last message")
    end = text.rindex(trimmed)
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


def _rename_reasoning(message: Message) -> dict[str, object]:
    """Give a message's reasoning the names that templates read; clients use different ones."""
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}
