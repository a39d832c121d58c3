"""Decide whether a request may start. The default starts all requests; an app may enforce quotas.

The engine calls `may_start` when there is capacity for a request. If the answer is to wait, the
engine calls `may_start` for this request again later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from skyrl_tx.contract.results import Result
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.sample_output import SampledTokenCounts
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause


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
