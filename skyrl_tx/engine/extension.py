"""Interfaces of optional features in the engine process: admission, result observers and retention.

Admission decides whether a request may start. The default starts all requests; an app may enforce
quotas. Observers write rows about completed requests. Retention rules remove old rows.
"""

import math
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
from skyrl_tx.engine.metrics import SampledTokenCounts
from skyrl_tx.engine.request_log import QueuedRequest, WriteRows
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store import sampling_sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause
from skyrl_tx.store.sampling_sessions import BASE_WEIGHTS, Origin

Key = TypeVar("Key")
_MAX_ORIGINS = 4096
"""How many origins are kept in memory. The oldest entry is dropped first."""


@dataclass(frozen=True, slots=True)
class Start:
    """The request may start now."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The request stays in its queue, and later requests of its model or session wait behind it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The request fails with this message."""

    reason: str


Decision = Start | Wait | Fail
START = Start()


class Admission:
    """Decides which requests may start. This class starts all of them; a subclass enforces quotas.

    The engine's thread calls the methods.
    """

    weights: Mapping[str, int] = MappingProxyType({})
    """Owners with a weight other than 1, and their weights in fair sharing.

    An owner without a weight has 1.
    """
    is_counting_usage = False
    """Whether there are quotas that need usage counts, for example tokens per day.

    If so, the engine calls `record_start`, `record_drawn`, `record_end` and `list_pauses`, and
    calls `may_start` again to count the waiting requests that are paused.
    """

    def refresh(self) -> None:
        """Read settings again if they have changed.

        Called before the first request, and about once a second.
        """

    def may_start(self, queued: QueuedRequest) -> Decision:
        """Decide whether a request starts. There is capacity for it."""
        return START

    def record_start(self, queued: QueuedRequest, num_tokens: int) -> None:
        """Charge a request that is about to start with the most tokens that it can use."""

    def record_drawn(self, queued: QueuedRequest, drawn: SampledTokenCounts) -> None:
        """Count the tokens of a sample that ends or is cancelled.

        Settle the charge: `record_start` charged the most tokens that the sample could use.
        """

    def record_end(self, queued: QueuedRequest, result: Result) -> None:
        """Count a result, and settle the charge that `record_start` made for the request.

        The request may have failed before it started, or started in a previous engine.
        """

    def list_pauses(self) -> Sequence[Pause]:
        """Return the pauses, for the status that clients and operators see."""
        return ()


MakeAdmission = Callable[[Store, Callable[[], None]], Admission]
"""Makes the admission of a feature.

Arguments: the database, and a function that waits until all results are in it.
"""


@dataclass(slots=True, kw_only=True)
class RowLimit(Generic[Key]):
    """A limit for the number of rows in each group, for example of the points in one run.

    Housekeeping removes the rows that exceed the limit.
    """

    find_superfluous: Callable[[Session, Key], Sequence[Any]]
    """Returns the keys of the rows that a group has too many."""
    remove: Callable[[Session, Sequence[Any]], object]
    """Removes rows by their keys. Called with a limited number of keys."""
    keys_to_trim: set[Key] = field(default_factory=set[Key])
    """Groups with new rows, for example runs.

    The observer adds groups, housekeeping removes them.
    """


class ResultObserver:
    """Writes rows about completed requests, in the transaction of the result.

    The engine's thread calls a method before the result is committed. The method returns a function
    that writes the rows, or None if there is nothing to write. The function is called in the
    transaction with the time of the commit. It is skipped if the request already has a result, for
    example because it was cancelled. Replay after a crash does not call observers.
    """

    @property
    def row_limits(self) -> Sequence[RowLimit[Any]]:
        """Limits for the rows that the observer writes."""
        return ()

    def observe_pass(
        self, queued: QueuedRequest, model: LiveModel, output: ForwardBackwardOutput, num_tokens: int, time: DeviceTime
    ) -> WriteRows | None:
        """Observe a forward_backward or a forward of `num_tokens` tokens."""

    def observe_step(
        self, queued: QueuedRequest, model: LiveModel, output: OptimStepOutput, time: DeviceTime
    ) -> WriteRows | None:
        """Observe an optimizer step. `model.num_steps` includes this step."""

    def observe_sample(
        self, queued: QueuedRequest, request: Sample, output: SampleOutput, origin: Origin, now: float, device_s: float
    ) -> WriteRows | None:
        """Observe a completed sample request.

        `origin` is the model and the optimizer step of the sampled weights.
        """

    def observe_drawn(
        self, queued: QueuedRequest, drawn: SampledTokenCounts, origin: Origin, device_s: float
    ) -> WriteRows | None:
        """Observe the tokens of a sample request that ended in any way.

        The request may have completed, or been cancelled, or its session may have ended. Unlike the
        rows of the other methods, these rows are written even if the request already has a result.
        """

    def observe_save(self, queued: QueuedRequest, model_id: ModelId) -> WriteRows | None:
        """Observe a save of a named checkpoint."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionClock:
    """The time and the settings that retention rules use."""

    now: float
    settings: EngineSettings
    extend: Callable[[float], float]
    """Extends a retention, in seconds, that clients can renew by using the data.

    After an outage of the API, the extended retention is infinite until clients have had time to
    return. Otherwise it is the same as before.
    """
    spare_bytes: float = math.inf
    """Free space on the disk of the artifacts, see `ArtifactStore.get_spare_bytes`."""

    def compute_cutoff(self, retention_s: float) -> float:
        """Return the time before which rows may be removed.

        `retention_s` is a retention that clients can renew.
        """
        return self.now - self.extend(retention_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
    """How long the rows of a table are kept."""

    name: str
    """The table or the kind of its rows, for example `usage`."""
    expire: Callable[[Session, RetentionClock], object] | None = None
    """Removes all rows past their retention.

    Runs at each housekeeping, in the engine that is the keeper.
    """
    prune: Callable[[Session, RetentionClock], int] | None = None
    """Removes up to about `pruning.MAX_ROWS` rows past their retention and returns their number.

    While a rule removes that many rows, it runs again soon.
    """
    on_removal: Callable[[Session, Sequence[ModelId]], object] | None = None
    """Removes the dependent rows of runs that are removed.

    A run is removed after its retention, or because somebody deleted it.
    """
    on_deletion_by_user: Callable[[Session, Sequence[ModelId]], object] | None = None
    """Runs after `on_removal`, only for runs that somebody deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExtension:
    """The interfaces that one feature implements in the engine process."""

    observer: Callable[[Store, EngineSettings], ResultObserver] | None = None
    """Makes the observer of results."""
    retention: Sequence[RetentionRule] = ()
    admission: MakeAdmission | None = None
    """Makes the object that decides which requests start. At most one feature may set this."""
