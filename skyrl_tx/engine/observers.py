"""Call the result observers of all optional features.

This module also finds the origin of sampled weights: their model and its number of optimizer steps.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlmodel import Session

from skyrl_tx.contract.ids import ModelId, SamplerId, SamplingSessionId
from skyrl_tx.contract.requests import Sample
from skyrl_tx.contract.results import ForwardBackwardOutput, OptimStepOutput, SampleOutput
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.device_cache import LiveModel
from skyrl_tx.engine.extension import ResultObserver, RowLimit
from skyrl_tx.engine.request_log import QueuedRequest, WriteRows
from skyrl_tx.engine.sample_output import SampledTokenCounts
from skyrl_tx.store import sampling_sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.sampling_sessions import BASE_WEIGHTS, Origin

_MAX_ORIGINS = 4096
"""How many origins are kept in memory. The oldest entry is dropped first."""


@dataclass(slots=True)
class ResultObservers:
    """Calls all observers for a completed request.

    Each observer returns a function that writes rows. The functions of all observers are combined
    into one.
    """

    store: Store
    observers: Sequence[ResultObserver] = ()
    _origins: OrderedDict[tuple[SamplingSessionId | None, SamplerId], Origin] = field(
        default_factory=OrderedDict[tuple[SamplingSessionId | None, SamplerId], Origin]
    )

    def list_row_limits(self) -> list[RowLimit[Any]]:
        """Return the limits of the rows of all observers."""
        return [limit for observer in self.observers for limit in observer.row_limits]

    def observe_pass(
        self, queued: QueuedRequest, model: LiveModel, output: ForwardBackwardOutput, num_tokens: int, time: DeviceTime
    ) -> WriteRows | None:
        """Return the rows about a forward_backward or a forward."""
        return _combine_rows(
            observer.observe_pass(queued, model, output, num_tokens, time) for observer in self.observers
        )

    def observe_step(
        self, queued: QueuedRequest, model: LiveModel, output: OptimStepOutput, time: DeviceTime
    ) -> WriteRows | None:
        """Return the rows about an optimizer step. `model.num_steps` includes this step."""
        return _combine_rows(observer.observe_step(queued, model, output, time) for observer in self.observers)

    def observe_sample(
        self, queued: QueuedRequest, request: Sample, output: SampleOutput, now: float, device_s: float
    ) -> WriteRows | None:
        """Return the rows about a sample request."""
        if not self.observers:
            return None
        origin = self._find_origin(queued.sampling_session_id, request.sampler)
        return _combine_rows(
            observer.observe_sample(queued, request, output, origin, now, device_s) for observer in self.observers
        )

    def observe_drawn(
        self, queued: QueuedRequest, request: Sample, drawn: SampledTokenCounts, device_s: float
    ) -> WriteRows | None:
        """Return the rows about the tokens of a sample request, also of a cancelled one."""
        if not self.observers:
            return None
        origin = self._find_origin(queued.sampling_session_id, request.sampler)
        return _combine_rows(observer.observe_drawn(queued, drawn, origin, device_s) for observer in self.observers)

    def observe_save(self, queued: QueuedRequest, model_id: ModelId) -> WriteRows | None:
        """Return the rows about a save of a named checkpoint."""
        return _combine_rows(observer.observe_save(queued, model_id) for observer in self.observers)

    def note_sampler(self, sampler: SamplerId, model: LiveModel) -> None:
        """Remember the origin of a new ephemeral sampler.

        In-flight sampling sessions need this: the next save of the model gives them newer weights,
        and the database then no longer has the step of this sampler.
        """
        self._remember_origin(None, sampler, Origin(model.model_id, model.num_steps))

    def _find_origin(self, session_id: SamplingSessionId | None, sampler: SamplerId | None) -> Origin:
        if sampler is None or session_id is None:
            return BASE_WEIGHTS
        origin = self._origins.get((session_id, sampler)) or self._origins.get((None, sampler))
        if origin is None:
            origin = self.store.read(lambda tx: sampling_sessions.find_origin(tx, session_id, sampler))
            self._remember_origin(session_id, sampler, origin)
        return origin

    def _remember_origin(self, session_id: SamplingSessionId | None, sampler: SamplerId, origin: Origin) -> None:
        if len(self._origins) >= _MAX_ORIGINS:
            self._origins.popitem(last=False)
        self._origins[session_id, sampler] = origin


def _combine_rows(rows: Iterable[WriteRows | None]) -> WriteRows | None:
    """Combine functions that write rows into one. Returns None if there are no functions."""
    present = [write for write in rows if write is not None]
    if len(present) < 2:
        return present[0] if present else None

    def write_all(tx: Session, now: float) -> None:
        for write in present:
            write(tx, now)

    return write_all
