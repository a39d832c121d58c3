"""Conversations of both APIs as prompts of the served model, and how its replies are parsed."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl_tx.apps.chat import schemas
from skyrl_tx.apps.chat.message import (
    MessageParser,
    ParserName,
    ReasoningSplit,
    begins_inside,
    choose_parser,
)
from skyrl_tx.apps.chat.schemas import (
    AnthropicMessage,
    AnthropicTool,
    ChatMessage,
    Content,
    ContentBlock,
    ContentPart,
)
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission.validation import quote_value, require

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


_TEXT_ONLY = "this server understands text, tool_use, tool_result and thinking only"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation."""

    text: str
    tokens: list[int]
    tool_parser: ParserName

    def create_parser(self, *, separates_reasoning: bool) -> MessageParser:
        """Return a parser for one reply."""
        split = ReasoningSplit(inside=begins_inside(self.text)) if separates_reasoning else None
        return MessageParser(split, self.tool_parser)


def render_prompt(
    text: ModelText,
    settings: ApiSettings,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, object] | None = None,
) -> ChatPrompt:
    """Render a conversation and encode it.

    Raises UserError if the model has no tokenizer or no template, or if its template refuses the conversation.
    """
    text.check()
    template = text.template
    prompt = template.render(
        messages,
        tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
    )
    chosen = settings.tool_parser
    name = choose_parser(template.source) if chosen == "auto" else chosen
    require(
        not tools or name != "none",
        "tools: the form of this model's tool calls is not known from its chat template; see --tool-parser",
    )
    return ChatPrompt(prompt, text.encode(prompt, add_special=False), name if tools else "none")


def convert_openai_message(message: ChatMessage, where: str) -> dict[str, object]:
    """Return a message of OpenAI's API as templates expect it. Raises UserError for images and audio."""
    require(not message.audio, f"{where}.audio: this server understands text only")
    require(not message.function_call, f"{where}.function_call: is not supported; use tool_calls")
    content = message.content
    if content is None:
        content = message.refusal or ""
    elif not isinstance(content, str):
        content = _join(_read_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))

    made: dict[str, object] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    for name, value in (("name", message.name), ("tool_call_id", message.tool_call_id)):
        if value is not None:
            made[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        made["reasoning_content"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            _convert_call(
                call.id, call.function.name, _read_arguments(call.function.arguments, f"{where}.tool_calls[{index}]")
            )
            for index, call in enumerate(message.tool_calls)
        ]
    return made


def _read_part(part: ContentPart, where: str) -> str:
    """Return the text of a part of a message. Raises UserError for images and audio."""
    require(part.type == "text" and part.text is not None, f"{where}.type {quote_value(part.type)}: must be 'text'")
    return part.text or ""


def _join(texts: Iterable[str]) -> str:
    """Join the text parts of one message, as lines."""
    return "\n".join(texts)


def _convert_call(call_id: str | None, name: str, arguments: object) -> dict[str, object]:
    """Return a tool call as templates expect it, with its arguments as an object."""
    call: dict[str, object] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def _read_arguments(text: str, where: str) -> object:
    try:
        value: object = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"{where}.function.arguments {quote_value(text)}: is not JSON") from error
    require(isinstance(value, dict), f"{where}.function.arguments {quote_value(text)}: must be a JSON object")
    return value


def convert_openai_tool(tool: schemas.Tool) -> dict[str, object]:
    """Return a tool as templates expect it, with the fields that the client sent."""
    return {"type": "function", "function": tool.function.model_dump(exclude_unset=True, exclude={"strict"})}


def convert_anthropic_messages(system: Content | None, messages: Sequence[AnthropicMessage]) -> list[dict[str, object]]:
    """Return the messages of Anthropic's API as templates expect them. Raises UserError for images and documents."""
    converted: list[dict[str, object]] = []
    if system is not None and (text := _read_text(system, "system")):
        converted.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            converted.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            converted.append(_convert_assistant(message.content, where))
        else:
            converted += _convert_user(message.content, message.role, where)
    return converted


def _convert_assistant(blocks: Sequence[ContentBlock], where: str) -> dict[str, object]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    for index, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # no client can have one from this server
            case "tool_use":
                require(block.name is not None, f"{where}[{index}].name: missing")
                calls.append(_convert_call(block.id, block.name or "", block.input or {}))
            case _:
                _refuse(block, f"{where}[{index}]")
    message: dict[str, object] = {"role": "assistant", "content": _join(texts)}
    if thoughts:
        message["reasoning_content"] = _join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _convert_user(blocks: Sequence[ContentBlock], role: str, where: str) -> list[dict[str, object]]:
    """Return a message for each result of a tool, and one for each text between them."""
    made: list[dict[str, object]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "tool_result":
                if texts:
                    made.append({"role": role, "content": _join(texts)})
                    texts = []
                content = "" if block.content is None else _read_text(block.content, f"{where}[{index}].content")
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case _:
                _refuse(block, f"{where}[{index}]")
    return [*made, {"role": role, "content": _join(texts)}] if texts or not made else made


def _read_text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text":
            _refuse(block, f"{where}[{index}]")
    return _join(block.text or "" for block in content)


def _refuse(block: ContentBlock, where: str) -> None:
    require(False, f"{where}.type {quote_value(block.type)}: {_TEXT_ONLY}")


def convert_anthropic_tools(tools: Sequence[AnthropicTool]) -> list[dict[str, object]]:
    """Return tools as templates expect them. Raises UserError for tools that Anthropic's own servers run."""
    converted: list[dict[str, object]] = []
    for index, tool in enumerate(tools):
        require(
            tool.type in (None, "custom"),
            f"tools[{index}].type {quote_value(tool.type)}: this server has no tools of its own; only 'custom'",
        )
        function: dict[str, object] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        converted.append({"type": "function", "function": function})
    return converted
