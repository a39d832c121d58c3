"""Database queries for the pages of the console. All results are limited in size.

Functions that list users' rows take an owner, directly or in a `ListQuery`. None means all owners.
Lists of runs, checkpoints and sessions include the rows of the owner's projects. Callers must check
which owner a visitor may see.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Executable, and_, func, literal_column, or_, select, true
from sqlmodel import Session, col
from sqlmodel import select as select_rows

from skyrl_tx.apps.history.timeline import RequestTimes, read_times
from skyrl_tx.contract.ids import ModelId, SamplingSessionId, SessionId
from skyrl_tx.store.checkpoints import is_visible, sum_bytes
from skyrl_tx.store.database import execute
from skyrl_tx.store.sessions import is_visible_to
from skyrl_tx.store.tables import ApiKeyRow, CheckpointRow, ModelRow, RequestRow, SamplingSessionRow, SessionRow

_MAX_OPEN = 5000
"""The overview counts at most this many open requests, oldest first."""
_MAX_FAILED = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """Selects one page of a list.

    The page has at most `limit` rows from `offset` on, among the rows that `owner` may see.
    `search` is a part of an id or name, and `project` is the id of a project. Some lists ignore
    these filters.
    """

    owner: str | None
    search: str = ""
    project: str | None = None
    limit: int
    offset: int = 0


def _match(query: ListQuery, *columns: object) -> ColumnElement[bool]:
    """Return the SQL condition that a column contains the search text.

    The condition is always true if there is no search text.
    """
    if not query.search:
        return true()
    return or_(*(col(column).contains(query.search, autoescape=True) for column in columns))


def _read_page(tx: Session, query: ListQuery, wanted: Any, *order: Any) -> tuple[list[Any], int]:
    """Return the rows of one page, and the total number of rows. `wanted` selects the rows of all pages."""
    rows = tx.exec(wanted.order_by(*order).limit(query.limit).offset(query.offset))
    total = wanted.with_only_columns(func.count(), maintain_column_froms=True)
    return list(rows), execute(tx, total).scalar_one()


class RunLine(NamedTuple):
    """A training run in a list, and its session."""

    row: ModelRow
    session: SessionRow


_RUNS = select_rows(ModelRow, SessionRow).join(SessionRow, col(SessionRow.session_id) == col(ModelRow.session_id))
_IS_KEPT = col(ModelRow.deleted_at).is_(None)


def list_runs(tx: Session, query: ListQuery) -> tuple[list[RunLine], int]:
    """Return a page of runs, most recently used first, and the total number of runs."""
    is_wanted = is_visible_to(query.owner) & _IS_KEPT
    if query.project is not None:
        is_wanted &= col(SessionRow.project_id) == query.project
    is_wanted &= _match(query, ModelRow.model_id, SessionRow.display_name, SessionRow.project_id, SessionRow.owner)
    newest_first = col(ModelRow.last_request_at).desc(), col(ModelRow.model_id)
    rows, total = _read_page(tx, query, _RUNS.where(is_wanted), *newest_first)
    return [RunLine(*row) for row in rows], total


def list_runs_of_session(tx: Session, session_id: SessionId, limit: int) -> list[RunLine]:
    """Return the runs of a session, oldest first."""
    statement = _RUNS.where(col(ModelRow.session_id) == session_id, _IS_KEPT)
    return [RunLine(*row) for row in tx.exec(statement.order_by(col(ModelRow.created_at)).limit(limit))]


def list_runs_loaded_from(tx: Session, path: str, limit: int) -> list[ModelId]:
    """Return the runs that were loaded from a checkpoint, oldest first."""
    statement = select(col(ModelRow.model_id)).where(col(ModelRow.loaded_from) == path, _IS_KEPT)
    return list(execute(tx, statement.order_by(col(ModelRow.created_at)).limit(limit)).scalars())


def list_copies(tx: Session, path: str, limit: int, now: float) -> list[CheckpointRow]:
    """Return the copies of a checkpoint."""
    statement = select_rows(CheckpointRow).where(col(CheckpointRow.copied_from) == path, is_visible(now))
    return list(tx.exec(statement.limit(limit)))


class OpenGroup(NamedTuple):
    """The open requests of one kind for one model or sampler."""

    owner: str
    session_id: SessionId
    kind: str
    model_id: ModelId | None
    sampling_session_id: SamplingSessionId | None
    number: int
    first_position: int


def list_open_groups(tx: Session, owner: str | None) -> list[OpenGroup]:
    """Return the open requests, at most the 5,000 oldest, in groups."""
    # Only read columns before the large body, because SQLite reads the whole body to find later
    # columns
    names = col(RequestRow.owner), col(RequestRow.session_id), col(RequestRow.kind), col(RequestRow.model_id)
    columns = (*names, col(RequestRow.sampling_session_id))
    is_open = col(RequestRow.status) == literal_column("'open'")
    is_wanted = is_open if owner is None else is_open & (col(RequestRow.owner) == owner)
    oldest = select(*columns, col(RequestRow.position)).where(is_wanted).order_by(col(RequestRow.position))
    part = oldest.limit(_MAX_OPEN).subquery().c
    groups = part.owner, part.session_id, part.kind, part.model_id, part.sampling_session_id
    counted = select(*groups, func.count(), func.min(part.position)).group_by(*groups)
    return [OpenGroup(*row) for row in execute(tx, counted)]


def get_arrival_time(tx: Session, position: int) -> float | None:
    """Return when the request at a position arrived, or None if the request is deleted."""
    return execute(
        tx, select(col(RequestRow.created_at)).where(col(RequestRow.position) == position)
    ).scalar_one_or_none()


class RequestLine(NamedTuple):
    """A request in a list. `result` is only set for failed requests."""

    times: RequestTimes
    result: bytes | None


def list_failed_requests(tx: Session, owner: str | None, limit: int) -> list[RequestLine]:
    """Return the newest failed requests, newest first.

    Rows of old requests are deleted after some time.
    """
    is_failed = col(RequestRow.status) == literal_column("'failed'")
    newest = select(col(RequestRow.position), col(RequestRow.owner)).where(is_failed)
    part = newest.order_by(col(RequestRow.position).desc()).limit(_MAX_FAILED).subquery()
    chosen = select(part.c.position).order_by(part.c.position.desc()).limit(limit)
    if owner is not None:
        chosen = chosen.where(part.c.owner == owner)
    return _read_requests(tx, chosen)


def list_requests_of_model(tx: Session, model_id: ModelId, limit: int) -> list[RequestLine]:
    """Return the newest requests of a model, open and completed, newest first."""
    position = col(RequestRow.position)
    newest = select(position).where(col(RequestRow.model_id) == model_id).order_by(position.desc())
    return _read_requests(tx, newest.limit(limit))


def _read_requests(tx: Session, positions: Executable) -> list[RequestLine]:
    found = read_times(tx, execute(tx, positions).scalars())
    failed = [times.position for times in found if times.status == "failed"]
    texts = select(col(RequestRow.position), col(RequestRow.result)).where(col(RequestRow.position).in_(failed))
    results = {row.position: row.result for row in execute(tx, texts)}
    return [RequestLine(times, results.get(times.position)) for times in reversed(found)]


def read_checkpoint_page(
    tx: Session, query: ListQuery, *, kind: str, scope: str, now: float
) -> tuple[list[tuple[CheckpointRow, str]], int, int]:
    """Return a page of checkpoints with their owners, and the number and size of all checkpoints.

    The newest checkpoints come first. `scope` is "own", "published" (by any owner), or "deleted"
    (checkpoints that can still be restored).
    """
    # Filters
    is_wanted: ColumnElement[bool] = _IS_KEPT
    if scope == "published":
        is_wanted &= col(CheckpointRow.public) & is_visible(now)
    elif scope == "deleted":
        is_wanted &= is_visible_to(query.owner) & col(CheckpointRow.deleted_at).is_not(None)
    else:
        is_wanted &= is_visible_to(query.owner) & is_visible(now)
    if kind:
        is_wanted &= col(CheckpointRow.kind) == kind
    is_wanted &= _match(query, CheckpointRow.name, CheckpointRow.model_id, SessionRow.owner)

    # One page
    joined = and_(col(ModelRow.model_id) == col(CheckpointRow.model_id))
    session = and_(col(SessionRow.session_id) == col(ModelRow.session_id))
    newest = (col(CheckpointRow.created_at).desc(), col(CheckpointRow.model_id), col(CheckpointRow.kind))
    wanted = select_rows(CheckpointRow, SessionRow.owner).join(ModelRow, joined).join(SessionRow, session)
    wanted = wanted.where(is_wanted)
    rows, number = _read_page(tx, query, wanted, *newest, col(CheckpointRow.name))

    # The size of all
    size = wanted.with_only_columns(sum_bytes(), maintain_column_froms=True)
    return [(row, owner) for row, owner in rows], number, execute(tx, size).scalar_one()


def list_checkpoints_of_runs(tx: Session, model_ids: Sequence[ModelId], limit: int, now: float) -> list[CheckpointRow]:
    """Return the newest checkpoints of these runs, oldest first."""
    statement = select_rows(CheckpointRow).where(col(CheckpointRow.model_id).in_(model_ids), is_visible(now))
    return list(tx.exec(statement.order_by(col(CheckpointRow.created_at).desc()).limit(limit)))[::-1]


def count_references(tx: Session, artifact_ids: Collection[str], now: float) -> dict[str, int]:
    """Return how many checkpoints use each of these artifacts."""
    statement = (
        select(col(CheckpointRow.artifact_id), func.count())
        .where(col(CheckpointRow.artifact_id).in_(artifact_ids), is_visible(now))
        .group_by(col(CheckpointRow.artifact_id))
    )
    return {str(artifact_id): number for artifact_id, number in execute(tx, statement)}


class SessionLine(NamedTuple):
    """A session in a list."""

    row: SessionRow
    num_runs: int


def read_session_page(tx: Session, query: ListQuery) -> tuple[list[SessionLine], int]:
    """Return a page of sessions, newest first, and the total number of sessions."""
    # One page
    is_wanted = is_visible_to(query.owner)
    if query.project is not None:
        is_wanted &= col(SessionRow.project_id) == query.project
    is_wanted &= _match(query, SessionRow.session_id, SessionRow.display_name, SessionRow.project_id, SessionRow.owner)
    newest_first = (col(SessionRow.created_at).desc(), col(SessionRow.session_id))
    rows, total = _read_page(tx, query, select_rows(SessionRow).where(is_wanted), *newest_first)

    # Runs of each session
    counted = select(col(ModelRow.session_id), func.count()).where(
        col(ModelRow.session_id).in_([row.session_id for row in rows]), _IS_KEPT
    )
    counts = execute(tx, counted.group_by(col(ModelRow.session_id)))
    numbers = {str(session_id): number for session_id, number in counts}
    return [SessionLine(row, numbers.get(row.session_id, 0)) for row in rows], total


def list_samplers_of_session(tx: Session, session_id: SessionId, limit: int) -> list[SamplingSessionRow]:
    """Return the newest samplers of a session, newest first."""
    statement = select_rows(SamplingSessionRow).where(col(SamplingSessionRow.session_id) == session_id)
    return list(tx.exec(statement.order_by(col(SamplingSessionRow.created_at).desc()).limit(limit)))


def read_key_page(tx: Session, query: ListQuery) -> tuple[list[ApiKeyRow], int]:
    """Return a page of API keys and the total number of keys.

    Newest keys come first, and revoked keys last.
    """
    is_wanted: ColumnElement[bool] = true() if query.owner is None else col(ApiKeyRow.owner) == query.owner
    order = (col(ApiKeyRow.revoked_at).is_not(None), col(ApiKeyRow.key_id).desc())
    return _read_page(tx, query, select_rows(ApiKeyRow).where(is_wanted), *order)
