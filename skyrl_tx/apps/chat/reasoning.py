"""Splits what a model thinks from what it says, at `<think>` and `</think>`, also while streaming."""

from dataclasses import dataclass
from typing import Literal

_BEGIN, _END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one kind."""

    kind: Literal["reasoning", "content"]
    text: str


def begins_inside(prompt: str) -> bool:
    """Whether the prompt's template has already opened the reasoning."""
    return prompt.rstrip().endswith(_BEGIN)


class ReasoningSplit:
    """Splits one growing text. Reasoning comes first or not at all; white space around it is dropped."""

    def __init__(self, *, inside: bool) -> None:
        """`inside`: the text begins with reasoning."""
        self._state: Literal["before", "reasoning", "after", "content"] = "reasoning" if inside else "before"
        self._held = ""
        self._has_text = False

    def feed(self, text: str) -> list[Piece]:
        """Add text; return the new pieces."""
        self._held += text
        pieces: list[Piece] = []
        if self._state == "before":
            self._open()
        if self._state == "reasoning":
            pieces += self._take_reasoning()
        if self._state == "after" and (rest := self._held.lstrip()):
            self._held, self._state = rest, "content"
        if self._state == "content" and self._held:
            pieces.append(Piece("content", self._held))
            self._held = ""
        return pieces

    def _open(self) -> None:
        """Decide whether the text begins with reasoning, once it is long enough to tell."""
        start = self._held.lstrip()
        if start.startswith(_BEGIN):
            self._held, self._state = start[len(_BEGIN) :], "reasoning"
        elif not _BEGIN.startswith(start):
            self._state = "content"

    def _take_reasoning(self) -> list[Piece]:
        end = self._held.find(_END)
        if not self._has_text:
            stripped = self._held.lstrip()
            end, self._held = stripped.find(_END), stripped
        if end >= 0:
            text, self._held = self._held[:end].rstrip(), self._held[end + len(_END) :]
            self._state = "after"
        else:
            keep = _held_back(self._held)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._has_text = self._has_text or bool(text)
        return [Piece("reasoning", text)] if text else []

    def finish(self) -> list[Piece]:
        """Return the rest: an unfinished tag is text."""
        text, self._held = self._held, ""
        match self._state:
            case "reasoning":
                return [Piece("reasoning", text)] if text.strip() else []
            case "after":
                return []
            case _:
                return [Piece("content", text)] if text else []


def _held_back(text: str) -> int:
    """Return the length of the end of a text that may belong to the end tag: white space, and a part of the tag."""
    partial = next((size for size in range(min(len(text), len(_END) - 1), 0, -1) if _END.startswith(text[-size:])), 0)
    before = text[: len(text) - partial]
    return partial + len(before) - len(before.rstrip())
