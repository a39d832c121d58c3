"""Heartbeat timeouts, retention and garbage collection."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.ids import ArtifactId, ModelId, SamplerId, SessionId
from skyrl_tx.engine.context import EngineContext
from skyrl_tx.engine.extension import RetentionClock
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.engine.schedule import Schedule
from skyrl_tx.store import (
    checkpoints,
    futures,
    identity,
    models,
    pruning,
    sessions,
)
from skyrl_tx.store.database import Store

T = TypeVar("T")
_log = logging.getLogger(__name__)
_NOTHING = "no artifact is removed now"
_CHECK_PERIOD_S = 0.05
_MAX_CLOCK_STEP_S = 5.0
"""Difference between the progress of the two clocks that is a suspend or a clock step, not an adjustment."""
_BATCH_ROWS = 500
"""Points or groups of samples that one transaction removes."""
_MAX_CHECK_GAP_S = 60.0
"""Uptime that one check adds to `get_continuous_s` at most: an engine that was busy for longer cannot know more."""


def _split_batches(keys: Sequence[T]) -> Iterator[Sequence[T]]:
    return (keys[start : start + _BATCH_ROWS] for start in range(0, len(keys), _BATCH_ROWS))


class ApiUptime:
    """API uptime as seen by the engine. Clients can send heartbeats and requests only during this time.

    The time of day, by which heartbeats are stamped, also advances while the machine is suspended, and in steps when
    somebody sets it. Either is an outage here: the monotonic clock does not advance with it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._checked_at, self._checked_time_of_day = time.monotonic(), time.time()
        self._total_s = self._continuous_s = 0.0

    def get_total_s(self) -> float:
        """Return the total uptime: a clock that stops while the API is down."""
        self._check()
        return self._total_s

    def get_continuous_s(self) -> float:
        """Return the uptime since the API was last down."""
        self._check()
        return self._continuous_s

    def _check(self) -> None:
        elapsed = time.monotonic() - self._checked_at
        step = time.time() - self._checked_time_of_day - elapsed
        is_step = abs(step) > _MAX_CLOCK_STEP_S
        if elapsed < _CHECK_PERIOD_S and not is_step:  # a check takes a system call
            return
        self._checked_at += elapsed
        self._checked_time_of_day += elapsed + step
        if is_step:
            _log.warning(
                "the time of day has stepped by %.0f s, or the machine was suspended; no session expires", step
            )
            self._continuous_s = 0.0
        elif self._store.is_peer_running():
            self._total_s += elapsed
            self._continuous_s += min(elapsed, _MAX_CHECK_GAP_S)
        else:
            self._continuous_s = 0.0


@dataclass(frozen=True, slots=True)
class Housekeeping:
    """Frees what closed sessions hold, and removes expired data."""

    context: EngineContext
    artifacts: ArtifactStore
    sampling: SamplingExecutor
    api_uptime: ApiUptime
    claims: list[identity.Claim] = field(default_factory=list[identity.Claim])
    """At most one, of an object store; the next collection uses it."""

    def evict_idle_models(self, is_waiting: Callable[[ModelId], bool], now: float) -> None:
        """Evict the models of closed sessions that have no running or waiting request."""
        models = self.context.models
        for model in models.list_resident():
            is_needed = model.model_id in models.busy or is_waiting(model.model_id)
            if not is_needed and self._describe_session_end(model.session_id, now) is not None:
                models.evict(model)

    def forget_idle_models(self, schedule: Schedule) -> None:
        """Forget the models that have no running or waiting request and are not on the device.

        The database has all that is needed to use them again.
        """
        active = self.context.models.busy | self.context.background_writer.blocked_models
        self.context.models.forget_evicted(lambda model_id: model_id in active or schedule.is_waiting(model_id))
        schedule.forget_idle_models(active | {model.model_id for model in self.context.models.list_resident()})

    def fail_orphaned_samples(self, now: float) -> None:
        """Fail the samples of closed sessions. Their clients cannot fetch them."""
        for session_id in self.sampling.list_sessions():
            if (how := self._describe_session_end(session_id, now)) is not None:
                self.sampling.end_session(session_id, f"its session {how}; begin a new one to sample again")

    def expire(self, now: float) -> None:
        """Remove models, checkpoints, samplers, logprobs and losses past their retention; close silent sessions."""
        clock, retention = self._make_clock(now), self.context.retention

        def drop(tx: Session) -> list[ModelId]:
            retention.expire(tx, clock)
            purged = models.purge(tx, now - clock.settings.deletion_undo_s, retention.delete_runs)
            return purged + models.expire(tx, clock.compute_cutoff(clock.settings.session_retention_s))

        for model_id in self.context.store.write(drop):
            self.context.models.discard(model_id)
            removed = "removed model %s: it was deleted, or its session is past its retention"
            _log.info(removed, model_id, extra={"model_id": model_id})

    def collect_garbage(self, read_position: int, now: float, *, is_keeper: bool = True) -> None:
        """Start to take away unreferenced artifacts if this engine is the keeper, and evict unreferenced samplers.

        Nothing is removed while requests that arrived after `read_position` wait: they may name an artifact that lost
        its other references since. The open samples of other engines count as references.
        """

        def look(tx: Session) -> tuple[bool, set[ArtifactId] | None]:
            unread = futures.list_pending(tx, read_position, 1, engine=self.context.store.engine_number)
            return bool(unread), checkpoints.find_referenced_artifacts(tx)

        # Find out whether anything may be removed. One transaction: a request that arrives later names a referenced
        # artifact or a young one.
        claim = self._claim() if is_keeper else None
        if is_keeper and claim is None:
            return
        has_unread, referenced = self.context.store.read(look)
        if has_unread:
            _log.debug("no artifact is removed now: there are unread requests")
            return
        if referenced is None:
            _log.warning("no artifact is removed now: a waiting load_weights is damaged and its artifact is unknown")
            return

        # Free samplers here, then files in the background.
        in_use = self.sampling.list_samplers_in_use()
        keep = referenced | {ArtifactId(sampler) for sampler in in_use}
        self._evict_idle_samplers(keep, in_use, now)
        if claim is not None:
            self._collect_artifacts(claim, keep)

    def _collect_artifacts(self, claim: identity.Claim, keep: Collection[ArtifactId]) -> None:
        """Start to take away all artifacts except these, those that the claim leaves alone, and young ones."""

        def collect() -> None:
            self.artifacts.collect({*keep, *claim.unclaimed}, claim.looked_at)
            settings = self.context.settings
            self.artifacts.empty_trash(retention_s=settings.trash_retention_s, max_bytes=settings.max_trash_bytes)

        def on_collected(collected: Future[None]) -> None:
            if (error := collected.exception()) is not None:  # they only take disk space
                _log.error("cannot remove unreferenced artifacts; retrying later", exc_info=error)

        self.context.background_writer.submit(collect, on_collected)

    def _claim(self) -> identity.Claim | None:
        """Return the right to collect artifacts, or None if there is none now.

        That of an object store is claimed in the background, for the next collection: no step waits for a network.
        """
        store, artifacts = self.context.store, self.artifacts
        if not artifacts.is_remote:
            try:
                return identity.claim(store, artifacts)
            except OSError as error:
                _log.error("%s: the identity of the data directory cannot be written: %s", _NOTHING, error)
                return None

        def on_claimed(claimed: Future[identity.Claim]) -> None:
            try:
                self.claims.append(claimed.result())
            except OSError as error:
                _log.error("%s: %s", _NOTHING, error)

        self.context.background_writer.submit(lambda: identity.claim(store, artifacts), on_claimed)
        return self.claims.pop() if self.claims else None

    def prune(self, now: float) -> bool:
        """Remove some rows past their retention, for example old results. Returns whether more are left."""
        clock, retention = self._make_clock(now), self.context.retention
        is_full = self.context.store.write(lambda tx: retention.prune(tx, clock)) >= pruning.MAX_ROWS
        return self.context.store.vacuum() or is_full

    def trim_tables(self) -> None:
        """Start to remove the rows beyond the bounds of features, for example old points of long runs."""
        store = self.context.store
        grown = [(bound, bound.grown) for bound in self.context.observers.list_row_limits() if bound.grown]
        for bound, _ in grown:
            bound.grown = set()

        def remove() -> None:
            for bound, keys in grown:
                for key in keys:
                    for batch in _split_batches(
                        store.read(lambda tx, bound=bound, key=key: bound.find_superfluous(tx, key))
                    ):
                        store.write(lambda tx, bound=bound, batch=batch: bound.remove(tx, batch))

        def on_removed(removed: Future[None]) -> None:
            if (error := removed.exception()) is not None:  # they only take disk space
                _log.error("cannot remove rows beyond their bounds; retrying later", exc_info=error)
                for bound, keys in grown:
                    bound.grown |= keys

        if grown:
            self.context.background_writer.submit(remove, on_removed)

    def _describe_session_end(self, session_id: SessionId, now: float) -> str | None:
        """Return how a session ended or that its heartbeat timed out; None while it is open."""
        row = self.context.store.read(lambda tx: sessions.find(tx, session_id))
        if row is None:
            return "is gone"
        if row.finished_at is not None:
            return f"has finished ({row.finish_reason})"
        timeout_s = self._extend_timeout_s(self.context.settings.session_timeout_s)
        return f"sent no heartbeat for {timeout_s:.0f} s" if row.last_heartbeat_at < now - timeout_s else None

    def _extend_timeout_s(self, limit_s: float) -> float:
        """Return a timeout or retention: infinite until the API was up long enough for clients to return."""
        settings = self.context.settings
        enough_s = min(settings.session_timeout_s, settings.session_retention_s)
        return limit_s if self.api_uptime.get_continuous_s() >= min(limit_s, enough_s) else math.inf

    def _make_clock(self, now: float) -> RetentionClock:
        return RetentionClock(now=now, settings=self.context.settings, extend=self._extend_timeout_s)

    def _evict_idle_samplers(self, keep: Collection[ArtifactId], in_use: Collection[SamplerId], now: float) -> None:
        """Evict samplers that are unreferenced, or that only closed sessions used."""
        for sampler, used_by in self.context.samplers.find_idle().items():
            is_wanted = sampler in in_use or any(
                self._describe_session_end(session_id, now) is None for session_id in used_by
            )
            if not is_wanted or ArtifactId(sampler) not in keep:
                self.context.samplers.evict(sampler)
                _log.info("evicted sampler %s", sampler)
