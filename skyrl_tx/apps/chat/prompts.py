"""Conversations of both APIs as prompts of the served model, and how its replies are parsed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
from skyrl_tx.apps.chat.template import Message
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission.validation import quote_value, require

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
