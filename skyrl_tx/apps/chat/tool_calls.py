"""Finds tool calls in what a model writes, also while streaming: the forms of Hermes and Qwen, and of Llama 3."""

import json
import secrets
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
ParserName = Literal["hermes", "llama3", "none"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` is a JSON object as text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


Found = str | ToolCall
"""Text, or a call."""


class ToolParser(Protocol):
    """Finds the calls in one growing text."""

    def feed(self, text: str) -> list[Found]:
        """Add text; return the new parts in order."""
        ...

    def finish(self) -> list[Found]:
        """Return the rest: an unfinished call is text."""
        ...


def parser_of(template: str) -> ParserName:
    """Return the form in which a model writes calls, by its chat template."""
    if _BEGIN in template:
        return "hermes"
    return "llama3" if _PYTHON_TAG in template or "ipython" in template else "none"


def make(name: ParserName) -> ToolParser | None:
    """Create a parser; None if calls cannot be recognized."""
    match name:
        case "hermes":
            return HermesParser()
        case "llama3":
            return Llama3Parser()
        case "none":
            return None


class HermesParser:
    """Calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; malformed ones are text."""

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._space = ""
        """White space before what may be a call; it is dropped there, and text elsewhere."""
        self._has_calls = False

    def feed(self, text: str) -> list[Found]:
        """Add text; return the new parts in order."""
        self._held += text
        found: list[Found] = []
        while True:
            if self._is_inside:
                body, tag, rest = self._held.partition(_END)
                if not tag:
                    return found
                call = _call_of(body, "arguments")
                self._held, self._is_inside = rest, False
                if call is None:
                    found += self._text(f"{_BEGIN}{body}{_END}")
                else:
                    found.append(call)
                    self._space, self._has_calls = "", True
            else:
                before, tag, rest = self._held.partition(_BEGIN)
                keep = 0 if tag else _num_opening(self._held)
                found += self._text(before[: len(before) - keep])
                if not tag:
                    self._held = before[len(before) - keep :]
                    return found
                self._held, self._is_inside = rest, True

    def _text(self, text: str) -> list[Found]:
        """Return text with the white space before it; hold white space at its end, and all of it between calls."""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if self._has_calls and stripped:
            stripped = stripped.lstrip()
        return [stripped] if stripped else []

    def finish(self) -> list[Found]:
        """Return the rest: an unfinished call is text."""
        rest = (_BEGIN if self._is_inside else "") + self._held
        if self._is_inside and (call := _call_of(self._held, "arguments")) is not None:
            return [call]  # complete but for its end tag
        space = "" if self._has_calls and not rest.strip() else self._space
        self._held, self._space = "", ""
        return [space + rest] if space + rest else []


def _num_opening(text: str) -> int:
    """Return the length of the end of a text that may begin a call."""
    return next((size for size in range(min(len(text), len(_BEGIN) - 1), 0, -1) if _BEGIN.startswith(text[-size:])), 0)


def _call_of(text: str, key: str) -> ToolCall | None:
    """Read one call; None if it is not a JSON object with a name and an object of arguments."""
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return _checked(value, key)


def _checked(value: object, *keys: str) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    call = cast(dict[str, object], value)
    arguments = next((call[key] for key in keys if key in call), dict[str, object]())
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None
    return ToolCall(str(call["name"]), json.dumps(arguments, ensure_ascii=False))


class Llama3Parser:
    """Calls as `{"name": …, "parameters": {…}}`, several separated by semicolons; the whole text is calls or text."""

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> list[Found]:
        """Add text; return it unless it may be a call."""
        if self._is_text:
            return [text] if text else []
        self._held += text
        start = self._held.lstrip()
        may_be_call = start.startswith(("{", _PYTHON_TAG)) or _PYTHON_TAG.startswith(start)
        if may_be_call:
            return []
        self._is_text = True
        released, self._held = self._held, ""
        return [released]

    def finish(self) -> list[Found]:
        """Return the calls, or the held text if it is none."""
        text, self._held = self._held, ""
        calls = _llama_calls(text.strip().removeprefix(_PYTHON_TAG).strip())
        return [*calls] if calls else [text] if text else []


def _llama_calls(text: str) -> list[ToolCall]:
    """Read all calls; none if the text is anything else."""
    decoder, calls, position = json.JSONDecoder(), list[ToolCall](), 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except ValueError:
            return []
        call = _checked(value, "parameters", "arguments")
        if call is None:
            return []
        calls.append(call)
        while position < len(text) and text[position] in "; \n\t\r":
            position += 1
    return calls
