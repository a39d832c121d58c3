"""Parse sampled text into reasoning, content and tool calls, while it is being streamed.

Reasoning is the text between `<think>` and `</think>`. Tool calls are recognized in the formats of
Hermes and Qwen (`<tool_call>`), and of Llama 3 (JSON).
"""

import json
import secrets
from dataclasses import dataclass, field
from typing import Literal, cast

from skyrl_tx.apps.chat.text import count_possible_start

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MAX_DEPTH = 100
"""How deep the lists and objects of a tool call may be nested."""
ParserName = Literal["hermes", "llama3", "none"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """New text of a message, as opposed to a tool call."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. `arguments` is a JSON object as text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


Part = TextPart | ToolCall


def _read_content(text: str) -> list[Part]:
    return [TextPart("content", text)] if text else []


def begins_inside(prompt: str) -> bool:
    """Return whether the prompt ends with `<think>`, so that the sample begins with reasoning."""
    return prompt.rstrip().endswith(_THINK)


class ReasoningSplit:
    """Separates reasoning from content in a text that arrives in parts.

    Only the beginning of a text can be reasoning. White space around the reasoning is dropped.
    """

    def __init__(self, *, inside: bool) -> None:
        """`inside`: the prompt already has the opening tag, so the text begins with reasoning."""
        self._state: Literal["before", "reasoning", "after", "content"] = "reasoning" if inside else "before"
        self._held = ""
        self._has_text = False

    def feed(self, text: str) -> list[TextPart]:
        """Add text and return the pieces that are now known to be reasoning or content."""
        self._held += text
        pieces: list[TextPart] = []
        if self._state == "before":
            self._open()
        if self._state == "reasoning":
            pieces += self._take_reasoning()
        if self._state == "after" and (rest := self._held.lstrip()):
            self._held, self._state = rest, "content"
        if self._state == "content" and self._held:
            pieces.append(TextPart("content", self._held))
            self._held = ""
        return pieces

    def _open(self) -> None:
        """Decide whether the text begins with reasoning, once the text is long enough to tell."""
        start = self._held.lstrip()
        if start.startswith(_THINK):
            self._held, self._state = start[len(_THINK) :], "reasoning"
        elif not _THINK.startswith(start):
            self._state = "content"

    def _take_reasoning(self) -> list[TextPart]:
        end = self._held.find(_END_THINK)
        if not self._has_text:
            stripped = self._held.lstrip()
            end, self._held = stripped.find(_END_THINK), stripped
        if end >= 0:
            text, self._held = self._held[:end].rstrip(), self._held[end + len(_END_THINK) :]
            self._state = "after"
        else:
            keep = _count_held_back(self._held)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._has_text = self._has_text or bool(text)
        return [TextPart("reasoning", text)] if text else []

    def finish(self) -> list[TextPart]:
        """Return the rest at the end of the text. An unfinished tag counts as text."""
        text, self._held = self._held, ""
        match self._state:
            case "reasoning":
                return [TextPart("reasoning", text)] if text.strip() else []
            case "after":
                return []
            case _:
                return [TextPart("content", text)] if text else []


def _count_held_back(text: str) -> int:
    """Return how many characters at the end of `text` may belong to the closing tag.

    These are the beginning of a tag, for example "</th", and the white space before it.
    """
    partial = count_possible_start(text, [_END_THINK])
    before = text[: len(text) - partial]
    return partial + len(before) - len(before.rstrip())


def choose_parser(template: str) -> ParserName:
    """Choose the parser for tool calls from the text of the model's chat template."""
    if _CALL in template:
        return "hermes"
    return "llama3" if _PYTHON_TAG in template or "ipython" in template else "none"


class HermesParser:
    """Parses calls of the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

    A malformed call is returned as text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._space = ""
        """White space at the end of the text so far.

        If a tool call follows, this white space is dropped. Otherwise it is part of the text.
        """
        self._has_calls = False

    def feed(self, text: str) -> list[Part]:
        """Add text and return the new parts in order."""
        self._held += text
        parts: list[Part] = []
        while True:
            # Inside a call: wait for its closing tag
            if self._is_inside:
                body, tag, rest = self._held.partition(_END_CALL)
                if not tag:
                    return parts
                call = _read_call(body, "arguments")
                self._held, self._is_inside = rest, False
                if call is None:
                    parts += self._release(f"{_CALL}{body}{_END_CALL}")
                else:
                    parts.append(call)
                    self._space, self._has_calls = "", True

            # Outside: release the text before the next call, except for a possible beginning of the
            # tag
            else:
                before, tag, rest = self._held.partition(_CALL)
                keep = 0 if tag else count_possible_start(self._held, [_CALL])
                parts += self._release(before[: len(before) - keep])
                if not tag:
                    self._held = before[len(before) - keep :]
                    return parts
                self._held, self._is_inside = rest, True

    def _release(self, text: str) -> list[Part]:
        """Return text that is certainly not a call.

        White space at the end of the text is held back until the next text. White space after a call
        is dropped.
        """
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if self._has_calls and stripped:
            stripped = stripped.lstrip()
        return _read_content(stripped)

    def finish(self) -> list[Part]:
        """Return the rest at the end of the text. An unfinished call counts as text."""
        rest = (_CALL if self._is_inside else "") + self._held
        # A call that lacks only its closing tag is complete
        if self._is_inside and (call := _read_call(self._held, "arguments")) is not None:
            return [call]
        space = "" if self._has_calls and not rest.strip() else self._space
        self._held, self._space = "", ""
        return _read_content(space + rest)


def _read_call(text: str, key: str) -> ToolCall | None:
    """Parse a tool call.

    Returns None if `text` is not a JSON object with a name and an object of arguments.
    """
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _check_call(value, key)


def _check_call(value: object, *keys: str) -> ToolCall | None:
    """Return a tool call, or None for other values, and for arguments that responses cannot contain.

    These are NaN, lone surrogates, and values that are nested deeper than JSON parsers accept.
    """
    if not isinstance(value, dict) or not _is_flat(value):
        return None
    call = cast(dict[str, object], value)
    arguments = next((call[key] for key in keys if key in call), dict[str, object]())
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{call['name']}{text}".encode()  # raises UnicodeEncodeError for a lone surrogate
    except ValueError:
        return None
    return ToolCall(str(call["name"]), text)


def _is_flat(value: object) -> bool:
    """Return whether lists and objects are nested at most `_MAX_DEPTH` deep."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        objects = [part.values() for part in level if isinstance(part, dict)]
        level = [inner for part in (*objects, *(part for part in level if isinstance(part, list))) for inner in part]
    return not level


class Llama3Parser:
    """Parses calls of the form `{"name": …, "parameters": {…}}`.

    Multiple calls are separated by semicolons.

    The whole text is either calls or content, so a text that may be a call is held back until it
    ends.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        """Add text and return it, unless the text so far may be a call."""
        if self._is_text:
            return _read_content(text)
        self._held += text
        start = self._held.lstrip()
        may_be_call = start.startswith(("{", _PYTHON_TAG)) or _PYTHON_TAG.startswith(start)
        if may_be_call:
            return []
        self._is_text = True
        released, self._held = self._held, ""
        return _read_content(released)

    def finish(self) -> list[Part]:
        """Return the calls, or the text if it is not a sequence of calls."""
        text, self._held = self._held, ""
        calls = _read_llama_calls(text.strip().removeprefix(_PYTHON_TAG).strip())
        return [*calls] if calls else _read_content(text)


def _read_llama_calls(text: str) -> list[ToolCall]:
    """Parse all calls in a text. Returns an empty list if the text has anything else in it."""
    decoder, calls, position = json.JSONDecoder(), list[ToolCall](), 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        call = _check_call(value, "parameters", "arguments")
        if call is None:
            return []
        calls.append(call)
        while position < len(text) and text[position] in "; \n\t\r":
            position += 1
    return calls


_PARSERS: dict[ParserName, type[HermesParser] | type[Llama3Parser]] = {"hermes": HermesParser, "llama3": Llama3Parser}


class MessageParser:
    """Parses a message that arrives in parts."""

    def __init__(self, split: ReasoningSplit | None, tools: ParserName) -> None:
        """With `split` None, reasoning is returned as content.

        With `tools` "none", so are tool calls.
        """
        self._split = split
        self._tools = _PARSERS[tools]() if tools in _PARSERS else None
        self.has_calls = False
        """True once the message has a tool call."""

    def feed(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Add text and return the new parts in order.

        With `is_last`, return everything that was held back.
        """
        if not text and not is_last:
            return []

        # Separate the reasoning
        pieces = [TextPart("content", text)] if self._split is None and text else []
        if self._split is not None:
            pieces = self._split.feed(text) + (self._split.finish() if is_last else [])
        if self._tools is None:
            return [*pieces]

        # Find tool calls in the content
        parts: list[Part] = []
        for piece in pieces:
            parts += [piece] if piece.kind == "reasoning" else self._tools.feed(piece.text)
        if is_last:
            parts += self._tools.finish()
        self.has_calls = self.has_calls or any(isinstance(part, ToolCall) for part in parts)
        return parts
