"""Interfaces of optional features in the engine process: admission, result observers and retention.

Admission decides whether a request may start. The default starts all requests; an app may enforce
quotas. Observers write rows about completed requests. Retention rules remove old rows; the core has
rules too.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
from skyrl_tx.store import (
    audit,
    checkpoints,
    completions,
    custom_losses,
    pruning,
    recorded_logprobs,
    sampling_sessions,
    sessions,
)
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
    """Calls the observers of all features, and finds the origin of sampled weights for them."""

    store: Store
    observers: Sequence[ResultObserver] = ()
    _origins: OrderedDict[tuple[SamplingSessionId | None, SamplerId], Origin] = field(
        default_factory=OrderedDict[tuple[SamplingSessionId | None, SamplerId], Origin]
    )

    def list_row_limits(self) -> list[RowLimit[Any]]:
        """Return the limits of the rows of all observers."""
        return [limit for observer in self.observers for limit in observer.row_limits]

    def collect_rows(self, observe: Callable[[ResultObserver], WriteRows | None]) -> WriteRows | None:
        """Call `observe` with each observer, and combine the functions that it returns into one.

        Returns None if there is nothing to write.
        """
        present = [write for observer in self.observers if (write := observe(observer)) is not None]
        if len(present) < 2:
            return present[0] if present else None

        def write_all(tx: Session, now: float) -> None:
            for write in present:
                write(tx, now)

        return write_all

    def note_sampler(self, sampler: SamplerId, model: LiveModel) -> None:
        """Remember the origin of a new ephemeral sampler.

        In-flight sampling sessions need this: the next save of the model gives them newer weights,
        and the database then no longer has the step of this sampler.
        """
        self._remember_origin(None, sampler, Origin(model.model_id, model.num_steps))

    def find_origin(self, session_id: SamplingSessionId | None, sampler: SamplerId | None) -> Origin:
        """Return the model and the optimizer step of sampled weights."""
        if sampler is None or session_id is None or not self.observers:
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


def _expire_checkpoints(tx: Session, clock: RetentionClock) -> None:
    for path in checkpoints.expire(tx, clock.now):
        audit.record(tx, "checkpoint_delete", audit.SERVER, clock.now, path=path, reason="expired")
    checkpoints.purge(tx, clock.now - clock.settings.deletion_undo_s, max_bytes=clock.spare_bytes)


def _release_samplers(tx: Session, clock: RetentionClock) -> None:
    settings = clock.settings
    before = clock.compute_cutoff(settings.sampler_retention_s)
    sampling_sessions.release_unused(tx, before, max_bytes=settings.max_ephemeral_sampler_bytes)


def _finish_sessions(tx: Session, clock: RetentionClock) -> None:
    retention_s = clock.extend(clock.settings.session_retention_s)
    sessions.finish_timed_out(tx, clock.now - retention_s, f"no heartbeat for {retention_s:.0f} s", clock.now)


_CORE_RULES = (
    RetentionRule(name="checkpoints", expire=_expire_checkpoints),
    RetentionRule(
        name="ephemeral samplers",
        expire=_release_samplers,
        prune=lambda tx, clock: pruning.delete_sampling_sessions(
            tx, clock.compute_cutoff(clock.settings.session_retention_s)
        ),
    ),
    RetentionRule(name="recorded logprobs", expire=lambda tx, clock: recorded_logprobs.expire(tx, clock.now)),
    RetentionRule(name="custom losses", expire=lambda tx, clock: custom_losses.expire(tx, clock.now)),
    RetentionRule(name="partial results", expire=lambda tx, _: completions.prune_partials(tx)),
    RetentionRule(
        name="sessions",
        expire=_finish_sessions,
        prune=lambda tx, clock: pruning.delete_finished_sessions(
            tx, clock.compute_cutoff(clock.settings.run_retention_s)
        ),
    ),
    RetentionRule(
        name="results",
        prune=lambda tx, clock: pruning.prune_results(
            tx, clock.now, retention_s=clock.extend(clock.settings.result_retention_s)
        ),
    ),
    RetentionRule(
        name="requests",
        prune=lambda tx, clock: pruning.delete_tombstones(
            tx,
            clock.now,
            retention_s=clock.extend(clock.settings.request_retention_s),
            session_retention_s=clock.extend(clock.settings.session_retention_s),
        ),
    ),
    RetentionRule(name="audit", prune=lambda tx, clock: audit.expire(tx, clock.now - audit.RETENTION_S)),
)
"""Runs have no rule here: the engine must also discard an expired run, see `Housekeeping.expire`."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention rules of the core and of all features."""

    rules: Sequence[RetentionRule]

    @classmethod
    def collect(cls, extensions: Sequence[EngineExtension]) -> "Retention":
        """Return the rules of the core and of the given features."""
        return cls((*_CORE_RULES, *(rule for extension in extensions for rule in extension.retention)))

    def expire(self, tx: Session, clock: RetentionClock) -> None:
        """Remove all rows past their retention, for rules with `expire`."""
        for rule in self.rules:
            if rule.expire is not None:
                rule.expire(tx, clock)

    def prune(self, tx: Session, clock: RetentionClock) -> int:
        """Remove some rows past their retention.

        Returns the largest number of rows that one rule removed.
        """
        ended = pruning.delete_ended_models(tx, clock.compute_cutoff(clock.settings.run_retention_s), self.remove_runs)
        return max(ended, *(rule.prune(tx, clock) for rule in self.rules if rule.prune is not None))

    def remove_runs(self, tx: Session, model_ids: Sequence[ModelId]) -> None:
        """Remove the dependent rows of runs that are removed."""
        for rule in self.rules:
            if rule.on_removal is not None:
                rule.on_removal(tx, model_ids)

    def delete_runs(self, tx: Session, model_ids: Sequence[ModelId]) -> None:
        """Remove the dependent rows of runs that a client or the operator deleted."""
        self.remove_runs(tx, model_ids)
        for rule in self.rules:
            if rule.on_deletion_by_user is not None:
                rule.on_deletion_by_user(tx, model_ids)
