"""Log-probabilities as OpenAI's API and vLLM return them.

The numbers are the backend's float32 values, unrounded.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from skyrl_tx.apps.chat.generation import Delta
from skyrl_tx.apps.chat.text import Detokenizer, ModelText
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.results import PromptResult, TopK

_LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot express."""
_SLICE = 256
"""How many tokens are described and encoded at once."""


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


def score_delta(delta: Delta, k: int) -> Iterator[list[TokenLogprob]]:
    """Yield the new tokens of a delta in slices, with log-probabilities and the top `k` at each position."""
    return _iterate_slices(delta.token_ids, delta.logprobs, delta.topk, k)


def score_prompt(tokens: Sequence[int], result: PromptResult, k: int) -> Iterator[list[TokenLogprob]]:
    """Yield the tokens of a prompt in slices, with log-probabilities. The first token has none."""
    assert result.logprobs is not None
    return _iterate_slices(np.asarray(tokens, np.int32), result.logprobs, result.topk, k)


def _iterate_slices(
    tokens: Int32Array, logprobs: Float32Array, topk: TopK | None, k: int
) -> Iterator[list[TokenLogprob]]:
    """Yield tokens in slices, because a token with its top tokens takes kilobytes as Python objects."""
    for start in range(0, len(tokens), _SLICE):
        part = slice(start, start + _SLICE)
        no_top: list[list[Any]] = [[]] * len(tokens[part])
        ids = no_top if topk is None else cast(list[list[int]], topk.token_ids[part, :k].tolist())
        values = no_top if topk is None else cast(list[list[float]], topk.logprobs[part, :k].tolist())
        rows = zip(tokens[part].tolist(), logprobs[part].tolist(), ids, values, strict=True)
        yield [_make_token(*row) for row in rows]


def _make_token(token: int, logprob: float, top: Sequence[int], numbers: Sequence[float]) -> TokenLogprob:
    """Return a token with the top tokens and their log-probabilities. `token` is added if it is not among them."""
    if math.isnan(logprob):
        return TokenLogprob(token, None, ())
    logprob = max(logprob, _LOWEST)
    pairs = zip(top, numbers, strict=True)
    scored = [(other, logprob if other == token else max(number, _LOWEST)) for other, number in pairs]
    return TokenLogprob(token, logprob, scored if token in top else [*scored, (token, logprob)])


class _JsonList:
    """A JSON list that is encoded in parts.

    No call of the encoder takes long, and the objects of encoded parts need not stay in memory.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def extend(self, values: Sequence[object]) -> None:
        """Encode values and append them."""
        if values:
            self._parts.append(msgspec.json.encode(values)[1:-1])

    def finish(self) -> msgspec.Raw:
        """Return the list as JSON."""
        return msgspec.Raw(b"[" + b",".join(self._parts) + b"]")


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, if the client wants the text of each choice to begin with the prompt.

    `scored` has the tokens of the prompt with log-probabilities, in slices.
    """

    text: str
    tokens: Sequence[int]
    scored: Iterable[list[TokenLogprob]]


class CompletionLogprobs:
    """Makes the `logprobs` objects of one choice of a completion.

    A stream has multiple objects per choice.
    """

    def __init__(self, text: ModelText, hidden: frozenset[int] = frozenset()) -> None:
        """`hidden` are the tokens that the choice's text leaves out."""
        self._text = text
        self._detokenizer = Detokenizer(text.decode, hidden)
        self._offset = 0
        """The position of the next token in the choice's text."""

    def describe(self, sampled: Iterable[list[TokenLogprob]], echo: Echo | None = None) -> dict[str, object]:
        """Return the `logprobs` object of the next tokens.

        `echo` is the prompt, if it is at the beginning of the choice's text.
        """
        lists = {name: _JsonList() for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        if echo is not None:
            # Tokens that the tokenizer added before the text, for example BOS, get the offset 0
            self._offset = -max(self._text.decode(echo.tokens).find(echo.text), 0)
            self._add(lists, echo.scored, Detokenizer(self._text.decode))
            self._offset = len(echo.text)
        self._add(lists, sampled, self._detokenizer)
        return {name: values.finish() for name, values in lists.items()}

    def _add(
        self, lists: Mapping[str, _JsonList], slices: Iterable[list[TokenLogprob]], detokenizer: Detokenizer
    ) -> None:
        for part in slices:
            offsets: list[int] = []
            for scored in part:
                offsets.append(max(self._offset, 0))
                self._offset += len(detokenizer.feed([scored.token]))
            lists["tokens"].extend([self._text.decode([scored.token]) for scored in part])
            lists["token_logprobs"].extend([scored.logprob for scored in part])
            lists["top_logprobs"].extend(
                [None if scored.logprob is None else self._describe_top(scored) for scored in part]
            )
            lists["text_offset"].extend(offsets)

    def _describe_top(self, token: TokenLogprob) -> dict[str, float]:
        """Return the log-probabilities of the top tokens by their texts.

        If multiple tokens have the same text, the most likely one counts.
        """
        top: dict[str, float] = {}
        for other, logprob in token.top:
            text = self._text.decode([other])
            top[text] = max(logprob, top.get(text, logprob))
        return top


def describe_chat(text: ModelText, slices: Iterable[list[TokenLogprob]], *, with_top: bool) -> msgspec.Raw:
    """Return the list `logprobs.content` of a choice of a chat completion."""

    def describe(token: int, logprob: float | None) -> dict[str, object]:
        return {
            "token": text.decode([token]),
            "logprob": logprob,
            "bytes": list(text.decode_bytes(token)),
        }

    described = _JsonList()
    for part in slices:
        described.extend(
            [
                describe(scored.token, scored.logprob)
                | {"top_logprobs": [describe(*other) for other in scored.top] if with_top else []}
                for scored in part
            ]
        )
    return described.finish()


def describe_prompt(text: ModelText, slices: Iterable[list[TokenLogprob]], k: int) -> msgspec.Raw:
    """Return the list `prompt_logprobs` in vLLM's form.

    It has one object per position, with token ids as keys.
    `rank` is None for a prompt token that is not among the top `k`, because its rank is unknown.
    """
    described = _JsonList()
    for part in slices:
        described.extend([None if scored.logprob is None else _describe_position(text, scored, k) for scored in part])
    return described.finish()


def _describe_position(text: ModelText, scored: TokenLogprob, k: int) -> dict[str, object]:
    return {
        str(other): {
            "logprob": logprob,
            "rank": rank if rank <= k else None,
            "decoded_token": text.decode([other]),
        }
        for rank, (other, logprob) in enumerate(scored.top, 1)
    }
