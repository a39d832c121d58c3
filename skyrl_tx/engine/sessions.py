"""What silent sessions lose, and what nobody needs any more."""

import logging
import math
from collections.abc import Collection
from concurrent.futures import Future

from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.ids import ArtifactId, ModelId, SamplerId, SessionId
from skyrl_tx.engine.room import Room
from skyrl_tx.engine.sampling import Sampling
from skyrl_tx.engine.schedule import Schedule
from skyrl_tx.store import checkpoints, futures, models, pruning, samplers, sessions, stability

_log = logging.getLogger(__name__)


def release_idle_models(room: Room, schedule: Schedule, now: float) -> list[ModelId]:
    """Take the models of finished and silent sessions off the device; they come back when asked for."""
    released: list[ModelId] = []
    for model in room.models.resident():
        is_needed = model.model_id in room.models.busy or schedule.is_waiting(model.model_id)
        if not is_needed and end_of(room, model.session_id, now) is not None:
            room.models.evict(model)
            released.append(model.model_id)
    return released


def end_samples(room: Room, sampling: Sampling, now: float) -> None:
    """Answer the samples of finished and silent sessions: nobody will fetch them, and others wait for their room."""
    for session_id in sampling.sessions():
        if (how := end_of(room, session_id, now)) is not None:
            sampling.end_session(session_id, f"its session {how}; begin a new one to sample again")


def end_of(room: Room, session_id: SessionId, now: float) -> str | None:
    """How a session came to its end, or fell silent; None while its client is there."""
    row = room.store.read(lambda tx: sessions.get(tx, session_id))
    if row is None:
        return "is gone"
    if row.finished_at is not None:
        return f"has finished ({row.finish_reason})"
    timeout_s = _silence_s(room, room.settings.session_timeout_s)
    return f"sent no heartbeat for {timeout_s:.0f} s" if row.last_heartbeat_at < now - timeout_s else None


def _silence_s(room: Room, limit_s: float) -> float:
    """How long a session may be silent; for ever until the API was there long enough to have heard who lives."""
    settings = room.settings
    enough_s = min(settings.session_timeout_s, settings.session_retention_s)
    return limit_s if room.presence.unbroken_s() >= enough_s else math.inf


def forget_unneeded(room: Room, now: float) -> None:
    """Drop what is past its time: models, checkpoints, samplers, records; and end the sessions that nobody takes up."""
    settings = room.settings
    retention_s = _silence_s(room, settings.session_retention_s)
    reason = f"no heartbeat for {retention_s:.0f} s"

    def drop(tx: Session) -> list[ModelId]:
        checkpoints.expire(tx, now)
        samplers.release_unused(tx, now - settings.sampler_retention_s, max_bytes=settings.max_unnamed_sampler_bytes)
        stability.expire(tx, now)
        sessions.end_silent(tx, now - retention_s, reason, now)
        return models.expire(tx, now - retention_s)

    for model_id in room.store.write(drop):
        room.models.forget(model_id)
        _log.info("model %s is gone: its session has been silent too long", model_id)


def collect(room: Room, artifacts: ArtifactStore, in_use: Collection[SamplerId], read_up_to: int, now: float) -> None:
    """Begin to remove the files that nothing points at, and samplers that nobody wants from the device.

    Not while requests wait that are not read, which arrived after the position `read_up_to`: what they sample from may
    have lost its name since.
    """

    def look(tx: Session) -> tuple[bool, set[ArtifactId] | None]:
        return bool(futures.pending(tx, read_up_to, 1)), checkpoints.referenced_artifacts(tx)

    has_unread, referenced = room.store.read(look)  # of one moment: what arrives later has a name in it, or is young
    if has_unread:
        _log.debug("no files are removed for now: requests wait that are not read yet")
        return
    if referenced is None:
        _log.warning("no files are removed for now: a load that waits is damaged, and what it points at is not known")
        return
    keep = referenced | {ArtifactId(sampler) for sampler in in_use}
    _release_idle_samplers(room, keep, in_use, now)

    def collected(removed: Future[list[ArtifactId]]) -> None:
        if (error := removed.exception()) is not None:  # they take room, and nothing else is wrong with them
            _log.error("files that nothing points at could not be removed; trying again later", exc_info=error)
            return
        for artifact_id in removed.result():
            _log.debug("removed artifact %s: nothing points at it", artifact_id)

    room.jobs.start(lambda: artifacts.collect(keep), collected)


def _release_idle_samplers(room: Room, keep: Collection[ArtifactId], in_use: Collection[SamplerId], now: float) -> None:
    """Take off the device what nothing points at any more, and what only finished and silent sessions wanted."""
    for sampler, wanted_by in room.samplers.idle().items():
        is_wanted = sampler in in_use or any(end_of(room, session_id, now) is None for session_id in wanted_by)
        if not is_wanted or ArtifactId(sampler) not in keep:
            room.samplers.drop(sampler)
            _log.info("sampler %s left the device", sampler)


def prune(room: Room, now: float) -> bool:
    """Drop some results and requests that nobody will ask for, and the room that they took; whether more are left."""
    settings = room.settings
    session_retention_s = _silence_s(room, settings.session_retention_s)

    def drop(tx: Session) -> int:
        num_results = pruning.forget_results(tx, now, retention_s=settings.result_retention_s)
        num_requests = pruning.forget_requests(
            tx, now, retention_s=settings.request_retention_s, session_retention_s=session_retention_s
        )
        num_samplers = pruning.forget_sampling_sessions(tx, now - session_retention_s)
        return max(num_results, num_requests, num_samplers)

    is_full = room.store.write(drop) >= pruning.AT_ONCE
    return room.store.give_back() or is_full
