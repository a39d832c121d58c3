"""Convert conversations of the OpenAI and Anthropic APIs to prompts of the served model."""

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

_TEXT_ONLY = "is not supported; this server accepts only text, tool_use, tool_result and thinking"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation, and the parser for tool calls in the reply to it."""

    text: str
    tokens: list[int]
    tool_parser: ParserName

    def create_parser(self, *, separates_reasoning: bool) -> MessageParser:
        """Create a parser for one reply."""
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

    Raises UserError if the model has no tokenizer or no chat template, if the template fails, or if
    there are tools and the format of the model's tool calls is unknown.
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

    # Choose the parser for tool calls
    configured = settings.tool_parser
    name = choose_parser(template.source) if configured == "auto" else configured
    require(
        not tools or name != "none",
        "tools: the server cannot tell from the model's chat template in which format the model writes tool calls; "
        "the operator can set it with --tool-parser",
    )
    return ChatPrompt(prompt, text.encode(prompt, add_special=False), name if tools else "none")


def convert_openai_message(message: ChatMessage, where: str) -> dict[str, object]:
    """Convert a message of OpenAI's API to the form that chat templates expect.

    `where` is the message's path in the request, for example "messages[2]". Raises UserError for
    images and audio.
    """
    # The content as one text
    require(not message.audio, f"{where}.audio: is not supported; this server only accepts text")
    require(not message.function_call, f"{where}.function_call: is not supported; use tool_calls")
    content = message.content
    if content is None:
        content = message.refusal or ""
    elif not isinstance(content, str):
        content = _join(_read_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))

    # The other fields, if they are set
    converted: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
    }
    for name, value in (("name", message.name), ("tool_call_id", message.tool_call_id)):
        if value is not None:
            converted[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        converted["reasoning_content"] = reasoning

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


def _read_part(part: ContentPart, where: str) -> str:
    """Return the text of one content part. Raises UserError for images and audio."""
    require(part.type == "text" and part.text is not None, f"{where}.type {quote_value(part.type)}: must be 'text'")
    return part.text or ""


def _join(texts: Iterable[str]) -> str:
    """Join the text parts of one message with line breaks."""
    return "\n".join(texts)


def _convert_call(call_id: str | None, name: str, arguments: object) -> dict[str, object]:
    """Convert a tool call to the form that chat templates expect."""
    call: dict[str, object] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def _read_arguments(text: str, where: str) -> object:
    try:
        value: object = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"{where}.function.arguments {quote_value(text)}: is not valid JSON: {error}") from error
    require(isinstance(value, dict), f"{where}.function.arguments {quote_value(text)}: must be a JSON object")
    return value


def convert_openai_tool(tool: schemas.Tool) -> dict[str, object]:
    """Convert a tool of OpenAI's API to the form that chat templates expect.

    Fields that were not sent are left out.
    """
    return {"type": "function", "function": tool.function.model_dump(exclude_unset=True, exclude={"strict"})}


def convert_anthropic_messages(system: Content | None, messages: Sequence[AnthropicMessage]) -> list[dict[str, object]]:
    """Convert messages of Anthropic's API to the form that chat templates expect.

    The result can have more messages than the request, because the system prompt and the results of
    tools become messages. Raises UserError for images and documents.
    """
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
    # Sort the blocks by kind
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
                pass  # made by Anthropic's servers; unreadable here
            case "tool_use":
                require(block.name is not None, f"{where}[{index}].name: missing")
                calls.append(_convert_call(block.id, block.name or "", block.input or {}))
            case _:
                _refuse(block, f"{where}[{index}]")

    # Make one message of them
    message: dict[str, object] = {"role": "assistant", "content": _join(texts)}
    if thoughts:
        message["reasoning_content"] = _join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _convert_user(blocks: Sequence[ContentBlock], role: str, where: str) -> list[dict[str, object]]:
    """Return one message for each tool result, and one for the texts between two tool results."""
    converted: list[dict[str, object]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(block.text or "")
            # The texts before a result become a message
            case "tool_result":
                if texts:
                    converted.append({"role": role, "content": _join(texts)})
                    texts = []
                content = "" if block.content is None else _read_text(block.content, f"{where}[{index}].content")
                converted.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case _:
                _refuse(block, f"{where}[{index}]")
    if texts or not converted:
        converted.append({"role": role, "content": _join(texts)})
    return converted


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
    """Convert tools of Anthropic's API to the form that chat templates expect.

    Raises UserError for tools that Anthropic's servers run, for example web search.
    """
    converted: list[dict[str, object]] = []
    for index, tool in enumerate(tools):
        require(
            tool.type in (None, "custom"),
            f"tools[{index}].type {quote_value(tool.type)}: this server supports only 'custom' tools, which run in the "
            "client",
        )
        function: dict[str, object] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        converted.append({"type": "function", "function": function})
    return converted
