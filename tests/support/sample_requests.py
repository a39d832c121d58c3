"""Sample requests, and their results put together from the deltas of a scheduler."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.contract.results import PromptResult, SampleDelta, SampledSequence

RED, BLUE = SamplerId("red"), SamplerId("blue")


def make_prompt(length: int, seed: int = 0) -> np.ndarray:
    """Return random tokens that include no token below 2."""
    return np.random.default_rng(seed).integers(2, 256, length, dtype=np.int32)


def make_request(
    name: str,
    prompt: np.ndarray,
    *,
    sampler: SamplerId | None = None,
    samples: int = 1,
    options: PromptOptions | None = None,
    **params,
) -> SampleRequest:
    """Return a request for 12 tokens per sample that EOS does not stop, unless given otherwise."""
    return SampleRequest(
        request_id=RequestId(name),
        sampler=sampler,
        prompt=prompt,
        num_samples=samples,
        params=SamplingParams(**{"seed": 3, "max_tokens": 12, "eos_stops": False, **params}),
        options=options or PromptOptions(),
    )


@dataclass
class Results:
    """The deltas of each sample, in order; checks that none follows the sample's last and that none is an error."""

    parts: dict[tuple[str, int], list[SampleDelta]] = field(default_factory=lambda: defaultdict(list))
    errors: dict[str, str] = field(default_factory=dict)
    may_fail: bool = False

    def add(self, deltas: list[SampleDelta]) -> None:
        for delta in deltas:
            if delta.error is not None:
                assert self.may_fail, delta.error
                self.errors[delta.request_id] = delta.error
                continue
            parts = self.parts[delta.request_id, delta.index]
            assert not parts or parts[-1].stop_reason is None, "a delta follows the sample's last"
            parts.append(delta)

    def sequence(self, name: str, index: int = 0) -> SampledSequence:
        """Return a sample that has ended."""
        parts = self.parts[name, index]
        assert parts[-1].stop_reason is not None, "the sample has not ended"
        return SampledSequence(
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            stop_reason=parts[-1].stop_reason,
        )

    @property
    def tokens(self) -> dict[tuple[str, int], list[int]]:
        """The tokens of every sample."""
        return {key: np.concatenate([part.tokens for part in parts]).tolist() for key, parts in self.parts.items()}

    @property
    def bits(self) -> dict[tuple[str, int], tuple[bytes, bytes]]:
        """The bytes of every sample's tokens and log-probabilities."""
        return {
            key: (
                np.concatenate([part.tokens for part in parts]).tobytes(),
                np.concatenate([part.logprobs for part in parts]).tobytes(),
            )
            for key, parts in self.parts.items()
        }

    @property
    def ended(self) -> set[tuple[str, int]]:
        """The samples that have ended."""
        return {key for key, parts in self.parts.items() if parts[-1].stop_reason is not None}

    @property
    def cache_hits(self) -> dict[str, int]:
        """The prefix cache hit, in tokens, of each request whose prompt was reported."""
        return {
            key[0]: prompt_result.cache_hit_tokens
            for key in self.parts
            if (prompt_result := self.prompt(key[0])) is not None
        }

    def prompt(self, name: str) -> PromptResult | None:
        """Return what was reported about a request's prompt."""
        return next((part.prompt for part in self.parts[name, 0] if part.prompt is not None), None)


def begin(scheduler: SampleScheduler, *requests: SampleRequest) -> None:
    """Queue requests."""
    scheduler.begin(PreparedSampleBatch(requests=requests))


def run(scheduler: SampleScheduler, *requests: SampleRequest, into: Results | None = None) -> Results:
    """Queue requests and step until nothing is left to do."""
    results = into or Results()
    begin(scheduler, *requests)
    while deltas := scheduler.step():
        results.add(deltas)
    return results
