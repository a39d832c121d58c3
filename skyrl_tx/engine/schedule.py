"""Which request is next: each model's in `seq_id` order, models in turns. No clock, no store, no backend.

The SDK posts a call's chunks out of order, and some ids never come. So a pass above a missing id waits for it, but not
when a barrier is there already (the SDK posts one only once all before it is acknowledged), and not for ever.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.engine.work import Work

MOST_UNDER_WAY = 4
"""Batches of passes, each with gradients of its own in memory. The last place is for what is within the budget.

The one before is for what is not, of a session that has no such pass under way: or the models of one session would keep
all others out until one of theirs is done.
"""
Read = Callable[[Sequence[Work]], Sequence[Work]]
"""Gives requests that are not read yet as they are once read."""
_MOST_TOGETHER = 32
"""Requests in a batch: however short, each is computed by itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far a model's numbered requests have come: the id expected next, and that of the last barrier."""

    next_seq: int = 1
    barrier_seq: int = 0

    def after(self, work: Work) -> "Place":
        """The place once this request was taken."""
        seq = work.seq_id or 0
        return Place(max(self.next_seq, seq + 1), max(self.barrier_seq, seq) if work.is_barrier else self.barrier_seq)


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next: passes of one direction, each model's in order, or one request of any kind.

    `refusal` is set when the only request came too late: its place is behind a barrier that took effect. `is_long`: the
    only request is a pass of more than the budget.
    """

    works: tuple[Work, ...]
    refusal: str | None = None
    is_long: bool = False


class Schedule:
    """All requests that wait, but samples. `now` is in seconds during which missing ids could have arrived."""

    def __init__(
        self,
        *,
        hole_wait_s: float,
        max_pass_tokens: int,
        max_models: int,
        max_read_bytes: int = 0,
        read: Read = lambda works: works,
    ) -> None:
        """`max_pass_tokens` is the budget of a batch; one request may exceed it.

        What was added unread is read when its turn is near: `max_read_bytes` of all models, or one request of each.
        """
        self._max_read_bytes = max_read_bytes
        self._read = read
        self._hole_wait_s = hole_wait_s
        self._max_pass_tokens = max_pass_tokens
        self._max_models = max_models
        self._lines: dict[ModelId, _Line] = {}
        self._num_served = 0
        self.num_bytes = 0
        """What all that waits takes in memory."""
        self.num_suspects = 0

    def __contains__(self, model_id: ModelId) -> bool:
        return model_id in self._lines

    def open(self, model_id: ModelId, place: Place) -> None:
        """Say where a model stands, before its first `add`."""
        self._lines[model_id] = _Line(place)

    def is_waiting(self, model_id: ModelId) -> bool:
        """Whether a model has requests in line."""
        return model_id in self._lines and self._lines[model_id].is_waiting

    def add(self, work: Work) -> None:
        """Put a request in its model's line."""
        assert work.model_id is not None
        self._lines[work.model_id].add(work)
        self.num_bytes += work.num_bytes
        self.num_suspects += work.is_suspect

    def take(
        self,
        now: float,
        held: Collection[ModelId] = (),
        *,
        busy: Collection[ModelId] = (),
        num_under_way: int = 0,
        with_long: Collection[SessionId] = (),
    ) -> Step | None:
        """Take out the next step, to run beside the batches under way on the models `busy`; None when nothing can.

        Models in `held` are passed over. Suspects are first, and wait until nothing is under way. `with_long`: the
        sessions that have a long pass under way.
        """
        if num_under_way and len(busy) >= self._max_models:
            return None
        turns = self._turns({*held, *busy})
        if self.num_suspects:
            turns.sort(key=lambda line: not line.has_suspect(now, self._hole_wait_s))
        for line in turns:
            first = self._head(line, now)
            if first is None:
                continue
            if refusal := line.refusal_of(first):
                return Step((self._serve(line, first),), refusal)
            if first.is_suspect and num_under_way:
                return None
            is_long = first.num_tokens > self._max_pass_tokens
            num_kept = 0 if not is_long else 2 if first.session_id in with_long else 1  # places that are not for it
            if first.model_pass is not None and MOST_UNDER_WAY - num_under_way <= num_kept:
                continue
            if first.model_pass is None or first.is_suspect:
                return Step((self._serve(line, first),), is_long=is_long)
            works = self._fill(line, first, turns, now, self._max_models - len(busy))
            return Step(tuple(works), is_long=is_long)
        return None

    def has_suspect(self, now: float, held: Collection[ModelId] = ()) -> bool:
        """Whether the next step is a suspect, which runs alone."""
        return any(line.has_suspect(now, self._hole_wait_s) for line in self._turns(held))

    def next_deadline(self) -> float | None:
        """The time at which a wait for a missing id ends, if any goes on."""
        return min(
            (line.hole_since + self._hole_wait_s for line in self._lines.values() if line.hole_since is not None),
            default=None,
        )

    def _turns(self, held: Collection[ModelId]) -> list["_Line"]:
        """Lines with work, the one that was served least recently first."""
        waiting = [line for model_id, line in self._lines.items() if line.is_waiting and model_id not in held]
        return sorted(waiting, key=lambda line: line.last_served)

    def _fill(self, lead: "_Line", first: Work, turns: list["_Line"], now: float, max_models: int) -> Iterator[Work]:
        """More passes of the same direction for the same batch, as far as its budget goes."""
        assert first.model_pass is not None
        budget, num_models, num_left = self._max_pass_tokens, 0, _MOST_TOGETHER
        for line in [lead, *(line for line in turns if line is not lead)]:
            if num_models == max_models or budget <= 0 or not num_left:
                return
            is_taken = False
            while (work := self._head(line, now)) is not None:
                is_same = work.model_pass is not None and work.model_pass.backward == first.model_pass.backward
                if not is_same or (work.is_suspect and work is not first) or line.refusal_of(work):
                    break
                if work is not first and (work.num_tokens > budget or not num_left):
                    break
                budget -= work.num_tokens
                num_left -= 1
                is_taken = True
                yield self._serve(line, work)
            num_models += is_taken

    def _head(self, line: "_Line", now: float) -> Work | None:
        """A line's head, read, and with it some of those behind it."""
        head = line.head(now, self._hole_wait_s)
        if head is None or not head.num_unread_bytes:
            return head
        num_waiting = sum(each.is_waiting for each in self._lines.values())
        unread = line.near(head, _MOST_TOGETHER, self._max_read_bytes // num_waiting)
        for before, after in zip(unread, self._read(unread), strict=True):
            line.replace(before, after)
            self.num_bytes += after.num_bytes - before.num_bytes
        return line.head(now, self._hole_wait_s)

    def _serve(self, line: "_Line", work: Work) -> Work:
        self._num_served += 1
        line.last_served = self._num_served
        line.take(work)
        self.num_bytes -= work.num_bytes
        self.num_suspects -= work.is_suspect
        return work


class _Line:
    """One model's requests."""

    def __init__(self, place: Place) -> None:
        self.last_served = 0
        self.hole_since: float | None = None
        self._place = place
        self._numbered: list[Work] = []
        self._num_barriers = 0
        self._unnumbered: deque[Work] = deque()

    @property
    def is_waiting(self) -> bool:
        return bool(self._numbered or self._unnumbered)

    def add(self, work: Work) -> None:
        if work.seq_id:
            insort(self._numbered, work, key=lambda other: other.seq_id or 0)
            self._num_barriers += work.is_barrier
        else:
            self._unnumbered.append(work)

    def head(self, now: float, hole_wait_s: float) -> Work | None:
        """The request that may run now. Those without a number run in order of arrival."""
        numbered = self._numbered[0] if self._numbered else None
        if numbered is not None and not self._may_run(numbered, now, hole_wait_s):
            numbered = None
        unnumbered = self._unnumbered[0] if self._unnumbered else None
        if numbered is not None and unnumbered is not None:
            return min(numbered, unnumbered, key=lambda work: work.position)
        return numbered or unnumbered

    def near(self, head: Work, most: int, most_bytes: int) -> list[Work]:
        """The head, and those behind it that are not read yet either, as far as there is room for them."""
        behind = [work for work in (*self._numbered[:most], *islice(self._unnumbered, most)) if work is not head]
        found = [head]
        for work in behind:
            most_bytes -= work.num_unread_bytes
            if work.num_unread_bytes and most_bytes >= head.num_unread_bytes:
                found.append(work)
        return found

    def replace(self, before: Work, after: Work) -> None:
        """Put a request, now read, in its own place."""
        for queue in (self._numbered, self._unnumbered):
            for place, work in enumerate(islice(queue, _MOST_TOGETHER)):
                if work is before:
                    queue[place] = after
                    return

    def has_suspect(self, now: float, hole_wait_s: float) -> bool:
        """Whether the head is one that may run now."""
        work = self.head(now, hole_wait_s)
        return work is not None and work.is_suspect

    def _may_run(self, work: Work, now: float, hole_wait_s: float) -> bool:
        assert work.seq_id is not None
        # A barrier anywhere in the line is at or above the first request, so whatever is missing will never come.
        if work.seq_id <= self._place.next_seq or self._num_barriers:
            return True
        if self.hole_since is None:
            self.hole_since = now
        return now >= self.hole_since + hole_wait_s

    def refusal_of(self, work: Work) -> str | None:
        """Why a request is too late, if it is."""
        if not work.seq_id or work.seq_id > self._place.barrier_seq:
            return None
        return (
            f"seq_id {work.seq_id} came too late: seq_id {self._place.barrier_seq}, an optim_step, save or load "
            "that comes after it, has taken effect"
        )

    def take(self, work: Work) -> None:
        """Remove the head."""
        self.hole_since = None
        self._place = self._place.after(work)
        if self._numbered and self._numbered[0] is work:
            del self._numbered[0]
            self._num_barriers -= work.is_barrier
        else:
            self._unnumbered.popleft()
