"""Interfaces of optional features in the engine process: result observers and retention."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sqlmodel import Session

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import Sample
from skyrl_tx.contract.results import ForwardBackwardOutput, OptimStepOutput, SampleOutput
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.admission import MakeAdmission
from skyrl_tx.engine.device_cache import LiveModel
from skyrl_tx.engine.request_log import QueuedRequest, WriteRows
from skyrl_tx.engine.sample_output import SampledTokenCounts
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store.database import Store
from skyrl_tx.store.sampling_sessions import Origin

Key = TypeVar("Key")


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
