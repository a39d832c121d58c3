"""The parts of an optional feature in the engine process: an observer of results, retention rules, and admission."""

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
from skyrl_tx.engine.request_log import ObserverRows, QueuedRequest
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store.database import Store
from skyrl_tx.store.sampling_sessions import Origin

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
