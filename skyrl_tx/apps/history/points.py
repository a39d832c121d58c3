"""Read and write points, the database rows for curves, and sums over the samples of each step.

There is one point for each completed pass and each optimizer step. The engine writes the point in
the same transaction as the result, so each request has exactly one point, even after a crash. The
SQL statements that run for every request are prepared statements, because they are faster.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from sqlalchemy import BigInteger, Dialect, Index, String, Text, TypeDecorator, bindparam, delete, func, insert, select
from sqlmodel import Field, Session, col

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store.database import PreparedStatement, execute, execute_in_batches, is_in_batch, make_upsert_builder
from skyrl_tx.store.tables import AppTable

PointKind = Literal["train", "forward", "step"]
LOSS_WEIGHT = "loss_weight:sum"
"""Name of the sum of the weights of a pass in `RunPointRow.values`.

Rows of releases before 0.3 do not have it.
"""
MAX_POINTS = 200_000
"""Limit on the points of one run.

If a run has more points, every second step in the older half of the run is deleted.
"""


def encode_numbers(values: Mapping[str, float | None] | None) -> str:
    """Encode numbers by name as JSON. NaN and infinity become null."""
    return msgspec.json.encode(values).decode()


class NumbersText(TypeDecorator[Mapping[str, float | None]]):
    """A column for numbers by name, stored as JSON text.

    Much faster than SQLAlchemy's JSON type.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Mapping[str, float | None] | None, dialect: Dialect) -> Any:
        """Encode the value for the database."""
        return encode_numbers(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Mapping[str, float | None]:
        """Decode the value from the database."""
        return msgspec.json.decode(value)


class RunPointRow(AppTable, table=True):
    """The metrics and times of one completed request. Written in the transaction of its result."""

    __tablename__ = "run_points"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("ix_run_points_model", "model_id", "position", "step"),)

    position: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    """The position of the request. The request's own row may be deleted already."""
    model_id: ModelId = Field(sa_type=String)
    kind: PointKind = Field(sa_type=String)
    """`train` for forward_backward, `forward` for forward, `step` for optim_step."""
    step: int = Field(sa_type=BigInteger)
    """For a pass, the number of optimizer steps before it.

    For an optimizer step, its number, from 1.
    """
    created_at: float
    """When the request arrived."""
    started_at: float
    """When the request first reached the device in the attempt that completed it."""
    at: float
    """When the request completed."""
    device_s: float = 0.0
    """Device time of the request in seconds.

    Requests that share a batch are charged in proportion to their tokens.
    """
    tokens: int = Field(default=0, sa_type=BigInteger)
    datums: int = 0
    values: Mapping[str, float | None] = Field(default_factory=dict, sa_type=NumbersText)
    """The metrics in the result, for example `loss:sum`, and of a pass also `LOSS_WEIGHT`.

    None stands for NaN or infinity.
    """


class SampledStepRow(AppTable, table=True):
    """Sums over all samples of an owner from the weights of one optimizer step."""

    __tablename__ = "sampled_steps"  # pyright: ignore[reportAssignmentType]

    model_id: str = Field(primary_key=True)
    step: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    """Number of optimizer steps in the sampled weights."""
    owner: str = Field(primary_key=True)
    samples: int = Field(default=0, sa_type=BigInteger)
    cut: int = Field(default=0, sa_type=BigInteger)
    """Number of samples that reached `max_tokens` or the context limit."""
    tokens: int = Field(default=0, sa_type=BigInteger)
    """Number of sampled tokens."""
    scored_tokens: int = Field(default=0, sa_type=BigInteger)
    """Number of tokens that were sampled at a temperature of at least 0.5.

    Only these count for the curve `surprise`, the mean -log p of sampled tokens.
    """
    logprob_sum: float = 0.0
    """Sum of the log-probabilities of the scored tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One completed request. The fields are explained in `RunPointRow`.

    A reader passes the `position` of its last point to `read_points` to get the points after it.
    """

    position: int
    model_id: ModelId
    kind: PointKind
    step: int
    created_at: float
    started_at: float
    at: float
    device_s: float
    tokens: int = 0
    datums: int = 0
    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTotals:
    """Sums over the samples from the weights of one step.

    The fields are explained in `SampledStepRow`.
    """

    step: int
    samples: int
    cut: int
    tokens: int
    scored_tokens: int
    logprob_sum: float


_NAMES = tuple(Point.__dataclass_fields__)
_INSERT = PreparedStatement(lambda _: insert(RunPointRow), _NAMES)


def add(tx: Session, point: Point) -> None:
    """Insert a point. NaN and infinity are stored as null."""
    row = {name: getattr(point, name) for name in _NAMES}
    _INSERT.execute(tx, {**row, "values": encode_numbers(point.values)})


_COLUMNS = tuple(getattr(RunPointRow, name) for name in _NAMES)
_SERIES = (
    select(*_COLUMNS)
    .where(col(RunPointRow.model_id) == bindparam("model_id"), col(RunPointRow.position) > bindparam("after"))
    .order_by(col(RunPointRow.position))
    .limit(bindparam("limit"))
)
_NEWEST = (
    select(*_COLUMNS)
    .where(col(RunPointRow.model_id) == bindparam("model_id"))
    .order_by(col(RunPointRow.position).desc())
    .limit(bindparam("limit"))
)


def read_points(tx: Session, model_id: ModelId, after_position: int = 0, limit: int = 10_000) -> list[Point]:
    """Return at most `limit` points of a run after a position, in order of arrival.

    A request can complete after a request that arrived later, if it has no sequence number or is a
    forward pass. A reader that polls with a cursor misses such a point, until it reads the run from
    the beginning again.
    """
    return _make_points(execute(tx, _SERIES, {"model_id": model_id, "after": after_position, "limit": limit}))


def read_newest(tx: Session, model_id: ModelId, limit: int, kind: PointKind | None = None) -> list[Point]:
    """Return the newest points of a run, in order of arrival. `kind` None means all kinds."""
    query = _NEWEST if kind is None else _NEWEST.where(col(RunPointRow.kind) == kind)
    return _make_points(execute(tx, query, {"model_id": model_id, "limit": limit}))[::-1]


def _make_points(rows: Iterable[Any]) -> list[Point]:
    return [Point(**row._mapping) for row in rows]


def find_superfluous(tx: Session, model_id: ModelId, max_points: int = MAX_POINTS) -> list[int]:
    """Return the positions of points to delete if a run has more than `max_points` points.

    These are the points of every second step in the older half. The points of a step are deleted
    together, so that all curves have the same steps.
    """
    is_in_run = col(RunPointRow.model_id) == model_id
    newest_first = select(col(RunPointRow.position)).where(is_in_run).order_by(col(RunPointRow.position).desc())
    if execute(tx, newest_first.offset(max_points).limit(1)).first() is None:
        return []

    # Number the points and steps of the older half
    middle = execute(tx, newest_first.offset(max_points // 2).limit(1)).scalar_one()
    older = is_in_run, col(RunPointRow.position) <= middle
    ranked = select(
        col(RunPointRow.position),
        func.dense_rank().over(order_by=col(RunPointRow.step)).label("step_rank"),
        func.row_number().over(order_by=col(RunPointRow.position)).label("row_rank"),
    ).where(*older)
    rows = execute(tx, ranked).all()

    # Delete every second step, or every second point if one step has nearly all points
    by_step = [position for position, step_rank, _ in rows if step_rank % 2 == 0]
    if len(by_step) >= len(rows) // 4:
        return by_step
    return [position for position, _, row_rank in rows if row_rank % 2 == 0]


_DELETE = delete(RunPointRow).where(is_in_batch(col(RunPointRow.position)))


def remove(tx: Session, positions: Collection[int]) -> None:
    """Delete points."""
    execute_in_batches(tx, _DELETE, positions)


_SUM_NAMES = tuple(SampleTotals.__dataclass_fields__)
_SUM_KEY = ("model_id", "step", "owner")
_SUM_COLUMNS = tuple(name for name in _SUM_NAMES if name not in _SUM_KEY)
_ADD_SUMS = PreparedStatement(make_upsert_builder(SampledStepRow, _SUM_KEY, _SUM_COLUMNS), (*_SUM_KEY, *_SUM_COLUMNS))


def add_sampled(tx: Session, model_id: str, owner: str, sampled: SampleTotals) -> None:
    """Add the samples of one request to the sums of their model, step and owner."""
    values = {name: getattr(sampled, name) for name in _SUM_NAMES}
    _ADD_SUMS.execute(tx, {"model_id": model_id, "owner": owner, **values})


def read_sampled(
    tx: Session, model_id: ModelId, owner: str, *, after_step: int = -1, limit: int = 10_000
) -> list[SampleTotals]:
    """Return the sums over an owner's samples for the newest steps after a step, oldest first."""
    columns = tuple(getattr(SampledStepRow, name) for name in _SUM_NAMES)
    query = select(*columns).where(col(SampledStepRow.model_id) == model_id, col(SampledStepRow.owner) == owner)
    query = query.where(col(SampledStepRow.step) > after_step).order_by(col(SampledStepRow.step).desc()).limit(limit)
    rows: Sequence[Any] = execute(tx, query).all()
    return [SampleTotals(**row._mapping) for row in reversed(rows)]


_RUN_ROWS = tuple(delete(row).where(is_in_batch(col(row.model_id))) for row in (RunPointRow, SampledStepRow))


def remove_runs(tx: Session, model_ids: Sequence[ModelId]) -> None:
    """Delete all points and sums of runs."""
    for statement in _RUN_ROWS:
        execute_in_batches(tx, statement, model_ids)
