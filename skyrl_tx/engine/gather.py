"""The deltas of one request's samples, joined as they come."""

from collections.abc import Callable

import numpy as np

from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.results import PromptResult, SampleDelta, SampledSequence, SampleOutput, StopReason, TopK
from skyrl_tx.engine.stops import StopWatch


class Gathering:
    """One request in decoding."""

    def __init__(self, request: SampleRequest, text_of: Callable[[list[int]], str]) -> None:
        self.request = request
        self._sequences = [
            _Sequence(StopWatch(request.params.stop_strings, text_of)) for _ in range(request.num_samples)
        ]
        self._prompt = PromptResult()

    def add(self, delta: SampleDelta) -> bool:
        """Take in one delta; whether it has a stop string, of which the backend knows nothing.

        What comes after a sample's end is dropped.
        """
        if delta.prompt is not None:
            self._prompt = delta.prompt
        return self._sequences[delta.index].add(delta)

    @property
    def num_open(self) -> int:
        """How many samples have not ended."""
        return sum(sequence.stop_reason is None for sequence in self._sequences)

    @property
    def is_complete(self) -> bool:
        """Whether all samples have ended."""
        return self.num_open == 0

    def output(self) -> SampleOutput:
        """The whole, once complete."""
        return SampleOutput(
            sequences=tuple(sequence.joined() for sequence in self._sequences),
            prompt=self._prompt,
            target_cells=self.request.options.target_cells,
        )


class _Sequence:
    """One sample so far."""

    def __init__(self, watch: StopWatch) -> None:
        self.stop_reason: StopReason | None = None
        self._watch = watch
        self._deltas: list[SampleDelta] = []
        self._num_dropped = 0

    def add(self, delta: SampleDelta) -> bool:
        if self.stop_reason is not None:
            return False
        self._deltas.append(delta)
        self.stop_reason = delta.stop_reason
        num_kept = self._watch.feed(delta.tokens.tolist())
        if num_kept is not None:
            self.stop_reason = "stop"
            self._num_dropped = len(delta.tokens) - num_kept
        return num_kept is not None

    def joined(self) -> SampledSequence:
        assert self.stop_reason is not None
        tokens = np.concatenate([delta.tokens for delta in self._deltas])
        end = len(tokens) - self._num_dropped
        topks = [delta.topk for delta in self._deltas if delta.topk is not None]
        topk = None
        if topks:
            ids = np.concatenate([part.token_ids for part in topks])
            topk = TopK(token_ids=ids[:end], logprobs=np.concatenate([part.logprobs for part in topks])[:end])
        logprobs = np.concatenate([delta.logprobs for delta in self._deltas])
        return SampledSequence(tokens=tokens[:end], logprobs=logprobs[:end], stop_reason=self.stop_reason, topk=topk)
