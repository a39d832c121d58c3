"""What silent sessions lose, and what nobody needs any more."""

import logging
import time
from collections.abc import Collection
from concurrent.futures import Future

from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.ids import ArtifactId, ModelId, SamplerId
from skyrl_tx.engine.room import Room
from skyrl_tx.engine.schedule import Schedule
from skyrl_tx.store import checkpoints, futures, samplers, sessions, stability

_log = logging.getLogger(__name__)


def release_idle_models(room: Room, schedule: Schedule) -> list[ModelId]:
    """Take the models of finished and silent sessions off the device; they come back when asked for."""
    silent_since = time.time() - room.settings.session_timeout_s
    released: list[ModelId] = []
    for model in room.models.resident():
        session_id = model.session_id
        row = room.store.read(lambda tx, session_id=session_id: sessions.get(tx, session_id))
        is_over = row is None or row.finished_at is not None or row.last_heartbeat_at < silent_since
        if is_over and not schedule.is_waiting(model.model_id):
            room.models.evict(model)
            released.append(model.model_id)
    return released


def forget_unneeded(room: Room, artifacts: ArtifactStore, in_use: Collection[SamplerId]) -> None:
    """Drop expired checkpoints, unused samplers and records, old results, and the files that nothing points at then."""
    now = time.time()

    def drop(tx: Session) -> None:
        checkpoints.expire(tx, now)
        settings = room.settings
        samplers.release_unused(tx, now - settings.sampler_retention_s, max_bytes=settings.max_unnamed_sampler_bytes)
        stability.expire(tx, now)
        futures.prune(tx, now)

    room.store.write(drop)
    keep = room.store.read(checkpoints.referenced_artifacts) | {ArtifactId(sampler) for sampler in in_use}

    def collected(removed: Future[list[ArtifactId]]) -> None:
        for artifact_id in removed.result():
            _log.debug("removed artifact %s: nothing points at it", artifact_id)

    room.jobs.start(lambda: artifacts.collect(keep), collected)
