"""What the engine says of itself, for the API to serve."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import update
from sqlmodel import Session

from skyrl_tx.store.tables import EngineStateRow, EngineStatus

_ONLY = 1
REQUEST_BYTES = 4096
"""What a sample that waits is taken to need in memory beside its prompt: an estimate on the safe side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLoad:
    """What the engine holds of samples that are not answered.

    `num_bytes` of `max_bytes`, each request counted with `REQUEST_BYTES`, of those that arrived up to `position`.
    """

    position: int
    num_bytes: int
    max_bytes: int


def publish(
    tx: Session,
    *,
    boot_id: str,
    pid: int,
    status: EngineStatus,
    capabilities: Mapping[str, object],
    base_models: Sequence[str],
    load: SampleLoad | None = None,
    detail: str = "",
    now: float,
) -> None:
    """Replace what the engine said before."""
    tx.merge(
        EngineStateRow(
            id=_ONLY,
            boot_id=boot_id,
            pid=pid,
            status=status,
            capabilities=dict(capabilities),
            base_models=list(base_models),
            load=None if load is None else asdict(load),
            detail=detail,
            updated_at=now,
        )
    )
    tx.flush()


def say_waiting(tx: Session, detail: str, now: float) -> None:
    """Say what the engine waits for, until it is heard of again."""
    tx.connection().execute(update(EngineStateRow).values(detail=detail, updated_at=now))


def get(tx: Session) -> EngineStateRow | None:
    """The engine's last word; None if none ever ran."""
    return tx.get(EngineStateRow, _ONLY)


def sample_load(tx: Session) -> SampleLoad | None:
    """What the engine said last of the samples it holds; None if it is not known."""
    state = get(tx)
    return None if state is None or state.load is None else SampleLoad(**state.load)
