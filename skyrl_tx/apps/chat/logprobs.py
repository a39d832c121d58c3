"""Log-probabilities in the forms of OpenAI's API. All numbers are the backend's own float32 values."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from skyrl_tx.apps.chat.generation import Delta
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.contract.results import PromptResult, TopK

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log-probability, None where there is none, and the likeliest tokens with theirs."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    """Likeliest first; has the token itself, with the same number, unless it is empty or not known."""


def of_delta(delta: Delta, k: int) -> list[TokenLogprob]:
    """Return the tokens of a delta, with the top `k` of each."""
    return _joined(delta.token_ids.tolist(), delta.logprobs.tolist(), delta.topk, k)


def of_prompt(tokens: Sequence[int], result: PromptResult, k: int) -> list[TokenLogprob]:
    """Return the tokens of a prompt; the first has no log-probability."""
    assert result.logprobs is not None
    return _joined(list(tokens), cast(list[float], result.logprobs.tolist()), result.topk, k)


def _joined(tokens: list[int], logprobs: list[float], topk: TopK | None, k: int) -> list[TokenLogprob]:
    ids = cast(list[list[int]], [[]] * len(tokens) if topk is None else topk.token_ids[:, :k].tolist())
    values = cast(list[list[float]], [[]] * len(tokens) if topk is None else topk.logprobs[:, :k].tolist())
    return [
        TokenLogprob(token, None, ())
        if math.isnan(logprob)
        else TokenLogprob(token, max(logprob, _LOWEST), [*_with_own(token, max(logprob, _LOWEST), top, numbers)])
        for token, logprob, top, numbers in zip(tokens, logprobs, ids, values, strict=True)
    ]


def _with_own(token: int, logprob: float, top: list[int], numbers: list[float]) -> Iterator[tuple[int, float]]:
    """Yield the top tokens; the token itself has its own number, and is the last if it is not among them."""
    for other, number in zip(top, numbers, strict=True):
        yield other, logprob if other == token else max(number, _LOWEST)
    if token not in top:
        yield token, logprob


class CompletionLogprobs:
    """The object `logprobs` of a completion's choice, or of a part of it."""

    def __init__(self, text: ModelText, offset: int = 0) -> None:
        """`offset` is the position in the choice's text at which it begins."""
        self._text = text
        self.offset = offset

    def object(self, tokens: Sequence[TokenLogprob]) -> dict[str, object]:
        """Return the object for the next tokens."""
        texts = [self._text.text_of([each.token], skip_special=False) for each in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self.offset)
            self.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [None if each.logprob is None else self._top(each) for each in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """Return the top tokens by their texts. Of tokens with equal texts the likeliest counts."""
        found: dict[str, float] = {}
        for other, logprob in token.top:
            text = self._text.text_of([other], skip_special=False)
            found[text] = max(logprob, found.get(text, logprob))
        return found


def chat_content(text: ModelText, tokens: Sequence[TokenLogprob], *, with_top: bool) -> list[dict[str, object]]:
    """Return the list `logprobs.content` of a chat choice."""

    def described(token: int, logprob: float | None) -> dict[str, object]:
        content = text.bytes_of(token)
        return {
            "token": text.text_of([token], skip_special=False),
            "logprob": logprob,
            "bytes": list(content),
        }

    return [
        described(each.token, each.logprob)
        | {"top_logprobs": [described(*other) for other in each.top] if with_top else []}
        for each in tokens
    ]


def prompt_logprobs(text: ModelText, tokens: Sequence[TokenLogprob], k: int) -> list[dict[str, object] | None]:
    """Return the list `prompt_logprobs` in vLLM's form: for each position the tokens by id.

    The rank of a token that is not among the top `k` is not known.
    """
    return [
        None
        if each.logprob is None
        else {
            str(other): {
                "logprob": logprob,
                "rank": rank if rank <= k else None,
                "decoded_token": text.text_of([other], skip_special=False),
            }
            for rank, (other, logprob) in enumerate(each.top, 1)
        }
        for each in tokens
    ]
