"""Conversations as prompts of the served model, and how its replies are parsed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from skyrl_tx.apps.chat import tool_calls
from skyrl_tx.apps.chat.message import MessageParser
from skyrl_tx.apps.chat.openai_schemas import ChatMessage, Tool
from skyrl_tx.apps.chat.reasoning import ReasoningSplit, begins_inside
from skyrl_tx.apps.chat.render import Message
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.apps.chat.tool_calls import ParserName
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission.validation import require, shown


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation."""

    text: str
    tokens: list[int]
    tool_parser: ParserName

    def parser(self, *, separates_reasoning: bool) -> MessageParser:
        """Return a parser for one reply."""
        split = ReasoningSplit(inside=begins_inside(self.text)) if separates_reasoning else None
        return MessageParser(split, tool_calls.make(self.tool_parser))


def render(
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
    name = tool_calls.parser_of(template.source) if chosen == "auto" else chosen
    require(
        not tools or name != "none",
        "tools: the form of this model's tool calls is not known from its chat template; see --tool-parser",
    )
    return ChatPrompt(prompt, text.encode(prompt, add_special=False), name if tools else "none")


def template_message(message: ChatMessage, where: str) -> dict[str, object]:
    """Return a message of OpenAI's API as templates expect it. Raises UserError for what is not text."""
    require(not message.audio, f"{where}.audio: this server understands text only")
    require(not message.function_call, f"{where}.function_call: is not supported; use tool_calls")
    parts = message.content
    content = parts if isinstance(parts, str) or parts is None else joined_text(parts_of(parts, f"{where}.content"))
    made: dict[str, object] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if content is None:
        made["content"] = message.refusal or ""
    for name, value in (("name", message.name), ("tool_call_id", message.tool_call_id)):
        if value is not None:
            made[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        made["reasoning_content"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            template_call(
                call.id, call.function.name, _arguments(call.function.arguments, f"{where}.tool_calls[{index}]")
            )
            for index, call in enumerate(message.tool_calls)
        ]
    return made


def parts_of(parts: Sequence[object], where: str) -> list[str]:
    """Return the texts of content parts. Raises UserError for images and audio."""
    texts: list[str] = []
    for index, part in enumerate(parts):
        kind, text = getattr(part, "type", None), getattr(part, "text", None)
        require(kind == "text" and isinstance(text, str), f"{where}[{index}].type {shown(kind)}: must be 'text'")
        texts.append(cast(str, text))
    return texts


def joined_text(texts: Sequence[str]) -> str:
    """Join the text parts of one message, as lines."""
    return "\n".join(texts)


def template_call(call_id: str | None, name: str, arguments: object) -> dict[str, object]:
    """Return a tool call as templates expect it, with its arguments as an object."""
    call: dict[str, object] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def _arguments(text: str, where: str) -> object:
    try:
        value: object = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"{where}.function.arguments {shown(text)}: is not JSON") from error
    require(isinstance(value, dict), f"{where}.function.arguments {shown(text)}: must be a JSON object")
    return value


def template_tool(tool: Tool) -> dict[str, object]:
    """Return a tool as templates expect it, with the fields that the client sent."""
    return {"type": "function", "function": tool.function.model_dump(exclude_unset=True, exclude={"strict"})}
