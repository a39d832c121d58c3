"""Assemble the output of a sample request, and find stop strings in it.

The backend returns the tokens of a sample in several parts, called deltas.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET, UnsetType

from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.results import (
    PromptResult,
    SampleDelta,
    SampledSequence,
    SampleOutput,
    StopReason,
    TopK,
    TrainerGap,
)
from skyrl_tx.engine.backend_checks import check_sequence

_MARGIN_CHARS = 8
"""Extra characters in the window of last tokens that is searched for stop strings.

They are needed because the window may start or end inside a character, whose bytes then decode to
up to three replacement characters, and because the tokenizer may drop a space at the start.
"""
_CHARS_PER_TOKEN = 4
"""Estimated number of characters per token, to guess how many tokens the window needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokenCounts:
    """The tokens of a sample request so far, also of a request that was cancelled."""

    prompt: int
    """Prompt tokens that were computed."""
    cached: int
    """Prompt tokens that were found in the prefix cache."""
    sampled: int


class SampleAssembler:
    """Joins the deltas of the samples of one request."""

    def __init__(self, request: SampleRequest, text_of: Callable[[list[int]], str]) -> None:
        """`text_of` decodes tokens to text. It is used only if the request has stop strings."""
        self.request = request
        self._sequences = [
            _Sequence(
                StopStringMatcher(
                    request.params.stop_strings, text_of, min_tokens=request.params.active_controls.min_tokens
                )
            )
            for _ in range(request.num_samples)
        ]
        self._prompt = PromptResult()

    def add(self, delta: SampleDelta) -> bool:
        """Add a delta.

        Returns True if this delta completes a stop string. The backend does not look for stop
        strings, so the caller must then stop the sample. Deltas that arrive after the end of their
        sample are dropped.
        """
        if delta.prompt is not None:
            self._prompt = delta.prompt
        return self._sequences[delta.index].add(delta)

    @property
    def num_open(self) -> int:
        """Number of samples that have not ended."""
        return sum(sequence.stop_reason is None for sequence in self._sequences)

    def count_tokens(self) -> SampledTokenCounts:
        """Return the number of tokens so far.

        All prompt tokens count from the start of the request, even while they are being computed.
        """
        num_cached = self._prompt.cache_hit_tokens
        return SampledTokenCounts(
            prompt=max(self.request.prompt.size - num_cached, 0),
            cached=num_cached,
            sampled=sum(sequence.count_tokens() for sequence in self._sequences),
        )

    def build_output(self) -> SampleOutput:
        """Return the output of all samples. All of them must have ended.

        Raises ServerError if arrays of the backend have the wrong form.
        """
        sequences = tuple(sequence.join() for sequence in self._sequences)
        for sequence in sequences:
            check_sequence(sequence)
        return SampleOutput(
            sequences=sequences,
            prompt=self._prompt,
            target_cells=self.request.options.target_cells,
        )


class _Sequence:
    """The deltas of one sample."""

    def __init__(self, matcher: "StopStringMatcher") -> None:
        self.stop_reason: StopReason | None = None
        self._matcher = matcher
        self._deltas: list[SampleDelta] = []
        self._gap: TrainerGap | UnsetType = UNSET
        self._num_dropped = 0

    def add(self, delta: SampleDelta) -> bool:
        if self.stop_reason is not None:
            return False
        if delta.tokens.size or delta.stop_reason is not None:
            self._deltas.append(delta)
        self.stop_reason = delta.stop_reason
        self._gap = delta.trainer_gap or UNSET
        num_kept = self._matcher.feed(delta.tokens.tolist())
        if num_kept is not None:
            self.stop_reason = "stop"
            self._num_dropped = len(delta.tokens) - num_kept
        return num_kept is not None

    def count_tokens(self) -> int:
        return sum(delta.tokens.size for delta in self._deltas) - self._num_dropped

    def join(self) -> SampledSequence:
        assert self.stop_reason is not None
        tokens = np.concatenate([delta.tokens for delta in self._deltas])
        logprobs = np.concatenate([delta.logprobs for delta in self._deltas])
        end = len(tokens) - self._num_dropped

        topks = [delta.topk for delta in self._deltas if delta.topk is not None]
        topk = None
        if topks:
            ids = np.concatenate([part.token_ids for part in topks])
            topk = TopK(token_ids=ids[:end], logprobs=np.concatenate([part.logprobs for part in topks])[:end])

        return SampledSequence(
            tokens=tokens[:end],
            logprobs=logprobs[:end],
            stop_reason=self.stop_reason,
            topk=topk,
            trainer_gap=self._gap,
        )


class StopStringMatcher:
    """Finds stop strings in a growing sample, even if they span multiple tokens."""

    def __init__(
        self, stop_strings: Sequence[str], text_of: Callable[[list[int]], str], *, min_tokens: int = 0
    ) -> None:
        """The first `min_tokens` tokens are not searched for stop strings."""
        self._num_exempt = min_tokens
        self._stop_strings = tuple(stop_strings)
        self._text_of = text_of
        self._longest = max((len(text) for text in stop_strings), default=0)
        self._window: list[int] = []

    def feed(self, tokens: list[int]) -> int | None:
        """Add the next tokens of the sample.

        If a stop string ends among `tokens`, returns how many of `tokens` belong to the sample,
        else None. The token that completes the stop string belongs to the sample.
        """
        if not self._stop_strings:
            return None
        if self._num_exempt and tokens:
            num_exempt = min(self._num_exempt, len(tokens))
            self._num_exempt -= num_exempt
            num_kept = self.feed(tokens[num_exempt:])
            return None if num_kept is None else num_exempt + num_kept
        if self._matches(self._window + tokens):
            return next(n for n in range(1, len(tokens) + 1) if self._matches(self._window + tokens[:n]))
        self._window = self._take_tail(self._window + tokens)
        return None

    def _matches(self, tokens: list[int]) -> bool:
        text = self._text_of(tokens)
        return any(stop in text for stop in self._stop_strings)

    def _take_tail(self, tokens: list[int]) -> list[int]:
        """Return enough of the last tokens to contain the start of any later match."""
        needed = self._longest + _MARGIN_CHARS
        count = needed // _CHARS_PER_TOKEN + 1
        while count < len(tokens):
            if len(self._text_of(tokens[-count:])) >= needed:
                return tokens[-count:]
            count *= 2
        return tokens
