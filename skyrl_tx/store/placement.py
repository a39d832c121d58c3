"""Which engine trains which model and executes which request, when several engines share the database.

A model in training belongs to one engine, and so do its requests. When an engine has ended, its models and its open
requests move to the others in one transaction; they restore the models from snapshot and log, as after a crash. A
request that moves gets a new position, so that its new engine reads it like one that has just arrived.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import bindparam, func, literal_column, select, text, update
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.store import engine_state, leases, models
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import EngineStateRow, ModelRow, RequestRow, SamplingSessionRow, SessionRow

RECENT_S = 600.0
"""Models without a request for longer do not count as an engine's load."""
HOLD_S = 60.0
"""Time for which an ended engine may start again and run alone what may have ended it. Then others run that."""
_MAX_MOVED_ATTEMPTS = 1
_LIVE = ("creating", "ready")
_IS_OPEN = col(RequestRow.status) == literal_column("'open'")  # a literal, so that the partial index is used


def choose_engine(tx: Session) -> int:
    """Return the number of the engine that a new model gets: the ready one with the least load for its places.

    While none is ready, it is the one that is most likely to be: the one that published a status last.
    """
    rows = engine_state.list_engines(tx)
    if len(rows) < 2:
        return rows[0].number if rows else 1
    now = engine_state.get_shared_time(tx)
    ready = [row for row in rows if engine_state.is_ready(row, now)]
    if not ready:
        return max(rows, key=lambda row: row.updated_at).number
    counts = count_models(tx, now)
    return min(ready, key=lambda row: (counts[row.number] / max(get_max_models(row), 1), row.number)).number


def get_max_models(row: EngineStateRow) -> int:
    """Return how many models an engine holds on its device."""
    number = row.capabilities.get("max_models", 1)
    return number if isinstance(number, int) else 1


_NUM_MODELS = (
    select(col(ModelRow.engine), func.count())
    .where(col(ModelRow.status).in_(_LIVE), col(ModelRow.last_request_at) > bindparam("after"))
    .group_by(col(ModelRow.engine))
)


def count_models(tx: Session, now: float) -> Counter[int]:
    """Return the number of models in training of each engine, those with a request lately."""
    return Counter(dict(execute(tx, _NUM_MODELS, {"after": now - RECENT_S}).all()))


_ADDRESSED = (
    select(col(ModelRow.engine))
    .where(col(ModelRow.status).in_(_LIVE))
    .union(select(col(RequestRow.engine)).where(_IS_OPEN))
)


def find_ended(tx: Session) -> set[int]:
    """Return the numbers that have models or open requests, but no engine."""
    return {number for (number,) in execute(tx, _ADDRESSED)} - leases.get_holders(tx).keys()


@dataclass(slots=True)
class MoveResult:
    """The outcome of `move`: models with their new engines, and the number of open requests."""

    models: dict[ModelId, int] = field(default_factory=dict[ModelId, int])
    num_requests: int = 0
    num_quarantined: int = 0
    """Requests that wait for an engine of their own number, because they may have ended two."""


_LIVE_OF = (
    select(col(ModelRow.model_id))
    .where(col(ModelRow.engine) == bindparam("engine"), col(ModelRow.status).in_(_LIVE))
    .order_by(col(ModelRow.last_request_at).desc(), col(ModelRow.model_id))
)
_OPEN_OF = (
    select(
        col(RequestRow.position),
        col(RequestRow.model_id),
        col(RequestRow.sampling_session_id),
        col(RequestRow.attempts),
        col(RequestRow.is_alone),
    )
    .where(_IS_OPEN, col(RequestRow.engine) == bindparam("engine"))
    .order_by(col(RequestRow.position))
)
_ANY_OPEN_OF = select(col(RequestRow.position)).where(_IS_OPEN, col(RequestRow.engine) == bindparam("engine")).limit(1)
_NUM_OPEN = select(col(RequestRow.engine), func.count()).where(_IS_OPEN).group_by(col(RequestRow.engine))
_UNWRITTEN = select(col(SamplingSessionRow.sampling_session_id), col(SamplingSessionRow.model_id)).where(
    col(SamplingSessionRow.model_id).is_not(None),
    col(SamplingSessionRow.sampler_id).is_not(None),
    col(SamplingSessionRow.size_bytes).is_(None),
)
"""Sampling sessions whose weights may be in the memory of their model's engine only."""
_SET_MODEL = update(ModelRow).where(col(ModelRow.model_id) == bindparam("name")).values(engine=bindparam("to"))
_SET_REQUEST = text(
    "UPDATE requests SET engine = :to, position = nextval(pg_get_serial_sequence('requests', 'position')),"
    " is_alone = false WHERE position = :old"
)
"""A request that moves does not run yet, so that a crash of its new engine is not its fault."""


def list_models(tx: Session, number: int) -> list[ModelId]:
    """Return the models in training of an engine, those with the newest requests first."""
    return [ModelId(name) for (name,) in execute(tx, _LIVE_OF, {"engine": number})]


def move(tx: Session, number: int, to: Sequence[int], *, hold: bool | None = None) -> MoveResult:
    """Share out the models and open requests of an engine that has ended among others, the least loaded first.

    A request that was running when two engines ended, or alone when one did, may be the cause. It is held with its
    model: an engine that starts with this number runs it alone first, as a quarantined request. By default that is so
    for `HOLD_S`.
    """
    now, row = engine_state.get_shared_time(tx), tx.get(EngineStateRow, number)
    if hold is None:
        hold = row is not None and now - row.updated_at < HOLD_S
    if row is not None:
        row.status = "stopping"  # no process chooses it for new work
    requests = execute(tx, _OPEN_OF, {"engine": number}).all()
    held: set[ModelId | None] = set()
    held_positions: set[int] = set()
    if hold:
        kept = [each for each in requests if each.is_alone or each.attempts > _MAX_MOVED_ATTEMPTS]
        held_positions = {each.position for each in kept}
        held = {each.model_id for each in kept if each.model_id is not None}
    wanted = dict.fromkeys(list_models(tx, number))
    wanted |= dict.fromkeys(each.model_id for each in requests if each.model_id is not None)
    moved = MoveResult(
        models=_distribute_models([name for name in wanted if name not in held], count_models(tx, now), to)
    )
    for model_id, engine in moved.models.items():
        execute(tx, _SET_MODEL, {"name": model_id, "to": engine})
    in_memory = {name: ModelId(str(model_id)) for name, model_id in execute(tx, _UNWRITTEN)}
    loads = Counter(dict(execute(tx, _NUM_OPEN).all()))
    for each in requests:
        model_id = each.model_id or in_memory.get(each.sampling_session_id)
        if each.position in held_positions or model_id in held:
            moved.num_quarantined += 1
            continue
        engine = None if model_id is None else moved.models.get(model_id) or models.get_engine_number(tx, model_id)
        if engine is None or engine not in to:
            engine = min(to, key=lambda name: (loads[name], name))
        loads[engine] += 1
        execute(tx, _SET_REQUEST, {"old": each.position, "to": engine})
        moved.num_requests += 1
    if moved.models or moved.num_requests:
        leases.notify_engines(tx)
    return moved


_GIVE = text(
    "UPDATE requests SET engine = :to, position = nextval(pg_get_serial_sequence('requests', 'position'))"
    " WHERE position = ANY(:positions) AND engine = :own AND status = 'open' RETURNING request_id"
)


def give_samples(tx: Session, own: int, to: int, positions: Sequence[int]) -> list[RequestId]:
    """Give requests of this engine that have not started to an engine without any open request; return those given.

    A request that was cancelled meanwhile is left out. None is given to an engine that is not ready, or has work now.
    """
    row, now = tx.get(EngineStateRow, to), engine_state.get_shared_time(tx)
    if row is None or not engine_state.is_ready(row, now) or to not in leases.get_holders(tx):
        return []
    if execute(tx, _ANY_OPEN_OF, {"engine": to}).first() is not None:
        return []
    given = execute(tx, _GIVE, {"own": own, "to": to, "positions": list(positions)})
    leases.notify_engines(tx)
    return [RequestId(name) for (name,) in given]


def _distribute_models(
    model_ids: Iterable[ModelId], counts: Mapping[int, int], to: Collection[int]
) -> dict[ModelId, int]:
    """Give each model to the engine that has the fewest then."""
    loads = {engine: counts.get(engine, 0) for engine in to}
    shared: dict[ModelId, int] = {}
    for model_id in model_ids:
        shared[model_id] = engine = min(loads, key=lambda name: (loads[name], name))
        loads[engine] += 1
    return shared


_OPEN_OF_MODEL = (
    select(col(RequestRow.position))
    .where(_IS_OPEN, col(RequestRow.model_id) == bindparam("model_id"))
    .order_by(col(RequestRow.position))
)


def hand_over(tx: Session, model_id: ModelId, to: int) -> None:
    """Give a model, of which this engine holds nothing any more, to another engine, with the requests that wait."""
    execute(tx, _SET_MODEL, {"name": model_id, "to": to})
    for (position,) in execute(tx, _OPEN_OF_MODEL, {"model_id": model_id}).all():
        execute(tx, _SET_REQUEST, {"old": position, "to": to})
    leases.notify_engines(tx)


_MAX_MODELS = 1000
_MODELS_IN_TRAINING = (
    select(col(ModelRow.engine), col(ModelRow.model_id), col(SessionRow.owner))
    .join(SessionRow)
    .where(col(ModelRow.status).in_(_LIVE), col(ModelRow.deleted_at).is_(None))
    .order_by(col(ModelRow.last_request_at).desc())
    .limit(_MAX_MODELS)
)
_OPEN_REQUESTS = (
    select(
        col(RequestRow.engine),
        func.count(),
        func.count().filter(col(RequestRow.attempts) > 0),
    )
    .where(_IS_OPEN)
    .group_by(col(RequestRow.engine))
)


@dataclass(frozen=True, slots=True)
class EngineWork:
    """An engine with its models in training, those with the newest requests first, and its requests."""

    engine: EngineStateRow
    is_running: bool
    """Whether it has published a status lately."""
    models: list[tuple[ModelId, str]]
    """Each with its owner."""
    num_waiting: int
    num_started: int


def list_engine_work(tx: Session) -> list[EngineWork]:
    """Return what each engine has, by number; an engine that has ended and has nothing is left out."""
    now = engine_state.get_shared_time(tx)
    models: dict[int, list[tuple[ModelId, str]]] = {}
    for number, model_id, owner in execute(tx, _MODELS_IN_TRAINING):
        models.setdefault(number, []).append((model_id, owner))
    counts = {number: (count, started) for number, count, started in execute(tx, _OPEN_REQUESTS)}
    found: list[EngineWork] = []
    for row in engine_state.list_engines(tx):
        count, started = counts.get(row.number, (0, 0))
        is_running = engine_state.is_running(row, now)
        if is_running or count or row.number in models:
            found.append(EngineWork(row, is_running, models.get(row.number, []), count - started, started))
    return found
