"""Tokens to text piece by piece: complete characters only, and nothing that may be the beginning of a stop string."""

from collections.abc import Sequence

from skyrl_tx.apps.chat.text import Decoder

_INCOMPLETE = "\ufffd"
_MAX_INCOMPLETE = 4
"""A decoder shows the bytes of one incomplete character as at most this number of U+FFFD."""


class Detokenizer:
    """The text of one growing sample.

    The joined pieces equal the text of all tokens decoded at once, for decoders whose output for a complete character
    does not depend on what follows, as those of byte-level tokenizers.
    """

    def __init__(self, decoder: Decoder, *, skip_special: bool = True) -> None:
        self._decoder = decoder
        self._skip_special = skip_special
        self._window: list[int] = []
        """Tokens whose text is decoded again with the next ones: a decoder may drop a space at the beginning."""
        self._num_context = 0
        """Tokens at the beginning of the window whose text is complete."""
        self._num_released = 0
        """Characters of the window's text that were returned."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the new text that no later token changes."""
        if not tokens:
            return ""
        self._window.extend(tokens)
        text = self._text(self._window)
        num_incomplete = min(len(text) - len(text.rstrip(_INCOMPLETE)), _MAX_INCOMPLETE)
        end = max(len(text) - num_incomplete, self._num_released)
        piece = text[self._num_released : end]
        if num_incomplete:
            self._num_released = end
        else:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_released = len(self._text(self._window))
        return piece

    def finish(self) -> str:
        """Return the rest, whose last character may be incomplete."""
        text = self._text(self._window)
        piece = text[self._num_released :]
        self._num_released = len(text)
        return piece

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decoder.text_of(tokens, skip_special=self._skip_special)


class StopStrings:
    """Cuts a growing text at the first match of a stop string."""

    def __init__(self, stops: Sequence[str], *, keep_match: bool = False) -> None:
        """`keep_match`: the text includes the stop string."""
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=1)
        self._keep_match = keep_match
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """Add text; return what is certain to come before a stop string. Nothing follows a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if matches:
            end, start, self.matched = min(matches)  # the first that is complete, as in the engine
            released, self._held = self._held[: end if self._keep_match else start], ""
            return released
        keep = self._num_kept()
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return released

    def _num_kept(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = min(self._longest - 1, len(self._held))
        return next(
            (
                size
                for size in range(longest, 0, -1)
                if any(stop.startswith(self._held[-size:]) for stop in self._stops)
            ),
            0,
        )

    def finish(self) -> str:
        """Return the held text: no stop string follows."""
        released, self._held = self._held, ""
        return released


class SampleText:
    """The text of one growing sample, cut at its stop."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        stops: Sequence[str],
        stop_tokens: frozenset[int],
        keep_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        """`stop_tokens` end the sample and are not part of its text, unless `keep_stop`."""
        self._detokenizer = Detokenizer(decoder, skip_special=skip_special)
        self._stops = StopStrings(stops, keep_match=keep_stop)
        self._stop_tokens = frozenset[int]() if keep_stop else stop_tokens

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the new text. A stop token can only be the last one of a sample."""
        if tokens and tokens[-1] in self._stop_tokens:
            tokens = tokens[:-1]
        return self._stops.feed(self._detokenizer.feed(tokens))

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
