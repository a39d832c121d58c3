"""Decide which sample request starts next.

Owners share by weight, and the sessions of an owner take turns.

This module uses no clock, database or backend. Owners with waiting samples share the KV cache
slots by weight. An owner with more than its share starts no sample until the other waiting owners
have their shares, but may use every slot that no other owner wants. Slots cannot be divided, so
owners with the same number of slots for their weight take turns by virtual time, which grows with
the tokens of the samples that have started.

The samples of one request start one by one. The request stays the head of its queue until all of
them have started. After each turn its queue moves behind the other queues of its owner.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import NamedTuple

from skyrl_tx.contract.batches import STARVATION_BOUND
from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.contract.requests import Sample
from skyrl_tx.engine.extension import Admission, Fail, Wait
from skyrl_tx.engine.fair_share import FairShare, VirtualTime
from skyrl_tx.engine.request_log import QueuedRequest


class OwnerKey(NamedTuple):
    """One owner and kind of request.

    The kinds are samples that decode, and single-token samples, which need no KV cache slot.
    """

    owner: str
    decodes: bool


class QueueKey(NamedTuple):
    """One queue: the requests of a session of one of the two kinds."""

    session_id: SessionId
    decodes: bool


def get_owner_key(queued: QueuedRequest) -> OwnerKey:
    """Return the owner and kind that a sample request counts for."""
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
    """The queues of an owner and kind, least recently served first, and the owner's last turn."""

    def __init__(self, last_turn: int) -> None:
        self.last_turn = last_turn
        self.queues: dict[QueueKey, deque[QueuedRequest]] = {}


class _OwnerRank(NamedTuple):
    """The rank of an owner: open samples relative to its weight, virtual time, and last turn.

    No two owners have the same last turn.
    """

    is_last: bool
    num_open: int
    at: VirtualTime
    last_turn: int
    turns: _OwnerQueues


class Turn(NamedTuple):
    """The next request. `failure` is the error message if admission rejects it."""

    queued: QueuedRequest
    failure: str | None = None


class SampleQueue:
    """Sample requests with samples that have not started."""

    def __init__(self, admission: Admission | None = None) -> None:
        self._admission = admission or Admission()
        self._owners: dict[OwnerKey, _OwnerQueues] = {}
        self._fair_share = {decodes: FairShare(lambda: self._admission.weights) for decodes in (True, False)}
        self._turn_numbers = count(1)
        self._num_passed: Counter[QueueKey] = Counter()  # requests that started while this queue was blocked
        self._blocked: set[QueueKey] = set()
        self._passed: set[QueueKey] = set()  # blocked queues that only STARVATION_BOUND requests may overtake

    def __len__(self) -> int:
        return sum(map(len, self.iterate_queues()))

    def __iter__(self) -> Iterator[QueuedRequest]:
        return chain.from_iterable(self.iterate_queues())

    def add(self, queued: QueuedRequest) -> None:
        """Add a request at the end of its queue."""
        self._get_queue(queued).append(queued)

    def add_first(self, queued: QueuedRequest) -> None:
        """Add a request at the head of its queue, because it must run again."""
        self._get_queue(queued).appendleft(queued)

    def iterate_queues(self) -> Iterator[Sequence[QueuedRequest]]:
        """Yield each queue. All requests of a queue belong to one session."""
        return (queue for turns in self._owners.values() for queue in turns.queues.values())

    def start_round(self) -> None:
        """Start a round of admission, in which no queue is blocked yet."""
        self._blocked.clear()
        self._passed.clear()

    def block(self, queued: QueuedRequest) -> None:
        """Skip the queue of this head for the rest of the round: its sampler has no slot."""
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
        """Return the next head that can start or that admission rejects. None if there is none.

        Among the owners of one kind, the one with the fewest open samples for its weight is first,
        then the one with the smaller virtual time, then the one least recently served. The two
        kinds take turns. Owners of weight 0 come after all other owners.

        A request with open samples may always start more samples if its kind has capacity. No new
        request starts after `STARVATION_BOUND` requests have overtaken a blocked queue (queues of
        owners of weight 0 do not count): all wait until a running request releases an adapter slot.

        Args:
            running: Requests with open samples.
            num_open: Number of open samples per owner and kind.
            has_capacity: Whether samples of a kind may start. The argument is `decodes`.
            may_join: Whether a request may start while other requests are running.
        """
        can_start = all(self._num_passed[key] < STARVATION_BOUND for key in self._passed)
        for turns in self._sort_owners(num_open, has_capacity):
            for key, queue in turns.queues.items():
                if key in self._blocked:
                    continue

                # A running request may always continue.
                head = queue[0]
                if head.request_id in running:
                    return Turn(head)

                # A new request must pass the starvation bound and admission.
                can_start = can_start and may_join(head)
                if not can_start:
                    continue
                decision = self._admission.may_start(head)
                if isinstance(decision, Wait):
                    self._drop_credit(get_owner_key(head))  # blocked time earns no credit
                    continue
                return Turn(head, decision.reason if isinstance(decision, Fail) else None)
        return None

    def is_paused(self, queued: QueuedRequest) -> bool:
        """Whether a request that has not started waits because of a quota."""
        return self._admission.is_counting_usage and isinstance(self._admission.may_start(queued), Wait)

    def record_start(self, queued: QueuedRequest) -> None:
        """Record that a head starts its first samples, and overtakes the blocked queues."""
        self._num_passed.pop(get_queue_key(queued), None)
        self._num_passed.update(self._passed)

    def end_turn(self, queued: QueuedRequest, *, has_more: bool, num_tokens: int = 1) -> None:
        """Move the queue of a head behind the owner's other queues.

        Remove the head unless it `has_more` samples.

        `num_tokens` is the maximum number of tokens of the samples that have started.
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
        """Remove requests. Returns the removed ones."""
        removed = [queued for queued in self if queued.request_id in request_ids]
        for owner, key in {(get_owner_key(queued), get_queue_key(queued)) for queued in removed}:
            queues = self._owners[owner].queues
            remaining = deque(queued for queued in queues[key] if queued.request_id not in request_ids)
            if remaining:
                queues[key] = remaining
            else:
                del queues[key]
                if not queues:
                    del self._owners[owner]
        return removed

    def _get_queue(self, queued: QueuedRequest) -> deque[QueuedRequest]:
        """Return the queue of a request. A new queue is added behind the owner's other queues."""
        owner = get_owner_key(queued)
        if owner not in self._owners:
            self._owners[owner] = _OwnerQueues(next(self._turn_numbers))
            self._drop_credit(owner)
        return self._owners[owner].queues.setdefault(get_queue_key(queued), deque())

    def _drop_credit(self, owner: OwnerKey) -> None:
        self._fair_share[owner.decodes].drop_credit(owner.owner)

    def _sort_owners(
        self, num_open: Mapping[OwnerKey, int], has_capacity: Callable[[bool], bool]
    ) -> list[_OwnerQueues]:
        """Return the owners of all kinds with capacity, in the order of their turns."""
        ranks_by_kind: list[list[_OwnerRank]] = []
        for decodes in (True, False):
            if has_capacity(decodes):
                share = self._fair_share[decodes]
                waiting = [
                    (share.get_weight(key.owner), key, turns)
                    for key, turns in self._owners.items()
                    if key.decodes == decodes
                ]

                # Divide the open samples by the weight. One open sample of the owner with the
                # smallest weight is 1.
                min_weight = min((weight for weight, _, _ in waiting if weight), default=1)
                ranks = [
                    _OwnerRank(
                        weight == 0,
                        num_open.get(key, 0) * min_weight // (weight or min_weight),
                        share.get_virtual_time(key.owner),
                        turns.last_turn,
                        turns,
                    )
                    for weight, key, turns in waiting
                ]
                ranks.sort()
                ranks_by_kind += [ranks] if ranks else []

        # The kinds take turns. Owners of weight 0 come last, regardless of the kind.
        ranks_by_kind.sort(key=lambda ranks: ranks[0].last_turn)
        order = [rank for ranks in ranks_by_kind for rank in ranks]
        order.sort(key=lambda rank: rank.is_last)
        return [rank.turns for rank in order]
