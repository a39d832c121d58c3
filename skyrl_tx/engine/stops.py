"""Stop strings, for every backend: found in the text of the tokens, also across their boundaries."""

from collections.abc import Callable, Sequence

_MARGIN_CHARS = 4  # a window may begin inside a character, or with a space that decoding drops


class StopWatch:
    """Reads one sample as it grows."""

    def __init__(self, stop_strings: Sequence[str], text_of: Callable[[list[int]], str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._text_of = text_of
        self._longest = max((len(text) for text in stop_strings), default=0)
        self._longest_bytes = max((len(text.encode()) for text in stop_strings), default=0)
        self._window: list[int] = []

    def feed(self, tokens: list[int]) -> int | None:
        """Take in the sample's next tokens; how many of them to keep if a stop string ends among them.

        The token that completes the match is the last one kept.
        """
        if not self._stop_strings:
            return None
        if self._matches(self._window + tokens):
            return next(n for n in range(1, len(tokens) + 1) if self._matches(self._window + tokens[:n]))
        self._window = self._tail(self._window + tokens)
        return None

    def _matches(self, tokens: list[int]) -> bool:
        text = self._text_of(tokens)
        return any(stop in text for stop in self._stop_strings)

    def _tail(self, tokens: list[int]) -> list[int]:
        """The last tokens whose text is long enough to hold the beginning of any match still to come."""
        count = self._longest_bytes + _MARGIN_CHARS
        while count < len(tokens):
            if len(self._text_of(tokens[-count:])) >= self._longest + _MARGIN_CHARS:
                return tokens[-count:]
            count *= 2
        return tokens
