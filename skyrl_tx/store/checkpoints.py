"""Checkpoints, which are names for saved weights, and references to artifacts."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from zlib import crc32

from sqlalchemy import BigInteger, bindparam, cast, func, literal_column, or_, true, tuple_
from sqlalchemy import select as select_columns
from sqlalchemy.sql.elements import ColumnElement
from sqlmodel import Session, col, select

from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, CheckpointPath, ModelId, SessionId
from skyrl_tx.contract.requests import LoadWeights
from skyrl_tx.store import sessions
from skyrl_tx.store.database import execute, get_existing, is_in_batch, split_batches
from skyrl_tx.store.tables import CheckpointRow, ModelRow, RequestRow, SamplingSessionRow, SessionRow, SnapshotRow

KEEP_LAST = "skyrl_tx.keep_last"
"""Key in the metadata of a run or session: how many checkpoints of each kind are kept, or `all`."""
_ROWS_PER_FETCH = 200


class CheckpointExists(Exception):
    """The name is in use, and the client did not ask to overwrite it."""


def put(tx: Session, row: CheckpointRow, overwrite: bool) -> ArtifactId | None:
    """Store a checkpoint, and return the artifact that had its name before, if any.

    Raises CheckpointExists if the name is in use and `overwrite` is False. If the checkpoint with
    this name is deleted, or has expired at `row.created_at`, the name is free. A deleted checkpoint
    then cannot be restored any more.
    """
    before = tx.get(CheckpointRow, (row.model_id, row.kind, row.name))
    if before is not None:
        if not overwrite and _exists(before, row.created_at):
            raise CheckpointExists(f"checkpoint {row.path} exists already; delete it first, or save under another name")
        tx.delete(before)
        tx.flush()
    tx.add(row)
    return None if before is None else before.artifact_id


def get(tx: Session, path: CheckpointPath, now: float) -> CheckpointRow | None:
    """Return a checkpoint, or None if it does not exist, is deleted or has expired."""
    row = tx.get(CheckpointRow, (path.model_id, path.kind, path.name))
    return row if row is not None and _exists(row, now) else None


def _exists(row: CheckpointRow, now: float) -> bool:
    return row.deleted_at is None and (row.expires_at is None or row.expires_at > now)


def mark_deleted(tx: Session, path: CheckpointPath, now: float) -> bool:
    """Mark a checkpoint as deleted. Return False if it does not exist.

    `undelete` can restore it until `purge` removes it.
    """
    row = get(tx, path, now)
    if row is None:
        return False
    row.deleted_at = now
    return True


def undelete(tx: Session, path: CheckpointPath) -> bool:
    """Restore a deleted checkpoint.

    Return False if there is no deleted checkpoint with this path.
    """
    row = tx.get(CheckpointRow, (path.model_id, path.kind, path.name))
    if row is None or row.deleted_at is None:
        return False
    row.deleted_at = None
    return True


def find_keep_last(tx: Session, model_id: ModelId, default: int) -> int:
    """Return how many checkpoints of each kind a run keeps; 0 means all.

    The metadata of the run decides, then the metadata of its session, then the default.
    """
    run = get_existing(tx, ModelRow, model_id)
    session = get_existing(tx, SessionRow, run.session_id)
    for metadata in (run.user_metadata or {}, session.user_metadata):
        if (value := metadata.get(KEEP_LAST)) is not None:
            return int(str(value)) if str(value).isdecimal() else 0
    return default


def trim(tx: Session, model_id: ModelId, kind: CheckpointKind, keep: int, now: float) -> list[CheckpointPath]:
    """Mark all but the newest `keep` checkpoints of a kind as deleted, and return their paths.

    Checkpoints that are published or have a TTL stay. Only checkpoints to train on and to sample
    from are removed, and none if `keep` is 0.
    """
    if not keep or kind == CheckpointKind.EXTERNAL:
        return []
    newest_first = [row for row in reversed(list_by_run(tx, model_id, now)) if row.kind == kind]
    superfluous = [row for row in newest_first[keep:] if not row.public and row.expires_at is None]
    for row in superfluous:
        row.deleted_at = now
    return [row.path for row in superfluous]


_DELETED = select(CheckpointRow).where(col(CheckpointRow.deleted_at) <= bindparam("before"))
_EXPIRED = select(CheckpointRow).where(col(CheckpointRow.expires_at) <= bindparam("before"))


def purge(tx: Session, before: float, max_bytes: float = math.inf) -> list[CheckpointPath]:
    """Remove the checkpoints that were deleted before a time, and return their paths.

    While deleted checkpoints take more than `max_bytes`, the oldest deletions are removed earlier.
    """
    purged = _remove(tx, tx.exec(_DELETED, params={"before": before}))
    num_bytes = execute(tx, select(sum_bytes()).where(col(CheckpointRow.deleted_at).is_not(None))).scalar_one()
    return purged + purge_oldest(tx, num_bytes - max_bytes)


def purge_oldest(tx: Session, num_bytes: float, condition: ColumnElement[bool] | None = None) -> list[CheckpointPath]:
    """Remove deleted checkpoints of `num_bytes` or more, the oldest deletions first.

    `condition` selects sessions. Returns the paths of the removed checkpoints.
    """
    purged: list[CheckpointRow] = []
    deleted = select(CheckpointRow).join(ModelRow, col(ModelRow.model_id) == col(CheckpointRow.model_id))
    deleted = deleted.join(SessionRow).where(
        col(CheckpointRow.deleted_at).is_not(None), true() if condition is None else condition
    )
    for row in tx.exec(deleted.order_by(col(CheckpointRow.deleted_at))) if num_bytes > 0 else ():
        if num_bytes <= 0:
            break
        num_bytes -= row.size_bytes
        purged.append(row)
    return _remove(tx, purged)


def _remove(tx: Session, rows: Iterable[CheckpointRow]) -> list[CheckpointPath]:
    removed = list(rows)
    for row in removed:
        tx.delete(row)
    tx.flush()
    return [row.path for row in removed]


def delete(tx: Session, path: CheckpointPath) -> bool:
    """Remove a checkpoint, even if it is marked as deleted. Return False if it does not exist.

    Garbage collection later removes its artifact, if nothing else refers to it.
    """
    row = tx.get(CheckpointRow, (path.model_id, path.kind, path.name))
    return row is not None and bool(_remove(tx, [row]))


def list_by_run(tx: Session, model_id: ModelId, now: float, *, only_public: bool = False) -> list[CheckpointRow]:
    """Return a run's checkpoints, oldest first."""
    oldest_first = (col(CheckpointRow.created_at), col(CheckpointRow.kind), col(CheckpointRow.name))
    statement = select(CheckpointRow).where(CheckpointRow.model_id == model_id, is_visible(now)).order_by(*oldest_first)
    return list(tx.exec(statement.where(col(CheckpointRow.public)) if only_public else statement))


def list_latest(
    tx: Session, model_ids: Iterable[ModelId], now: float, *, only_public: bool = False
) -> dict[ModelId, list[CheckpointRow]]:
    """Return the latest checkpoint of each kind of these runs, oldest first."""
    columns = col(CheckpointRow.model_id), col(CheckpointRow.kind), col(CheckpointRow.name)
    newest_first = col(CheckpointRow.created_at).desc(), col(CheckpointRow.name).desc()
    rank = func.row_number().over(partition_by=columns[:2], order_by=newest_first).label("rank")
    ranked = select_columns(*columns, rank).where(is_in_batch(columns[0]), is_visible(now))
    if only_public:
        ranked = ranked.where(col(CheckpointRow.public))

    latest = ranked.subquery()
    is_latest = tuple_(*columns).in_(select_columns(*latest.c[:3]).where(latest.c.rank == 1))
    oldest_first = col(CheckpointRow.created_at), col(CheckpointRow.kind), col(CheckpointRow.name)
    found: dict[ModelId, list[CheckpointRow]] = {}
    for ids in split_batches(model_ids):
        for row in tx.exec(select(CheckpointRow).where(is_latest).order_by(*oldest_first), params={"ids": ids}):
            found.setdefault(row.model_id, []).append(row)
    return found


def select_published_runs(now: float):
    """Return a subquery for the ids of runs with a public checkpoint."""
    return select(CheckpointRow.model_id).where(col(CheckpointRow.public), is_visible(now))


_KEY = col(CheckpointRow.model_id), col(CheckpointRow.kind), col(CheckpointRow.name)
_NEWEST_FIRST = col(CheckpointRow.created_at).desc(), *_KEY
_WITH_BASE_MODEL = select(CheckpointRow, col(ModelRow.base_model)).join(
    ModelRow, col(ModelRow.model_id) == col(CheckpointRow.model_id)
)


def list_owned(
    tx: Session, owner: str, limit: int, offset: int, now: float
) -> tuple[list[tuple[CheckpointRow, str]], int]:
    """Return a page of an owner's checkpoints, newest first, with their base models.

    The second value is the number of all checkpoints of the owner.
    """
    is_owned = (col(SessionRow.owner) == owner) & col(ModelRow.deleted_at).is_(None)
    runs = select(ModelRow.model_id).join(SessionRow).where(is_owned)
    conditions = col(CheckpointRow.model_id).in_(runs), is_visible(now)
    page = tx.exec(_WITH_BASE_MODEL.where(*conditions).order_by(*_NEWEST_FIRST).limit(limit).offset(offset))
    return list(page), tx.exec(select(func.count()).select_from(CheckpointRow).where(*conditions)).one()


def iterate(
    tx: Session,
    *,
    viewer: str | None,
    owners: Collection[str] | None,
    project_ids: Collection[str] | None,
    kind: CheckpointKind | None,
    base_models: Collection[str] | None,
    after: tuple[float, CheckpointPath] | None,
    now: float,
) -> Iterator[tuple[CheckpointRow, str]]:
    """Yield checkpoints with their base models, newest first.

    Args:
        tx: The transaction.
        viewer: Yield only checkpoints that this owner may see; None sees all.
        owners: Yield only checkpoints of these owners; None means all owners.
        project_ids: Yield only checkpoints of these projects; None means any project or none.
        kind: Yield only checkpoints of this kind; None means all kinds.
        base_models: Yield only checkpoints for these base models; None means all.
        after: Creation time and path of the previous page's last checkpoint; None starts at the newest.
        now: Checkpoints that have expired at this time are left out.
    """
    conditions = [is_visible(now), col(ModelRow.deleted_at).is_(None), sessions.is_visible_to(viewer)]
    for column, values in (
        (col(SessionRow.owner), owners),
        (col(SessionRow.project_id), project_ids),
        (col(ModelRow.base_model), base_models),
        (col(CheckpointRow.kind), None if kind is None else [kind]),
    ):
        if values is not None:
            conditions.append(column.in_(values))

    if after is not None:
        created_at, path = after
        has_later_key = tuple_(*_KEY) > tuple_(path.model_id, path.kind, path.name)
        is_equally_old = col(CheckpointRow.created_at) == created_at
        conditions.append((col(CheckpointRow.created_at) < created_at) | (is_equally_old & has_later_key))
    statement = _WITH_BASE_MODEL.join(SessionRow).where(*conditions).order_by(*_NEWEST_FIRST)
    yield from tx.exec(statement.execution_options(yield_per=_ROWS_PER_FETCH))


def count(tx: Session, now: float) -> tuple[int, int]:
    """Return the number of checkpoints of all owners and their total size in bytes."""
    number, size_bytes = tx.exec(select(func.count(), sum_bytes()).where(is_visible(now))).one()
    return number, size_bytes


def sum_bytes() -> ColumnElement[int]:
    """Return the SQL expression for the total size of the selected checkpoints in bytes."""
    total = func.coalesce(func.sum(col(CheckpointRow.size_bytes)), 0)
    return cast(total, BigInteger)  # in PostgreSQL, the sum of integers is a decimal


def is_visible(now: float) -> ColumnElement[bool]:
    """Return the condition that a checkpoint is neither expired nor deleted."""
    return is_unexpired(now) & col(CheckpointRow.deleted_at).is_(None)


def is_unexpired(now: float) -> ColumnElement[bool]:
    """Return the condition that a checkpoint has not expired. It may be deleted."""
    return or_(col(CheckpointRow.expires_at).is_(None), col(CheckpointRow.expires_at) > now)


@dataclass(frozen=True, slots=True)
class StorageUsage:
    """Number and total size of checkpoints."""

    num_checkpoints: int = 0
    num_bytes: int = 0


def get_usage_by_session(tx: Session, session_ids: Collection[SessionId], now: float) -> dict[SessionId, StorageUsage]:
    """Return the storage of each session. Sessions without checkpoints are left out."""
    statement = (
        select(col(ModelRow.session_id), func.count(), sum_bytes())
        .join(CheckpointRow, col(CheckpointRow.model_id) == col(ModelRow.model_id))
        .where(col(ModelRow.session_id).in_(session_ids), is_visible(now))
        .group_by(col(ModelRow.session_id))
    )
    return {session_id: StorageUsage(count, size) for session_id, count, size in execute(tx, statement)}


def get_usage_by_owner(
    tx: Session, owner: str | None, project_id: str | None, now: float
) -> list[tuple[str, str | None, StorageUsage]]:
    """Return the storage by owner and project.

    `owner` and `project_id` are filters; None means all.
    """
    groups = col(SessionRow.owner), col(SessionRow.project_id)
    statement = (
        select(*groups, func.count(), sum_bytes())
        .join(ModelRow, col(ModelRow.session_id) == col(SessionRow.session_id))
        .join(CheckpointRow, col(CheckpointRow.model_id) == col(ModelRow.model_id))
        .where(is_visible(now))
        .group_by(*groups)
        .order_by(*groups)
    )

    if owner is not None:
        statement = statement.where(groups[0] == owner)
    if project_id is not None:
        statement = statement.where(groups[1] == project_id)
    return [
        (row_owner, project, StorageUsage(count, size)) for row_owner, project, count, size in execute(tx, statement)
    ]


def set_ttl(tx: Session, path: CheckpointPath, expires_at: float | None) -> None:
    """Set when a checkpoint expires; None means never. Raises LookupError if it does not exist."""
    get_existing(tx, CheckpointRow, (path.model_id, path.kind, path.name)).expires_at = expires_at


def set_public(tx: Session, path: CheckpointPath, public: bool) -> None:
    """Set whether other owners may read a checkpoint. Raises LookupError if it does not exist."""
    get_existing(tx, CheckpointRow, (path.model_id, path.kind, path.name)).public = public


def expire(tx: Session, now: float) -> list[CheckpointPath]:
    """Remove the expired checkpoints, and return their paths."""
    return _remove(tx, tx.exec(_EXPIRED, params={"before": now}))


_REFERENCES = (
    select(col(SamplingSessionRow.sampler_id)).where(col(SamplingSessionRow.sampler_id).is_not(None)),
    select(col(CheckpointRow.artifact_id)),
    select(col(SnapshotRow.artifact_id)),
    select(col(RequestRow.sampler_id)).where(
        col(RequestRow.status) == literal_column("'open'"), col(RequestRow.sampler_id).is_not(None)
    ),
)
_COVERED = (
    select(SnapshotRow.effect_order).where(SnapshotRow.model_id == RequestRow.model_id).correlate(RequestRow)
).scalar_subquery()
_IS_REPLAYED = (col(RequestRow.effect_order) > func.coalesce(_COVERED, 0)) & col(RequestRow.model_id).in_(
    select(ModelRow.model_id).where(col(ModelRow.status).in_(("creating", "ready")))
)
_LOADS_THAT_MAY_RUN = select(col(RequestRow.body), col(RequestRow.body_crc), col(RequestRow.status)).where(
    col(RequestRow.kind) == literal_column("'load_weights'"),  # a literal, so that the partial index is used
    or_(col(RequestRow.status) == "open", _IS_REPLAYED),
)
"""Load requests that are open, or that a recovery would replay."""


def find_referenced_artifacts(tx: Session) -> set[ArtifactId] | None:
    """Return all artifacts that the database refers to.

    Checkpoints, snapshots, samplers, open sample requests, and load requests that may run refer to
    artifacts. Returns None if the body of an open load request is damaged, because its artifact is
    then unknown. The request will fail soon, but until then an engine may have its undamaged body
    in memory.
    """
    referenced = {ArtifactId(name) for statement in _REFERENCES for name in execute(tx, statement).scalars()}
    for body, body_crc, status in execute(tx, _LOADS_THAT_MAY_RUN):
        try:
            if body_crc not in (None, crc32(body)):
                raise codec.CodecError("its checksum does not match")
            request = codec.decode(body)
        except codec.CodecError:
            if status == "open":
                return None
            continue  # a damaged request with a result cannot be replayed
        if isinstance(request, LoadWeights):  # a rejected load request has another class
            referenced.add(request.artifact_id)
    return referenced
