"""Log-probabilities as OpenAI's API and vLLM return them.

The numbers are the backend's float32 values, unrounded.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from skyrl_tx.apps.chat.generation import Delta
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.contract.results import PromptResult, TopK

_LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log-probability, and the most likely tokens at its position."""

    token: int
    logprob: float | None
    """None for the first token of a prompt."""
    top: Sequence[tuple[int, float]]
    """Pairs of token and log-probability, most likely first.

    Includes `token` unless `logprob` is None.
    """


def score_delta(delta: Delta, k: int) -> list[TokenLogprob]:
    """Return the tokens of a delta, with log-probabilities and the top `k` at each position."""
    return _combine(delta.token_ids.tolist(), delta.logprobs.tolist(), delta.topk, k)


def score_prompt(tokens: Sequence[int], result: PromptResult, k: int) -> list[TokenLogprob]:
    """Return the tokens of a prompt with their log-probabilities. The first token has none."""
    assert result.logprobs is not None
    return _combine(list(tokens), cast(list[float], result.logprobs.tolist()), result.topk, k)


def _combine(tokens: list[int], logprobs: list[float], topk: TopK | None, k: int) -> list[TokenLogprob]:
    ids = cast(list[list[int]], [[]] * len(tokens) if topk is None else topk.token_ids[:, :k].tolist())
    values = cast(list[list[float]], [[]] * len(tokens) if topk is None else topk.logprobs[:, :k].tolist())
    return [
        TokenLogprob(token, None, ())
        if math.isnan(logprob)
        else TokenLogprob(token, max(logprob, _LOWEST), [*_include_own(token, max(logprob, _LOWEST), top, numbers)])
        for token, logprob, top, numbers in zip(tokens, logprobs, ids, values, strict=True)
    ]


def _include_own(token: int, logprob: float, top: list[int], numbers: list[float]) -> Iterator[tuple[int, float]]:
    """Yield the top tokens. The sampled token is added at the end if it is not among them."""
    for other, number in zip(top, numbers, strict=True):
        yield other, logprob if other == token else max(number, _LOWEST)
    if token not in top:
        yield token, logprob


class CompletionLogprobs:
    """Makes the `logprobs` objects of one choice of a completion.

    A stream has multiple objects per choice.
    """

    def __init__(self, text: ModelText, offset: int = 0) -> None:
        """`offset` is the index in the choice's text where the first token begins."""
        self._text = text
        self.offset = offset

    def describe(self, tokens: Sequence[TokenLogprob]) -> dict[str, object]:
        """Return the `logprobs` object of the next tokens."""
        texts = [self._text.decode([scored.token], skip_special=False) for scored in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self.offset)
            self.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [scored.logprob for scored in tokens],
            "top_logprobs": [None if scored.logprob is None else self._describe_top(scored) for scored in tokens],
            "text_offset": offsets,
        }

    def _describe_top(self, token: TokenLogprob) -> dict[str, float]:
        """Return the log-probabilities of the top tokens by their texts.

        If multiple tokens have the same text, the most likely one counts.
        """
        top: dict[str, float] = {}
        for other, logprob in token.top:
            text = self._text.decode([other], skip_special=False)
            top[text] = max(logprob, top.get(text, logprob))
        return top


def describe_chat(text: ModelText, tokens: Sequence[TokenLogprob], *, with_top: bool) -> list[dict[str, object]]:
    """Return the list `logprobs.content` of a choice of a chat completion."""

    def describe(token: int, logprob: float | None) -> dict[str, object]:
        return {
            "token": text.decode([token], skip_special=False),
            "logprob": logprob,
            "bytes": list(text.decode_bytes(token)),
        }

    return [
        describe(scored.token, scored.logprob)
        | {"top_logprobs": [describe(*other) for other in scored.top] if with_top else []}
        for scored in tokens
    ]


def describe_prompt(text: ModelText, tokens: Sequence[TokenLogprob], k: int) -> list[dict[str, object] | None]:
    """Return the list `prompt_logprobs` in vLLM's form.

    It has one object per position, with token ids as keys.
    `rank` is None for a prompt token that is not among the top `k`, because its rank is unknown.
    """
    return [
        None
        if scored.logprob is None
        else {
            str(other): {
                "logprob": logprob,
                "rank": rank if rank <= k else None,
                "decoded_token": text.decode([other], skip_special=False),
            }
            for rank, (other, logprob) in enumerate(scored.top, 1)
        }
        for scored in tokens
    ]
