"""The record of a running sample, with the pages that it uses."""

from dataclasses import dataclass, field

import numpy as np

from skyrl_tx.backends.jax.sample.draw import DrawnTokens
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.results import PromptResult, SampleDelta, TopK
from skyrl_tx.contract.samples import OpenSample

BASE_SLOT = 0
"""The adapter slot of the base model."""

MAX_STOPS = 8
"""How many stop tokens per sample the programs check.

If a sample has more, only the host checks them.
"""

SampleKey = tuple[RequestId, int]
"""A request and the index of a sample in it."""

_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class BlockTableRow:
    """A row of the block table: the pages and the state slot of one prompt or sample.

    Page i holds the positions from `i * page_size` on. Only the last page is ever written, and only
    if it is neither full nor shared. Numbers count within the shard.
    """

    pages: list[int]
    state: int = 0
    """The slot of its state of fixed size; 0 for models without state."""
    shard: int = 0


def get_max_tokens(request: SampleRequest) -> int:
    """Return the maximum number of tokens of each sample of a request."""
    assert request.params.max_tokens is not None
    return request.params.max_tokens


def get_max_kv_length(request: SampleRequest) -> int:
    """Return how many KV positions a sample of a request may need."""
    return request.prompt.size + get_max_tokens(request)


@dataclass(slots=True, kw_only=True)
class RunningSample(OpenSample):
    """One sample that has its first token.

    The next decode step reads the token at index `position` of the prompt plus the sample, and
    writes its key and value at this KV position. The host may not have read the tokens of
    dispatched steps yet.

    A preemption removes the sample's keys and values from the KV cache. When the sample continues,
    decode steps process the tokens that it has already drawn again, one by one: prefill chunks
    would round differently.
    """

    adapter: int  # adapter slot
    key: SampleKey = field(init=False)
    size: int = field(init=False)
    """Length of the prompt in tokens."""
    position: int = field(init=False)
    """KV positions in use after all dispatched steps."""
    end: int = field(init=False)
    """KV positions in use after the last step that the sample may take."""
    row: int = -1
    """The sample's row in the last dispatched decode slice (a fixed number of decode steps).
    -1 if the sample had no row, or was preempted since."""
    table: BlockTableRow = field(default_factory=lambda: BlockTableRow([]))
    """The pages and the state slot of the sample; empty while the sample waits."""

    def __post_init__(self) -> None:
        """Start after the prompt."""
        self.key = self.request.request_id, self.index
        self.size = self.position = self.request.prompt.size
        self.end = self.size + self.max_tokens - 1

    @property
    def is_adjusted(self) -> bool:
        """Whether the next step changes the logits.

        It depends on the position alone, so a sample takes the same slices again after a preemption.
        """
        return self.adjuster is not None and self.adjuster.adjusts(self.position - self.size + 1)

    @property
    def reports_raw(self) -> bool:
        """Whether raw log-probabilities are reported and differ from tempered ones."""
        params = self.request.params
        return bool(params.raw_logprobs) and (params.temperature not in (0, 1) or self.adjuster is not None)

    @property
    def next_token(self) -> int:
        """The token that the next step reads.

        The host must have read the tokens of all dispatched steps.
        """
        index = self.position - self.size
        if index == self.num_drawn - 1:
            return int(self.drawn[-1][-1])
        return int(np.concatenate(self.drawn)[index])

    @property
    def num_replayed(self) -> int:
        """How many of the next tokens were drawn before a preemption."""
        return max(self.num_drawn - 1 - (self.position - self.size), 0)

    def get_replayed_tokens(self) -> Int32Array:
        """Return the next tokens that were drawn before a preemption."""
        return np.concatenate(self.drawn)[self.num_drawn - self.num_replayed :] if self.num_replayed else _NO_TOKENS

    def preempt(self) -> None:
        """Reset the position: the KV cache holds nothing of the sample any more."""
        self.position, self.row = self.size, -1

    def length_after(self, num_steps: int) -> int:
        """Return how many KV positions the sample has after up to `num_steps` more steps."""
        return min(self.position + num_steps, self.end)

    def takes_one_slice(self, slice_tokens: int) -> bool:
        """Return whether the first decode slice of the sample is the next one, and completes it."""
        return self.position == self.size and self.end <= self.position + slice_tokens

    def kv_length(self, slice_tokens: int) -> int:
        """Return the KV positions that the sample needs for the next slice that draws new tokens."""
        return self.length_after(self.num_replayed + slice_tokens)

    def take_first(self, drawn: DrawnTokens, prompt: PromptResult | None) -> SampleDelta:
        """Append the first token. `drawn` has one step."""
        k = self.request.options.sample_topk
        topk = TopK(token_ids=drawn.topk_tokens[:, :k], logprobs=drawn.topk_logprobs[:, :k]) if k else None
        return self.take(drawn.tokens, drawn.logprobs, topk, prompt)

    def take_slice(
        self, start: int, tokens: Int32Array, logprobs: Float32Array, is_stopped: bool, topk: TopK | None = None
    ) -> SampleDelta | None:
        """Append the tokens that a slice drew.

        Returns None if all of them were drawn before a preemption.

        The slice started when `start` KV positions were in use. `is_stopped` says whether the last
        token is one of the stop tokens that the program checks.
        """
        if (num_known := self.num_drawn - (start - self.size) - 1) > 0:
            tokens, logprobs = tokens[num_known:], logprobs[num_known:]
            topk = topk and TopK(token_ids=topk.token_ids[num_known:], logprobs=topk.logprobs[num_known:])
            if not tokens.size:
                return None
        if len(self.stops) > MAX_STOPS:
            return self.take(tokens, logprobs, topk)
        return self.take_judged(tokens, logprobs, is_stopped, topk)
