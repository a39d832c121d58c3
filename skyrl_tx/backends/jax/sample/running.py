"""Records of the samples that run, and of the keys and values of their prompts."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.sample.draw import Drawn
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.results import PromptResult, SampleDelta, StopReason, TopK

BASE = 0
"""The adapter slot of the base model."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class PromptKV:
    """The keys and values of one prompt, in a buffer of `length` positions."""

    data: Any
    """Belongs to the programs. `JaxPrograms.extend` replaces it."""
    length: int


def max_tokens(request: SampleRequest) -> int:
    """Return how many tokens a sample of the request may have."""
    assert request.params.max_tokens is not None
    return request.params.max_tokens


def max_kv_length(request: SampleRequest) -> int:
    """Return how many KV positions a sample of the request may need."""
    return request.prompt.size + max_tokens(request)


@dataclass(slots=True, kw_only=True)
class RunningSample:
    """One sample that has its first token.

    `last_token` was drawn and is not in the KV cache yet; its key will be written at `position`.
    """

    request: SampleRequest
    index: int
    adapter: int  # adapter slot
    stops: frozenset[int]
    drawn: list[Int32Array] = field(default_factory=list[Int32Array])
    num_drawn: int = 0
    last_token: int = field(default=-1)
    stop_reason: StopReason | None = None

    @property
    def position(self) -> int:
        """The KV positions in use: the prompt and all drawn tokens but the last."""
        return self.request.prompt.size + self.num_drawn - 1

    def cached_tokens(self) -> Int32Array:
        """Return the tokens whose keys the KV cache holds."""
        return np.concatenate([self.request.prompt, *self.drawn])[: self.position]

    def kv_length(self, slice_tokens: int) -> int:
        """Return how many KV positions the sample needs to the end of the next slice."""
        return self.position + min(slice_tokens, self.num_left)

    @property
    def num_left(self) -> int:
        """How many more tokens the sample may have."""
        return max_tokens(self.request) - self.num_drawn

    def take(self, drawn: Drawn, prompt: PromptResult | None = None) -> SampleDelta:
        """Append tokens up to the sample's end and return them as a delta."""
        num = min(self.num_left, drawn.tokens.size)
        stopping = np.flatnonzero([token in self.stops for token in drawn.tokens[:num].tolist()])
        if stopping.size:
            num = int(stopping[0]) + 1
        self.drawn.append(drawn.tokens[:num].copy())
        self.num_drawn += num
        self.last_token = int(drawn.tokens[num - 1])
        if stopping.size:
            self.stop_reason = "stop"
        elif self.num_left == 0:
            self.stop_reason = "length"
        k = self.request.options.sample_topk
        return SampleDelta(
            request_id=self.request.request_id,
            index=self.index,
            tokens=self.drawn[-1],
            logprobs=drawn.logprobs[:num].copy(),
            stop_reason=self.stop_reason,
            topk=TopK(token_ids=drawn.topk_tokens[:num, :k].copy(), logprobs=drawn.topk_logprobs[:num, :k].copy())
            if k
            else None,
            prompt=prompt,
        )
