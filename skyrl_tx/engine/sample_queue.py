"""Chooses the next sample request: the owner with the fewest open samples for its weight, and its sessions in turns.

No clock, store or backend. Owners whose samples wait share the KV cache slots by weight: an owner with more than its
share starts no sample until others have theirs, and takes every slot that no other owner wants. Slots are whole, so
owners that have their share in whole slots take turns by virtual time, which grows by the tokens of what has started.

A request keeps its turn order while its samples start one by one: it stays the head of its queue until all of them have
started, and its queue moves to the end after each turn.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from skyrl_tx.contract.batches import STARVATION_BOUND
from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.contract.requests import Sample
from skyrl_tx.engine.admission import Admission, Fail, Wait
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.schedule import FairShare, VirtualTime


class OwnerKey(NamedTuple):
    """One owner's requests that decode, or those for one token, which need no KV cache slot."""

    owner: str
    decodes: bool


class QueueKey(NamedTuple):
    """One queue: the requests of a session, of one of both kinds."""

    session_id: SessionId
    decodes: bool


def get_owner_key(queued: QueuedRequest) -> OwnerKey:
    """Return whose share of the capacity a sample request takes."""
    return OwnerKey(queued.owner, decodes=_needs_decoding(queued))


def get_queue_key(queued: QueuedRequest) -> QueueKey:
    """Return the queue of a sample request."""
    return QueueKey(queued.session_id, decodes=_needs_decoding(queued))


def get_sample(queued: QueuedRequest) -> Sample:
    """Return the body of a sample request."""
    assert isinstance(queued.request, Sample)
    return queued.request


def _needs_decoding(queued: QueuedRequest) -> bool:
    return get_sample(queued).params.max_tokens != 1


class _OwnerQueues:
    """The queues of one owner and kind, the least recently served first, with the number of its last turn."""

    def __init__(self, last_turn: int) -> None:
        self.last_turn = last_turn
        self.queues: dict[QueueKey, deque[QueuedRequest]] = {}


class _OwnerRank(NamedTuple):
    """The numbers that decide when an owner is next: open samples for its weight, virtual time, last turn."""

    is_last: bool
    num_open: int
    at: VirtualTime
    turns: _OwnerQueues

    def get_sort_key(self) -> tuple[bool, int, VirtualTime, int]:
        """Return what places are sorted by."""
        return self.is_last, self.num_open, self.at, self.turns.last_turn


class Turn(NamedTuple):
    """The request that is next. `failure` is why it fails, if admission lets it fail."""

    queued: QueuedRequest
    failure: str | None = None


class SampleQueue:
    """Sample requests with samples that have not started."""

    def __init__(self, admission: Admission | None = None) -> None:
        self._admission = admission or Admission()
        self._owners: dict[OwnerKey, _OwnerQueues] = {}
        self._fair_share = {decodes: FairShare(lambda: self._admission.weights) for decodes in (True, False)}
        self._turn_numbers = count(1)
        self._num_passed: Counter[QueueKey] = Counter()  # requests that started before a blocked queue's head
        self._blocked: set[QueueKey] = set()
        self._passed: set[QueueKey] = set()  # the blocked ones that may not be passed without end

    def __len__(self) -> int:
        return sum(len(queue) for turns in self._owners.values() for queue in turns.queues.values())

    def __iter__(self) -> Iterator[QueuedRequest]:
        return (queued for turns in self._owners.values() for queue in turns.queues.values() for queued in queue)

    def add(self, queued: QueuedRequest) -> None:
        """Add a request at the end of its queue."""
        self._get_queue(queued).append(queued)

    def add_first(self, queued: QueuedRequest) -> None:
        """Add a request at the head of its queue, to run it again."""
        self._get_queue(queued).appendleft(queued)

    def iterate_heads(self) -> Iterator[tuple[QueuedRequest, int]]:
        """Yield the head of each queue, with the number of its requests."""
        return ((queue[0], len(queue)) for turns in self._owners.values() for queue in turns.queues.values())

    def iterate_queues(self) -> Iterator[Sequence[QueuedRequest]]:
        """Yield the requests of each queue, which are of one session."""
        return (queue for turns in self._owners.values() for queue in turns.queues.values())

    def start_round(self) -> None:
        """Start a round of admission: no queue is blocked."""
        self._blocked.clear()
        self._passed.clear()

    def block(self, queued: QueuedRequest) -> None:
        """Skip this head's queue for the rest of the round: its sampler has no slot."""
        self._blocked.add(get_queue_key(queued))
        owner = get_owner_key(queued)
        if not self._fair_share[owner.decodes].get_virtual_time(owner.owner).is_last:
            self._passed.add(get_queue_key(queued))

    def choose_next(
        self,
        running: Collection[RequestId],
        *,
        num_open: Mapping[OwnerKey, int],
        has_capacity: Callable[[bool], bool],
        may_join: Callable[[QueuedRequest], bool],
    ) -> Turn | None:
        """Return the next head that may run, or fails because of admission; None without either.

        Of each kind the owners with the fewest open samples for their weight come first, and of these the one with the
        least virtual time, then the one least recently served; the kinds themselves take turns. Owners of weight 0 come
        after those of both kinds. A running request may always continue, as its kind has capacity. No request starts
        after a blocked queue was passed `STARVATION_BOUND` times, unless its owner has weight 0: all wait until running
        requests release a sampler slot.

        Args:
            running: The requests with open samples.
            num_open: Number of each owner's open samples.
            has_capacity: Whether a sample that decodes, or one that does not, has capacity.
            may_join: Whether a request may start next to those that run.
        """
        can_start = all(self._num_passed[key] < STARVATION_BOUND for key in self._passed)
        for turns in self._sort_owners(num_open, has_capacity):
            for key, queue in turns.queues.items():
                if key in self._blocked:
                    continue
                head = queue[0]
                if head.request_id in running:
                    return Turn(head)
                can_start = can_start and may_join(head)
                if not can_start:
                    continue
                decision = self._admission.may_start(head)
                if isinstance(decision, Wait):
                    self._record_arrival(get_owner_key(head))  # a wait for a quota saves up nothing
                    continue
                return Turn(head, decision.reason if isinstance(decision, Fail) else None)
        return None

    def is_paused(self, queued: QueuedRequest) -> bool:
        """Whether a request that has not started waits because of a quota."""
        return self._admission.is_counting and isinstance(self._admission.may_start(queued), Wait)

    def record_start(self, queued: QueuedRequest) -> None:
        """Record that a head starts its first samples: it passes the blocked queues."""
        self._num_passed.pop(get_queue_key(queued), None)
        self._num_passed.update(self._passed)

    def end_turn(self, queued: QueuedRequest, *, has_more: bool, num_tokens: int = 1) -> None:
        """Move a head's queue to the end. Remove the head unless it `has_more` samples to start.

        `num_tokens` is what the samples that started may take.
        """
        turns, key, owner = self._owners[get_owner_key(queued)], get_queue_key(queued), get_owner_key(queued)
        self._fair_share[owner.decodes].charge(owner.owner, num_tokens)
        turns.last_turn = next(self._turn_numbers)
        queue = turns.queues.pop(key)
        if not has_more:
            queue.popleft()
        if queue:
            turns.queues[key] = queue
        elif not turns.queues:
            del self._owners[get_owner_key(queued)]

    def remove(self, request_ids: Collection[RequestId]) -> list[QueuedRequest]:
        """Remove requests and return those that were here."""
        removed = [queued for queued in self if queued.request_id in request_ids]
        for owner, key in {(get_owner_key(queued), get_queue_key(queued)) for queued in removed}:
            queues = self._owners[owner].queues
            kept = deque(queued for queued in queues[key] if queued.request_id not in request_ids)
            if kept:
                queues[key] = kept
            else:
                del queues[key]
                if not queues:
                    del self._owners[owner]
        return removed

    def _get_queue(self, queued: QueuedRequest) -> deque[QueuedRequest]:
        """Return the queue of a request; a new one is the last in its order."""
        owner = get_owner_key(queued)
        if owner not in self._owners:
            self._owners[owner] = _OwnerQueues(next(self._turn_numbers))
            self._record_arrival(owner)
        return self._owners[owner].queues.setdefault(get_queue_key(queued), deque())

    def _record_arrival(self, owner: OwnerKey) -> None:
        self._fair_share[owner.decodes].record_arrival(owner.owner)

    def _sort_owners(
        self, num_open: Mapping[OwnerKey, int], has_capacity: Callable[[bool], bool]
    ) -> list[_OwnerQueues]:
        """Return the owners' turns of the kinds with capacity, in order."""
        of_kind: list[list[_OwnerRank]] = []
        for decodes in (True, False):
            if has_capacity(decodes):
                share = self._fair_share[decodes]
                waiting = [
                    (share.get_weight(key.owner), key, turns)
                    for key, turns in self._owners.items()
                    if key.decodes == decodes
                ]
                least = min((weight for weight, _, _ in waiting if weight), default=1)
                # Open samples in units of what the owner with the least weight has of one.
                owners = [
                    _OwnerRank(
                        weight == 0,
                        num_open.get(key, 0) * least // (weight or least),
                        share.get_virtual_time(key.owner),
                        turns,
                    )
                    for weight, key, turns in waiting
                ]
                owners.sort(key=_OwnerRank.get_sort_key)
                of_kind += [owners] if owners else []
        of_kind.sort(key=lambda owners: owners[0].turns.last_turn)
        places = [place for owners in of_kind for place in owners]
        places.sort(key=lambda place: place.is_last)  # of both kinds
        return [place.turns for place in places]
