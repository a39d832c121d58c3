"""Guarantees taken out of the product, one at a time: a simulation that does not notice is worth little."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from sqlmodel import Session

from skyrl_tx.artifacts import files, local
from skyrl_tx.contract.ids import ArtifactId, ModelId
from skyrl_tx.engine import handlers
from skyrl_tx.engine.recovery import LoggedRequest, Recovery
from skyrl_tx.engine.request_log import DeliveryAttempts
from skyrl_tx.server.engine_status import AdmissionControl
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.store import checkpoints, futures, models
from skyrl_tx.store.tables import CheckpointRow


def _flush_nothing() -> None:
    files.fsync = local.fsync = lambda path: None


def _flush_no_directory() -> None:
    flush = files.fsync
    files.fsync = local.fsync = lambda path: None if path.is_dir() else flush(path)


def _number_snapshots_wrongly() -> None:
    put = models.put_snapshot

    def put_later(tx: Session, model_id: ModelId, artifact_id: ArtifactId, effect_order: int, now: float) -> Any:
        return put(tx, model_id, artifact_id, effect_order + 1, now)

    models.put_snapshot = put_later


def _show_all_rows() -> None:
    Principal.can_act_for = lambda self, owner: owner is not None  # type: ignore[method-assign]


def _accept_duplicates() -> None:
    submit, number = futures.submit, count()
    futures.submit = lambda tx, new, now: submit(tx, replace(new, key=f"{new.key}/{next(number)}"), now)


def _replay_failed_steps() -> None:
    replay = handlers.replay

    def replay_as_if_done(recovery: Recovery, logged: LoggedRequest) -> None:
        replay(recovery, replace(logged, failed=False))

    handlers.replay = replay_as_if_done


def _count_no_attempts() -> None:
    DeliveryAttempts.count = lambda self, request_ids: None  # type: ignore[method-assign]


def _add_rows_of_another_attempt() -> None:
    put, made = checkpoints.put, dict[str, CheckpointRow]()

    def put_first(tx: Session, row: CheckpointRow, overwrite: bool) -> Any:
        return put(tx, made.setdefault(f"{row.path} {row.artifact_id}", row), overwrite)

    checkpoints.put = put_first


def _share_no_memory() -> None:
    check = AdmissionControl._check

    def check_as_largest(self: AdmissionControl, owner: str, size: int) -> None:
        queued = Counter(self._load.by_owner if self._load is not None else {}) + self._num_bytes
        check(self, max(queued, key=lambda name: queued[name], default=owner), size)

    AdmissionControl._check = check_as_largest  # type: ignore[method-assign]


MUTATIONS: dict[str, tuple[Callable[[], None], str]] = {
    "no_flush": (_flush_nothing, "power_loss"),
    "no_directory_flush": (_flush_no_directory, "power_loss"),
    "snapshot_number": (_number_snapshots_wrongly, "kills"),
    "no_owners": (_show_all_rows, "network"),
    "duplicates": (_accept_duplicates, "network"),
    "replayed_failures": (_replay_failed_steps, "bad_requests,kills"),
    "no_attempts": (_count_no_attempts, "bad_requests"),
    "rows_of_another_attempt": (_add_rows_of_another_attempt, "full_database"),
    "no_shares": (_share_no_memory, "greedy_owner"),
}
"""Guarantees to take out by name, and kinds of faults under which that is noticed."""


def take_out(name: str) -> None:
    """Take a guarantee out of this process."""
    MUTATIONS[name][0]()
