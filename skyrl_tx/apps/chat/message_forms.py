"""Other forms of a conversation, for chat templates that cannot render the form of the client.

A form is a list of messages with the same content, written in another way. For example, some
templates accept only one system message. Other templates concatenate the arguments of a tool call
with other text, so the arguments must be a string.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import cast

Message = Mapping[str, object]


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


def iterate_forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
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
