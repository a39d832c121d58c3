"""Records of the samples that run."""

from dataclasses import dataclass, field

import numpy as np

from skyrl_tx.backends.jax.sample.draw import Drawn
from skyrl_tx.backends.jax.sample.pages import KVTable
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.results import PromptResult, SampleDelta, TopK
from skyrl_tx.contract.samples import OpenSample

BASE = 0
"""The adapter slot of the base model."""

_NONE = np.zeros(0, np.int32)


def max_tokens(request: SampleRequest) -> int:
    """Return how many tokens a sample of the request may have."""
    assert request.params.max_tokens is not None
    return request.params.max_tokens


def max_kv_length(request: SampleRequest) -> int:
    """Return how many KV positions a sample of the request may need."""
    return request.prompt.size + max_tokens(request)


@dataclass(slots=True, kw_only=True)
class RunningSample(OpenSample):
    """One sample that has its first token.

    `last_token` was drawn and is not in the KV cache yet; its key will be written at `position`. After a preemption the
    drawn tokens are computed again in the same steps, because chunks of a prompt would round otherwise.
    """

    adapter: int  # adapter slot
    num_again: int = 0
    """How many of the next tokens were drawn before."""
    table: KVTable = field(default_factory=lambda: KVTable([]))
    """Its pages and its state; empty while it waits."""

    @property
    def position(self) -> int:
        """The KV positions in use: the prompt and all drawn tokens before `last_token`."""
        return self.request.prompt.size + self.num_drawn - 1 - self.num_again

    @property
    def last_token(self) -> int:
        """The token from which the next one is computed."""
        if not self.num_again:
            return int(self.drawn[-1][-1])
        return int(np.concatenate(self.drawn)[self.num_drawn - 1 - self.num_again])

    @property
    def num_steps_left(self) -> int:
        """How many steps the sample takes at most."""
        return self.num_left + self.num_again

    def tokens_again(self) -> Int32Array:
        """Return the next tokens as far as they were drawn before."""
        return np.concatenate(self.drawn)[self.num_drawn - self.num_again :] if self.num_again else _NONE

    def preempt(self) -> None:
        """Note that the KV cache no longer has anything of the sample: after its prompt, its tokens come again."""
        self.num_again = self.num_drawn - 1

    def length_after(self, num_steps: int) -> int:
        """Return how many KV positions the sample has after its next steps, up to `num_steps`."""
        return self.position + min(num_steps, self.num_steps_left)

    def kv_length(self, slice_tokens: int) -> int:
        """Return how many KV positions the sample needs to the end of the next slice that draws new tokens."""
        return self.length_after(self.num_again + slice_tokens)

    def take_drawn(self, drawn: Drawn, prompt: PromptResult | None = None) -> SampleDelta | None:
        """Append the tokens that a program drew, see `take`. Returns None if all were drawn before."""
        if self.num_again:
            num_again = min(self.num_again, drawn.tokens.size)
            self.num_again -= num_again
            drawn = drawn.after(num_again)
            if not drawn.tokens.size:
                return None
        k = self.request.options.sample_topk
        topk = TopK(token_ids=drawn.topk_tokens[:, :k], logprobs=drawn.topk_logprobs[:, :k]) if k else None
        return self.take(drawn.tokens, drawn.logprobs, topk, prompt)
