"""A sample request that has started samples."""

from collections import Counter

from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.sample_output import SampleAssembler
from skyrl_tx.store import completions


class RunningRequest:
    """A running request. Its first `num_started` samples have been given to the backend."""

    def __init__(self, queued: QueuedRequest, assembler: SampleAssembler) -> None:
        self.queued = queued
        self.assembler = assembler
        self.num_started = 0
        self.clock_s = 0.0  # device time of its samples: the clock at their ends minus the clock at their starts
        self.first_token_at = 0.0
        self.num_streamed = Counter[int]()  # tokens that were streamed, by sample index
        request = assembler.request
        self.num_tokens = request.num_samples * (request.prompt.size + (request.params.max_tokens or 0))

    @property
    def num_left(self) -> int:
        """Number of samples that have not started."""
        return self.assembler.request.num_samples - self.num_started

    @property
    def num_open(self) -> int:
        """Number of samples that have started but not ended."""
        return self.assembler.num_open - self.num_left

    def take_partial(self, delta: SampleDelta) -> completions.Partial:
        """Return the new tokens of a streamed sample, for clients."""
        start = self.num_streamed[delta.index]
        self.num_streamed[delta.index] += delta.tokens.size
        return completions.Partial(
            request_id=delta.request_id,
            sample_index=delta.index,
            start=start,
            tokens=delta.tokens,
            logprobs=delta.logprobs,
            topk=delta.topk,
        )
