"""Compare some of the sampler's log-probabilities with the trainer's, while the server runs.

The trainer gets prompt and sample as one prompt, and returns the log-probabilities of the sample's
tokens under the same weights. The mean absolute difference between the log-probabilities of trainer
and sampler is the *gap* of the sample.

Log-probabilities of prompts are computed at temperature 1 and without filters. So only samples at
temperature 0, or at temperature 1 without top-k and top-p, are compared.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count

import numpy as np
from msgspec import structs

from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.backend import AbstractBackend, Snapshot
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, RequestError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.contract.results import SampleDelta, TrainerGap

_log = logging.getLogger(__name__)
SampleKey = tuple[RequestId, int]
"""A sample: its request and its index."""
_MIN_WARNED_TOKENS = 16
"""Samples with fewer tokens cause no warning, because one token can dominate their gap."""
MAX_GAP = 0.25
"""The largest gap, in nats, that rounding explains.
Rounding in bfloat16 causes a few hundredths, different weights cause about 1."""


class TrainerSamplers:
    """The sampler weights that are loaded on the trainer too, and the trainer's length limit."""

    def __init__(self, trainer: AbstractBackend, *, are_needed: bool) -> None:
        self._trainer = trainer
        self._are_needed = are_needed
        self._loaded: set[SamplerId] = set()
        self.max_tokens = 0
        """The longest sample on the trainer, in tokens, prompt included.
        Set by `limit_capabilities`."""

    def limit_capabilities(self, trainer: Capabilities, combined: Capabilities) -> Capabilities:
        """Return the capabilities of trainer and sampler together.

        If samplers are loaded on the trainer too, the smaller `max_samplers` of both applies, and a
        sample may use only what both support.
        """
        self.max_tokens = min(trainer.max_context_length, trainer.max_sample_tokens)
        if not self._are_needed:
            return combined
        return replace(
            combined,
            max_samplers=min(combined.max_samplers, trainer.max_samplers),
            sampling_controls=combined.sampling_controls & trainer.sampling_controls,
            sampled_logprobs=combined.sampled_logprobs & trainer.sampled_logprobs,
        )

    def load(self, sampler: SamplerId, source: Snapshot) -> None:
        """Load the weights of a sampler on the trainer, if checks or fallback need them.

        If that fails, for example because memory is exhausted, the trainer neither scores nor draws
        these samples.
        """
        if not self._are_needed or sampler in self._loaded:
            return

        try:
            self._trainer.load_sampler(sampler, source)
        except BackendLost:
            raise
        except Exception as error:  # the sampler can still sample
            self._trainer.check_devices()
            _log.warning(
                "the trainer could not load sampler %s, so it neither scores nor draws samples of it: %s",
                sampler,
                error,
                exc_info=None if isinstance(error, RequestError) else error,
            )
        else:
            self._loaded.add(sampler)

    def drop(self, sampler: SamplerId) -> None:
        """Free the weights of a sampler on the trainer. No running sample may use them."""
        if sampler in self._loaded:
            self._trainer.drop_sampler(sampler)
            self._loaded.discard(sampler)

    def has_weights(self, request: SampleRequest) -> bool:
        """Return whether the trainer has the weights that a request samples from.

        It always has the base model.
        """
        return request.sampler is None or request.sampler in self._loaded

    def begin(self, request: SampleRequest, purpose: str) -> bool:
        """Start a request on the trainer. Returns False, and logs `purpose`, if the trainer refuses it."""
        try:
            self._trainer.begin_sample(PreparedSampleBatch(requests=(request,)))
        except RequestError as error:
            _log.warning("the trainer cannot %s: %s", purpose, error)
            return False
        return True


@dataclass(slots=True)
class _WatchedSample:
    """A sample that is chosen for comparison and still running, with its deltas so far."""

    request: SampleRequest
    index: int
    deltas: list[SampleDelta] = field(default_factory=list[SampleDelta])


@dataclass(slots=True)
class _Check:
    """The comparison of one sample, which the trainer is scoring."""

    key: SampleKey
    sampler: SamplerId | None
    logprobs: Float32Array
    """The sampler's log-probabilities of the first tokens of the sample, which the trainer scores.
    """
    final_delta: SampleDelta | None
    """The sample's last delta, held back until the gap is known.
    None if the engine has ended the sample."""
    scored: Float32Array | None = None
    """The trainer's log-probabilities of the row. The last ones are of the sample's tokens."""


class TrainerChecks:
    """The comparisons of a composed backend.

    A chosen sample is watched until it ends. Then the trainer scores it, and the sample's last
    delta waits for the result.
    """

    def __init__(self, trainer: AbstractBackend, samplers: TrainerSamplers, share: float) -> None:
        """Compare a `share` of all samples, from 0 to 1.

        The request id and the index of a sample decide whether it is compared, so that a replay
        after a crash chooses the same samples.
        """
        self._trainer = trainer
        self._samplers = samplers
        self._share = share
        self._watched: dict[SampleKey, _WatchedSample] = {}
        self._running: dict[RequestId, _Check] = {}
        self._numbers = count()
        self._warned: set[SamplerId | None] = set()
        self._num_samples = self._num_tokens = 0
        self._sum = self._largest = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the trainer is scoring samples."""
        return bool(self._running)

    def drop(self, sampler: SamplerId) -> None:
        """End the comparisons that use the weights of a sampler."""
        self._cancel_checks(request_id for request_id, check in self._running.items() if check.sampler == sampler)
        self._warned.discard(sampler)

    def begin(self, batch: PreparedSampleBatch) -> None:
        """Choose samples of new requests for comparison."""
        for key, request in list_samples(batch):
            if self._samplers.has_weights(request) and _is_comparable(request) and self._is_chosen(*key):
                self._watched[key] = _WatchedSample(request, key[1])

    def watch(self, deltas: Sequence[SampleDelta]) -> list[SampleDelta]:
        """Record the tokens of chosen samples, and start to score the samples that have ended.

        Returns the deltas that the engine gets now. The end of a sample that the trainer scores is
        missing: `read` returns it with the gap.
        """
        if not self._watched:
            return list(deltas)

        passed: list[SampleDelta] = []
        for delta in deltas:
            key = delta.request_id, delta.index
            if (watched := self._watched.get(key)) is None:
                passed.append(delta)
                continue
            watched.deltas.append(delta)
            if delta.stop_reason is None and delta.error is None:
                passed.append(delta)
                continue

            # The sample has ended. Pass on its last tokens, but not its end, if the trainer scores
            # it.
            del self._watched[key]
            if delta.error is not None or not self._start_check(watched, _strip_tokens(delta)):
                passed.append(delta)
            elif delta.tokens.size or delta.prompt is not None:
                passed.append(structs.replace(delta, stop_reason=None))
        return passed

    def read(self, deltas: Sequence[SampleDelta]) -> list[SampleDelta]:
        """Read the trainer's scores.

        Returns the ends of the samples that waited for them, with their gaps.
        """
        ended: list[SampleDelta] = []
        for delta in deltas:
            if (check := self._running.get(delta.request_id)) is None:
                continue
            if delta.prompt is not None:
                check.scored = delta.prompt.logprobs
            if delta.stop_reason is None and delta.error is None:
                continue

            del self._running[delta.request_id]
            if delta.error is not None:
                _log.warning("the trainer could not score a sample, which is not compared: %s", delta.error)
            gap = None if delta.error is not None or check.scored is None else self._measure_gap(check, check.scored)
            if check.final_delta is not None:
                ended.append(structs.replace(check.final_delta, trainer_gap=gap))
        return ended

    def get_waiting_deltas(self) -> list[SampleDelta]:
        """Return one delta without tokens if the end of any sample waits for its gap."""
        waiting = next((check.final_delta for check in self._running.values() if check.final_delta is not None), None)
        return [] if waiting is None else [structs.replace(waiting, stop_reason=None)]

    def give_up(self) -> list[SampleDelta]:
        """End all comparisons.

        Returns the ends of the samples that waited for them, without gaps.
        """
        waiting = [check.final_delta for check in self._running.values() if check.final_delta is not None]
        self._cancel_checks(self._running)
        return waiting

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Forget the samples of requests.

        If the engine has ended a sample, its comparison continues.
        """
        for key in [key for key in self._watched if key[0] in request_ids]:
            del self._watched[key]
        self._cancel_checks(
            request_id
            for request_id, check in self._running.items()
            if check.final_delta is not None and check.key[0] in request_ids
        )

    def end_sample(self, key: SampleKey) -> None:
        """Compare a sample that the engine has ended.

        Its gap counts in the meters, but no delta reports it.
        """
        if (watched := self._watched.pop(key, None)) is not None:
            self._start_check(watched, None)
        for check in self._running.values():
            if check.key == key:
                check.final_delta = None

    def forget(self, key: SampleKey) -> None:
        """Do not compare a sample. The trainer is about to draw it."""
        self._watched.pop(key, None)

    def meters(self, meters: Meters) -> Meters:
        """Add the results of the comparisons to `meters`."""
        if not self._share:
            return meters
        return replace(
            meters,
            compared_samples=self._num_samples,
            compared_tokens=self._num_tokens,
            trainer_gap_nats=self._sum,
            trainer_gap_max_nats=self._largest,
        )

    def _is_chosen(self, request_id: RequestId, index: int) -> bool:
        digest = blake2b(f"{request_id}:{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._share * 2**64

    def _start_check(self, watched: _WatchedSample, final_delta: SampleDelta | None) -> bool:
        """Start to score a sample on the trainer. Returns False if the trainer cannot score it.

        If prompt and sample are longer than the trainer's limit, only the first tokens are scored.
        """
        request = watched.request
        tokens = np.concatenate([request.prompt, *(delta.tokens for delta in watched.deltas)])
        row = tokens[: self._samplers.max_tokens - 1]
        num_tokens = row.size - request.prompt.size
        if num_tokens < 1:
            return False

        scoring = make_scoring_request(
            RequestId(f"check-{next(self._numbers)}"), request.sampler, row, num_tokens, request.cache_scope
        )
        if not self._samplers.begin(scoring, "score a sample, which is not compared"):
            return False
        self._running[scoring.request_id] = _Check(
            key=(request.request_id, watched.index),
            sampler=request.sampler,
            logprobs=np.concatenate([delta.logprobs for delta in watched.deltas])[:num_tokens],
            final_delta=final_delta,
        )
        return True

    def _measure_gap(self, check: _Check, scored: Float32Array) -> TrainerGap | None:
        """Return the gap of a sample, add it to the meters and log it.

        Returns None if a log-probability is not finite, which happens when a model has diverged.
        """
        size, (request_id, index) = check.logprobs.size, check.key
        differences = np.abs(check.logprobs.astype(np.float64) - scored[-size:])
        if not np.isfinite(differences).all():
            _log.info(
                "sample %d of %s has log-probabilities that are not finite and is not compared", index, request_id
            )
            return None

        gap = TrainerGap(mean=float(differences.mean()), largest=float(differences.max()), num_tokens=size)
        self._num_samples += 1
        self._num_tokens += size
        self._sum += float(differences.sum())
        self._largest = max(self._largest, gap.largest)

        _log.info(
            "sample %d of %s: log-probabilities differ from the trainer's by %.2g nats on average, %.2g at most, "
            "in %d tokens",
            index,
            request_id,
            gap.mean,
            gap.largest,
            size,
        )

        # Warn once for each sampler.
        if gap.mean > MAX_GAP and size >= _MIN_WARNED_TOKENS and check.sampler not in self._warned:
            self._warned.add(check.sampler)
            _log.warning(
                "%s: the log-probabilities of a sample differ from the trainer's by %.2g nats on average, and rounding "
                "explains at most %.2g. The sampling servers do not sample from the trained weights; training on "
                "these samples may diverge",
                "base model" if check.sampler is None else f"sampler {check.sampler}",
                gap.mean,
                MAX_GAP,
            )
        return gap

    def _cancel_checks(self, request_ids: Iterable[RequestId]) -> None:
        cancelled = list(request_ids)
        if cancelled:
            self._trainer.cancel_sample(cancelled)
            for request_id in cancelled:
                del self._running[request_id]


def make_scoring_request(
    request_id: RequestId,
    sampler: SamplerId | None,
    row: Int32Array,
    last_n: int | None = None,
    cache_scope: str = "",
) -> SampleRequest:
    """Return a request for the log-probabilities of a row of tokens, or of its `last_n` tokens.

    The row is the prompt. The one token that the request samples is not used.
    """
    return SampleRequest(
        request_id=request_id,
        sampler=sampler,
        prompt=row,
        num_samples=1,
        params=SamplingParams(seed=0, max_tokens=1, temperature=0.0),
        options=PromptOptions(logprobs=True, last_n=last_n),
        cache_scope=cache_scope,
    )


def _is_comparable(request: SampleRequest) -> bool:
    params = request.params
    if params.controls:  # the trainer scores tokens with the model's own logits
        return False
    return params.temperature == 0 or (params.temperature == 1 and params.top_k <= 0 and params.top_p >= 1)


def _strip_tokens(delta: SampleDelta) -> SampleDelta:
    """Return a sample's last delta without its tokens."""
    return SampleDelta(
        request_id=delta.request_id,
        index=delta.index,
        tokens=delta.tokens[:0],
        logprobs=delta.logprobs[:0],
        stop_reason=delta.stop_reason,
    )


def list_samples(batch: PreparedSampleBatch) -> list[tuple[SampleKey, SampleRequest]]:
    """Return all samples of a batch, each with its request."""
    return [
        ((request.request_id, index), request)
        for request in batch.requests
        for index in range(request.first_index, request.first_index + request.num_samples)
    ]
