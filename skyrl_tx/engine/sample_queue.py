"""Chooses the next sample request: sessions take turns. No clock, store or backend.

A request keeps its turn order while its samples start one by one: it stays the head of its queue until all of them have
started, and its queue moves to the end after each turn.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from skyrl_tx.contract.batches import STARVATION_BOUND
from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.contract.requests import Sample
from skyrl_tx.engine.request import QueuedRequest


class QueueKey(NamedTuple):
    """One queue: a session's requests that decode, or those for one token, which need no KV cache slot."""

    session_id: SessionId
    decodes: bool


def queue_key(queued: QueuedRequest) -> QueueKey:
    """Return the queue of a sample request."""
    return QueueKey(queued.session_id, decodes=sample_of(queued).params.max_tokens != 1)


def sample_of(queued: QueuedRequest) -> Sample:
    """Return the body of a sample request."""
    assert isinstance(queued.request, Sample)
    return queued.request


class SampleQueue:
    """Sample requests with samples that have not started."""

    def __init__(self) -> None:
        self._queues: dict[QueueKey, deque[QueuedRequest]] = {}  # the least recently served first
        self._num_passed: Counter[QueueKey] = Counter()  # requests that started before a blocked queue's head
        self._blocked: set[QueueKey] = set()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[QueuedRequest]:
        return (queued for queue in self._queues.values() for queued in queue)

    def add(self, queued: QueuedRequest) -> None:
        """Add a request at the end of its queue."""
        self._queues.setdefault(queue_key(queued), deque()).append(queued)

    def add_first(self, queued: QueuedRequest) -> None:
        """Add a request at the head of its queue, to run it again."""
        self._queues.setdefault(queue_key(queued), deque()).appendleft(queued)

    def start_round(self) -> None:
        """Start a round of admission: no queue is blocked."""
        self._blocked.clear()

    def block(self, queued: QueuedRequest) -> None:
        """Skip this head's queue for the rest of the round: its sampler has no slot."""
        self._blocked.add(queue_key(queued))

    def next(
        self,
        running: Collection[RequestId],
        *,
        has_capacity: Callable[[QueueKey], bool],
        may_start: Callable[[QueuedRequest], bool],
    ) -> QueuedRequest | None:
        """Return the head of the least recently served queue that may run, or None.

        A running request may always continue, as its queue has capacity. No request starts after a blocked queue was
        passed `STARVATION_BOUND` times: all wait until running requests release a sampler slot.
        """
        can_start = all(self._num_passed[key] < STARVATION_BOUND for key in self._blocked)
        for key, queue in self._queues.items():
            if key in self._blocked or not has_capacity(key):
                continue
            head = queue[0]
            if head.request_id in running:
                return head
            can_start = can_start and may_start(head)
            if can_start:
                return head
        return None

    def note_start(self, queued: QueuedRequest) -> None:
        """Record that a head starts its first samples: it passes the blocked queues."""
        self._num_passed.pop(queue_key(queued), None)
        self._num_passed.update(self._blocked)

    def end_turn(self, queued: QueuedRequest, *, has_more: bool) -> None:
        """Move a head's queue to the end. Remove the head unless it `has_more` samples to start."""
        key = queue_key(queued)
        queue = self._queues.pop(key)
        if not has_more:
            queue.popleft()
        if queue:
            self._queues[key] = queue

    def remove(self, request_ids: Collection[RequestId]) -> list[QueuedRequest]:
        """Remove requests and return those that were here."""
        removed = [queued for queued in self if queued.request_id in request_ids]
        for key in {queue_key(queued) for queued in removed}:
            kept = deque(queued for queued in self._queues[key] if queued.request_id not in request_ids)
            if kept:
                self._queues[key] = kept
            else:
                del self._queues[key]
        return removed
