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


def score_delta(delta: Delta, k: int) -> list[TokenLogprob]:
    """Return the tokens of a delta, with the top `k` of each."""
    return _combine(delta.token_ids.tolist(), delta.logprobs.tolist(), delta.topk, k)


def score_prompt(tokens: Sequence[int], result: PromptResult, k: int) -> list[TokenLogprob]:
    """Return the tokens of a prompt; the first has no log-probability."""
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

    def describe(self, tokens: Sequence[TokenLogprob]) -> dict[str, object]:
        """Return the object for the next tokens."""
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
        """Return the top tokens by their texts. Of tokens with equal texts the likeliest counts."""
        top: dict[str, float] = {}
        for other, logprob in token.top:
            text = self._text.decode([other], skip_special=False)
            top[text] = max(logprob, top.get(text, logprob))
        return top


def describe_chat(text: ModelText, tokens: Sequence[TokenLogprob], *, with_top: bool) -> list[dict[str, object]]:
    """Return the list `logprobs.content` of a chat choice."""

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
    """Return the list `prompt_logprobs` in vLLM's form: for each position the tokens by id.

    The rank of a token that is not among the top `k` is not known.
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
