"""The samplers of a composed backend that are loaded on its trainer too, to score samples or to draw them there."""

import logging
from dataclasses import replace

from skyrl_tx.contract.backend import AbstractBackend, Snapshot
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, RequestError
from skyrl_tx.contract.ids import SamplerId

_log = logging.getLogger(__name__)
_NOT_LOADED = "the trainer neither scores nor draws samples of sampler %s, which cannot be loaded there: %s"


class TrainerSamplers:
    """The weights of samplers that the trainer has, and how long its samples may be."""

    def __init__(self, trainer: AbstractBackend, *, are_needed: bool) -> None:
        self._trainer = trainer
        self._are_needed = are_needed
        self._loaded: set[SamplerId] = set()
        self.max_tokens = 0
        """The most tokens of a sample on the trainer, its prompt included."""

    def limit(self, trainer: Capabilities, both: Capabilities) -> Capabilities:
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

    def has_weights_of(self, request: SampleRequest) -> bool:
        """Whether the trainer has the weights of a request. It always has those of the base model."""
        return request.sampler is None or request.sampler in self._loaded
