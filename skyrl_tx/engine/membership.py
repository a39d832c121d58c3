"""This engine among those that share the database: takes over from ended ones, and gives away what it has too much of.

An engine that stops, dies or is stuck loses its lease, and any other one shares out its models and open requests. The
new owner of a model restores it when it is next asked for, from snapshot and log, as after a crash of its own.

Waiting samples also move to engines that have nothing to do. The API gives each sample to an engine when it arrives, by
the number of requests, but samples take unequal times. An engine gives away only what it has not started, in one
transaction that names another engine in the rows: whenever a process ends, each sample belongs to exactly one. Until
the commit it is this engine's, and no other thread could start it meanwhile.
"""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from sqlmodel import Session

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.engine.context import EngineContext
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.engine.schedule import Schedule
from skyrl_tx.store import engine_state, leases, models, placement
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import EngineStateRow

_log = logging.getLogger(__name__)
PERIOD_S = 0.5
"""Interval of looking whether another engine has ended."""
_BALANCE_PERIOD_S = 5.0
_MIN_DIFFERENCE = 2
"""Models that an engine has more than another one before it gives one away."""
STUCK_S = 60.0
"""Time without a published status after which an engine that is connected loses its lease."""
_MAX_GAP_S = 5.0
_MAX_GIVEN = 256
"""Samples that one engine is given at once, so that the loop waits for a short transaction."""
_ENDED = ("failed", "unloaded", "left", "expired")


def reassign_last_run(store: Store) -> None:
    """Before a start, which takes long: let the engines that are ready go on with what the last one of this number had.

    Only requests that may have ended it stay: this engine runs them alone.
    """
    if not store.is_shared:
        return

    def work(tx: Session) -> placement.MoveResult:
        ready = _find_ready_engines(tx) - {store.engine_number}
        return (
            placement.move(tx, store.engine_number, sorted(ready), quarantine=True) if ready else placement.MoveResult()
        )

    _log_move(store.engine_number, store.write(work))


def check_same_base(store: Store, base_model_hash: str) -> None:
    """Raise UserError if another engine serves other base weights: a model may move to any engine."""
    if not store.is_shared:
        return

    def others(tx: Session) -> list[EngineStateRow]:
        running = leases.get_holders(tx).keys() - {store.engine_number}
        return [row for row in engine_state.list_engines(tx) if row.number in running]

    for row in store.read(others):
        theirs = row.capabilities.get("base_model_hash")
        if theirs and base_model_hash and theirs != base_model_hash:
            raise UserError(
                f"engine {row.number} on {row.host} serves other base weights than this one; engines that share a "
                "database serve the same --base-model, with adapters of the same form"
            )


def _find_ready_engines(tx: Session) -> set[int]:
    """Return the engines that run and execute requests."""
    running, now = leases.get_holders(tx).keys(), engine_state.get_shared_time(tx)
    return {row.number for row in engine_state.list_engines(tx) if engine_state.is_ready(row, now)} & running


def _log_move(number: int, moved: placement.MoveResult) -> None:
    if moved.models or moved.num_requests:
        what = "engine %d has ended: the others go on with its %d models and %d open requests"
        _log.warning(what, number, len(moved.models), moved.num_requests)


@dataclass(slots=True)
class _LastStatus:
    """When a status of another engine was last seen to change, by this engine's monotonic clock."""

    updated_at: float
    since: float


@dataclass(slots=True)
class SampleBalancer:
    """The part of an engine's loop that gives samples away, each time it has looked at the others."""

    context: EngineContext
    sampling: SamplingExecutor
    _newest: int = 0
    """The last sample that was here at the last look. Earlier ones have waited since then, whatever the clocks say."""

    def balance(self, rows: Collection[EngineStateRow], running: Collection[int]) -> None:
        """Share what has waited since the last look with the engines that have published that they have no sample."""
        own, waited_up_to, self._newest = self.context.store.engine_number, self._newest, self.sampling.newest
        idle = [row.number for row in rows if row.number in running and row.number != own and _is_idle(row)]
        if not idle or not self.sampling.num_waiting:
            return
        waiting = self.sampling.find_movable(waited_up_to)
        for index, number in enumerate(idle):  # this engine keeps as many as each of them gets
            self._give_samples(number, [each.position for each in waiting[index :: len(idle) + 1][:_MAX_GIVEN]])

    def _give_samples(self, number: int, positions: list[int]) -> None:
        own = self.context.store.engine_number

        def work(tx: Session) -> list[RequestId]:
            return placement.give_samples(tx, own, number, positions)

        if positions and (given := self.context.store.write(work)):
            self.sampling.forget_given(given)
            _log.info("gave %d samples to engine %d, which has nothing to do", len(given), number)


def _is_idle(row: EngineStateRow) -> bool:
    load = engine_state.read_sample_load(row)
    return row.status == "ready" and load is not None and load.num_requests == 0


@dataclass(slots=True)
class Membership:
    """The part of an engine's loop that concerns the others. Without others it does nothing."""

    context: EngineContext
    schedule: Schedule
    spreading: SampleBalancer
    _checked_at: float = 0.0
    _balanced_at: float = field(default_factory=time.monotonic)
    _seen: dict[int, _LastStatus] = field(default_factory=dict[int, _LastStatus])
    _waiting_until: dict[int, float] = field(default_factory=dict[int, float])
    """Times at which to look again at ended engines whose requests are held."""
    _is_keeper: bool = False

    def check(self) -> None:
        """Look at the others, at most twice a second."""
        store, now = self.context.store, time.monotonic()
        if not store.is_shared or now - self._checked_at < PERIOD_S:
            return
        gap_s, self._checked_at = now - self._checked_at, now
        ended, rows, holders = store.read(
            lambda tx: (placement.find_ended(tx), engine_state.list_engines(tx), leases.get_holders(tx))
        )
        for number in sorted(ended - {store.engine_number}):
            if now >= self._waiting_until.get(number, 0.0):
                self._take_over(number)
        if gap_s > _MAX_GAP_S:  # this engine was busy, or itself stopped: it knows nothing about the others' silence
            self._seen.clear()
        for row in rows:
            if row.number in holders and row.number != store.engine_number:
                self._end_if_stuck(row, holders[row.number], now)
        self.spreading.balance(rows, holders)
        if now - self._balanced_at >= _BALANCE_PERIOD_S:
            self._balanced_at = now
            self._balance_models()

    def is_keeper(self) -> bool:
        """Whether this engine removes what is old, for all: the first one that asks does, as long as it runs."""
        if not self._is_keeper:
            self._is_keeper = not self.context.store.is_shared or self.context.store.write(leases.become_keeper)
        return self._is_keeper

    def discard_ended_models(self) -> None:
        """Discard the models that the keeper has expired or removed."""
        context = self.context
        context.request_log.wait_for_commits()
        for model in context.models.list_resident():
            if model.model_id in context.models.busy:
                continue
            row = context.store.read(lambda tx, name=model.model_id: models.get(tx, name))
            if row is None or row.status in _ENDED:
                context.models.discard(model.model_id)

    def _take_over(self, number: int) -> None:
        """Share out what an ended engine had, unless it has started again meanwhile, or another one was faster."""

        def work(tx: Session) -> placement.MoveResult:
            ready = _find_ready_engines(tx) | {self.context.store.engine_number}
            return placement.move(tx, number, sorted(ready)) if leases.take(tx, number) else placement.MoveResult()

        moved = self.context.store.write(work)
        _log_move(number, moved)
        if moved.num_quarantined:
            self._waiting_until[number] = time.monotonic() + _MAX_GAP_S

    def _end_if_stuck(self, row: EngineStateRow, pid: int, now: float) -> None:
        seen = self._seen.get(row.number)
        if seen is None or seen.updated_at != row.updated_at:
            self._seen[row.number] = _LastStatus(row.updated_at, now)
        elif now - seen.since > STUCK_S:
            del self._seen[row.number]
            silence = "engine %d (process %d on %s) has published no status for %.0f s: it loses its lease"
            _log.error(silence, row.number, row.pid, row.host, now - seen.since)
            self.context.store.write(lambda tx: leases.revoke(tx, pid))

    def _balance_models(self) -> None:
        """Give one model that nothing waits for to an engine that has fewer, as one that has just started."""
        store = self.context.store
        own = store.engine_number

        def look(tx: Session) -> tuple[int | None, list[ModelId]]:
            counts, others = placement.count_models(tx, time.time()), _find_ready_engines(tx) - {own}
            to = min(others, key=lambda number: (counts[number], number), default=None)
            if to is None or counts[own] - counts[to] < _MIN_DIFFERENCE:
                return None, []
            return to, placement.list_models(tx, own)

        to, mine = store.read(look)
        if to is None:
            return
        resident = {model.model_id: model for model in self.context.models.list_resident()}
        is_busy = self.context.models.busy | self.context.background_writer.blocked_models
        idle = [name for name in mine if name not in is_busy and not self.schedule.is_waiting(name)]
        # One that is not on the device costs nothing; of the others the one that was used least lately.
        idle.sort(key=lambda name: resident[name].last_used if name in resident else 0.0)
        for model_id in idle[:1]:
            self._give_model(model_id, to)

    def _give_model(self, model_id: ModelId, to: int) -> None:
        context = self.context
        model = next((each for each in context.models.list_resident() if each.model_id == model_id), None)
        if model is not None:
            context.models.evict(model)
        if context.ephemeral_samplers.has_unwritten(model_id):
            return  # its weights are in this memory only
        context.request_log.wait_for_commits()
        context.models.forget_evicted(lambda name: name != model_id)
        self.schedule.forget(model_id)
        context.store.write(lambda tx: placement.hand_over(tx, model_id, to))
        _log.info("gave model %s to engine %d, which has fewer", model_id, to, extra={"model_id": model_id})
