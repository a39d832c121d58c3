"""Names for saved weights, and what keeps an artifact alive."""

from zlib import crc32

from sqlalchemy import BigInteger, cast, func, literal_column, or_
from sqlalchemy.sql.elements import ColumnElement
from sqlmodel import Session, col, select

from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ArtifactId, CheckpointPath, ModelId
from skyrl_tx.contract.requests import LoadWeights
from skyrl_tx.store.tables import CheckpointRow, ModelRow, RequestRow, SamplingSessionRow, SessionRow, SnapshotRow


class CheckpointExists(Exception):
    """The name is taken, and overwriting was not asked for."""


def put(tx: Session, row: CheckpointRow, overwrite: bool) -> ArtifactId | None:
    """Give an artifact a name; returns the artifact that had it. Raises CheckpointExists if one does.

    A name whose time is over at `row.created_at` is free.
    """
    before = tx.get(CheckpointRow, (row.model_id, row.kind, row.name))
    if before is None:
        tx.add(row)
        tx.flush()
        return None
    if not overwrite and (before.expires_at is None or before.expires_at > row.created_at):
        raise CheckpointExists(f"checkpoint {row.path} exists already; delete it first, or save under another name")
    replaced = before.artifact_id
    tx.delete(before)
    tx.flush()
    tx.add(row)
    tx.flush()
    return replaced


def get(tx: Session, path: CheckpointPath, now: float) -> CheckpointRow | None:
    """Read a checkpoint; None if there is none or its time is over."""
    row = tx.get(CheckpointRow, (path.model_id, path.kind, path.name))
    return row if row is not None and (row.expires_at is None or row.expires_at > now) else None


def delete(tx: Session, path: CheckpointPath) -> bool:
    """Remove a name; the artifact goes once nothing else points at it. False if there is no such name."""
    row = tx.get(CheckpointRow, (path.model_id, path.kind, path.name))
    if row is None:
        return False
    tx.delete(row)
    tx.flush()
    return True


def list_of_run(tx: Session, model_id: ModelId, now: float, *, only_public: bool = False) -> list[CheckpointRow]:
    """A run's checkpoints, oldest first."""
    oldest_first = (col(CheckpointRow.created_at), col(CheckpointRow.kind), col(CheckpointRow.name))
    wanted = select(CheckpointRow).where(CheckpointRow.model_id == model_id, lasting(now)).order_by(*oldest_first)
    return list(tx.exec(wanted.where(col(CheckpointRow.public)) if only_public else wanted))


def published_runs(now: float):
    """The ids of runs with a public checkpoint, as part of a query."""
    return select(CheckpointRow.model_id).where(col(CheckpointRow.public), lasting(now))


def list_owned(tx: Session, owner: str, limit: int, offset: int, now: float) -> tuple[list[CheckpointRow], int]:
    """A page of an owner's checkpoints, newest first, and how many there are in all."""
    runs = select(ModelRow.model_id).join(SessionRow).where(SessionRow.owner == owner)
    is_wanted = col(CheckpointRow.model_id).in_(runs), lasting(now)
    newest_first = (
        col(CheckpointRow.created_at).desc(),
        col(CheckpointRow.model_id),
        col(CheckpointRow.kind),
        col(CheckpointRow.name),
    )
    page = tx.exec(select(CheckpointRow).where(*is_wanted).order_by(*newest_first).limit(limit).offset(offset))
    return list(page), tx.exec(select(func.count()).select_from(CheckpointRow).where(*is_wanted)).one()


def count(tx: Session, now: float) -> tuple[int, int]:
    """How many checkpoints there are, of all owners, and their size in bytes."""
    number, size_bytes = tx.exec(select(func.count(), total_bytes()).where(lasting(now))).one()
    return number, size_bytes


def total_bytes() -> ColumnElement[int]:
    """How long the files of the selected checkpoints are together, as part of a query."""
    return cast(func.coalesce(func.sum(col(CheckpointRow.size_bytes)), 0), BigInteger)  # some databases sum decimals


def lasting(now: float) -> ColumnElement[bool]:
    """Which checkpoints there still are, as part of a query."""
    return or_(col(CheckpointRow.expires_at).is_(None), col(CheckpointRow.expires_at) > now)


def set_ttl(tx: Session, path: CheckpointPath, expires_at: float | None) -> None:
    """Say until when a checkpoint lasts; None: for ever. Raises LookupError if there is none."""
    _existing(tx, path).expires_at = expires_at
    tx.flush()


def set_public(tx: Session, path: CheckpointPath, public: bool) -> None:
    """Say whether others may read a checkpoint. Raises LookupError if there is none."""
    _existing(tx, path).public = public
    tx.flush()


def _existing(tx: Session, path: CheckpointPath) -> CheckpointRow:
    row = tx.get(CheckpointRow, (path.model_id, path.kind, path.name))
    if row is None:
        raise LookupError(f"no checkpoint {path}")
    return row


def expire(tx: Session, now: float) -> list[CheckpointPath]:
    """Remove the names whose time is over; returns them."""
    over = list(tx.exec(select(CheckpointRow).where(col(CheckpointRow.expires_at) <= now)))
    for row in over:
        tx.delete(row)
    tx.flush()
    return [row.path for row in over]


def referenced_artifacts(tx: Session) -> set[ArtifactId] | None:
    """Every artifact that something points at: a checkpoint, a snapshot, a sampler, a load that may run (again).

    None while that is not known: an open load is damaged. It will fail soon, but an engine may hold it as it was.
    """
    samplers = tx.exec(select(SamplingSessionRow.sampler_id).where(col(SamplingSessionRow.sampler_id).is_not(None)))
    referenced = {ArtifactId(sampler_id) for sampler_id in samplers if sampler_id is not None}
    referenced.update(map(ArtifactId, tx.exec(select(CheckpointRow.artifact_id))))
    referenced.update(map(ArtifactId, tx.exec(select(SnapshotRow.artifact_id))))
    for body, body_crc, status in tx.exec(_loads_that_may_run()):
        try:
            if body_crc not in (None, crc32(body)):
                raise codec.CodecError("its checksum is not that of what was written")
            request = codec.decode(body)
        except codec.CodecError:
            if status == "open":
                return None
            continue  # what is answered and damaged no recovery can repeat
        if isinstance(request, LoadWeights):  # and none that was refused
            referenced.add(request.artifact_id)
    return referenced


def _loads_that_may_run():
    """Bodies, checksums and statuses of loads that are open, or whose effect a recovery would repeat."""
    covered = (
        select(SnapshotRow.effect_order).where(SnapshotRow.model_id == RequestRow.model_id).correlate(RequestRow)
    ).scalar_subquery()
    live = select(ModelRow.model_id).where(col(ModelRow.status).in_(("creating", "ready")))
    is_replayed = (col(RequestRow.effect_order) > func.coalesce(covered, 0)) & col(RequestRow.model_id).in_(live)
    return select(RequestRow.body, RequestRow.body_crc, RequestRow.status).where(
        col(RequestRow.kind) == literal_column("'load_weights'"),  # spelt out, as the partial index on it must see it
        or_(col(RequestRow.status) == "open", is_replayed),
    )
