"""Conversations of Anthropic's API as chat templates expect them."""

from collections.abc import Sequence

from skyrl_tx.apps.chat.anthropic_schemas import AnthropicMessage, AnthropicTool, Block, Content
from skyrl_tx.apps.chat.prompts import joined_text, template_call
from skyrl_tx.server.submission.validation import require, shown

_TEXT_ONLY = "this server understands text, tool_use, tool_result and thinking only"


def template_messages(system: Content | None, messages: Sequence[AnthropicMessage]) -> list[dict[str, object]]:
    """Return the messages. Raises UserError for images and documents."""
    converted: list[dict[str, object]] = []
    if system is not None and (text := _text(system, "system")):
        converted.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            converted.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            converted.append(_assistant(message.content, where))
        else:
            converted += _user(message.content, message.role, where)
    return converted


def _assistant(blocks: Sequence[Block], where: str) -> dict[str, object]:
    texts: list[str] = []
    thoughts: list[str] = []
    called: list[dict[str, object]] = []
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
                called.append(template_call(block.id, block.name or "", block.input or {}))
            case _:
                _refuse(block, f"{where}[{index}]")
    message: dict[str, object] = {"role": "assistant", "content": joined_text(texts)}
    if thoughts:
        message["reasoning_content"] = joined_text(thoughts)
    if called:
        message["tool_calls"] = called
    return message


def _user(blocks: Sequence[Block], role: str, where: str) -> list[dict[str, object]]:
    """Return the results of tools as messages of their own, and the text between them."""
    made: list[dict[str, object]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "tool_result":
                if texts:
                    made.append({"role": role, "content": joined_text(texts)})
                    texts = []
                content = "" if block.content is None else _text(block.content, f"{where}[{index}].content")
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case _:
                _refuse(block, f"{where}[{index}]")
    return [*made, {"role": role, "content": joined_text(texts)}] if texts or not made else made


def _text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text":
            _refuse(block, f"{where}[{index}]")
    return joined_text([block.text or "" for block in content])


def _refuse(block: Block, where: str) -> None:
    require(False, f"{where}.type {shown(block.type)}: {_TEXT_ONLY}")


def template_tools(tools: Sequence[AnthropicTool]) -> list[dict[str, object]]:
    """Return the tools. Raises UserError for those that Anthropic's own servers run."""
    converted: list[dict[str, object]] = []
    for index, tool in enumerate(tools):
        require(
            tool.type in (None, "custom"),
            f"tools[{index}].type {shown(tool.type)}: this server has no tools of its own; only 'custom'",
        )
        function: dict[str, object] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        converted.append({"type": "function", "function": function})
    return converted
