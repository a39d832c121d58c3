"""What silent sessions lose, and what nobody needs any more."""

import logging
import time
from concurrent.futures import Future

from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.ids import ArtifactId, ModelId
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


def forget_unneeded(room: Room, artifacts: ArtifactStore) -> None:
    """Drop expired checkpoints, unused samplers and records, old results, and the files that nothing points at then."""
    now = time.time()

    def drop(tx: Session) -> None:
        checkpoints.expire(tx, now)
        samplers.release_unused(tx, now - room.settings.sampler_retention_s)
        stability.expire(tx, now)
        futures.prune(tx, now)

    room.store.write(drop)
    keep = room.store.read(checkpoints.referenced_artifacts)

    def collected(removed: Future[list[ArtifactId]]) -> None:
        for artifact_id in removed.result():
            _log.debug("removed artifact %s: nothing points at it", artifact_id)

    room.jobs.start(lambda: artifacts.collect(keep), collected)
