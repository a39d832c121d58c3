"""The parts of an optional feature in the engine process: an observer of results, retention rules, and admission."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from sqlmodel import Session

from skyrl_tx.contract.ids import ModelId, SamplerId, SamplingSessionId
from skyrl_tx.contract.requests import Sample
from skyrl_tx.contract.results import ForwardBackwardOutput, OptimStepOutput, Result, SampleOutput
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.device_cache import LiveModel
from skyrl_tx.engine.request_log import ObserverRows, QueuedRequest
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store import sampling_sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.pauses import Pause
from skyrl_tx.store.sampling_sessions import BASE_WEIGHTS, Origin


@dataclass(frozen=True, slots=True)
class Start:
    """The request starts now."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The request stays in its queue, and the later requests of its model or session behind it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The request fails with this message."""

    reason: str


Decision = Start | Wait | Fail


START = Start()


class Admission:
    """Starts all requests. A subclass that enforces quotas replaces the methods; the engine's thread calls them."""

    weights: Mapping[str, int] = MappingProxyType({})
    """The share of the device of each owner with another weight than 1."""
    is_counting = False
    """Whether the engine calls `started`, `ended` and `pauses`, and asks again about waiting requests to count them."""

    def refresh(self) -> None:
        """Look for changed settings. Called before the first request, and about once a second."""

    def may_start(self, queued: QueuedRequest) -> Decision:
        """Decide about a request for which there is a place now."""
        return START

    def record_start(self, queued: QueuedRequest) -> None:
        """Count a request that starts."""

    def record_end(self, queued: QueuedRequest, result: Result) -> None:
        """Count a request that has a result: one that started, one that failed before, or one of an earlier engine."""

    def list_pauses(self) -> Sequence[Pause]:
        """Return whose requests wait, for the status that clients and people read."""
        return ()


MakeAdmission = Callable[[Store, Callable[[], None]], Admission]
"""Receives the database, and a function that waits until all results so far are in it."""


Key = TypeVar("Key")


@dataclass(slots=True, kw_only=True)
class RowLimit(Generic[Key]):
    """A limit for related rows, for example for the points of one run. Housekeeping removes what exceeds it."""

    find_superfluous: Callable[[Session, Key], Sequence[Any]]
    """Returns the keys of the rows to remove."""
    remove: Callable[[Session, Sequence[Any]], object]
    """Removes rows by their keys, a limited number in each call."""
    grown: set[Key] = field(default_factory=set[Key])
    """The owners of new rows, for example runs. The observer adds to it, housekeeping empties it."""


class ResultObserver:
    """Makes rows about completed requests, which are written in the transaction of the result.

    The engine's thread calls a method before the result is committed. What it returns is called in the transaction
    with the time of the commit, unless the request was completed before, by a cancellation. None writes nothing.
    Replay completes no request, so it calls no observer.
    """

    @property
    def row_limits(self) -> Sequence[RowLimit[Any]]:
        """The limits of the rows that the observer writes."""
        return ()

    def observe_pass(
        self, queued: QueuedRequest, model: LiveModel, output: ForwardBackwardOutput, num_tokens: int, time: DeviceTime
    ) -> ObserverRows | None:
        """Observe a forward_backward or a forward."""

    def observe_step(
        self, queued: QueuedRequest, model: LiveModel, output: OptimStepOutput, time: DeviceTime
    ) -> ObserverRows | None:
        """Observe an optimizer step, which `model` has counted."""

    def observe_sample(
        self, queued: QueuedRequest, request: Sample, output: SampleOutput, origin: Origin, now: float, device_s: float
    ) -> ObserverRows | None:
        """Observe a sample request. `origin` is the model and the step whose weights were sampled."""

    def observe_save(self, queued: QueuedRequest, model_id: ModelId) -> ObserverRows | None:
        """Observe a save with a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionClock:
    """The time and the settings for retention rules."""

    now: float
    settings: EngineSettings
    extend: Callable[[float], float]
    """Returns a retention that a client can renew: infinite until the API was up long enough for clients to return."""

    def compute_cutoff(self, retention_s: float) -> float:
        """Return the time of the oldest row to keep, for a retention that a client can renew."""
        return self.now - self.extend(retention_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
    """How long the rows of one table live."""

    name: str
    """The table, or the kind of its rows, for example `usage`."""
    expire: Callable[[Session, RetentionClock], object] | None = None
    """Removes all rows past their retention. It runs at each housekeeping, in the engine that is the keeper."""
    prune: Callable[[Session, RetentionClock], int] | None = None
    """Removes at most about `pruning.MAX_ROWS` rows past their retention and returns their number.

    It runs again soon while a rule removes that many.
    """
    remove_runs: Callable[[Session, Sequence[ModelId]], object] | None = None
    """Removes the rows of runs that are removed for good."""
    delete_runs: Callable[[Session, Sequence[ModelId]], object] | None = None
    """Runs after `remove_runs` for runs that somebody deleted, but not for runs past their retention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExtension:
    """The parts of one feature in the engine process."""

    observer: Callable[[Store, EngineSettings], ResultObserver] | None = None
    """Makes the feature's observer of results."""
    retention: Sequence[RetentionRule] = ()
    admission: MakeAdmission | None = None
    """Makes the object that decides which requests start. At most one feature has it."""


_MAX_ORIGINS = 4096


@dataclass(slots=True)
class ResultObservers:
    """Asks each observer for its rows about a completed request, and joins them."""

    store: Store
    observers: Sequence[ResultObserver] = ()
    _origins: OrderedDict[tuple[SamplingSessionId | None, SamplerId], Origin] = field(
        default_factory=OrderedDict[tuple[SamplingSessionId | None, SamplerId], Origin]
    )

    def list_row_limits(self) -> list[RowLimit[Any]]:
        """Return the limits of the rows that observers write."""
        return [bound for observer in self.observers for bound in observer.row_limits]

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
        """Return the rows about an optimizer step, which `model` has counted."""
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

    def observe_save(self, queued: QueuedRequest, model_id: ModelId) -> ObserverRows | None:
        """Return the rows about a save with a name."""
        return _combine_rows(observer.observe_save(queued, model_id) for observer in self.observers)

    def note_sampler(self, sampler: SamplerId, model: LiveModel) -> None:
        """Remember the step of an ephemeral sampler, because in-flight sessions forget it at the next save."""
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
    """Return what writes all of these rows, or None if there are none."""
    present = [write for write in rows if write is not None]
    if len(present) < 2:
        return present[0] if present else None

    def write_all(tx: Session, now: float) -> None:
        for write in present:
            write(tx, now)

    return write_all
