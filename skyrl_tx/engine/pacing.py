"""Which training requests wait because of a quota: of a day, or of what runs at once."""

from dataclasses import dataclass

from skyrl_tx.engine.pauses import Pauses
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.room import Room


@dataclass(frozen=True, slots=True)
class QuotaPacing:
    """The `Pacing` of the engine's schedule."""

    pauses: Pauses
    room: Room

    @property
    def is_active(self) -> bool:
        """Whether any quota may make a training request wait."""
        return self.pauses.is_active or self.room.is_bounded

    def is_paused(self, queued: QueuedRequest) -> bool:
        """Whether a request waits. Only passes do, so that work can be saved."""
        return self.pauses.is_paused(queued) or (queued.model_pass is not None and self.room.of(queued) == 0)

    def hand_over(self, queued: QueuedRequest) -> None:
        """Count a request that starts."""
        self.pauses.hand_over(queued)
        if queued.model_pass is not None:
            self.room.take(queued, 1)
