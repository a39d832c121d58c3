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
"""Appended to the last message, to find the end of the message in the rendered prompt.

The mark ends with a space. If the space is missing in the prompt, the template strips the texts of
messages.
"""

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
    except TemplateError as error:
        raise UserError(f"the model's chat template is malformed: {error}") from error


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
        the model continues it. Raises UserError if the template fails.
        """
        # Mark the end of the last message
        prepared = [_rename_reasoning(message) for message in messages]
        if continue_final_message:
            content = prepared[-1].get("content") if prepared else None
            if not isinstance(content, str) or not content.strip():
                raise UserError("continue_final_message: the last message has no text that could be continued")
            prepared[-1] = {**prepared[-1], "content": content + _MARK}

        # Choose the template and its variables
        source = self._sources["tool_use" if tools and "tool_use" in self._sources else "default"]
        template_variables: dict[str, Any] = {
            **self._tokens,
            **(variables or {}),
            "messages": prepared,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _compile(source)(**template_variables)
        except Exception as error:  # a template is a program, so it can raise anything
            raise UserError(f"messages: the model's chat template failed with: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text


def _cut_at_mark(text: str) -> str:
    """Return the prompt up to the mark.

    Raises UserError if the template dropped the last message.
    """
    trimmed = _MARK.rstrip()
    if trimmed not in text:
        raise UserError(
            "continue_final_message: cannot continue the last message, because the model's chat template drops its text"
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
