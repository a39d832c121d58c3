"""What the engine says of itself, for the API to serve."""

from collections.abc import Mapping, Sequence

from sqlmodel import Session

from skyrl_tx.store.tables import EngineStateRow, EngineStatus

_ONLY = 1


def publish(
    tx: Session,
    *,
    boot_id: str,
    pid: int,
    status: EngineStatus,
    capabilities: Mapping[str, object],
    base_models: Sequence[str],
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
            detail=detail,
            updated_at=now,
        )
    )
    tx.flush()


def get(tx: Session) -> EngineStateRow | None:
    """The engine's last word; None if none ever ran."""
    return tx.get(EngineStateRow, _ONLY)
