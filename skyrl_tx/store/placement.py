"""Placement of models and requests on engines, when multiple engines share the database.

A model in training and its requests belong to one engine. When an engine has ended, its models and
open requests are moved to the other engines in one transaction. Their new engines restore the
models from snapshot and log, as after a crash. Engines read requests in the order of
`RequestRow.position`. A moved request gets a new, higher position, so its new engine reads it like
a new request.

Leases show which engines are running. A lease is a PostgreSQL advisory lock, so no clock is
involved. Each engine holds the lock of its number on its write connection, and never reconnects
this connection. If the lock is free, the engine can no longer commit anything, because PostgreSQL
rolls back the transaction of a lost connection before it releases the locks of the connection. With
SQLite there is only engine 1 and no lease.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import bindparam, func, select, text, update
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.store import engine_state, models
from skyrl_tx.store.database import execute
from skyrl_tx.store.dialect import ENGINE_CHANNEL, ENGINE_CLASS, LOCK_CLASS
from skyrl_tx.store.futures import IS_OPEN
from skyrl_tx.store.tables import EngineStateRow, ModelRow, RequestRow, SamplingSessionRow, SessionRow

RECENT_S = 600.0
"""A model that has had no request for this many seconds does not count as load of its engine."""
QUARANTINE_S = 60.0
"""How long quarantined requests wait for a restart of their engine, see `move`.

Then they move as well.
"""
_MAX_MOVED_ATTEMPTS = 1
"""A request that was started more often may have caused the end of its engine, see `move`."""
_LIVE = ("creating", "ready")
_KEEPER_LOCK = 4
"""Second key of the lock of the keeper, the engine that removes old data for all engines."""

_LEASE_HOLDERS = text(
    "SELECT objid::int, pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND classid = :class"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_TAKE_LEASE = text("SELECT pg_try_advisory_xact_lock(:class, :number)")
_BECOME_KEEPER = text("SELECT pg_try_advisory_lock(:class, :number)")
_TERMINATE = text("SELECT pg_terminate_backend(:pid)")
_NOTIFY_ENGINES = text(f"NOTIFY {ENGINE_CHANNEL}")


def get_running(tx: Session) -> dict[int, int]:
    """Return the PostgreSQL process id of each running engine's connection, by engine number."""
    return dict(tx.connection().execute(_LEASE_HOLDERS, {"class": ENGINE_CLASS}).all())


def take_lease(tx: Session, number: int) -> bool:
    """Take the lease of a number until the end of the transaction, and return whether it was free.

    No engine can start with this number during the transaction.
    """
    return tx.connection().execute(_TAKE_LEASE, {"class": ENGINE_CLASS, "number": number}).scalar_one()


def become_keeper(tx: Session) -> bool:
    """Make this engine the keeper, which removes old data.

    Return False if another engine is the keeper. The engine stays the keeper until it exits. With
    SQLite the only engine is always the keeper.
    """
    connection = tx.connection()
    if connection.dialect.name != "postgresql":
        return True
    return connection.execute(_BECOME_KEEPER, {"class": LOCK_CLASS, "number": _KEEPER_LOCK}).scalar_one()


def revoke_lease(tx: Session, pid: int) -> None:
    """Close the connection of a stuck engine.

    The engine loses its lease and cannot commit anything afterwards.
    """
    tx.connection().execute(_TERMINATE, {"pid": pid})


def notify_engines(tx: Session) -> None:
    """Wake all engines when the transaction commits.

    Other commits of an engine wake only the API processes.
    """
    tx.connection().execute(_NOTIFY_ENGINES)


def choose_engine(tx: Session) -> int:
    """Return the number of the engine for a new model.

    This is the ready engine with the fewest recent models, relative to the number of models that
    its device can hold. If no engine is ready, this is the engine that published its status most
    recently, because it is likely to be ready soon.
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
    """Return how many models an engine can hold on its device."""
    number = row.capabilities.get("max_models", 1)
    return number if isinstance(number, int) else 1


_MODEL_COUNTS = (
    select(col(ModelRow.engine), func.count())
    .where(col(ModelRow.status).in_(_LIVE), col(ModelRow.last_request_at) > bindparam("after"))
    .group_by(col(ModelRow.engine))
)


def count_models(tx: Session, now: float) -> Counter[int]:
    """Return for each engine how many models in training had a request in the last `RECENT_S`."""
    return Counter(dict(execute(tx, _MODEL_COUNTS, {"after": now - RECENT_S}).all()))


_ENGINES_WITH_WORK = (
    select(col(ModelRow.engine))
    .where(col(ModelRow.status).in_(_LIVE))
    .union(select(col(RequestRow.engine)).where(IS_OPEN))
)


def find_ended(tx: Session) -> set[int]:
    """Return the engine numbers with models or open requests whose engine is not running."""
    return {number for (number,) in execute(tx, _ENGINES_WITH_WORK)} - get_running(tx).keys()


@dataclass(slots=True)
class MoveResult:
    """The result of `move`."""

    models: dict[ModelId, int] = field(default_factory=dict[ModelId, int])
    """The moved models, with the numbers of their new engines."""
    num_requests: int = 0
    """Number of moved requests."""
    num_quarantined: int = 0
    """Number of requests that were not moved.

    These are requests that may have caused the end of the engine, and other requests of their models.
    """


_LIVE_MODELS = (
    select(col(ModelRow.model_id))
    .where(col(ModelRow.engine) == bindparam("engine"), col(ModelRow.status).in_(_LIVE))
    .order_by(col(ModelRow.last_request_at).desc(), col(ModelRow.model_id))
)
_OPEN_BY_ENGINE = (
    select(
        col(RequestRow.position),
        col(RequestRow.model_id),
        col(RequestRow.sampling_session_id),
        col(RequestRow.attempts),
        col(RequestRow.is_alone),
    )
    .where(IS_OPEN, col(RequestRow.engine) == bindparam("engine"))
    .order_by(col(RequestRow.position))
)
_ANY_OPEN_BY_ENGINE = (
    select(col(RequestRow.position)).where(IS_OPEN, col(RequestRow.engine) == bindparam("engine")).limit(1)
)
_OPEN_COUNTS = select(col(RequestRow.engine), func.count()).where(IS_OPEN).group_by(col(RequestRow.engine))
_UNWRITTEN_SAMPLERS = select(col(SamplingSessionRow.sampling_session_id), col(SamplingSessionRow.model_id)).where(
    col(SamplingSessionRow.model_id).is_not(None),
    col(SamplingSessionRow.sampler_id).is_not(None),
    col(SamplingSessionRow.size_bytes).is_(None),
)
"""Sampling sessions whose weights may exist only in the memory of their model's engine."""
_SET_MODEL = update(ModelRow).where(col(ModelRow.model_id) == bindparam("name")).values(engine=bindparam("to"))
_SET_REQUEST = text(
    "UPDATE requests SET engine = :to, position = nextval(pg_get_serial_sequence('requests', 'position')),"
    " is_alone = false WHERE position = :old"
)
"""Moves a request.

`is_alone` says that nothing else ran on the device. It is reset, because otherwise a crash of the
new engine would be counted as a crash that this request caused.
"""


def list_models(tx: Session, number: int) -> list[ModelId]:
    """Return the models in training of an engine. The model with the newest request comes first."""
    return [ModelId(name) for (name,) in execute(tx, _LIVE_MODELS, {"engine": number})]


def move(tx: Session, number: int, to: Sequence[int], *, quarantine: bool | None = None) -> MoveResult:
    """Distribute the models and open requests of an ended engine over the engines `to`.

    The least loaded engine gets the next model or request. A request may have caused the end of the
    engine if it was running alone, or if it had been started twice. Such a request and its model
    are quarantined: they are not moved, and an engine that starts with the same number runs the
    request alone.

    `quarantine` says whether requests and models are quarantined. By default they are quarantined
    only while the last status of the ended engine is younger than `QUARANTINE_S`.
    """
    now, row = engine_state.get_shared_time(tx), tx.get(EngineStateRow, number)
    if quarantine is None:
        quarantine = row is not None and now - row.updated_at < QUARANTINE_S
    if row is not None:
        row.status = "stopping"  # so that no process chooses it for new work

    # Find the requests that may have caused the end of the engine, and their models.
    requests = execute(tx, _OPEN_BY_ENGINE, {"engine": number}).all()
    quarantined_models: set[ModelId | None] = set()
    quarantined_positions: set[int] = set()
    if quarantine:
        risky = [request for request in requests if request.is_alone or request.attempts > _MAX_MOVED_ATTEMPTS]
        quarantined_positions = {request.position for request in risky}
        quarantined_models = {request.model_id for request in risky if request.model_id is not None}

    # Move the models.
    model_ids = dict.fromkeys(list_models(tx, number))
    model_ids |= dict.fromkeys(request.model_id for request in requests if request.model_id is not None)
    moved_ids = [model_id for model_id in model_ids if model_id not in quarantined_models]
    moved = MoveResult(models=_distribute_models(moved_ids, count_models(tx, now), to))
    for model_id, engine in moved.models.items():
        execute(tx, _SET_MODEL, {"name": model_id, "to": engine})

    # Move the requests: to the engine of their model, or to the least loaded engine.
    in_memory = {name: ModelId(str(model_id)) for name, model_id in execute(tx, _UNWRITTEN_SAMPLERS)}
    loads = Counter(dict(execute(tx, _OPEN_COUNTS).all()))
    for request in requests:
        model_id = request.model_id or in_memory.get(request.sampling_session_id)
        if request.position in quarantined_positions or model_id in quarantined_models:
            moved.num_quarantined += 1
            continue
        engine = None if model_id is None else moved.models.get(model_id) or models.get_engine_number(tx, model_id)
        if engine is None or engine not in to:
            engine = min(to, key=lambda candidate: (loads[candidate], candidate))
        loads[engine] += 1
        execute(tx, _SET_REQUEST, {"old": request.position, "to": engine})
        moved.num_requests += 1

    if moved.models or moved.num_requests:
        notify_engines(tx)
    return moved


_GIVE_REQUESTS = text(
    "UPDATE requests SET engine = :to, position = nextval(pg_get_serial_sequence('requests', 'position'))"
    " WHERE position = ANY(:positions) AND engine = :giver AND status = 'open' RETURNING request_id"
)


def give_sample_requests(tx: Session, giver: int, to: int, positions: Sequence[int]) -> list[RequestId]:
    """Move waiting sample requests to an idle engine, and return their ids.

    A request that was cancelled meanwhile is left out. Nothing is moved if the engine `to` is not
    ready or has open requests.

    Args:
        tx: The transaction.
        giver: Number of the engine that gives the requests. It has not started them.
        to: Number of the idle engine.
        positions: Positions of the requests.
    """
    row, now = tx.get(EngineStateRow, to), engine_state.get_shared_time(tx)
    if row is None or not engine_state.is_ready(row, now) or to not in get_running(tx):
        return []
    if execute(tx, _ANY_OPEN_BY_ENGINE, {"engine": to}).first() is not None:
        return []
    given = execute(tx, _GIVE_REQUESTS, {"giver": giver, "to": to, "positions": list(positions)})
    notify_engines(tx)
    return [RequestId(name) for (name,) in given]


def _distribute_models(
    model_ids: Iterable[ModelId], counts: Mapping[int, int], to: Collection[int]
) -> dict[ModelId, int]:
    """Assign each model in turn to the engine with the fewest models."""
    loads = {engine: counts.get(engine, 0) for engine in to}
    engines: dict[ModelId, int] = {}
    for model_id in model_ids:
        engines[model_id] = engine = min(loads, key=lambda candidate: (loads[candidate], candidate))
        loads[engine] += 1
    return engines


_OPEN_BY_MODEL = (
    select(col(RequestRow.position))
    .where(IS_OPEN, col(RequestRow.model_id) == bindparam("model_id"))
    .order_by(col(RequestRow.position))
)


def hand_over(tx: Session, model_id: ModelId, to: int) -> None:
    """Move a model and its open requests to another engine.

    The current engine must have unloaded the model.
    """
    execute(tx, _SET_MODEL, {"name": model_id, "to": to})
    for (position,) in execute(tx, _OPEN_BY_MODEL, {"model_id": model_id}).all():
        execute(tx, _SET_REQUEST, {"old": position, "to": to})
    notify_engines(tx)


_MAX_MODELS = 1000
_MODELS_WITH_OWNERS = (
    select(col(ModelRow.engine), col(ModelRow.model_id), col(SessionRow.owner))
    .join(SessionRow)
    .where(col(ModelRow.status).in_(_LIVE), col(ModelRow.deleted_at).is_(None))
    .order_by(col(ModelRow.last_request_at).desc())
    .limit(_MAX_MODELS)
)
_REQUEST_COUNTS = (
    select(
        col(RequestRow.engine),
        func.count(),
        func.count().filter(col(RequestRow.attempts) > 0),
    )
    .where(IS_OPEN)
    .group_by(col(RequestRow.engine))
)


@dataclass(frozen=True, slots=True)
class EngineWork:
    """An engine with its models in training and its open requests."""

    engine: EngineStateRow
    is_running: bool
    """Whether the engine has published a status in the last `engine_state.FRESH_S`."""
    models: list[tuple[ModelId, str]]
    """Models and their owners. The model with the newest request comes first."""
    num_waiting: int
    num_started: int


def list_engine_work(tx: Session) -> list[EngineWork]:
    """Return the models and requests of each engine, ordered by number.

    Engines that are not running and have neither models nor requests are left out.
    """
    now = engine_state.get_shared_time(tx)
    models: dict[int, list[tuple[ModelId, str]]] = {}
    for number, model_id, owner in execute(tx, _MODELS_WITH_OWNERS):
        models.setdefault(number, []).append((model_id, owner))
    counts = {number: (count, started) for number, count, started in execute(tx, _REQUEST_COUNTS)}
    work: list[EngineWork] = []
    for row in engine_state.list_engines(tx):
        count, started = counts.get(row.number, (0, 0))
        is_running = engine_state.is_running(row, now)
        if is_running or count or row.number in models:
            work.append(EngineWork(row, is_running, models.get(row.number, []), count - started, started))
    return work
