"""Usage: tokens, requests and device seconds, and the storage of checkpoints.

Work is stored by session, model and kind in buckets of five minutes. The engine adds to a bucket in
the same transaction that stores the result. After two weeks the buckets are merged into hours. The
storage of checkpoints is recorded once in each hour in which an engine runs.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Index,
    String,
    bindparam,
    cast,
    delete,
    exists,
    func,
    insert,
    literal,
    literal_column,
    select,
)
from sqlmodel import Field, Session, col

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store.checkpoints import is_visible, sum_bytes
from skyrl_tx.store.database import PreparedStatement, execute, execute_in_batches, is_in_batch, make_upsert_builder
from skyrl_tx.store.tables import AppTable, CheckpointRow, ModelRow, SessionRow, partial_index

BUCKET_S = 300
HOUR_S = 3600
FINE_S = 14 * 86_400.0
"""Age at which buckets of five minutes are merged into hours."""
RETENTION_S = 400 * 86_400.0
MAX_ROWS = 1000
_MAX_BUCKETS = 30_000
"""More than all kinds of usage have in a month, before and after buckets are merged."""
UsageKind = Literal["training", "forward", "prefill", "prefill_cached", "sampled", "checkpoint"]
GroupColumn = Literal[
    "owner", "session_id", "model_id", "base_model", "project_id", "key_id", "bucket_at", "hour", "day"
]


class UsageRow(AppTable, table=True):
    """Completed work of one kind for one session and one model, in an interval of five minutes."""

    __tablename__ = "usage"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        Index("ix_usage_session_id", "session_id"),
        partial_index("ix_usage_fine", "bucket_at", "bucket_at % 3600 <> 0"),
    )

    bucket_at: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    """Start of the interval. The intervals of old rows are hours."""
    session_id: SessionId = Field(primary_key=True, sa_type=String)
    model_id: str = Field(primary_key=True)
    """The model that was trained or sampled from; empty for base weights."""
    kind: UsageKind = Field(primary_key=True, sa_type=String)
    owner: str
    """Owner of the session. Stored here because the session may be removed before its usage."""
    tokens: int = Field(default=0, sa_type=BigInteger)
    requests: int = Field(default=0, sa_type=BigInteger)
    device_s: float = 0.0


class StorageHourRow(AppTable, table=True):
    """The size of a session's checkpoints in one hour in which an engine ran."""

    __tablename__ = "storage_hours"  # pyright: ignore[reportAssignmentType]

    hour_at: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    session_id: SessionId = Field(primary_key=True, sa_type=String)
    owner: str
    """Owner of the session. Stored here because the session may be removed before its usage."""
    num_bytes: int = Field(sa_type=BigInteger)


class Work(NamedTuple):
    """Completed work of one kind."""

    kind: UsageKind
    tokens: int = 0
    requests: int = 1
    device_s: float = 0.0


class Total(NamedTuple):
    """The total work of one kind in one group."""

    group: tuple[Any, ...]
    """Values of the columns `group_by` of `read_totals`, in the same order."""
    kind: UsageKind
    tokens: int
    requests: int
    device_s: float


_KEY = ("bucket_at", "session_id", "model_id", "kind")
_SUMS = ("tokens", "requests", "device_s")
_ADD = PreparedStatement(make_upsert_builder(UsageRow, _KEY, _SUMS), (*_KEY, "owner", *_SUMS))


def add(tx: Session, owner: str, session_id: SessionId, model_id: str, now: float, work: Sequence[Work]) -> None:
    """Add work to the bucket of `now`. `model_id` is empty for base weights."""
    common = {
        "bucket_at": int(now) // BUCKET_S * BUCKET_S,
        "session_id": session_id,
        "model_id": model_id,
        "owner": owner,
    }
    _add_rows(tx, [{**common, **item._asdict()} for item in work])


def _add_rows(tx: Session, rows: list[dict[str, Any]]) -> None:
    if rows:
        _ADD.execute(tx, rows if len(rows) > 1 else rows[0])


def read_totals(
    tx: Session,
    owner: str | None,
    since: float,
    group_by: Sequence[GroupColumn] = (),
    *,
    until: float | None = None,
    session_ids: Collection[SessionId] | None = None,
    model_id: str | None = None,
    limit: int = 10_000,
) -> list[Total]:
    """Return the work from `since` until `until` by group and kind, ordered by group.

    Args:
        tx: The transaction.
        owner: Count only the work of this owner; None means all owners.
        since: First time, in seconds since the epoch, rounded down to a bucket.
        group_by: Columns that define the groups. `bucket_at`, `hour` and `day` are start times in seconds since the
            epoch. `project_id` and `key_id` are None if the session was removed. `base_model` is None for
            base weights and if the model was removed.
        until: End of the time range; None means no end.
        session_ids: Count only the work of these sessions.
        model_id: Count only the work of this model.
        limit: Largest number of totals.
    """
    groups = [_get_group_column(name) for name in group_by]
    bucket_at = col(UsageRow.bucket_at)

    statement = (
        select(
            *(group.label(name) for name, group in zip(group_by, groups, strict=True)),
            col(UsageRow.kind),
            cast(func.sum(col(UsageRow.tokens)), BigInteger),  # in PostgreSQL, the sum of integers is a decimal
            cast(func.sum(col(UsageRow.requests)), BigInteger),
            func.sum(col(UsageRow.device_s)),
        )
        .where(bucket_at >= int(since) // BUCKET_S * BUCKET_S)
        .group_by(*groups, col(UsageRow.kind))
        .order_by(*groups, col(UsageRow.kind))
        .limit(limit)
    )

    # Join the tables that the groups need.
    if {"project_id", "key_id"} & set(group_by):
        is_same_session = col(SessionRow.session_id) == col(UsageRow.session_id)
        statement = statement.outerjoin_from(UsageRow, SessionRow, is_same_session)
    if "base_model" in group_by:
        statement = statement.outerjoin_from(UsageRow, ModelRow, col(ModelRow.model_id) == col(UsageRow.model_id))

    # Apply the filters.
    if until is not None:
        statement = statement.where(bucket_at < until)
    if owner is not None:
        statement = statement.where(col(UsageRow.owner) == owner)
    if session_ids is not None:
        statement = statement.where(col(UsageRow.session_id).in_(session_ids))
    if model_id is not None:
        statement = statement.where(col(UsageRow.model_id) == model_id)
    num_groups = len(groups)
    return [Total(tuple(row[:num_groups]), *row[num_groups:]) for row in execute(tx, statement)]


def read_buckets(tx: Session, since: int, session_id: SessionId | None = None) -> list[tuple[int, UsageKind, int]]:
    """Return the tokens since a time, as tuples of bucket, kind and tokens, oldest first.

    `session_id` None means all sessions.
    """
    session_ids = None if session_id is None else [session_id]
    totals = read_totals(tx, None, since, ("bucket_at",), session_ids=session_ids, limit=_MAX_BUCKETS)
    return [(total.group[0], total.kind, total.tokens) for total in totals]


def _get_group_column(name: GroupColumn) -> Any:
    bucket_at = col(UsageRow.bucket_at)
    match name:
        case "hour" | "day":
            length_s = literal_column(str(HOUR_S if name == "hour" else 86_400), BigInteger)
            return bucket_at - bucket_at % length_s
        case "project_id" | "key_id":
            return col(getattr(SessionRow, name))
        case "base_model":
            return col(ModelRow.base_model)
        case _:
            return col(getattr(UsageRow, name))


# A literal, so that the partial index is used.
_IS_FINE: ColumnElement[bool] = literal_column("bucket_at % 3600 <> 0", Boolean)
_FINE_BUCKETS = (
    select(col(UsageRow.bucket_at))
    .where(_IS_FINE, col(UsageRow.bucket_at) < bindparam("before"))
    .order_by(col(UsageRow.bucket_at))
    .limit(bindparam("limit"))
)
_BUCKET_ROWS = select(*(getattr(UsageRow, name) for name in (*_KEY, "owner", *_SUMS))).where(
    is_in_batch(col(UsageRow.bucket_at))
)
_DELETE_BUCKETS = delete(UsageRow).where(_IS_FINE, is_in_batch(col(UsageRow.bucket_at)))


def prune(tx: Session, now: float, *, limit: int = MAX_ROWS) -> int:
    """Merge old buckets into hours, and delete buckets past their retention.

    At least one complete bucket is merged, so slightly more than `limit` rows may change. Returns
    the number of merged rows or the number of deleted rows, whichever is larger.
    """
    # Merge old buckets. The last bucket may be incomplete because of the limit.
    fine = execute(tx, _FINE_BUCKETS, {"before": int(now - FINE_S), "limit": limit}).scalars()
    buckets = sorted(set(fine))
    if len(buckets) > 1:
        buckets.pop()
    hours: list[dict[str, Any]] = []
    for row in execute_in_batches(tx, _BUCKET_ROWS, buckets):
        hours.append({**row._mapping, "bucket_at": row.bucket_at // HOUR_S * HOUR_S})
    _add_rows(tx, hours)
    execute_in_batches(tx, _DELETE_BUCKETS, buckets)

    # Delete expired buckets.
    expired = select(col(UsageRow.bucket_at)).where(col(UsageRow.bucket_at) < int(now - RETENTION_S)).limit(limit)
    last = max(execute(tx, expired.order_by(col(UsageRow.bucket_at))).scalars(), default=None)
    removed = 0
    if last is not None:
        removed = execute(tx, delete(UsageRow).where(col(UsageRow.bucket_at) <= last)).rowcount
    return max(len(hours), removed)


class StorageHour(NamedTuple):
    """The size of a session's checkpoints in one hour."""

    hour_at: int
    session_id: SessionId
    owner: str
    project_id: str | None
    """The project that the session belongs to now."""
    num_bytes: int


def record_storage(tx: Session, now: float) -> bool:
    """Record the storage of the current hour. Return False if it was recorded before.

    Hours older than `RETENTION_S` are deleted.
    """
    hour_at = int(now) // HOUR_S * HOUR_S
    if execute(tx, select(exists().where(col(StorageHourRow.hour_at) == hour_at))).scalar():
        return False

    stored = (
        select(literal(hour_at), col(SessionRow.session_id), col(SessionRow.owner), sum_bytes())
        .join(ModelRow, col(ModelRow.session_id) == col(SessionRow.session_id))
        .join(CheckpointRow, col(CheckpointRow.model_id) == col(ModelRow.model_id))
        .where(is_visible(now))
        .group_by(col(SessionRow.session_id), col(SessionRow.owner))
    )
    execute(tx, insert(StorageHourRow).from_select(["hour_at", "session_id", "owner", "num_bytes"], stored))
    execute(tx, delete(StorageHourRow).where(col(StorageHourRow.hour_at) < int(now - RETENTION_S)))
    return True


def read_storage(
    tx: Session, owner: str | None, since: float, until: float | None = None, *, limit: int = 10_000
) -> Sequence[StorageHour]:
    """Return the recorded hours from `since` until `until`, in order.

    `owner` None means all owners.
    """
    row = StorageHourRow
    statement = (
        select(col(row.hour_at), col(row.session_id), col(row.owner), col(SessionRow.project_id), col(row.num_bytes))
        .outerjoin(SessionRow, col(SessionRow.session_id) == col(row.session_id))
        .where(col(row.hour_at) >= int(since) // HOUR_S * HOUR_S)
        .order_by(col(row.hour_at), col(row.session_id))
        .limit(limit)
    )
    if until is not None:
        statement = statement.where(col(row.hour_at) < until)
    if owner is not None:
        statement = statement.where(col(row.owner) == owner)

    return [StorageHour(*found) for found in execute(tx, statement)]
