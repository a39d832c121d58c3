"""Share the work with the other engines of the same database: failover and load balancing.

An engine that stops, crashes or is stuck loses its lease. Another engine then distributes its
models and open requests among the running engines. The new owner of a model restores it from its
snapshot and the log when the next request to it arrives, as after a crash.

Waiting samples move to idle engines. The API assigns each sample to an engine when it arrives, by
the number of open requests, but samples take different times. An engine gives away only samples
that it has not started. It does so in one transaction that writes the number of the new engine into
the rows. So each sample belongs to exactly one engine, regardless of when a process ends.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from sqlmodel import Session

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.engine.context import EngineContext
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.engine.schedule import Schedule
from skyrl_tx.store import engine_state, models, placement
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import EngineStateRow

_log = logging.getLogger(__name__)
PERIOD_S = 0.5
"""Seconds between two checks of the other engines."""
_BALANCE_PERIOD_S = 5.0
_MIN_DIFFERENCE = 2
"""An engine that has this many models more than another engine gives one away."""
STUCK_S = 60.0
"""Seconds without a published status after which a connected engine loses its lease."""
_MAX_GAP_S = 5.0
_MAX_GIVEN = 256
"""Samples that one transaction gives to an engine.

The loop waits for the transaction, so it must be short.
"""
_ENDED = ("failed", "unloaded", "left", "expired")


def reassign_previous_work(store: Store) -> None:
    """Move the models and requests of the previous engine with this number to ready engines.

    Called before this engine starts its backend, which takes long. Requests that may have caused
    the crash are not moved: this engine will run each of them alone.
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
    """Raise UserError if another engine serves other base weights.

    Models move between engines, so all of them must have the same weights.
    """
    if not store.is_shared:
        return

    def list_running(tx: Session) -> list[EngineStateRow]:
        running = placement.get_running(tx).keys() - {store.engine_number}
        return [row for row in engine_state.list_engines(tx) if row.number in running]

    for row in store.read(list_running):
        theirs = row.capabilities.get("base_model_hash")
        if theirs and base_model_hash and theirs != base_model_hash:
            raise UserError(
                f"engine {row.number} on {row.host} serves other base weights than this engine; engines that share a "
                "database must have the same --base-model and the same adapter settings, for example "
                "--backend-config.expert-lora"
            )


def _find_ready_engines(tx: Session) -> set[int]:
    """Return the numbers of the running engines that execute requests."""
    running, now = placement.get_running(tx).keys(), engine_state.get_shared_time(tx)
    return {row.number for row in engine_state.list_engines(tx) if engine_state.is_ready(row, now)} & running


def _is_idle(row: EngineStateRow) -> bool:
    load = engine_state.read_sample_load(row)
    return row.status == "ready" and load is not None and load.num_requests == 0


def _log_move(number: int, moved: placement.MoveResult) -> None:
    if moved.models or moved.num_requests:
        ended = "engine %d has ended: other engines take over its %d models and %d open requests"
        _log.warning(ended, number, len(moved.models), moved.num_requests)


@dataclass(slots=True)
class Membership:
    """Checks the other engines of the database.

    Does nothing if this engine does not share its database.
    """

    context: EngineContext
    schedule: Schedule
    sampling: SamplingExecutor
    _checked_at: float = 0.0
    _balanced_at: float = field(default_factory=time.monotonic)
    _newest_sample: int = 0
    """Position of the newest sample at the last check. Samples up to it have waited for a whole period."""
    _seen: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    """The time of the last status of each engine, and when this engine first saw it (monotonic clock)."""
    _waiting_until: dict[int, float] = field(default_factory=dict[int, float])
    """Ended engines with quarantined requests, and when to check them again."""
    _is_keeper: bool = False

    def check(self) -> None:
        """Check the other engines, at most twice a second."""
        store, now = self.context.store, time.monotonic()
        if not store.is_shared or now - self._checked_at < PERIOD_S:
            return

        # Take over from engines that have ended.
        gap_s, self._checked_at = now - self._checked_at, now
        ended, rows, holders = store.read(
            lambda tx: (placement.find_ended(tx), engine_state.list_engines(tx), placement.get_running(tx))
        )
        for number in sorted(ended - {store.engine_number}):
            if now >= self._waiting_until.get(number, 0.0):
                self._take_over(number)
        # End engines that are stuck. After a long gap between two checks, this engine cannot know
        # how long the other engines were silent.
        if gap_s > _MAX_GAP_S:
            self._seen.clear()
        others = [row for row in rows if row.number in holders and row.number != store.engine_number]
        for row in others:
            self._end_if_stuck(row, holders[row.number], now)

        # Balance samples and models.
        self._balance_samples([row.number for row in others if _is_idle(row)])
        if now - self._balanced_at >= _BALANCE_PERIOD_S:
            self._balanced_at = now
            self._balance_models()

    def is_keeper(self) -> bool:
        """Whether this engine removes expired data for all engines.

        The first engine that asks keeps this role.
        """
        if not self._is_keeper:
            self._is_keeper = not self.context.store.is_shared or self.context.store.write(placement.become_keeper)
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
        """Distribute the work of an ended engine.

        Does nothing if it has started again, or if another engine was faster.
        """

        def work(tx: Session) -> placement.MoveResult:
            ready = _find_ready_engines(tx) | {self.context.store.engine_number}
            is_ended = placement.take_lease(tx, number)
            return placement.move(tx, number, sorted(ready)) if is_ended else placement.MoveResult()

        moved = self.context.store.write(work)
        _log_move(number, moved)
        if moved.num_quarantined:
            self._waiting_until[number] = time.monotonic() + _MAX_GAP_S

    def _end_if_stuck(self, row: EngineStateRow, pid: int, now: float) -> None:
        updated_at, since = self._seen.get(row.number, (None, now))
        if updated_at != row.updated_at:
            self._seen[row.number] = row.updated_at, now
        elif now - since > STUCK_S:
            del self._seen[row.number]
            silence = (
                "engine %d (process %d on %s) is stuck: it has published no status for %.0f s, and loses its lease"
            )
            _log.error(silence, row.number, row.pid, row.host, now - since)
            # Read, because the stuck engine may hold the write lock.
            self.context.store.read(lambda tx: placement.revoke_lease(tx, pid))

    def _balance_samples(self, idle: Sequence[int]) -> None:
        """Give samples that have waited since the last check to idle engines."""
        waited_up_to, self._newest_sample = self._newest_sample, self.sampling.newest
        if not idle or not self.sampling.num_waiting:
            return

        # Give every engine the same number of samples, including this one.
        store, waiting = self.context.store, self.sampling.find_movable(waited_up_to)
        for index, number in enumerate(idle):
            positions = [queued.position for queued in waiting[index :: len(idle) + 1][:_MAX_GIVEN]]
            give = partial(placement.give_sample_requests, giver=store.engine_number, to=number, positions=positions)
            if positions and (given := store.write(give)):
                self.sampling.remove(given)
                _log.info("gave %d samples to engine %d, which was idle", len(given), number)

    def _balance_models(self) -> None:
        """Give one idle model to an engine that has fewer models, for example to a new engine."""
        store = self.context.store
        own = store.engine_number

        def look(tx: Session) -> tuple[int | None, list[ModelId]]:
            counts, candidates = placement.count_models(tx, time.time()), _find_ready_engines(tx) - {own}
            to = min(candidates, key=lambda number: (counts[number], number), default=None)
            if to is None or counts[own] - counts[to] < _MIN_DIFFERENCE:
                return None, []
            return to, placement.list_models(tx, own)

        to, mine = store.read(look)
        if to is None:
            return

        # Choose an idle model. A model that is not on the device is free to move, else take the
        # least recently used.
        resident = {model.model_id: model for model in self.context.models.list_resident()}
        is_busy = self.context.models.busy | self.context.background_writer.blocked_models
        idle = [name for name in mine if name not in is_busy and not self.schedule.is_waiting(name)]
        idle.sort(key=lambda name: resident[name].last_used if name in resident else 0.0)
        for model_id in idle[:1]:
            self._give_model(model_id, to)

    def _give_model(self, model_id: ModelId, to: int) -> None:
        context = self.context
        model = next((model for model in context.models.list_resident() if model.model_id == model_id), None)
        if model is not None:
            context.models.evict(model)
        if context.ephemeral_samplers.has_unwritten(model_id):
            return  # only the memory of this engine has its newest weights
        context.request_log.wait_for_commits()
        context.models.forget_evicted(lambda name: name != model_id)
        self.schedule.forget(model_id)
        context.store.write(lambda tx: placement.hand_over(tx, model_id, to))
        _log.info("gave model %s to engine %d, which has fewer models", model_id, to, extra={"model_id": model_id})
