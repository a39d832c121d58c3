"""Compares some samples of a sampler with the trainer, which scores their tokens with the same weights.

The trainer computes the log-probabilities of a sample as those of a prompt. Those are at temperature 1, so samples at
another temperature cannot be compared, nor can samples whose log-probabilities may be those after a filter.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count

import numpy as np
from msgspec import structs

from skyrl_tx.backends.trainer_fallback import SampleKey, TrainerSamplers
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import RequestError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.contract.results import SampleDelta, TrainerGap

_log = logging.getLogger(__name__)
_MIN_WARNED_TOKENS = 16
MAX_GAP = 0.25
"""The largest mean difference of right log-probabilities: bfloat16 gives some hundredths, other weights 1."""


@dataclass(slots=True)
class _WatchedSample:
    """A chosen sample that has not ended, and what came of it."""

    request: SampleRequest
    index: int
    tokens: list[Int32Array] = field(default_factory=list[Int32Array])
    logprobs: list[Float32Array] = field(default_factory=list[Float32Array])

    def add(self, delta: SampleDelta) -> None:
        self.tokens.append(delta.tokens)
        self.logprobs.append(delta.logprobs)


@dataclass(slots=True)
class _Check:
    """A sample whose tokens the trainer scores."""

    key: SampleKey
    sampler: SamplerId | None
    logprobs: Float32Array
    """The sampler's, of the first tokens of the sample."""
    final_delta: SampleDelta | None
    """The end of the sample, which waits for the gap. None: the engine has ended the sample itself."""
    scored: Float32Array | None = None


class TrainerChecks:
    """The comparisons of a composed backend. Those of one sample end with the sample or soon after."""

    def __init__(self, trainer: AbstractBackend, samplers: TrainerSamplers, share: float) -> None:
        """`share` of all samples is chosen, from 0 to 1: by their ids, so that a replay chooses the same."""
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
        """Whether the trainer has samples to score."""
        return bool(self._running)

    def drop(self, sampler: SamplerId) -> None:
        """End the comparisons that need a sampler."""
        self._cancel_checks(request_id for request_id, check in self._running.items() if check.sampler == sampler)
        self._warned.discard(sampler)

    def begin(self, batch: PreparedSampleBatch) -> None:
        """Choose among the samples of requests that begin."""
        for request in batch.requests:
            if not self._samplers.has_weights(request) or not _is_comparable(request):
                continue
            for index in range(request.first_index, request.first_index + request.num_samples):
                if self._is_chosen(request.request_id, index):
                    self._watched[request.request_id, index] = _WatchedSample(request, index)

    def watch(self, deltas: Sequence[SampleDelta]) -> list[SampleDelta]:
        """Return the sampler's deltas without the ends of chosen samples: those wait for their gap."""
        if not self._watched:
            return list(deltas)
        passed: list[SampleDelta] = []
        for delta in deltas:
            key = delta.request_id, delta.index
            if (watched := self._watched.get(key)) is None:
                passed.append(delta)
                continue
            watched.add(delta)
            if delta.stop_reason is None and delta.error is None:
                passed.append(delta)
                continue
            del self._watched[key]
            if delta.error is not None or not self._start_check(watched, _strip_tokens(delta)):
                passed.append(delta)
            elif delta.tokens.size or delta.prompt is not None:
                passed.append(structs.replace(delta, stop_reason=None))
        return passed

    def read(self, deltas: Sequence[SampleDelta]) -> list[SampleDelta]:
        """Take what the trainer has scored, and return the ends of samples that waited for it."""
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
                _log.warning("a sample could not be compared with the trainer: %s", delta.error)
            gap = None if delta.error is not None or check.scored is None else self._measure_gap(check, check.scored)
            if check.final_delta is not None:
                ended.append(structs.replace(check.final_delta, trainer_gap=gap))
        return ended

    def get_waiting_deltas(self) -> list[SampleDelta]:
        """Return a delta without tokens if the end of any sample waits."""
        held = next((check.final_delta for check in self._running.values() if check.final_delta is not None), None)
        return [] if held is None else [structs.replace(held, stop_reason=None)]

    def give_up(self) -> list[SampleDelta]:
        """End all comparisons, and return the ends of samples that waited for them, without gaps."""
        held = [check.final_delta for check in self._running.values() if check.final_delta is not None]
        self._cancel_checks(self._running)
        return held

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Forget the samples of requests. The comparison of one that the engine ended itself goes on."""
        for key in [key for key in self._watched if key[0] in request_ids]:
            del self._watched[key]
        self._cancel_checks(
            request_id
            for request_id, check in self._running.items()
            if check.final_delta is not None and check.key[0] in request_ids
        )

    def end_sample(self, request_id: RequestId, index: int) -> None:
        """Compare a sample that the engine has ended, for the meters only: no delta of it may follow."""
        key = request_id, index
        if (watched := self._watched.pop(key, None)) is not None:
            self._start_check(watched, None)
        for check in self._running.values():
            if check.key == key:
                check.final_delta = None

    def forget(self, key: SampleKey) -> None:
        """Do not compare a sample that the trainer draws itself."""
        self._watched.pop(key, None)

    def meters(self, held: Meters) -> Meters:
        """Return meters with what the comparisons have found."""
        if not self._share:
            return held
        return replace(
            held,
            compared_samples=self._num_samples,
            compared_tokens=self._num_tokens,
            trainer_gap_nats=self._sum,
            trainer_gap_max_nats=self._largest,
        )

    def _is_chosen(self, request_id: RequestId, index: int) -> bool:
        digest = blake2b(f"{request_id}:{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._share * 2**64

    def _start_check(self, watched: _WatchedSample, held: SampleDelta | None) -> bool:
        """Let the trainer score a sample, as far as it has room. Returns whether it does."""
        request = watched.request
        row = np.concatenate([request.prompt, *watched.tokens])[: self._samplers.max_tokens - 1]
        num_tokens = row.size - request.prompt.size
        if num_tokens < 1:
            return False
        scoring = SampleRequest(
            request_id=RequestId(f"check-{next(self._numbers)}"),
            sampler=request.sampler,
            prompt=row,
            num_samples=1,
            params=SamplingParams(seed=0, max_tokens=1, temperature=0.0),
            options=PromptOptions(logprobs=True, last_n=num_tokens),
            cache_scope=request.cache_scope,
        )
        try:
            self._trainer.begin_sample(PreparedSampleBatch(requests=(scoring,)))
        except RequestError as error:
            _log.warning("a sample cannot be compared with the trainer: %s", error)
            return False
        self._running[scoring.request_id] = _Check(
            key=(request.request_id, watched.index),
            sampler=request.sampler,
            logprobs=np.concatenate(watched.logprobs)[:num_tokens],
            final_delta=held,
        )
        return True

    def _measure_gap(self, check: _Check, scored: Float32Array) -> TrainerGap | None:
        """Return the gap of a sample; None if a log-probability is not finite, as those of a diverged model."""
        size, (request_id, index) = check.logprobs.size, check.key
        differences = np.abs(check.logprobs.astype(np.float64) - scored[-size:])
        if not np.isfinite(differences).all():
            _log.info("sample %d of %s has log-probabilities that are not finite", index, request_id)
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
        if gap.mean > MAX_GAP and size >= _MIN_WARNED_TOKENS and check.sampler not in self._warned:
            self._warned.add(check.sampler)
            _log.warning(
                "sampler %s: the log-probabilities of a sample differ from the trainer's by %.2g nats on average, "
                "where rounding gives %.2g at most: its samples are not those of the trained weights",
                check.sampler or "of the base model",
                gap.mean,
                MAX_GAP,
            )
        return gap

    def _cancel_checks(self, request_ids: Iterable[RequestId]) -> None:
        gone = list(request_ids)
        if gone:
            self._trainer.cancel_sample(gone)
            for request_id in gone:
                del self._running[request_id]


def _is_comparable(request: SampleRequest) -> bool:
    params = request.params
    return params.temperature == 0 or (params.temperature == 1 and params.top_k <= 0 and params.top_p >= 1)


def _strip_tokens(delta: SampleDelta) -> SampleDelta:
    """Return the end of a sample without the tokens that come with it."""
    return SampleDelta(
        request_id=delta.request_id,
        index=delta.index,
        tokens=delta.tokens[:0],
        logprobs=delta.logprobs[:0],
        stop_reason=delta.stop_reason,
    )
