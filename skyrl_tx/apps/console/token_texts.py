"""Tokens as the playground shows them: each with its text, so that the texts joined are the text of all."""

from collections.abc import Iterable, Sequence

from skyrl_tx.apps.chat.logprobs import TokenLogprob
from skyrl_tx.apps.chat.text import Detokenizer, ModelText


class TokenTexts:
    """Describes the tokens of one growing text. Without a tokenizer all texts are empty."""

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._detokenizer = Detokenizer(text, skip_special=False) if text.has_tokenizer else None

    def of(self, tokens: Iterable[int]) -> list[str]:
        """Return the texts of the next tokens. The last token of a character has its text, those before it none."""
        detokenizer = self._detokenizer
        return ["" if detokenizer is None else detokenizer.feed([token]) for token in tokens]

    def described(self, scored: Sequence[TokenLogprob]) -> list[dict[str, object]]:
        """Return the next tokens with log-probabilities and likeliest tokens."""
        return [
            self._described(each, text)
            for each, text in zip(scored, self.of(each.token for each in scored), strict=True)
        ]

    def _described(self, scored: TokenLogprob, text: str) -> dict[str, object]:
        made: dict[str, object] = {"id": scored.token, "text": text, "logprob": scored.logprob}
        if not text:
            made["bytes"] = self._bytes(scored.token)
        return made | {"top": [(token, self._alone(token), logprob) for token, logprob in scored.top]}

    def _alone(self, token: int) -> str:
        """Return the text of a token without its neighbours; the bytes of a part of a character in hexadecimal."""
        if self._detokenizer is None:
            return ""
        content = self._text.decode_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return f"<{content.hex(' ')}>"

    def _bytes(self, token: int) -> str:
        return "" if self._detokenizer is None else self._text.decode_bytes(token).hex(" ")
