"""Draw samples on the trainer while the sampling servers are unreachable.

With the same seed, the trainer draws different tokens than the sampler. So only samples without
tokens are moved to the trainer. The trainer finishes a sample that was moved to it, even if a
sampling server returns in the meantime.
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


class TrainerFallback:
    """The samples that can still be moved to the trainer, and the samples that the trainer draws.

    Each sample is offered to the trainer at most once. If the trainer refuses it, it stays with the
    sampler.
    """

    def __init__(self, trainer: AbstractBackend, samplers: TrainerSamplers) -> None:
        self._trainer = trainer
        self._samplers = samplers
        self._unstarted: dict[SampleKey, SampleRequest] = {}
        """Samples on the sampler that have no tokens yet, each with a request for this sample only.
        """
        self._moved: dict[RequestId, SampleKey] = {}
        """Samples on the trainer, by the id of their request there, for example `fallback-0`."""
        self._numbers = count()
        self.num_samples = 0
        """How many samples were moved to the trainer since the start."""

    @property
    def is_drawing(self) -> bool:
        """Whether the trainer is drawing samples."""
        return bool(self._moved)

    def begin(self, batch: PreparedSampleBatch) -> None:
        """Record the samples of requests that the sampler has accepted."""
        for request in batch.requests:
            for index in range(request.first_index, request.first_index + request.num_samples):
                self._unstarted[request.request_id, index] = _select_sample(request, index)

    def record_progress(self, deltas: Sequence[SampleDelta]) -> None:
        """Forget the samples that have tokens now, or have ended. They stay with the sampler."""
        for delta in deltas:
            if delta.tokens.size or delta.stop_reason is not None or delta.error is not None:
                self._unstarted.pop((delta.request_id, delta.index), None)

    def move_unstarted(self) -> list[SampleKey]:
        """Move the samples without tokens to the trainer.

        Returns the samples that the trainer accepted.
        """
        candidates, self._unstarted = self._unstarted, {}
        return [key for key, request in candidates.items() if self._begin(key, request)]

    def read(self, deltas: Sequence[SampleDelta]) -> list[SampleDelta]:
        """Return the trainer's deltas of moved samples, with the request ids of the engine."""
        own_deltas: list[SampleDelta] = []
        for delta in deltas:
            if (key := self._moved.get(delta.request_id)) is None:
                continue
            if delta.stop_reason is not None or delta.error is not None:
                del self._moved[delta.request_id]
            own_deltas.append(structs.replace(delta, request_id=key[0]))
        return own_deltas

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Forget the samples of requests."""
        for key in [key for key in self._unstarted if key[0] in request_ids]:
            del self._unstarted[key]
        trainer_ids = [trainer_id for trainer_id, key in self._moved.items() if key[0] in request_ids]
        if trainer_ids:
            self._trainer.cancel_sample(trainer_ids)
            for trainer_id in trainer_ids:
                del self._moved[trainer_id]

    def end_sample(self, request_id: RequestId, index: int) -> None:
        """End one sample: forget it, and end it on the trainer if it was moved there."""
        self._unstarted.pop((request_id, index), None)
        for trainer_id in [trainer_id for trainer_id, key in self._moved.items() if key == (request_id, index)]:
            self._trainer.end_sample(trainer_id, index)
            del self._moved[trainer_id]

    def _begin(self, key: SampleKey, request: SampleRequest) -> bool:
        """Start a sample on the trainer.

        Returns False if it is too long, or if the trainer refuses it.
        """
        assert request.params.max_tokens is not None
        fits = request.prompt.size + request.params.max_tokens <= self._samplers.max_tokens
        if not fits or not self._samplers.has_weights(request):
            return False

        # A new request id, because a backend expects the parts of one request in the order of their
        # indices.
        trainer_id = RequestId(f"fallback-{next(self._numbers)}")
        try:
            self._trainer.begin_sample(PreparedSampleBatch(requests=(replace(request, request_id=trainer_id),)))
        except RequestError as error:
            _log.warning("the trainer cannot draw a sample, which waits for the sampling servers: %s", error)
            return False
        self._moved[trainer_id] = key
        self.num_samples += 1
        return True


def _select_sample(request: SampleRequest, index: int) -> SampleRequest:
    """Return a request for one sample of a request.

    Only sample 0 asks for results about the prompt.
    """
    options = request.options if index == 0 else PromptOptions(sample_topk=request.options.sample_topk)
    return replace(request, first_index=index, num_samples=1, options=options)
