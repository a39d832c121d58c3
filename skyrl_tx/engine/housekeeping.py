"""Periodic maintenance: heartbeat timeouts, retention and garbage collection."""

import logging
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.ids import ArtifactId, ModelId, SamplerId, SessionId
from skyrl_tx.engine.context import EngineContext
from skyrl_tx.engine.extension import Retention, RetentionClock, RowLimit
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.engine.schedule import Schedule
from skyrl_tx.store import checkpoints, futures, identity, models, pruning, sessions
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)
_NOTHING_REMOVED = "no artifact is removed now"
_CHECK_PERIOD_S = 0.05
_MAX_CLOCK_STEP_S = 5.0
"""Difference in progress between the time of day and the monotonic clock, in seconds.

A larger difference means that somebody set the clock, or that the machine was suspended.
"""
_BATCH_ROWS = 500
"""How many rows that exceed a limit one transaction removes, for example points of a run."""
_STEADY_CLOCK_S = 3600.0
"""Nothing expires for this long after the clock was set.

The clock may be wrong, and corrected soon.
"""
_MAX_CHECK_GAP_S = 60.0
"""Maximum uptime that one check adds to `get_continuous_s`.

If the engine was busy for longer, it cannot know whether the API was up all the time.
"""


class ApiUptime:
    """How long the API has been up, as seen by the engine.

    Clients can send requests only during this time.

    Heartbeats are stored with the time of day. The time of day jumps when somebody sets the clock,
    and it advances while the machine is suspended. The monotonic clock does neither, so a
    comparison of the two clocks detects both. Both count as an outage.
    """

    def __init__(self, store: Store, last_active_at: float | None = None) -> None:
        """`last_active_at` is when an engine was last active, or None if no engine ever ran.

        If that is more than `_STEADY_CLOCK_S` ago, the clock may have been set while no engine ran.
        """
        self._store = store
        self._checked_at, self._checked_time_of_day = time.monotonic(), time.time()
        self._total_s = self._continuous_s = 0.0
        self._clock_set_at = -math.inf
        if last_active_at is not None and abs(self._checked_time_of_day - last_active_at) > _STEADY_CLOCK_S:
            self._clock_set_at = self._checked_at

    def has_steady_clock(self) -> bool:
        """Return whether the clock has not been set for an hour.

        Also False in the first hour after a start, if no engine ran for an hour before it.
        """
        self._check()
        return self._checked_at - self._clock_set_at >= _STEADY_CLOCK_S

    def get_total_s(self) -> float:
        """Return the total uptime in seconds. It does not advance while the API is down."""
        self._check()
        return self._total_s

    def get_continuous_s(self) -> float:
        """Return the uptime in seconds since the last outage."""
        self._check()
        return self._continuous_s

    def _check(self) -> None:
        # Compare the two clocks. Checks within `_CHECK_PERIOD_S` are skipped, because looking for the
        # API takes a system call.
        elapsed = time.monotonic() - self._checked_at
        jump = time.time() - self._checked_time_of_day - elapsed
        has_jumped = abs(jump) > _MAX_CLOCK_STEP_S
        if elapsed < _CHECK_PERIOD_S and not has_jumped:
            return
        self._checked_at += elapsed
        self._checked_time_of_day += elapsed + jump

        # Count the time if the API was up.
        if has_jumped:
            _log.warning(
                "the clock was set by %.0f s, or the machine was suspended; sessions get new time to send heartbeats, "
                "and nothing expires for an hour",
                jump,
            )
            self._continuous_s = 0.0
            self._clock_set_at = self._checked_at
        elif self._store.is_peer_running():
            self._total_s += elapsed
            self._continuous_s += min(elapsed, _MAX_CHECK_GAP_S)
        else:
            self._continuous_s = 0.0


@dataclass(frozen=True, slots=True)
class Housekeeping:
    """Releases resources of closed sessions, and removes expired data."""

    context: EngineContext
    artifacts: ArtifactStore
    retention: Retention
    sampling: SamplingExecutor
    api_uptime: ApiUptime
    claims: list[identity.Claim] = field(default_factory=list[identity.Claim])
    """At most one claim of an object store, which the next garbage collection uses.

    A claim is the permission to remove unreferenced artifacts, see `store.identity`.
    """

    def evict_idle_models(self, is_waiting: Callable[[ModelId], bool], now: float) -> None:
        """Evict models of closed sessions, unless they have running or waiting requests."""
        models = self.context.models
        for model in models.list_resident():
            is_needed = model.model_id in models.busy or is_waiting(model.model_id)
            if not is_needed and self._describe_session_end(model.session_id, now) is not None:
                models.evict(model)

    def forget_idle_models(self, schedule: Schedule) -> None:
        """Forget models that are not on the device and have no running or waiting requests.

        Their next request reads them from the database again.
        """
        active = self.context.models.busy | self.context.background_writer.blocked_models
        self.context.models.forget_evicted(lambda model_id: model_id in active or schedule.is_waiting(model_id))
        schedule.forget_idle_models(active | {model.model_id for model in self.context.models.list_resident()})

    def fail_orphaned_samples(self, now: float) -> None:
        """Fail the samples of closed sessions, because their clients can no longer fetch them."""
        for session_id in self.sampling.list_sessions():
            if (ending := self._describe_session_end(session_id, now)) is not None:
                self.sampling.end_session(session_id, f"its session {ending}; begin a new one to sample again")

    def expire(self, now: float) -> None:
        """Remove data past its retention, for example models, and close silent sessions."""
        if not self.api_uptime.has_steady_clock():
            return
        clock, retention = self._make_clock(now), self.retention

        def drop(tx: Session) -> list[ModelId]:
            retention.expire(tx, clock)
            purged = models.purge(tx, now - clock.settings.deletion_undo_s, retention.delete_runs)
            return purged + models.expire(tx, clock.compute_cutoff(clock.settings.session_retention_s))

        for model_id in self.context.store.write(drop):
            self.context.models.discard(model_id)
            reason = "removed model %s: it was deleted, or its session is past its retention"
            _log.info(reason, model_id, extra={"model_id": model_id})

    def collect_garbage(self, read_position: int, now: float, *, is_keeper: bool = True) -> None:
        """Evict unreferenced samplers. The keeper also starts to remove unreferenced artifacts.

        Nothing is removed while the database has requests after `read_position`. This engine has
        not read these requests, and they may refer to an artifact whose other references have just
        been removed. Samples that wait or run in other engines count as references.
        """

        def read_references(tx: Session) -> tuple[bool, set[ArtifactId] | None]:
            unread = futures.list_pending(tx, read_position, 1, engine=self.context.store.engine_number)
            return bool(unread), checkpoints.find_referenced_artifacts(tx)

        # Decide whether anything may be removed. This is one transaction: requests that arrive
        # after it can only refer to artifacts that are referenced or young.
        claim = self._claim() if is_keeper and self.api_uptime.has_steady_clock() else None
        if is_keeper and claim is None:
            return
        has_unread, referenced = self.context.store.read(read_references)
        if has_unread:
            _log.debug("no artifact is removed now: there are unread requests")
            return
        if referenced is None:
            _log.warning("no artifact is removed now: a waiting load_weights is damaged, so its artifact is unknown")
            return

        # Evict samplers now, and remove files in the background.
        in_use = self.sampling.list_samplers_in_use()
        keep = referenced | {ArtifactId(sampler) for sampler in in_use}
        self._evict_idle_samplers(keep, in_use, now)
        if claim is not None:
            self._collect_artifacts(claim, keep)

    def _collect_artifacts(self, claim: identity.Claim, keep: Collection[ArtifactId]) -> None:
        """Start to remove all artifacts except `keep`, unclaimed artifacts and young artifacts."""

        def collect() -> None:
            self.artifacts.collect({*keep, *claim.unclaimed}, claim.claimed_at)
            settings = self.context.settings
            self.artifacts.empty_trash(retention_s=settings.trash_retention_s, max_bytes=settings.max_trash_bytes)

        def on_collected(collected: Future[None]) -> None:
            if (error := collected.exception()) is not None:  # the artifacts only take disk space
                _log.error("cannot remove unreferenced artifacts; retrying later", exc_info=error)

        self.context.background_writer.submit(collect, on_collected)

    def _claim(self) -> identity.Claim | None:
        """Return the right to remove artifacts, or None if this engine does not have it now.

        An object store is claimed in the background, and the claim is used by the next garbage
        collection. So the engine's loop never waits for the network.
        """
        store, artifacts = self.context.store, self.artifacts
        if not artifacts.is_remote:
            try:
                return identity.claim(store, artifacts)
            except OSError as error:
                _log.error("%s: cannot write the identity of the data directory: %s", _NOTHING_REMOVED, error)
                return None

        def on_claimed(claimed: Future[identity.Claim]) -> None:
            try:
                self.claims.append(claimed.result())
            except OSError as error:
                _log.error("%s: %s", _NOTHING_REMOVED, error)

        self.context.background_writer.submit(lambda: identity.claim(store, artifacts), on_claimed)
        return self.claims.pop() if self.claims else None

    def prune(self, now: float) -> bool:
        """Remove some rows past their retention, for example old results.

        Returns True if more are left.
        """
        if not self.api_uptime.has_steady_clock():
            return False
        clock, retention = self._make_clock(now), self.retention
        is_full = self.context.store.write(lambda tx: retention.prune(tx, clock)) >= pruning.MAX_ROWS
        return self.context.store.vacuum() or is_full

    def trim_tables(self) -> None:
        """Start to remove rows that exceed limits of features, for example old points of runs."""
        for limit in self.context.observers.list_row_limits():
            if limit.keys_to_trim:
                self._start_trimming(limit)

    def _start_trimming(self, limit: RowLimit[Any]) -> None:
        store, keys = self.context.store, limit.keys_to_trim
        limit.keys_to_trim = set()

        def remove() -> None:
            for key in keys:
                rows = store.read(lambda tx, key=key: limit.find_superfluous(tx, key))
                for start in range(0, len(rows), _BATCH_ROWS):
                    batch = rows[start : start + _BATCH_ROWS]
                    store.write(lambda tx, batch=batch: limit.remove(tx, batch))

        def on_removed(removed: Future[None]) -> None:
            if (error := removed.exception()) is not None:  # the rows only take disk space
                _log.error("cannot remove rows that exceed their limits; retrying later", exc_info=error)
                limit.keys_to_trim |= keys

        self.context.background_writer.submit(remove, on_removed)

    def _describe_session_end(self, session_id: SessionId, now: float) -> str | None:
        """Return how a session ended, for example by a heartbeat timeout, or None if it is open."""
        row = self.context.store.read(lambda tx: sessions.find(tx, session_id))
        if row is None:
            return "is gone"
        if row.finished_at is not None:
            return f"has finished ({row.finish_reason})"
        timeout_s = self._extend_timeout_s(self.context.settings.session_timeout_s)
        return f"sent no heartbeat for {timeout_s:.0f} s" if row.last_heartbeat_at < now - timeout_s else None

    def _extend_timeout_s(self, limit_s: float) -> float:
        """Return `limit_s`, or infinity after an outage until clients have had time to return."""
        settings = self.context.settings
        enough_s = min(settings.session_timeout_s, settings.session_retention_s)
        return limit_s if self.api_uptime.get_continuous_s() >= min(limit_s, enough_s) else math.inf

    def _make_clock(self, now: float) -> RetentionClock:
        return RetentionClock(
            now=now,
            settings=self.context.settings,
            extend=self._extend_timeout_s,
            spare_bytes=self.artifacts.get_spare_bytes(),
        )

    def _evict_idle_samplers(self, keep: Collection[ArtifactId], in_use: Collection[SamplerId], now: float) -> None:
        """Evict samplers that are unreferenced, or that only closed sessions used."""
        num_evicted = 0
        for sampler, used_by in self.context.samplers.find_idle().items():
            is_needed = sampler in in_use or any(
                self._describe_session_end(session_id, now) is None for session_id in used_by
            )
            if not is_needed or ArtifactId(sampler) not in keep:
                self.context.samplers.evict(sampler)
                num_evicted += 1
        if num_evicted:
            _log.info("evicted samplers that no open session uses: %d", num_evicted)
