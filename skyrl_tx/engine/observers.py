"""Call the observers of all features, and find the origin of sampled weights."""

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
from skyrl_tx.engine.request_log import ObserverRows, QueuedRequest
from skyrl_tx.engine.sample_output import DrawnTokens
from skyrl_tx.store import sampling_sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.sampling_sessions import BASE_WEIGHTS, Origin

_MAX_ORIGINS = 4096


@dataclass(slots=True)
class ResultObservers:
    """Calls all observers for a completed request, and combines the rows that they write."""

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
    ) -> ObserverRows | None:
        """Return the rows about a forward_backward or a forward."""
        return _combine_rows(
            observer.observe_pass(queued, model, output, num_tokens, time) for observer in self.observers
        )

    def observe_step(
        self, queued: QueuedRequest, model: LiveModel, output: OptimStepOutput, time: DeviceTime
    ) -> ObserverRows | None:
        """Return the rows about an optimizer step. `model.num_steps` includes it."""
        return _combine_rows(observer.observe_step(queued, model, output, time) for observer in self.observers)

    def observe_sample(
        self, queued: QueuedRequest, request: Sample, output: SampleOutput, now: float, device_s: float
    ) -> ObserverRows | None:
        """Return the rows about a sample request."""
        if not self.observers:
            return None
        origin = self._find_origin(queued.sampling_session_id, request.sampler)
        return _combine_rows(
            observer.observe_sample(queued, request, output, origin, now, device_s) for observer in self.observers
        )

    def observe_drawn(
        self, queued: QueuedRequest, request: Sample, drawn: DrawnTokens, device_s: float
    ) -> ObserverRows | None:
        """Return the rows about the tokens of a sample request, also of a cancelled one."""
        if not self.observers:
            return None
        origin = self._find_origin(queued.sampling_session_id, request.sampler)
        return _combine_rows(observer.observe_drawn(queued, drawn, origin, device_s) for observer in self.observers)

    def observe_save(self, queued: QueuedRequest, model_id: ModelId) -> ObserverRows | None:
        """Return the rows about a save of a named checkpoint."""
        return _combine_rows(observer.observe_save(queued, model_id) for observer in self.observers)

    def note_sampler(self, sampler: SamplerId, model: LiveModel) -> None:
        """Remember the optimizer step of an ephemeral sampler.

        In-flight sessions forget it at the next save.
        """
        self._remember_origin(None, sampler, Origin(model.model_id, model.num_steps))

    def _find_origin(self, name: SamplingSessionId | None, sampler: SamplerId | None) -> Origin:
        if sampler is None or name is None:
            return BASE_WEIGHTS
        origin = self._origins.get((name, sampler)) or self._origins.get((None, sampler))
        if origin is None:
            origin = self.store.read(lambda tx: sampling_sessions.find_origin(tx, name, sampler))
            self._remember_origin(name, sampler, origin)
        return origin

    def _remember_origin(self, name: SamplingSessionId | None, sampler: SamplerId, origin: Origin) -> None:
        if len(self._origins) >= _MAX_ORIGINS:
            self._origins.popitem(last=False)
        self._origins[name, sampler] = origin


def _combine_rows(rows: Iterable[ObserverRows | None]) -> ObserverRows | None:
    """Combine functions that write rows. Returns None if there are none."""
    present = [write for write in rows if write is not None]
    if len(present) < 2:
        return present[0] if present else None

    def write_all(tx: Session, now: float) -> None:
        for write in present:
            write(tx, now)

    return write_all
