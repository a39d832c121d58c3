"""Samples in decoding, slice by slice; sessions take turns."""

import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlmodel import Session

from skyrl_tx.contract.batches import PreparedSampleBatch
from skyrl_tx.contract.errors import ServerError, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId, SessionId
from skyrl_tx.contract.requests import Rejected, Sample
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.engine import prepare, validate
from skyrl_tx.engine.answers import Answer
from skyrl_tx.engine.gather import Gathering
from skyrl_tx.engine.room import ENDS_ENGINE, Room
from skyrl_tx.engine.work import Work
from skyrl_tx.failpoints import reach
from skyrl_tx.store import cancellations, samplers, stability
from skyrl_tx.store.engine_state import REQUEST_BYTES

_log = logging.getLogger(__name__)
_MOST_PASSED = 64
_LOOK_AHEAD = 8
"""One sample waits in the backend for so many slots: a slot is filled at once, and nobody waits behind many."""


class _Lane(NamedTuple):
    """What waits in order: a session's requests for samples, or those for one token a sample, which take no slot."""

    session_id: SessionId
    decodes: bool


class _Running:
    """One request in decoding, whose first `num_begun` samples have been handed over.

    `is_suspect`: it was under way when something failed, so it runs alone.
    """

    def __init__(self, work: Work, gathering: Gathering, is_suspect: bool) -> None:
        self.work = work
        self.gathering = gathering
        self.is_suspect = is_suspect
        self.num_begun = 0
        request = gathering.request
        self.num_tokens = request.num_samples * (request.prompt.size + (request.params.max_tokens or 0))

    @property
    def num_left(self) -> int:
        """How many samples have not begun: while there are any, it stays the first of its lane."""
        return self.gathering.request.num_samples - self.num_begun

    @property
    def num_open(self) -> int:
        """How many samples have begun and not ended."""
        return self.gathering.num_open - self.num_left


class Sampling:
    """All requests for samples, waiting and running."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._waiting: dict[_Lane, deque[Work]] = {}  # the one served least recently first; what is left of it too
        self._running: dict[RequestId, _Running] = {}
        self._num_passed: Counter[_Lane] = Counter()  # requests begun while a lane waited for a sampler's slot
        self._num_running_tokens = self._num_running_bytes = 0
        slots = room.capabilities.sample_slots
        self._most_open = -(-slots * (_LOOK_AHEAD + 1) // _LOOK_AHEAD) if slots else sys.maxsize
        self._at_once = 1 if slots else sys.maxsize  # samples of a request that begin in one turn of its lane
        self._suspects: dict[RequestId, Work] = {}  # no other sample runs beside these
        self._heard = 0  # cancellations, up to this position
        self.num_bytes = 0
        """What all that waits takes in memory."""

    def add(self, work: Work) -> None:
        """Take up a request; what cannot run is answered at once."""
        try:
            if isinstance(work.request, Rejected):
                raise (ServerError if work.is_damaged else UserError)(work.request.message)
            if not isinstance(work.request, Sample):
                raise UserError(f"{work.kind}: model_id is missing")
            validate.check_sample(work.request, self._room.capabilities)
            self._check_size(work)
            if work.request.params.stop_strings:
                self._room.backend.text_of([])  # raises where strings cannot be found
        except Exception as error:
            self._room.fail(work, error)
            return
        if work.is_suspect:
            self._suspects[work.request_id] = work
        self._waiting.setdefault(_lane(work), deque()).append(work)
        self.num_bytes += work.num_bytes

    @property
    def num_held_bytes(self) -> int:
        """What all requests that are not answered take in memory, about."""
        num_waiting = sum(map(len, self._waiting.values()))
        num_requests = num_waiting + sum(not running.num_left for running in self._running.values())
        return self.num_bytes + self._num_running_bytes + num_requests * REQUEST_BYTES

    def sessions(self) -> set[SessionId]:
        """Client sessions with samples that wait or run."""
        return {lane.session_id for lane in self._waiting} | {each.work.session_id for each in self._running.values()}

    def end_session(self, session_id: SessionId, reason: str) -> None:
        """Answer all samples of a session with a failure."""
        works = [work for lane, queue in self._waiting.items() if lane.session_id == session_id for work in queue]
        works += [running.work for running in self._running.values() if running.work.session_id == session_id]
        for work in self._remove({work.request_id for work in works}):
            self._room.user_failure(work, reason)

    def samplers_in_use(self) -> set[SamplerId]:
        """Samplers that requests wait for or run on, whatever becomes of their names meanwhile."""
        works = [work for queue in self._waiting.values() for work in queue]
        works += [running.work for running in self._running.values()]
        return {sampler for work in works if (sampler := _sample(work).sampler) is not None}

    def _check_size(self, work: Work) -> None:
        """Refuse a request that back-pressure would hold off for ever."""
        limit = self._room.settings.max_waiting_sample_bytes
        if work.num_bytes + REQUEST_BYTES > limit:
            raise UserError(
                f"prompt: the request takes {work.num_bytes + REQUEST_BYTES} bytes, all that wait may take {limit}"
            )

    @property
    def is_running(self) -> bool:
        """Whether any sample is under way."""
        return bool(self._running)

    @property
    def has_suspect(self) -> bool:
        """Whether the next sample, or the one under way, may be to blame for an engine's end."""
        return any(work.is_suspect for work in self._suspects.values())

    def step(self) -> bool:
        """Begin what has room and decode one slice of all that runs; whether there was anything to do."""
        self._forget_cancelled()
        self._admit()
        return self._decode()

    def go_on(self) -> bool:
        """As `step`, beginning no other request."""
        self._forget_cancelled()
        self._admit(may_begin=False)
        return self._decode()

    def _decode(self) -> bool:
        if not self._running:
            return False
        try:
            deltas = self._room.backend.step_sample()
        except ENDS_ENGINE:
            raise
        except Exception as error:
            self._slice_failed(error)
            return True
        reach("sample.slice")
        self._gather(deltas)
        return True

    def give_up(self) -> None:
        """Stop in good order: what runs stays open and runs again later, no attempt counted."""
        request_ids = list(self._running)
        self._drop_all()
        self._room.attempts.give_back(request_ids)

    def _forget_cancelled(self) -> None:
        """Let go of what was answered already because its client wants it no more."""
        if not self._running and not self._waiting:
            return
        heard = self._room.store.read(lambda tx: cancellations.since(tx, self._heard))
        if not heard:
            return
        self._heard = position = heard[-1][0]
        self._room.store.write_soon(lambda tx: cancellations.forget(tx, position))
        self._remove({request_id for _, request_id in heard})

    def _remove(self, request_ids: Collection[RequestId]) -> list[Work]:
        """Have requests neither wait nor run any more; returns those that did."""
        removed = [running.work for running in self._running.values() if running.work.request_id in request_ids]
        for work in removed:
            self._drop(self._running[work.request_id])
        self._room.attempts.forget(request_ids)
        for lane, queue in list(self._waiting.items()):
            gone = [work for work in queue if work.request_id in request_ids]
            if not gone:
                continue
            removed += gone
            self.num_bytes -= sum(work.num_bytes for work in gone)
            kept = deque(work for work in queue if work.request_id not in request_ids)
            if kept:
                self._waiting[lane] = kept
            else:
                del self._waiting[lane]
        for request_id in request_ids:
            self._suspects.pop(request_id, None)
        return removed

    def _admit(self, *, may_begin: bool = True) -> None:
        """Hand over as many samples as there is room for, where slots are told a sample of each lane in turn."""
        begun: list[Work] = []
        handed: dict[RequestId, int] = {}  # the first of a request's samples that is handed over now
        num_open: Counter[bool] = Counter()  # samples under way, those that decode and the others
        for running in self._running.values():
            num_open[_lane(running.work).decodes] += running.num_open
        without_slot: set[_Lane] = set()
        while (work := self._next(without_slot, num_open, may_begin)) is not None:
            running = self._running.get(work.request_id)
            if running is None:
                if not self._has_slot(work):
                    without_slot.add(_lane(work))
                    continue
                running = self._enter(work)
                begun.append(work)
                self._num_passed.update(without_slot)
            handed.setdefault(work.request_id, running.num_begun)
            count = min(running.num_left, self._at_once)
            running.num_begun += count
            num_open[_lane(work).decodes] += count
            self._end_turn(running)
        self._begin(begun, handed)

    def _next(self, without_slot: Collection[_Lane], num_open: Counter[bool], may_begin: bool) -> Work | None:
        """Whose sample is next: of the lane that was served least recently, if there is room for it.

        One whose sampler has no slot is passed over, but not for ever: then all wait until a slot is free. What has
        begun goes on meanwhile, or its own slot would never be free.
        """
        heads: Iterable[Work] = (
            queue[0]
            for lane, queue in self._waiting.items()
            if lane not in without_slot and num_open[lane.decodes] < self._most_open
        )
        if self.has_suspect:
            heads = sorted(heads, key=lambda work: not work.is_suspect)
        may_begin = may_begin and all(self._num_passed[lane] < _MOST_PASSED for lane in without_slot)
        for work in heads:
            if work.request_id in self._running:
                return work
            may_begin = may_begin and self._has_room(work)
            if may_begin:
                return work
        return None

    def _enter(self, work: Work) -> _Running:
        """Have the head of a lane run; none of its samples has begun."""
        self._num_passed.pop(_lane(work), None)
        request = prepare.sample_request(work.request_id, _sample(work), self._room.capabilities)
        is_suspect = work.request_id in self._suspects
        running = _Running(work, Gathering(request, self._room.backend.text_of), is_suspect)
        self._running[work.request_id] = running
        self.num_bytes -= work.num_bytes
        self._num_running_bytes += work.num_bytes
        self._num_running_tokens += running.num_tokens
        return running

    def _end_turn(self, running: _Running) -> None:
        """Have the lane of a request that runs be the last; it stays the first in there while samples are left."""
        lane = _lane(running.work)
        queue = self._waiting.pop(lane)
        if not running.num_left:
            queue.popleft()
        if queue:
            self._waiting[lane] = queue

    def _has_room(self, work: Work) -> bool:
        if not self._running:
            return True
        if work.request_id in self._suspects or any(running.is_suspect for running in self._running.values()):
            return False
        capabilities = self._room.capabilities
        return capabilities.sample_slots > 0 or self._num_running_tokens < capabilities.max_sample_tokens

    def _has_slot(self, work: Work) -> bool:
        sampler = _sample(work).sampler
        return sampler is None or self._room.samplers.acquire(sampler, work.session_id)

    def _begin(self, works: list[Work], handed: Mapping[RequestId, int]) -> None:
        """Hand over samples, from the one that is told for each request; `works` are those that had not begun."""
        fit = {work.request_id for work in self._room.attempt(works)}
        for work in works:
            if work.request_id not in fit:
                self._drop(self._running[work.request_id])
                self._suspects.pop(work.request_id, None)
        for request_id, first in handed.items():
            if (running := self._running.get(request_id)) is None:
                continue
            request = running.gathering.request
            part = prepare.sample_part(request, first, running.num_begun)
            try:
                if request.sampler is not None:
                    self._room.samplers.load(request.sampler)
                self._room.backend.begin_sample(PreparedSampleBatch(requests=(part,)))
            except ENDS_ENGINE:
                raise
            except Exception as error:
                self._end(running, error)

    def _slice_failed(self, error: Exception) -> None:
        """Run each again alone, from its recorded seed, so that only the culprit fails."""
        failed = list(self._running.values())
        if len(failed) == 1:
            self._end(failed[0], error)
            return
        _log.warning("a slice of %d requests failed; each runs alone now: %s", len(failed), error)
        self._drop_all()
        self._room.attempts.give_back([running.work.request_id for running in failed])
        for running in reversed(failed):
            self._suspects[running.work.request_id] = running.work
            self._waiting.setdefault(_lane(running.work), deque()).appendleft(running.work)
            self.num_bytes += running.work.num_bytes

    def _gather(self, deltas: Sequence[SampleDelta]) -> None:
        for delta in deltas:
            running = self._running.get(delta.request_id)
            if running is None:
                continue
            if delta.error is not None:
                self._end(running, ServerError(delta.error))
                continue
            try:
                if running.gathering.add(delta):  # its stop string: others need its slot
                    self._room.backend.end_sample(delta.request_id, delta.index)
            except ENDS_ENGINE:
                raise
            except Exception as error:
                self._end(running, error)
        for running in [running for running in self._running.values() if running.gathering.is_complete]:
            self._end(running, None)

    def _end(self, running: _Running, error: Exception | None) -> None:
        work = running.work
        self._drop(running)
        self._suspects.pop(work.request_id, None)
        if error is not None:
            self._room.fail(work, error)
            return

        request, output = _sample(work), running.gathering.output()
        drawn = zip(request.sequence_ids, output.sequences, strict=request.is_recorded)
        logprobs = {sequence_id: sequence.logprobs for sequence_id, sequence in drawn}

        def rows(tx: Session) -> None:
            name, now = work.sampling_session_id, time.time()
            if name is not None and samplers.get(tx, name) is not None:
                samplers.touch(tx, name, now)
            if request.is_recorded:
                stability.record(tx, work.session_id, request.prompt.size, logprobs, now)

        self._room.answers.give([Answer(work=work, result=output)], rows)

    def _drop_all(self) -> None:
        for running in list(self._running.values()):
            self._drop(running)

    def _drop(self, running: _Running) -> None:
        """Have a request run no more."""
        request, lane = running.gathering.request, _lane(running.work)
        del self._running[request.request_id]
        if running.num_left:
            self._waiting[lane].popleft()
            if not self._waiting[lane]:
                del self._waiting[lane]
        self._num_running_tokens -= running.num_tokens
        self._num_running_bytes -= running.work.num_bytes
        self._room.backend.cancel_sample([request.request_id])  # of no effect where all had ended
        if request.sampler is not None:
            self._room.samplers.release(request.sampler)


def _lane(work: Work) -> _Lane:
    return _Lane(work.session_id, decodes=_sample(work).params.max_tokens != 1)


def _sample(work: Work) -> Sample:
    assert isinstance(work.request, Sample)
    return work.request
