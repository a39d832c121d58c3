"""The models and requests that each engine has, for people."""

from dataclasses import dataclass

from sqlalchemy import func, literal_column, select
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store import engine_state
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import EngineStateRow, ModelRow, RequestRow, SessionRow

_MAX_MODELS = 1000
_MODELS = (
    select(col(ModelRow.engine), col(ModelRow.model_id), col(SessionRow.owner))
    .join(SessionRow)
    .where(col(ModelRow.status).in_(("creating", "ready")), col(ModelRow.deleted_at).is_(None))
    .order_by(col(ModelRow.last_request_at).desc())
    .limit(_MAX_MODELS)
)
_OPEN = (
    select(
        col(RequestRow.engine),
        func.count(),
        func.count().filter(col(RequestRow.attempts) > 0),
    )
    .where(col(RequestRow.status) == literal_column("'open'"))  # a literal, so that the partial index is used
    .group_by(col(RequestRow.engine))
)


@dataclass(frozen=True, slots=True)
class Holding:
    """An engine with its models in training, those with the newest requests first, and its requests."""

    engine: EngineStateRow
    is_running: bool
    """Whether it has published a status lately."""
    models: list[tuple[ModelId, str]]
    """Each with its owner."""
    num_waiting: int
    num_started: int


def holdings(tx: Session) -> list[Holding]:
    """Return what each engine has, by number; an engine that has ended and has nothing is left out."""
    now = engine_state.shared_time(tx)
    models: dict[int, list[tuple[ModelId, str]]] = {}
    for number, model_id, owner in execute(tx, _MODELS):
        models.setdefault(number, []).append((model_id, owner))
    counts = {number: (count, started) for number, count, started in execute(tx, _OPEN)}
    found: list[Holding] = []
    for row in engine_state.all_engines(tx):
        count, started = counts.get(row.number, (0, 0))
        is_running = engine_state.is_running(row, now)
        if is_running or count or row.number in models:
            found.append(Holding(row, is_running, models.get(row.number, []), count - started, started))
    return found
