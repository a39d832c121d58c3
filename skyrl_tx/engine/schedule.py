"""Decide which request runs next. Samples have their own queue, see `sample_queue`.

Owners (for example users with an API key) share the device in proportion to their weights, which
admins set. The models (adapters of training runs) of one owner take turns,
and the requests of one model run in `seq_id` order. This module uses no clock, database or backend:
callers pass the time, and `Schedule.read_bodies` reads the bodies of large requests.

The SDK posts the requests of one call out of order, and some sequence numbers never arrive. A
request behind a sequence gap waits until the gap timeout has passed. It does not wait if a barrier
(for example an optim_step) has arrived, because the client sends a barrier only after the server
has acknowledged all earlier requests.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.engine.extension import START, Admission, Fail, Wait
from skyrl_tx.engine.fair_share import FairShare, VirtualTime
from skyrl_tx.engine.request_log import QueuedRequest

MAX_RUNNING_BATCHES = 4
"""How many batches of passes may run at the same time. Each batch keeps its gradients in memory.

A pass is a `forward` or `forward_backward` request. It is long if it has more tokens than the
budget of a batch. A long pass must leave slots free for other passes:

- one slot
- a second slot if its session is already running a long pass
- a third slot if its owner is already running a long pass, and there are other owners

So neither an owner nor a session can occupy the device with long passes.

A running batch may wait for the compiler, because its shapes are new. A new pass of the same owner
must then leave one slot free, and it joins no batch of another owner. So an owner whose passes need
many compilations does not stop other owners.
"""

_MAX_BATCH_REQUESTS = 32

_NON_PASS_TOKENS = 256
"""Cost of a request that is no pass, for example an optimizer step, in tokens for `fair_share`."""

ReadBodies = Callable[[Sequence[QueuedRequest]], Sequence[QueuedRequest]]
"""Reads the deferred bodies of requests."""


@dataclass(frozen=True, slots=True)
class SequenceCursor:
    """Which requests of a model have started.

    `next_seq` is the next expected `seq_id`, and `barrier_seq` the `seq_id` of the last barrier.
    """

    next_seq: int = 1
    barrier_seq: int = 0

    def advance(self, queued: QueuedRequest) -> "SequenceCursor":
        """Return the cursor after a request has started."""
        seq = queued.seq_id or 0
        barrier_seq = max(self.barrier_seq, seq) if queued.is_barrier else self.barrier_seq
        return SequenceCursor(max(self.next_seq, seq + 1), barrier_seq)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """Requests to run next: all `forward`, all `forward_backward`, or a single one of another kind."""

    requests: tuple[QueuedRequest, ...]
    refusal: str | None = None
    """Error text if a barrier with a higher `seq_id` ran before the single request arrived."""
    failure: str | None = None
    """Error text if admission rejected the single request."""
    is_long: bool = False
    """Whether the single request is a pass that exceeds the token budget."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunningBatch:
    """A running batch of passes, for the rules of MAX_RUNNING_BATCHES."""

    models: Collection[ModelId]
    owner: str
    """Owner of the first request."""
    session_id: SessionId
    """Session of the first request."""
    is_long: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether the next micro-batch waits for the compiler."""
        return False


@dataclass(slots=True, kw_only=True)
class Schedule:
    """All waiting requests except samples.

    `now` arguments are seconds of API uptime: the clock stops while clients cannot send requests.

    Bodies of large requests are read when their turn is near: up to `max_read_bytes` in total, and
    at least one request of each model. The cost of `take` grows with the number of models that
    have waiting requests, not with the number of known models.
    """

    gap_timeout_s: float
    max_pass_tokens: int
    """Token budget of a batch. A single request may exceed it."""
    max_models: int
    max_batch_requests: int = _MAX_BATCH_REQUESTS
    max_read_bytes: int = 0
    read_bodies: ReadBodies = lambda requests: requests
    admission: Admission = field(default_factory=Admission)
    fair_share: FairShare = field(default_factory=FairShare)
    """The tokens charged to each owner. Unused while there is only one owner."""
    on_credit_dropped: Callable[[str], None] = lambda owner: None
    """Called with an owner when `fair_share` drops the owner's credit, see `FairShare.drop_credit`.

    Credit is device time that the owner did not use. Owners cannot save it for later. The engine
    passes a function that makes the training executor drop it too, in its own `FairShare`. Not
    called while there is only one owner.
    """
    num_bytes_by_owner: Counter[str] = field(default_factory=Counter[str])
    """Memory of the waiting requests."""
    _queues: "dict[ModelId, _ModelQueue]" = field(default_factory=lambda: {})
    _waiting: "dict[ModelId, _ModelQueue]" = field(default_factory=lambda: {})
    _last_served_by_owner: dict[str, int] = field(default_factory=dict[str, int])
    """For each owner with a queue, the value of `_num_served` when it was last served."""
    _num_requests: Counter[str] = field(default_factory=Counter[str])
    _num_served: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all waiting requests."""
        return self.num_bytes_by_owner.total()

    def __contains__(self, model_id: ModelId) -> bool:
        return model_id in self._queues

    def add_model(self, model_id: ModelId, cursor: SequenceCursor) -> None:
        """Add a model's queue. Must be called before the model's first request is added."""
        self._queues[model_id] = _ModelQueue(cursor)

    def is_waiting(self, model_id: ModelId) -> bool:
        """Whether a model has waiting requests."""
        return model_id in self._waiting

    def forget(self, model_id: ModelId) -> None:
        """Forget a model that was moved to another engine. It must have no waiting requests."""
        assert model_id not in self._waiting
        self._queues.pop(model_id, None)

    def forget_idle_models(self, active: Collection[ModelId]) -> None:
        """Remove the queues of models that have no waiting request and are not `active`.

        The caller must not add such a model again before the results of its requests are committed.
        """
        for model_id in self._queues.keys() - self._waiting.keys() - set(active):
            del self._queues[model_id]
        present = {queue.owner for queue in self._queues.values()}
        for owner in self._last_served_by_owner.keys() - present:
            del self._last_served_by_owner[owner], self.num_bytes_by_owner[owner], self._num_requests[owner]
        if not self.has_multiple_owners:
            self.fair_share.reset()

    def add(self, queued: QueuedRequest) -> None:
        """Add a request to its model's queue."""
        assert queued.model_id is not None
        queue = self._waiting[queued.model_id] = self._queues[queued.model_id]
        queue.add(queued)
        self._last_served_by_owner.setdefault(queue.owner, 0)
        if not self._num_requests[queue.owner]:  # the owner was idle
            self._drop_credit(queue.owner)
        self._num_requests[queue.owner] += 1
        self.num_bytes_by_owner[queue.owner] += queued.num_bytes

    def take(
        self,
        now: float,
        blocked: Collection[ModelId] = (),
        running: Collection[RunningBatch] = (),
    ) -> ScheduledBatch | None:
        """Remove and return the next batch or request, or None if nothing can run.

        Args:
            now: API uptime in seconds.
            blocked: Models whose files a background thread is still writing.
            running: The running batches. None of their models starts another request.
        """
        busy = {model_id for batch in running for model_id in batch.models}
        if len(busy) >= self.max_models:
            return None
        queues = self._order_queues(busy.union(blocked))
        compiling_owners = {batch.owner for batch in running if batch.is_waiting and self.has_multiple_owners}

        for queue in queues:
            first = self._find_runnable(queue, now)
            if first is None:  # the owner waits for a missing sequence number or a quota
                self._drop_credit(queue.owner)
                continue

            # A request that arrived too late fails now.
            if refusal := queue.explain_refusal(first):
                return ScheduledBatch((self._take_request(queue, first),), refusal)

            # A pass needs a slot among the running batches. See MAX_RUNNING_BATCHES.
            is_long = first.num_tokens > self.max_pass_tokens
            num_reserved = int(is_long)
            if is_long:
                long_batches = [batch for batch in running if batch.is_long]
                num_reserved += any(batch.session_id == first.session_id for batch in long_batches)
                num_reserved += self.has_multiple_owners and any(batch.owner == first.owner for batch in long_batches)
            num_reserved = max(num_reserved, first.owner in compiling_owners)
            if first.model_pass is not None and MAX_RUNNING_BATCHES - len(running) <= num_reserved:
                continue

            # Admission may let the request start, wait or fail.
            decision = self.admission.may_start(first)
            if isinstance(decision, Wait):
                self._drop_credit(queue.owner)
                continue
            if isinstance(decision, Fail):
                return ScheduledBatch((self._take_request(queue, first),), failure=decision.reason)
            if first.model_pass is None:
                return ScheduledBatch((self._start_request(queue, first),))

            # Add passes of the same kind (`forward` or `forward_backward`), from all models.
            joining = [other for other in queues if other.owner == queue.owner or other.owner not in compiling_owners]
            requests = self._fill_batch(queue, first, joining, now, self.max_models - len(busy))
            return ScheduledBatch(tuple(requests), is_long=is_long)
        return None

    @property
    def has_multiple_owners(self) -> bool:
        """Whether there are multiple owners, so that weights matter."""
        return len(self._last_served_by_owner) > 1

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_paused(self) -> int:
        """Number of requests that wait because of a quota, or behind such a request."""
        if not self.admission.is_counting_usage:
            return 0
        firsts = ((queue.first, len(queue)) for queue in self._waiting.values())
        return sum(count for first, count in firsts if first is not None and self._is_paused(first))

    def get_next_deadline(self) -> float | None:
        """Return when the next gap timeout ends, or None if no request waits behind a gap."""
        return min(
            (queue.gap_since + self.gap_timeout_s for queue in self._waiting.values() if queue.gap_since is not None),
            default=None,
        )

    def _is_paused(self, queued: QueuedRequest) -> bool:
        """Whether a pass waits because of a quota. Its body need not have been read."""
        return queued.kind == "model_pass" and isinstance(self.admission.may_start(queued), Wait)

    def _drop_credit(self, owner: str) -> None:
        if self.has_multiple_owners:
            self.fair_share.drop_credit(owner)
            self.on_credit_dropped(owner)

    def _order_queues(self, excluded: Collection[ModelId]) -> list["_ModelQueue"]:
        """Return the queues with requests: one of each owner, then a second one, and so on.

        Owners come in the order of their virtual times. Among the queues of one owner, the least
        recently served queue comes first. All queues of owners of weight 0 come last.
        """
        waiting = [queue for model_id, queue in self._waiting.items() if model_id not in excluded]
        waiting.sort(key=lambda queue: queue.last_served)
        if not self.has_multiple_owners:
            return waiting
        # Owners with a weight come first, then owners of weight 0. Both are served in rounds: the
        # first queue of each owner, then the second queue of each, and so on. Within a round, sort by
        # the owner's virtual time, and then by the owner's last turn.
        num_before: Counter[str] = Counter()
        ranks: list[tuple[bool, int, VirtualTime, int]] = []
        for queue in waiting:
            owner = queue.owner
            virtual_time = self.fair_share.get_virtual_time(owner)
            last_served = self._last_served_by_owner[owner]
            ranks.append((virtual_time.is_last, num_before[owner], virtual_time, last_served))
            num_before[queue.owner] += 1
        order = sorted(range(len(waiting)), key=ranks.__getitem__)
        return [waiting[index] for index in order]

    def _fill_batch(
        self, lead: "_ModelQueue", first: QueuedRequest, queues: list["_ModelQueue"], now: float, max_models: int
    ) -> Iterator[QueuedRequest]:
        """Yield `first` and more passes of the same kind, within the token budget of a batch.

        `queues` are the queues whose passes may join. If owners have unequal weights, a batch
        contains requests of one owner only, because all owners in a batch are served at the same
        rate.
        """
        assert first.model_pass is not None
        if self.has_multiple_owners and self.fair_share.is_weighted:
            queues = [queue for queue in queues if queue.owner == lead.owner]

        budget, num_models, num_left = self.max_pass_tokens, 0, self.max_batch_requests
        for queue in [lead, *(queue for queue in queues if queue is not lead)]:
            if num_models == max_models or budget <= 0 or not num_left:
                return

            # Take passes of this model until one does not fit.
            is_taken = False
            while (queued := self._find_runnable(queue, now)) is not None:
                is_same = queued.model_pass is not None and queued.model_pass.backward == first.model_pass.backward
                if not is_same or queue.explain_refusal(queued):
                    break
                if queued is not first:
                    if queued.num_tokens > budget or not num_left:
                        break
                    if self.admission.may_start(queued) != START:
                        break
                budget -= queued.num_tokens
                num_left -= 1
                is_taken = True
                yield self._start_request(queue, queued)
            num_models += is_taken

    def _find_runnable(self, queue: "_ModelQueue", now: float) -> QueuedRequest | None:
        """Return the first request of a queue that may run, with its body.

        If the body was deferred, this also reads the bodies of the next requests.
        """
        head = queue.find_runnable(now, self.gap_timeout_s)
        if head is None or not head.num_deferred_bytes:
            return head
        if self.admission.is_counting_usage and self._is_paused(head):  # do not read the body of a paused request
            return None
        deferred = queue.find_deferred(head, _MAX_BATCH_REQUESTS, self.max_read_bytes // len(self._waiting))
        for before, after in zip(deferred, self.read_bodies(deferred), strict=True):
            queue.replace(before, after)
            self.num_bytes_by_owner[queue.owner] += after.num_bytes - before.num_bytes
        return queue.find_runnable(now, self.gap_timeout_s)

    def _take_request(self, queue: "_ModelQueue", queued: QueuedRequest) -> QueuedRequest:
        self._num_served += 1
        queue.last_served = self._last_served_by_owner[queue.owner] = self._num_served
        queue.remove_head(queued)
        assert queued.model_id is not None
        if not queue.is_waiting:
            del self._waiting[queued.model_id]
        self.num_bytes_by_owner[queue.owner] -= queued.num_bytes
        self._num_requests[queue.owner] -= 1
        if self.has_multiple_owners:
            self.fair_share.charge(queue.owner, queued.num_tokens or _NON_PASS_TOKENS)
        return queued

    def _start_request(self, queue: "_ModelQueue", queued: QueuedRequest) -> QueuedRequest:
        if self.admission.is_counting_usage:
            self.admission.record_start(queued, queued.num_tokens)
        return self._take_request(queue, queued)


class _ModelQueue:
    """The waiting requests of one model."""

    def __init__(self, cursor: SequenceCursor) -> None:
        self.owner = ""  # known with the first request
        self.last_served = 0
        self.gap_since: float | None = None
        self._cursor = cursor
        self._numbered: list[QueuedRequest] = []
        self._num_barriers = 0
        self._unnumbered: deque[QueuedRequest] = deque()

    def __len__(self) -> int:
        return len(self._numbered) + len(self._unnumbered)

    @property
    def first(self) -> QueuedRequest | None:
        """The waiting request with the lowest `seq_id`, which may not be runnable yet.

        If no waiting request has a `seq_id`, the oldest request.
        """
        return next(chain(self._numbered, self._unnumbered), None)

    @property
    def is_waiting(self) -> bool:
        return bool(self._numbered or self._unnumbered)

    def add(self, queued: QueuedRequest) -> None:
        self.owner = queued.owner
        if queued.seq_id:
            insort(self._numbered, queued, key=lambda other: other.seq_id or 0)
            self._num_barriers += queued.is_barrier
        else:
            self._unnumbered.append(queued)

    def find_runnable(self, now: float, gap_timeout_s: float) -> QueuedRequest | None:
        """Return the first request that may run.

        Requests without a `seq_id` run in order of arrival.
        """
        numbered = self._numbered[0] if self._numbered else None
        if numbered is not None and not self._can_run(numbered, now, gap_timeout_s):
            numbered = None
        unnumbered = self._unnumbered[0] if self._unnumbered else None
        if numbered is not None and unnumbered is not None:
            return min(numbered, unnumbered, key=lambda queued: queued.position)
        return numbered or unnumbered

    def find_deferred(self, head: QueuedRequest, max_requests: int, max_bytes: int) -> list[QueuedRequest]:
        """Return the head, and the requests after it whose deferred bodies fit into `max_bytes`."""
        successors = (*self._numbered[:max_requests], *islice(self._unnumbered, max_requests))
        deferred = [head]
        for queued in successors:
            if queued is head:
                continue
            max_bytes -= queued.num_deferred_bytes
            if queued.num_deferred_bytes and max_bytes >= head.num_deferred_bytes:
                deferred.append(queued)
        return deferred

    def replace(self, before: QueuedRequest, after: QueuedRequest) -> None:
        """Replace a request by the same request with its body."""
        for queue in (self._numbered, self._unnumbered):
            for index, queued in enumerate(islice(queue, _MAX_BATCH_REQUESTS)):
                if queued is before:
                    queue[index] = after
                    return

    def explain_refusal(self, queued: QueuedRequest) -> str | None:
        """Return the error message for a request that arrived too late, else None."""
        if not queued.seq_id or queued.seq_id > self._cursor.barrier_seq:
            return None
        return (
            f"seq_id {queued.seq_id} arrived too late: seq_id {self._cursor.barrier_seq}, a later optim_step, save or "
            "load of this model, has already run"
        )

    def remove_head(self, queued: QueuedRequest) -> None:
        """Remove the request that `find_runnable` returned, and advance the cursor."""
        self.gap_since = None
        self._cursor = self._cursor.advance(queued)
        if self._numbered and self._numbered[0] is queued:
            del self._numbered[0]
            self._num_barriers -= queued.is_barrier
        else:
            self._unnumbered.popleft()

    def _can_run(self, queued: QueuedRequest, now: float, gap_timeout_s: float) -> bool:
        assert queued.seq_id is not None
        # The client sent the barrier after all earlier requests were acknowledged: the missing
        # numbers will not arrive.
        if queued.seq_id <= self._cursor.next_seq or self._num_barriers:
            return True
        if self.gap_since is None:
            self.gap_since = now
        return now >= self.gap_since + gap_timeout_s
