"""Splits the text of an assistant's message into reasoning, content and tool calls, also while streaming."""

from skyrl_tx.apps.chat.reasoning import Piece, ReasoningSplit
from skyrl_tx.apps.chat.tool_calls import ToolCall, ToolParser

Part = Piece | ToolCall


class MessageParser:
    """Parses one growing text."""

    def __init__(self, split: ReasoningSplit | None, tools: ToolParser | None) -> None:
        """`split` None: reasoning is content. `tools` None: calls are content."""
        self._split = split
        self._tools = tools
        self.has_calls = False
        """Whether a tool was called."""

    def feed(self, text: str) -> list[Part]:
        """Add text; return the new parts in order."""
        if not text:
            return []
        return self._find_calls([Piece("content", text)] if self._split is None else self._split.feed(text))

    def finish(self) -> list[Part]:
        """Return the rest."""
        parts = self._find_calls([] if self._split is None else self._split.finish())
        if self._tools is not None:
            parts += self._described(self._tools.finish())
        return parts

    def _find_calls(self, pieces: list[Piece]) -> list[Part]:
        tools = self._tools
        if tools is None:
            return [*pieces]
        parts: list[Part] = []
        for piece in pieces:
            parts += [piece] if piece.kind == "reasoning" else self._described(tools.feed(piece.text))
        return parts

    def _described(self, found: list[str | ToolCall]) -> list[Part]:
        self.has_calls = self.has_calls or any(isinstance(each, ToolCall) for each in found)
        return [Piece("content", each) if isinstance(each, str) else each for each in found]
