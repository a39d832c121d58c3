"""Convert conversations of the OpenAI and Anthropic APIs to prompts of the served model."""

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NoReturn, cast

from skyrl_tx.apps.chat.generation import Delta
from skyrl_tx.apps.chat.message import FORMATS, MessageFormat, MessageParser, Part, TextPart, choose_format
from skyrl_tx.apps.chat.response_template import ResponseTemplate, TemplateParser
from skyrl_tx.apps.chat.schemas import (
    AnthropicMessage,
    AnthropicTool,
    ChatMessage,
    Content,
    ContentBlock,
    ContentPart,
)
from skyrl_tx.apps.chat.service import ChatService
from skyrl_tx.apps.chat.template import Message, ToolArguments, read_text
from skyrl_tx.contract.errors import FieldError, ServerError
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.submission.validation import quote_value, require

_log = logging.getLogger(__name__)
_TEXT_ONLY = "is not supported; this server accepts only text, tool_use, tool_result and thinking"
_RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of chat templates that a request cannot set."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation, and the form of the reply to it."""

    text: str
    tokens: list[int]
    form: MessageFormat | ResponseTemplate
    tools: Sequence[Mapping[str, object]]

    @property
    def delimiters(self) -> Collection[str]:
        """The texts between the parts of a reply. The parser must see them, also if they are special tokens."""
        return self.form.list_delimiters(has_tools=bool(self.tools))

    def create_reader(self, *, separates_reasoning: bool = True, has_one_call: bool = False) -> "ReplyReader":
        """Create a reader for one reply. With `has_one_call`, it leaves out tool calls after the first."""
        parser = self.form.create_parser(self.text, self.tools, separates_reasoning=separates_reasoning)
        return ReplyReader(parser, has_one_call=has_one_call)


class ReplyReader:
    """Reads the parts of one reply as its text arrives."""

    def __init__(self, parser: MessageParser | TemplateParser, *, has_one_call: bool) -> None:
        self._parser = parser
        self._has_one_call = has_one_call

    @property
    def has_calls(self) -> bool:
        """Whether the reply has a tool call so far."""
        return self._parser.has_calls

    def read(self, delta: Delta) -> list[Part]:
        """Return the new parts of the reply in order."""
        had_calls = self.has_calls
        parts = self._parser.feed(delta.text, is_last=delta.finish is not None)
        if not self._has_one_call:
            return parts
        first = next((part for part in parts if not isinstance(part, TextPart)), None)
        return [part for part in parts if isinstance(part, TextPart) or (part is first and not had_calls)]


def render_prompt(
    service: ChatService,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, object] | None = None,
) -> ChatPrompt:
    """Render a conversation and encode it.

    Raises UserError if the model has no tokenizer or no chat template, if the template fails, or if
    there are tools and the format of the model's tool calls is unknown. Raises ApiError 500 if the
    template cannot be read or is malformed.
    """
    service.text.check()

    # Templates have different names for the variable that turns reasoning on, for example `thinking` in DeepSeek V3.1
    variables = dict(variables or {})
    if "enable_thinking" in variables:
        variables.setdefault("thinking", variables["enable_thinking"])

    try:
        template = service.text.template
        prompt = template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
    except ServerError as error:  # the message may name a path on the server
        _log.error("cannot render a prompt with the chat template: %s", error)
        detail = "the server cannot use its chat template; the server's log has the reason"
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, detail) from error

    # Choose the form of the reply
    configured = service.context.settings.tool_parser
    if configured == "auto":
        form = service.response_template or FORMATS[choose_format(template.source)]
    else:
        form = FORMATS[configured]
    require(
        not tools or form.has_calls,
        "tools: the server cannot tell from the model's chat template in which format the model writes tool calls; "
        "the operator can set it with --tool-parser",
        field="tools",
    )
    return ChatPrompt(prompt, service.encode(prompt, add_special=False), form, tools)


def read_variables(given: Mapping[str, object] | None, fields: Iterable[tuple[str, str, object]]) -> dict[str, object]:
    """Return the variables of a request for the chat template.

    `given` is `chat_template_kwargs`. `fields` lists the other fields of the request that set a
    variable: the name of the field, the name of the variable, and the value. The value is None if
    the client did not set the field. Raises UserError if two fields give a variable different
    values.
    """
    variables = dict(given or {})
    for name in _RESERVED_VARIABLES:
        path = f"chat_template_kwargs.{name}"
        require(name not in variables, f"{path}: must not be set here; the server sets it", field=path)
    for name, variable, value in fields:
        other = variables.setdefault(variable, value) if value is not None else None
        require(
            other == value,
            f"{name}: sets {variable} of the chat template to {value}, but another field sets it to "
            f"{quote_value(other)}; send one of the two",
            field=name,
        )
    return variables


def convert_openai_message(message: ChatMessage, where: str) -> dict[str, object]:
    """Convert a message of OpenAI's API to the form that chat templates expect.

    `where` is the message's path in the request, for example "messages[2]". Raises UserError for
    images and audio.
    """
    # The content as text or as parts
    for name, hint in (("audio", "this server only accepts text"), ("function_call", "use tool_calls")):
        path = f"{where}.{name}"
        require(not getattr(message, name), f"{path}: is not supported; {hint}", field=path)
    content = message.refusal if message.content is None else message.content
    if isinstance(content, list):
        content = [_read_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]

    # The fields that are set
    converted: dict[str, object] = {"role": "system" if message.role == "developer" else message.role}
    reasoning = message.reasoning_content or message.reasoning
    others = {"content": content, "name": message.name, "tool_call_id": message.tool_call_id}
    for name, value in (others | {"reasoning_content": reasoning}).items():
        if value is not None:
            converted[name] = value

    # Tool calls
    if message.tool_calls:
        converted["tool_calls"] = [
            _convert_call(
                call.id,
                call.function.name,
                _read_arguments(call.function.arguments, f"{where}.tool_calls[{index}]"),
            )
            for index, call in enumerate(message.tool_calls)
        ]
    return converted


def _read_part(part: ContentPart, where: str) -> dict[str, str]:
    """Convert one content part. Raises UserError for images and audio."""
    path = f"{where}.type"
    is_text = part.type == "text" and part.text is not None
    require(is_text, f"{path} {quote_value(part.type)}: must be 'text'", field=path)
    return _make_part(part.text)


def _make_part(text: str | None) -> dict[str, str]:
    return {"type": "text", "text": text or ""}


def _convert_call(call_id: str | None, name: str, arguments: object) -> dict[str, object]:
    """Convert a tool call to the form that chat templates expect."""
    call: dict[str, object] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def _read_arguments(text: str, where: str) -> ToolArguments:
    path = f"{where}.function.arguments"
    try:
        value: object = json.loads(text or "{}")
        # Raises ValueError for NaN, and UnicodeEncodeError for a lone surrogate
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise FieldError(f"{path} {quote_value(text)}: is not valid JSON: {error}", path) from error
    if not isinstance(value, dict):
        raise FieldError(f"{path} {quote_value(text)}: must be a JSON object", path)
    return ToolArguments(cast(dict[str, object], value), text or "{}")


def convert_anthropic_messages(system: Content | None, messages: Sequence[AnthropicMessage]) -> list[dict[str, object]]:
    """Convert messages of Anthropic's API to the form that chat templates expect.

    The result can have more messages than the request, because the system prompt and the results of
    tools become messages. Raises UserError for images and documents.
    """
    converted: list[dict[str, object]] = []
    first: dict[str, object] = {"role": "system", "content": _read_content(system or "", "system")}
    if read_text(first):
        converted.append(first)
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
    # Sort the blocks by kind
    texts: list[dict[str, str]] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []

    for index, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(_make_part(block.text))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # made by Anthropic's servers; unreadable here
            case "tool_use":
                path = f"{where}[{index}].name"
                require(block.name is not None, f"{path}: missing", field=path)
                calls.append(_convert_call(block.id, block.name or "", block.input or {}))
            case _:
                _refuse(block, f"{where}[{index}]")

    # Make one message of them
    message: dict[str, object] = {"role": "assistant"}
    if texts:
        message["content"] = texts
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _convert_user(blocks: Sequence[ContentBlock], role: str, where: str) -> list[dict[str, object]]:
    """Return one message for each tool result, and one for the texts between two tool results."""
    converted: list[dict[str, object]] = []
    texts: list[dict[str, str]] = []
    for index, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(_make_part(block.text))
            # The texts before a result become a message
            case "tool_result":
                if texts:
                    converted.append({"role": role, "content": texts})
                    texts = []
                content = "" if block.content is None else _read_content(block.content, f"{where}[{index}].content")
                converted.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case _:
                _refuse(block, f"{where}[{index}]")
    if texts or not converted:
        converted.append({"role": role, "content": texts})
    return converted


def _read_content(content: Content, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text":
            _refuse(block, f"{where}[{index}]")
    return [_make_part(block.text) for block in content]


def _refuse(block: ContentBlock, where: str) -> NoReturn:
    raise FieldError(f"{where}.type {quote_value(block.type)}: {_TEXT_ONLY}", f"{where}.type")


def convert_anthropic_tools(tools: Sequence[AnthropicTool]) -> list[dict[str, object]]:
    """Convert tools of Anthropic's API to the form that chat templates expect.

    Raises UserError for tools that Anthropic's servers run, for example web search.
    """
    converted: list[dict[str, object]] = []
    for index, tool in enumerate(tools):
        path = f"tools[{index}].type"
        require(
            tool.type in (None, "custom"),
            f"{path} {quote_value(tool.type)}: this server supports only 'custom' tools, which run in the client",
            field=path,
        )
        function: dict[str, object] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        converted.append({"type": "function", "function": function})
    return converted
