"""Read and write logged runs and their points in the database.

A logged run is a run of the client's logger, with metrics that only the client knows, for example
rewards. A logged run belongs to an owner, and also to a training run (a model) once the server knows
which. The number and the size of the points of a logged run are limited.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from sqlalchemy import (
    JSON,
    BigInteger,
    Executable,
    Index,
    Label,
    Text,
    UniqueConstraint,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)
from sqlalchemy import cast as sql_cast
from sqlmodel import Field, Session, col
from sqlmodel import select as select_rows

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.server.errors import bad_request, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.store import models
from skyrl_tx.store.database import execute, execute_in_batches, is_in_batch
from skyrl_tx.store.tables import BIG_KEY, AppTable

RETENTION_S = 90 * 86_400.0
"""A logged run is deleted this long after its last point."""
MAX_POINTS = 50_000
"""Limit on the points of a logged run.

If a run has more points, every second point of the older half is deleted.
"""
MAX_BYTES = 32 * 2**20
"""Limit on the size of a logged run's values as JSON.

If the values are larger, every second point of the older half is deleted.
"""
MAX_PAGE_BYTES = 8 * 2**20
"""Limit on the size of the values that are read at once, as JSON, unless one point is larger."""
_RUN_BYTES = 1024
"""Estimated size of a logged run without points."""
MAX_RUNS = 10_000
"""Limit on the logged runs of an owner."""
CLIENT_RUN = "client"
"""Name of the logged run for metrics that the client logs without a logger for a model."""


class LoggedRunRow(AppTable, table=True):
    """A run of a client's logger, for example of trackio."""

    __tablename__ = "logged_runs"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("owner", "project", "key"), {"sqlite_autoincrement": True})

    logged_run_id: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    owner: str
    project: str
    """The logger's project.

    Empty or the session's project for metrics that were logged without a logger.
    """
    key: str
    """Distinguishes runs of one name: the logger's run id, or the id of the model or session."""
    name: str
    config: Mapping[str, object] = Field(default_factory=dict, sa_type=JSON)
    model_id: str | None = Field(default=None, index=True)
    """The model that the run belongs to, once it is known."""
    seeks_model: bool = False
    """Whether the server still looks for the model.

    False once it was found, or if there were multiple candidates.
    """
    num_points: int = 0
    num_bytes: int = Field(default=0, sa_type=BigInteger)
    """Size of the values of all points, as JSON."""
    created_at: float
    last_at: float = Field(index=True)


class LoggedPointRow(AppTable, table=True):
    """Metrics that a client logged for one step."""

    __tablename__ = "logged_points"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        UniqueConstraint("logged_run_id", "log_id"),
        Index("ix_logged_points_run", "logged_run_id", "position"),
        {"sqlite_autoincrement": True},  # positions are never reused: readers keep them as cursors
    )

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    """Order of arrival."""
    logged_run_id: int = Field(sa_type=BigInteger)
    log_id: str
    """Chosen by the client. A point with the same id is a retry."""
    step: int = Field(sa_type=BigInteger)
    at: float
    values: Mapping[str, float | None] = Field(sa_type=JSON)


_NEW_POINTS = insert(LoggedPointRow)
_POINTS = select(
    col(LoggedPointRow.position),
    col(LoggedRunRow.project),
    col(LoggedRunRow.name),
    col(LoggedPointRow.step),
    col(LoggedPointRow.at),
    col(LoggedPointRow.values),
).join(LoggedRunRow, col(LoggedRunRow.logged_run_id) == col(LoggedPointRow.logged_run_id))
_KNOWN = select(col(LoggedPointRow.log_id)).where(
    col(LoggedPointRow.logged_run_id) == bindparam("run_id"), is_in_batch(col(LoggedPointRow.log_id))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A logged run to write to. Owner, project and key identify it; the client chooses them and the name."""

    owner: str
    project: str
    key: str
    name: str
    model_id: ModelId | None = None
    """The model that the run belongs to, if the client named it."""
    seeks_model: bool = False
    """Whether the server looks for a fitting model among the owner's active models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLoggedPoint:
    """Metrics of one step. A value of None stands for NaN or infinity."""

    log_id: str
    step: int
    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedPoint:
    """A stored point, with the names of its run and project."""

    position: int
    project: str
    run: str
    step: int
    at: float
    values: Mapping[str, float | None]


def open_run(tx: Session, run: LoggedRun, now: float, config: Mapping[str, object] | None = None) -> LoggedRunRow:
    """Find or create a logged run. Raises UserError if the owner would have more than `MAX_RUNS`.

    `config` is stored if the run has none yet.
    """
    # The combination of the three columns is unique
    row = tx.exec(
        select_rows(LoggedRunRow).where(
            col(LoggedRunRow.owner) == run.owner,
            col(LoggedRunRow.project) == run.project,
            col(LoggedRunRow.key) == run.key,
        )
    ).one_or_none()

    # Create the run
    if row is None:
        count = execute(tx, select(func.count()).where(col(LoggedRunRow.owner) == run.owner)).scalar_one()
        if count >= MAX_RUNS:
            raise UserError(
                f"{run.owner} has {count} logged runs, and the limit is {MAX_RUNS}; a logged run is deleted "
                f"{RETENTION_S / 86_400:.0f} days after its last point"
            )

        row = LoggedRunRow(**asdict(run), created_at=now, last_at=now)
        tx.add(row)

    # Update it
    if config and not row.config:
        row.config = dict(config)
    row.last_at = max(row.last_at, now)
    tx.flush()
    return row


def add_points(tx: Session, run: LoggedRunRow, points: Sequence[NewLoggedPoint], now: float) -> int:
    """Append points to a logged run and return how many are new.

    A point whose `log_id` is stored already is a retry, and is ignored.
    """
    run_id = run.logged_run_id
    assert run_id is not None

    # Drop retries. Of multiple new points with the same id, the first one counts.
    new = {point.log_id: point for point in reversed(points)}
    for (log_id,) in execute_in_batches(tx, _KNOWN, new, run_id=run_id):
        new.pop(log_id, None)
    if not new:
        return 0

    # Insert the points
    rows = [
        {"logged_run_id": run_id, "log_id": point.log_id, "step": point.step, "at": now, "values": dict(point.values)}
        for point in reversed(new.values())
    ]
    execute(tx, _NEW_POINTS, rows)

    # Keep the run within its limits
    run.num_points += len(rows)
    run.num_bytes += sum(len(json.dumps(row["values"])) for row in rows)
    while run.num_points > MAX_POINTS or (run.num_bytes > MAX_BYTES and run.num_points > 1):
        _thin(tx, run)
    tx.flush()
    return len(rows)


def _thin(tx: Session, run: LoggedRunRow) -> None:
    """Delete every second point in the older half of a run."""
    number = cast(Label[int], func.row_number().over(order_by=col(LoggedPointRow.position)).label("number"))
    is_in_run = col(LoggedPointRow.logged_run_id) == run.logged_run_id
    ranked = select(col(LoggedPointRow.position), number).where(is_in_run).subquery()
    dropped = select(ranked.c.position).where(ranked.c.number <= (run.num_points + 1) // 2, ranked.c.number % 2 == 1)
    num_dropped = execute(tx, delete(LoggedPointRow).where(col(LoggedPointRow.position).in_(dropped))).rowcount
    run.num_bytes -= run.num_bytes * num_dropped // run.num_points
    run.num_points -= num_dropped


def set_model(tx: Session, run: LoggedRunRow, model_id: ModelId | None) -> None:
    """Assign a logged run to a model, or to no model.

    The server no longer looks for a matching model after this.
    """
    run.model_id, run.seeks_model = model_id, False
    tx.add(run)
    tx.flush()


def list_runs(
    tx: Session,
    owner: str | None,
    *,
    project: str | None = None,
    model_id: ModelId | None = None,
    is_free: bool = False,
    limit: int = 1000,
    offset: int = 0,
) -> list[LoggedRunRow]:
    """Return a page of logged runs, most recently written first.

    `owner` None means all owners. `is_free` leaves out runs that belong to a model.
    """
    query = select_rows(LoggedRunRow).order_by(col(LoggedRunRow.last_at).desc(), col(LoggedRunRow.logged_run_id))
    for column, value in ((LoggedRunRow.owner, owner), (LoggedRunRow.project, project)):
        if value is not None:
            query = query.where(col(column) == value)
    if model_id is not None:
        query = query.where(col(LoggedRunRow.model_id) == model_id)
    if is_free:
        query = query.where(col(LoggedRunRow.model_id).is_(None))
    return list(tx.exec(query.limit(limit).offset(offset)))


def read_points(
    tx: Session,
    logged_run_ids: Sequence[int],
    *,
    after: int = 0,
    limit: int = 1000,
    max_bytes: int = MAX_PAGE_BYTES,
) -> list[LoggedPoint]:
    """Return points of these runs after a position, in order of arrival.

    Returns fewer than `limit` points if their values exceed `max_bytes`, but at least one point.
    """
    if not logged_run_ids:
        return []

    # Find the last point that fits, without reading the values
    position, is_wanted = col(LoggedPointRow.position), col(LoggedPointRow.logged_run_id).in_(logged_run_ids)
    sizes = select(position, func.length(sql_cast(col(LoggedPointRow.values), Text)))
    last, num_bytes = after, 0
    for point, size in execute(tx, sizes.where(is_wanted, position > after).order_by(position).limit(limit)):
        num_bytes += size
        if last > after and num_bytes > max_bytes:
            break
        last = point or 0

    return _select_points(tx, _POINTS.where(is_wanted, position > after, position <= last).order_by(position))


def has_points(tx: Session, logged_run_ids: Sequence[int], *, after: int) -> bool:
    """Return whether these runs have points after a position."""
    position, is_wanted = col(LoggedPointRow.position), col(LoggedPointRow.logged_run_id).in_(logged_run_ids)
    return execute(tx, select(position).where(is_wanted, position > after).limit(1)).first() is not None


def read_last_points(tx: Session, logged_run_ids: Sequence[int], *, limit: int) -> list[LoggedPoint]:
    """Return the last points of these runs, in order of arrival."""
    query = _POINTS.where(col(LoggedPointRow.logged_run_id).in_(logged_run_ids))
    return _select_points(tx, query.order_by(col(LoggedPointRow.position).desc()).limit(limit))[::-1]


def read_last_steps(tx: Session, model_id: ModelId, limit: int) -> list[LoggedPoint]:
    """Return the points of the last steps of all logged runs of a model, ordered by step."""
    newest = _POINTS.order_by(col(LoggedPointRow.step).desc(), col(LoggedPointRow.at).desc()).limit(limit)
    return _select_points(tx, newest.where(col(LoggedRunRow.model_id) == model_id))[::-1]


def _select_points(tx: Session, query: Executable) -> list[LoggedPoint]:
    return [
        LoggedPoint(position=position, project=project, run=name, step=step, at=at, values=values)
        for position, project, name, step, at, values in execute(tx, query)
    ]


def list_run_ids(tx: Session, model_id: ModelId) -> list[int]:
    """Return the ids of the logged runs of a model."""
    return [row.logged_run_id for row in list_runs(tx, None, model_id=model_id) if row.logged_run_id is not None]


def get_last_step(tx: Session, logged_run_id: int) -> int | None:
    """Return the largest step of a logged run, or None if it has no points."""
    query = select(func.max(col(LoggedPointRow.step))).where(col(LoggedPointRow.logged_run_id) == logged_run_id)
    return execute(tx, query).scalar_one()


def forget_models(tx: Session, model_ids: Sequence[ModelId]) -> None:
    """Mark the logged runs of deleted models, so that the next `prune` deletes them."""
    of_models = update(LoggedRunRow).where(is_in_batch(col(LoggedRunRow.model_id)))
    execute_in_batches(tx, of_models.values(model_id=None, last_at=0.0), model_ids)


def prune(tx: Session, before: float, *, limit: int) -> int:
    """Delete logged runs whose last point is older than `before`, and their points.

    Deletes at most `limit` points and `limit` runs, and returns the larger of both numbers.
    """
    old = select(col(LoggedRunRow.logged_run_id)).where(col(LoggedRunRow.last_at) < before)
    points = select(col(LoggedPointRow.position)).where(col(LoggedPointRow.logged_run_id).in_(old)).limit(limit)
    num_points = execute(tx, delete(LoggedPointRow).where(col(LoggedPointRow.position).in_(points))).rowcount
    is_empty = ~exists().where(col(LoggedPointRow.logged_run_id) == col(LoggedRunRow.logged_run_id))
    runs = old.where(is_empty).limit(limit)
    num_runs = execute(tx, delete(LoggedRunRow).where(col(LoggedRunRow.logged_run_id).in_(runs))).rowcount
    return max(num_points, num_runs)


def count_stored_bytes(tx: Session) -> dict[str, int]:
    """Return the bytes of each owner in logged runs."""
    owner, num_bytes = col(LoggedRunRow.owner), func.sum(col(LoggedRunRow.num_bytes) + _RUN_BYTES)
    return {name: int(total) for name, total in execute(tx, select(owner, num_bytes).group_by(owner))}


def find_logged_run(tx: Session, caller: Principal, logged_run_id: int) -> LoggedRunRow:
    """Return a logged run.

    Raises ApiError 404 if it does not exist or the caller may not see it.
    """
    row = tx.get(LoggedRunRow, logged_run_id)
    if row is None or not caller.can_act_for(row.owner):
        raise not_found(f"logged run {logged_run_id} does not exist")
    return row


def join_logged_run(tx: Session, caller: Principal, logged_run_id: int, run_id: str | None) -> None:
    """Assign a logged run to a training run of the same owner, or to none if `run_id` is None.

    Raises ApiError 404 if the caller cannot see one of them, and 400 if they have different owners.
    """
    row = find_logged_run(tx, caller, logged_run_id)
    if run_id is None:
        set_model(tx, row, None)
        return
    model_id = access.find_model(tx, caller, ModelId(run_id)).model_id
    if models.get_owner(tx, model_id) != row.owner:
        raise bad_request(f"training_run_id {model_id!r}: must have the same owner as the logged run")
    set_model(tx, row, model_id)


def get_logger_names(tx: Session, model_ids: Collection[ModelId]) -> dict[str, str | None]:
    """Return the names that clients' loggers gave to these runs.

    The name is None for a run with metrics that were logged without a logger. Runs without metrics
    are left out.
    """
    is_wanted = col(LoggedRunRow.model_id).in_(model_ids)
    statement = select(col(LoggedRunRow.model_id), col(LoggedRunRow.name)).where(is_wanted)
    names: dict[str, str | None] = {}
    for row in execute(tx, statement.order_by(col(LoggedRunRow.last_at))):
        model_id, name = row[0] or "", row[1]
        names[model_id] = names.get(model_id) if name == CLIENT_RUN else name
    return names


def choose_reward(names: Iterable[str]) -> str | None:
    """Return the name of the reward among the names of logged metrics, or None if there is none.

    A metric counts as reward if its name contains "reward". Exact names, for example
    "env/reward_mean", are preferred.
    """
    named = [name for name in names if "reward" in name.lower()]
    exact = ("reward", "reward_mean", "mean_reward", "total")
    return min(named, key=lambda name: name.lower().rpartition("/")[2] not in exact, default=None)
