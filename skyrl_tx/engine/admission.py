"""Decides whether a request may start. The default starts everything at once; an app may enforce quotas.

The engine asks `may_start` when it has a place for a request: once for each request, unless the decision is to wait.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from skyrl_tx.contract.results import Result
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.store.database import Store
from skyrl_tx.store.pauses import Pause


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
