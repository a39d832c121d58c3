"""Draws samples on the trainer while the servers of a sampler are lost.

The trainer draws other tokens from the same seed, so only samples that have no tokens yet are moved to it. A sample
that is on the trainer ends there, also when a server is back.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count

from msgspec import structs

from skyrl_tx.contract.backend import AbstractBackend, Snapshot
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, RequestError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.contract.results import SampleDelta

_log = logging.getLogger(__name__)
SampleKey = tuple[RequestId, int]
"""A sample: its request and its index."""


_NOT_LOADED = "the trainer neither scores nor draws samples of sampler %s, which cannot be loaded there: %s"


class TrainerSamplers:
    """The weights of samplers that the trainer has, and how long its samples may be."""

    def __init__(self, trainer: AbstractBackend, *, are_needed: bool) -> None:
        self._trainer = trainer
        self._are_needed = are_needed
        self._loaded: set[SamplerId] = set()
        self.max_tokens = 0
        """The most tokens of a sample on the trainer, its prompt included."""

    def limit_capabilities(self, trainer: Capabilities, both: Capabilities) -> Capabilities:
        """Return the capabilities of both: what is loaded on both is bounded by both."""
        self.max_tokens = min(trainer.max_context_length, trainer.max_sample_tokens)
        return replace(both, max_samplers=min(both.max_samplers, trainer.max_samplers)) if self._are_needed else both

    def load(self, sampler: SamplerId, source: Snapshot) -> None:
        """Load a sampler, if it is needed. One that finds no memory is not there."""
        if not self._are_needed or sampler in self._loaded:
            return
        try:
            self._trainer.load_sampler(sampler, source)
        except BackendLost:
            raise
        except Exception as error:  # samples need the sampler only
            self._trainer.check_devices()
            _log.warning(_NOT_LOADED, sampler, error, exc_info=None if isinstance(error, RequestError) else error)
        else:
            self._loaded.add(sampler)

    def drop(self, sampler: SamplerId) -> None:
        """Free a sampler. Nothing may use it any more."""
        if sampler in self._loaded:
            self._trainer.drop_sampler(sampler)
            self._loaded.discard(sampler)

    def has_weights(self, request: SampleRequest) -> bool:
        """Whether the trainer has the weights of a request. It always has those of the base model."""
        return request.sampler is None or request.sampler in self._loaded


class TrainerFallback:
    """The samples that may move to the trainer, and those that are there. A sample is tried once."""

    def __init__(self, trainer: AbstractBackend, samplers: TrainerSamplers) -> None:
        self._trainer = trainer
        self._samplers = samplers
        self._unstarted: dict[SampleKey, SampleRequest] = {}
        """Samples without tokens that the sampler has, each as a request of its own."""
        self._moved: dict[RequestId, SampleKey] = {}
        """Samples on the trainer, by the request that they are there."""
        self._numbers = count()
        self.num_samples = 0
        """Samples that the trainer has drawn, or draws."""

    @property
    def is_drawing(self) -> bool:
        """Whether the trainer draws any sample now."""
        return bool(self._moved)

    def begin(self, batch: PreparedSampleBatch) -> None:
        """Note samples that the sampler has started."""
        for request in batch.requests:
            for index in range(request.first_index, request.first_index + request.num_samples):
                self._unstarted[request.request_id, index] = _select_sample(request, index)

    def record_progress(self, deltas: Sequence[SampleDelta]) -> None:
        """Note which of them have tokens, or have ended."""
        for delta in deltas:
            if delta.tokens.size or delta.stop_reason is not None or delta.error is not None:
                self._unstarted.pop((delta.request_id, delta.index), None)

    def move_unstarted(self) -> list[SampleKey]:
        """Begin all samples without tokens on the trainer, as far as it can draw them; return which ones.

        The others stay where they are.
        """
        candidates, self._unstarted = self._unstarted, {}
        return [key for key, request in candidates.items() if self._begin(key, request)]

    def read(self, deltas: Sequence[SampleDelta]) -> list[SampleDelta]:
        """Return the trainer's deltas as those of the samples that it draws here."""
        found: list[SampleDelta] = []
        for delta in deltas:
            if (key := self._moved.get(delta.request_id)) is None:
                continue
            if delta.stop_reason is not None or delta.error is not None:
                del self._moved[delta.request_id]
            found.append(structs.replace(delta, request_id=key[0]))
        return found

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Forget the samples of requests."""
        for key in [key for key in self._unstarted if key[0] in request_ids]:
            del self._unstarted[key]
        gone = [own for own, key in self._moved.items() if key[0] in request_ids]
        if gone:
            self._trainer.cancel_sample(gone)
            for own in gone:
                del self._moved[own]

    def end_sample(self, request_id: RequestId, index: int) -> None:
        """End one sample, if it is here."""
        self._unstarted.pop((request_id, index), None)
        for own in [own for own, key in self._moved.items() if key == (request_id, index)]:
            self._trainer.end_sample(own, index)
            del self._moved[own]

    def _begin(self, key: SampleKey, request: SampleRequest) -> bool:
        assert request.params.max_tokens is not None
        fits = request.prompt.size + request.params.max_tokens <= self._samplers.max_tokens
        if not fits or not self._samplers.has_weights(request):
            return False
        # A request of its own: parts of one request need not come in order here.
        own = RequestId(f"fallback-{next(self._numbers)}")
        try:
            self._trainer.begin_sample(PreparedSampleBatch(requests=(replace(request, request_id=own),)))
        except RequestError as error:
            _log.warning("a sample cannot be drawn by the trainer: %s", error)
            return False
        self._moved[own] = key
        self.num_samples += 1
        return True


def _select_sample(request: SampleRequest, index: int) -> SampleRequest:
    """Return one sample of a request; the first one brings the results about the prompt."""
    options = request.options if index == 0 else PromptOptions(sample_topk=request.options.sample_topk)
    return replace(request, first_index=index, num_samples=1, options=options)
