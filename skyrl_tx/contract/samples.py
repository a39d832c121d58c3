"""Bookkeeping for running samples, for backends to use. It uses no device."""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.logit_adjuster import LogitAdjuster
from skyrl_tx.contract.results import PromptResult, SampleDelta, StopReason, TopK


@dataclass(slots=True, kw_only=True)
class OpenSample:
    """One sample, from its request to its stop reason."""

    request: SampleRequest
    index: int
    stops: frozenset[int]
    """Tokens that end the sample."""
    drawn: list[Int32Array] = field(default_factory=list[Int32Array])
    num_drawn: int = 0
    stop_reason: StopReason | None = None
    adjuster: LogitAdjuster | None = None
    """Changes the logits of the next token; None if the parameters never change them."""
    is_late: bool = False
    """Whether the constraint had not computed the next mask when the last round of samples needed it."""
    state: Any = None
    """Free for the backend to use, for example for the keys and values of the sample."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of the sample."""
        assert self.request.params.max_tokens is not None
        return self.request.params.max_tokens

    @property
    def num_left(self) -> int:
        """Number of tokens that the sample may still get."""
        return self.max_tokens - self.num_drawn

    @property
    def is_adjusted(self) -> bool:
        """Whether the logits of the next token change."""
        return self.adjuster is not None and self.adjuster.adjusts(self.num_drawn)

    @property
    def last_token(self) -> int:
        """The token that the next token is computed from."""
        return int(self.drawn[-1][-1] if self.drawn else self.request.prompt[-1])

    def uniform(self, position: int | None = None) -> float:
        """Return a random number in [0, 1) for a token, by default the next one.

        It depends only on the seed, the index of the sample and the position.
        """
        index = self.num_drawn if position is None else position
        return np.random.default_rng([self.request.params.seed % 2**64, self.index, index]).random()

    def take(
        self, tokens: Int32Array, logprobs: Float32Array, topk: TopK | None = None, prompt: PromptResult | None = None
    ) -> SampleDelta:
        """Append new tokens up to the end of the sample and return them as a delta.

        Args:
            tokens: at least one token, in order. Tokens after a stop token or after `max_tokens`
                are dropped.
            logprobs: the log-probabilities of these tokens.
            topk: the likeliest tokens at the same positions, as many as the request asks for.
            prompt: results about the prompt, to be passed with the first tokens of index 0.
        """
        num = min(self.num_left, tokens.size)
        stop = next((n for n, token in enumerate(tokens[:num].tolist()) if token in self.stops), None)
        if stop is not None:
            num = stop + 1
        if topk is not None:
            topk = TopK(token_ids=topk.token_ids[:num].copy(), logprobs=topk.logprobs[:num].copy())
        return self.take_judged(tokens[:num].copy(), logprobs[:num].copy(), stop is not None, topk, prompt)

    def take_judged(
        self,
        tokens: Int32Array,
        logprobs: Float32Array,
        is_stopped: bool,
        topk: TopK | None = None,
        prompt: PromptResult | None = None,
    ) -> SampleDelta:
        """Append new tokens, all before the end of the sample or at it, and return them as a delta.

        Args:
            tokens: at least one token, in order.
            logprobs: the log-probabilities of these tokens.
            is_stopped: whether the last token is a stop token.
            topk: the likeliest tokens at the same positions, as many as the request asks for.
            prompt: results about the prompt, to be passed with the first tokens of index 0.
        """
        self.drawn.append(tokens)
        self.num_drawn += tokens.size
        if is_stopped:
            self.stop_reason = "stop"
        elif self.num_drawn == self.request.params.max_tokens:
            self.stop_reason = "length"
        if self.adjuster is not None and self.stop_reason is None:
            self.adjuster.accept(tokens.tolist())

        return SampleDelta(
            request_id=self.request.request_id,
            index=self.index,
            tokens=tokens,
            logprobs=logprobs,
            stop_reason=self.stop_reason,
            topk=topk,
            prompt=prompt,
        )


S = TypeVar("S", bound=OpenSample)

MASK_WAIT_S = 0.02
"""How long a round of samples waits for the masks of constraints, in seconds.

A mask usually takes less than a millisecond, and a round has the masks of a few steps. A grammar may
take much longer, and other samples should not wait for it.
"""


def select_ready(samples: Sequence[S], deadline: float, *, others_decode: bool = False) -> list[S]:
    """Return the samples whose next logits can be computed.

    Waits for masks until `deadline`, in seconds of `time.monotonic`. A sample whose mask was late in
    the last round is waited for only if nothing else can decode: none of `samples`, and, as
    `others_decode` says, no other sample.
    """

    def is_ready(sample: S, timeout_s: float) -> bool:
        sample.is_late = sample.adjuster is not None and not sample.adjuster.is_ready(timeout_s)
        return not sample.is_late

    ready = [sample for sample in samples if is_ready(sample, 0.0 if sample.is_late else deadline - time.monotonic())]
    if not ready and not others_decode:
        ready = [sample for sample in samples if is_ready(sample, deadline - time.monotonic())]
    return ready


class OpenSamples:
    """The running samples of all requests, in order of arrival."""

    def __init__(self, eos_token_ids: Collection[int], vocab_size: int | None = None) -> None:
        """Start without samples. Tokens of `eos_token_ids` end a sample, except if `eos_stops` is False.

        A backend that changes logits, see `OpenSample.adjuster`, passes the size of its vocabulary.
        """
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._samples: dict[tuple[RequestId, int], OpenSample] = {}

    def __len__(self) -> int:
        """Return the number of running samples."""
        return len(self._samples)

    def begin(self, batch: PreparedSampleBatch) -> None:
        """Add the samples of a batch. A request may arrive in multiple parts."""
        for request in batch.requests:
            stops = frozenset(request.params.stop_token_ids)
            if request.params.eos_stops:
                stops |= self._eos
            for index in range(request.first_index, request.first_index + request.num_samples):
                sample = OpenSample(request=request, index=index, stops=stops)
                if self._vocab_size is not None:
                    sample.adjuster = LogitAdjuster.make(request, stops, self._vocab_size)
                self._samples[request.request_id, index] = sample

    def first(self, most: int) -> list[OpenSample]:
        """Return the `most` earliest samples, which decode now.

        Later samples wait until these have ended.
        """
        return list(self._samples.values())[:most]

    def by_request(self) -> Counter[RequestId]:
        """Return the number of running samples per request."""
        return Counter(request_id for request_id, _ in self._samples)

    def drop_ended(self) -> None:
        """Remove samples that have a stop reason, together with their state."""
        self._samples = {key: sample for key, sample in self._samples.items() if sample.stop_reason is None}

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Remove all samples of these requests. Unknown ids are ignored."""
        self._samples = {key: sample for key, sample in self._samples.items() if key[0] not in request_ids}

    def end(self, request_id: RequestId, index: int) -> None:
        """Remove one sample. Does nothing if it is not running."""
        self._samples.pop((request_id, index), None)
