"""The engine's loop. One turn: take in requests, one step of training, one slice of decoding."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.requests import Sample
from skyrl_tx.engine import sessions
from skyrl_tx.engine.answers import Answers
from skyrl_tx.engine.attempts import Attempts
from skyrl_tx.engine.handlers import handle
from skyrl_tx.engine.jobs import Jobs
from skyrl_tx.engine.passes import Passes
from skyrl_tx.engine.presence import Presence
from skyrl_tx.engine.recovery import Recovery
from skyrl_tx.engine.remake import make_samplers_again
from skyrl_tx.engine.residency import Models, Samplers
from skyrl_tx.engine.room import Room
from skyrl_tx.engine.sampling import Sampling
from skyrl_tx.engine.schedule import Place, Schedule, Step
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.engine.state import StatePublisher
from skyrl_tx.engine.unnamed import WriteBehind
from skyrl_tx.engine.work import BARRIER_KINDS, Work, work_of
from skyrl_tx.store import cancellations, engine_state, futures
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)
_PAGE = 256
_LONGEST_WAIT_S = 1.0
_READING_S = 0.1
_SHORTEST_WAIT_S = 0.05
_PRUNING_PAUSE_S = 0.2
_LARGE_BODY = 65_536  # to read it later takes another statement, which is little beside what so large a pass takes
_BATCH_STEPS = 4  # micro-batches that requests share: enough to keep a device busy, few to wait for


class Engine:
    """Runs a backend for a store, on the thread that calls `run`."""

    def __init__(
        self, settings: EngineSettings, backend: AbstractBackend, store: Store, artifacts: ArtifactStore
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._store = store
        self._artifacts = artifacts

    def run(self, stop: threading.Event, on_ready: Callable[[Capabilities], None] = lambda _: None) -> None:
        """Serve until `stop` is set (then call `store.wake`); what was begun is finished or left for the next start.

        Raises BackendLost or StoreError: nothing can be trusted, and requests not answered run in the next engine.
        """
        state = StatePublisher(self._store, self._settings.base_models)
        state.start()
        jobs = Jobs(self._store.wake)
        attempts = Attempts(self._store)
        threading.Thread(target=attempts.give_back_when, args=(stop,), name="heed stop", daemon=True).start()
        try:
            started = time.monotonic()
            capabilities = self._backend.start()
            _log.info("backend ready on %s after %.1f s", ", ".join(capabilities.devices), time.monotonic() - started)
            answers = Answers(self._store, attempts)
            recovery = Recovery(self._backend, capabilities, self._store, self._artifacts)
            recovery.check_base(self._settings.base_models[0])
            behind = WriteBehind(jobs, recovery, self._store, self._settings.max_unwritten_samplers)
            room = Room(
                settings=self._settings,
                backend=self._backend,
                capabilities=capabilities,
                store=self._store,
                attempts=attempts,
                answers=answers,
                jobs=jobs,
                recovery=recovery,
                models=Models(self._backend, capabilities, self._store, answers, jobs, recovery, behind),
                samplers=Samplers(self._backend, capabilities, recovery, behind),
                behind=behind,
                presence=Presence(self._store),
            )
            self._store.write(cancellations.forget)  # they are answered, so they will not be read
            loop = _Loop(room, self._artifacts)
            make_samplers_again(room)
            state.load = loop.sample_load()
            state.say("ready", capabilities)
            on_ready(capabilities)
            while not stop.is_set():
                state.check()
                state.load = loop.sample_load()
                if not loop.turn():
                    self._store.wait(loop.longest_wait())
            state.say("stopping", capabilities)
            loop.finish()
            _log.info("engine stopped in good order")
        finally:
            attempts.close()
            state.close()
            jobs.close()
            self._backend.close()


class _Loop:
    """The state of a running engine."""

    def __init__(self, room: Room, artifacts: ArtifactStore) -> None:
        self._room = room
        self._artifacts = artifacts
        self._schedule = Schedule(
            hole_wait_s=room.settings.hole_wait_s,
            max_pass_tokens=_batch_tokens(room.capabilities),
            max_models=room.capabilities.max_models,
            max_read_bytes=room.settings.max_backlog_bytes // 2,
            read=self._read_bodies,
        )
        self._passes = Passes(room)
        self._sampling = Sampling(room)
        self._position = 0
        self._is_busy = self._is_turn_of_passes = False
        self._housekeeping_at = self._pruning_at = time.monotonic()

    def turn(self) -> bool:
        """Do a little of everything; whether there was anything to do."""
        worked = self._take_in()
        worked |= self._room.jobs.finish()
        self._is_busy = self._share_device()
        worked |= self._is_busy
        self._room.answers.settle()
        settings = self._room.settings
        self._room.models.keep_due(
            interval_s=settings.snapshot_interval_s,
            num_effects=settings.snapshot_effects,
            max_share=settings.snapshot_max_share,
        )
        if time.monotonic() >= self._housekeeping_at:
            self._housekeeping_at = time.monotonic() + settings.housekeeping_interval_s
            now = time.time()
            sessions.release_idle_models(self._room, self._schedule, now)
            sessions.end_samples(self._room, self._sampling, now)
            sessions.forget_unneeded(self._room, now)
            worked |= self._take_in()  # what is in memory keeps its files
            sessions.collect(self._room, self._artifacts, self._sampling.samplers_in_use(), self._position, now)
            self._room.behind.retry()
        if time.monotonic() >= self._pruning_at:
            has_more = sessions.prune(self._room, time.time())
            pause_s = (
                min(settings.housekeeping_interval_s, _PRUNING_PAUSE_S)
                if has_more
                else settings.housekeeping_interval_s
            )
            self._pruning_at = time.monotonic() + pause_s
        return worked

    def _share_device(self) -> bool:
        """Some steps of training, then some slices of decoding: neither side waits for more than that of the other.

        A suspect has the device to itself, so that nothing else is marked should it take the engine down again. What
        was begun before it comes to its end, nothing is begun beside it.
        """
        if self._sampling.has_suspect:
            return self._passes.go_on() or self._sampling.step()
        if self._passes.has_suspect or self._is_suspect_next():
            return self._sampling.go_on() or self._passes.go_on() or self._train()
        settings, worked = self._room.settings, False
        for run, how_often in (
            (self._train, settings.training_steps_per_turn),
            (self._sampling.step, settings.decode_slices_per_turn),
        ):
            for _ in range(how_often):
                if not run():
                    break
                worked = True
        return worked

    def sample_load(self) -> engine_state.SampleLoad:
        """What is held of samples, for the API to count on from."""
        return engine_state.SampleLoad(
            position=self._position,
            num_bytes=self._sampling.num_held_bytes,
            max_bytes=self._room.settings.max_waiting_sample_bytes,
        )

    def _has_room(self) -> bool:
        """Whether more may be read. When nothing runs all may be waiting for what is not read yet.

        Of large passes only that they are there, so that who queues many keeps nobody from being seen.
        """
        backlog = self._schedule.num_bytes + self._sampling.num_bytes
        return backlog < self._room.settings.max_backlog_bytes or not self._is_busy

    def longest_wait(self) -> float:
        """How long there may be nothing to do, if nobody asks."""
        deadline = self._schedule.next_deadline()
        if deadline is None:
            return _LONGEST_WAIT_S
        return min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, deadline - self._room.presence.seconds()))

    def finish(self) -> None:
        """End in good order: batches under way are answered, models are kept, samples are left open."""
        while self._passes.go_on():
            pass
        self._sampling.give_up()
        self._room.jobs.finish(wait=True)
        for model in self._room.models.resident():
            self._room.models.keep_now(model)
        self._room.answers.settle(wait=True)

    def _take_in(self) -> bool:
        """Read what has arrived; of much a part, so that what runs goes on meanwhile."""
        end = time.monotonic() + _READING_S
        worked = False
        while self._has_room() and self._read_page():
            worked = True
            if not self._is_busy or time.monotonic() >= end:
                break
        return worked

    def _read_page(self) -> bool:
        position, is_full = self._position, self._schedule.num_bytes >= self._room.settings.max_backlog_bytes // 2
        most = 0 if is_full else _LARGE_BODY

        def look(tx: Session) -> tuple[int, list[futures.PendingRequest]]:
            last = futures.last_position(tx)  # before the page, so that nothing in between is passed over
            return last, futures.pending(tx, position, _PAGE, most)

        last, page = self._room.store.read(look)
        for pending in page:
            self._position = pending.position
            work = work_of(pending)
            if work.model_id is None or isinstance(work.request, Sample):
                self._sampling.add(work)
            else:
                self._line_up(work)
        if len(page) < _PAGE:  # the rest was answered before it was read: cancelled, and counted by the API until now
            self._position = max(self._position, last)
        return bool(page)

    def _read_bodies(self, works: Sequence[Work]) -> list[Work]:
        """What was left out while much was waiting, or for its size."""
        request_ids = [work.request_id for work in works]
        found = {each.request_id: each for each in self._room.store.read(lambda tx: futures.some(tx, request_ids))}
        return [work_of(found[request_id]) for request_id in request_ids]

    def _line_up(self, work: Work) -> None:
        model_id = work.model_id
        assert model_id is not None
        if model_id not in self._schedule:
            store = self._room.store
            last = store.read(lambda tx: futures.last_answered_seq(tx, model_id))
            barrier = store.read(lambda tx: futures.last_answered_seq(tx, model_id, BARRIER_KINDS))
            self._schedule.open(model_id, Place(last + 1, barrier))
        self._schedule.add(work)

    def _is_suspect_next(self) -> bool:
        schedule = self._schedule
        held = {*self._room.jobs.held, *self._room.models.busy}
        return schedule.num_suspects > 0 and schedule.has_suspect(self._room.presence.seconds(), held)

    def _train(self) -> bool:
        """One step: other work that is next, or a pass one micro-batch further; in turns where there are both."""
        passes, step = self._passes, None
        if not self._is_turn_of_passes:
            step = self._schedule.take(
                self._room.presence.seconds(),
                self._room.jobs.held,
                busy=self._room.models.busy,
                num_under_way=passes.num_under_way,
                with_long=passes.with_long,
            )
        if step is not None:
            self._begin(step)
        is_done = step is not None and step.works[0].model_pass is None
        self._is_turn_of_passes = is_done and passes.num_under_way > 0
        return is_done or passes.go_on() or step is not None

    def _begin(self, step: Step) -> None:
        first = step.works[0]
        _log.debug("%s: %d requests, first %s of %s", first.kind, len(step.works), first.request_id, first.model_id)
        if step.refusal is not None:
            self._room.user_failure(first, step.refusal)
        elif first.model_pass is not None:
            self._passes.begin(step.works, is_long=step.is_long)
        else:
            for work in self._room.attempt([first]):
                handle(self._room, work)
                if work.is_suspect:
                    self._room.jobs.finish(wait=True)  # its files too are written with nothing beside them


def _batch_tokens(capabilities: Capabilities) -> int:
    """Tokens of a batch: some micro-batches, where the backend says what they hold."""
    few = _BATCH_STEPS * capabilities.micro_batch_tokens
    return min(few or capabilities.max_pass_tokens, capabilities.max_pass_tokens)
