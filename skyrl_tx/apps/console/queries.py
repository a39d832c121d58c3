"""Database queries for the pages of the console. All results are limited in size.

Functions that list users' rows take an owner, directly or in a `ListQuery`. None means all owners.
Lists of runs, checkpoints and sessions include the rows of the owner's projects. Callers must check
which owner a visitor may see.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import BigInteger, ColumnElement, and_, cast, func, literal_column, or_, select, true
from sqlmodel import Session, col
from sqlmodel import select as select_rows

from skyrl_tx.apps.history.tables import LoggedPointRow, LoggedRunRow
from skyrl_tx.apps.teams.usage import UsageRow
from skyrl_tx.contract.ids import ModelId, SamplingSessionId, SessionId
from skyrl_tx.store.checkpoints import is_visible
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


@dataclass(frozen=True, slots=True)
class RunLine:
    """A training run in a list."""

    model_id: ModelId
    session_id: SessionId
    owner: str
    project_id: str | None
    display_name: str | None
    base_model: str
    spec: bytes
    status: str
    created_at: float
    last_request_at: float
    num_steps: int
    loaded_from: str | None
    finished_at: float | None
    """When the run's session finished."""


_RUN_COLUMNS = (
    col(ModelRow.model_id),
    col(ModelRow.session_id),
    col(SessionRow.owner),
    col(SessionRow.project_id),
    col(SessionRow.display_name),
    col(ModelRow.base_model),
    col(ModelRow.spec),
    col(ModelRow.status),
    col(ModelRow.created_at),
    col(ModelRow.last_request_at),
    col(ModelRow.num_steps),
    col(ModelRow.loaded_from),
    col(SessionRow.finished_at),
)


_RUNS = select(*_RUN_COLUMNS).join(SessionRow, col(SessionRow.session_id) == col(ModelRow.session_id))
_IS_KEPT = col(ModelRow.deleted_at).is_(None)


def list_runs(tx: Session, query: ListQuery) -> tuple[list[RunLine], int]:
    """Return a page of runs, most recently used first, and the total number of runs."""
    is_wanted = is_visible_to(query.owner) & _IS_KEPT
    if query.project is not None:
        is_wanted &= col(SessionRow.project_id) == query.project
    is_wanted &= _match(query, ModelRow.model_id, SessionRow.display_name, SessionRow.project_id, SessionRow.owner)
    page = _RUNS.where(is_wanted).order_by(col(ModelRow.last_request_at).desc(), col(ModelRow.model_id))
    rows = execute(tx, page.limit(query.limit).offset(query.offset))
    total = select(func.count()).select_from(ModelRow).join(SessionRow).where(is_wanted)
    return [RunLine(*row) for row in rows], execute(tx, total).scalar_one()


def get_run(tx: Session, model_id: ModelId) -> RunLine | None:
    """Return a run, or None if it does not exist or is deleted."""
    row = execute(tx, _RUNS.where(col(ModelRow.model_id) == model_id, _IS_KEPT)).one_or_none()
    return None if row is None else RunLine(*row)


def list_runs_of_session(tx: Session, session_id: SessionId, limit: int) -> list[RunLine]:
    """Return the runs of a session, oldest first."""
    statement = _RUNS.where(col(ModelRow.session_id) == session_id, _IS_KEPT)
    return [RunLine(*row) for row in execute(tx, statement.order_by(col(ModelRow.created_at)).limit(limit))]


def list_runs_loaded_from(tx: Session, paths: Collection[str], limit: int) -> list[tuple[ModelId, str]]:
    """Return the runs that were loaded from one of these checkpoints, each with the path."""
    statement = (
        select(col(ModelRow.model_id), col(ModelRow.loaded_from))
        .where(col(ModelRow.loaded_from).in_(paths), _IS_KEPT)
        .order_by(col(ModelRow.created_at))
    )
    return [(model_id, path or "") for model_id, path in execute(tx, statement.limit(limit))]


def list_copies(tx: Session, path: str, limit: int, now: float) -> list[CheckpointRow]:
    """Return the copies of a checkpoint."""
    statement = select_rows(CheckpointRow).where(col(CheckpointRow.copied_from) == path, is_visible(now))
    return list(tx.exec(statement.limit(limit)))


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """Metrics that the client logged for one step."""

    step: int
    at: float
    values: Mapping[str, float | None]


def list_logged_steps(tx: Session, model_id: ModelId, limit: int) -> list[LoggedStep]:
    """Return the metrics that clients logged for the last steps of a run, ordered by step."""
    statement = (
        select(col(LoggedPointRow.step), col(LoggedPointRow.at), col(LoggedPointRow.values))
        .join(LoggedRunRow, col(LoggedRunRow.logged_run_id) == col(LoggedPointRow.logged_run_id))
        .where(col(LoggedRunRow.model_id) == model_id)
        .order_by(col(LoggedPointRow.step).desc(), col(LoggedPointRow.at).desc())
        .limit(limit)
    )
    return [LoggedStep(*row) for row in execute(tx, statement)][::-1]


@dataclass(frozen=True, slots=True)
class OpenGroup:
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


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A request in a list. `result` is only set for failed requests."""

    request_id: str
    kind: str
    owner: str
    model_id: ModelId | None
    seq_id: int | None
    status: str
    created_at: float
    started_at: float | None
    completed_at: float | None
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
    return _read_requests(tx, col(RequestRow.position).in_(chosen), limit)


def list_requests_of_model(tx: Session, model_id: ModelId, limit: int) -> list[RequestLine]:
    """Return the newest requests of a model, open and completed, newest first."""
    newest = (
        select(col(RequestRow.position))
        .where(col(RequestRow.model_id) == model_id)
        .order_by(col(RequestRow.position).desc())
        .limit(limit)
    )
    return _read_requests(tx, col(RequestRow.position).in_(newest), limit)


def _read_requests(tx: Session, is_wanted: ColumnElement[bool], limit: int) -> list[RequestLine]:
    # Rows without results
    columns = (
        col(RequestRow.request_id),
        col(RequestRow.kind),
        col(RequestRow.owner),
        col(RequestRow.model_id),
        col(RequestRow.seq_id),
        col(RequestRow.status),
        col(RequestRow.created_at),
        col(RequestRow.started_at),
        col(RequestRow.completed_at),
    )
    newest_first = select(col(RequestRow.position), *columns).where(is_wanted).order_by(col(RequestRow.position).desc())
    rows = list(execute(tx, newest_first.limit(limit)))

    # The results of failed requests, which have the error
    failed = [row[0] for row in rows if row[6] == "failed"]
    texts = select(col(RequestRow.position), col(RequestRow.result)).where(col(RequestRow.position).in_(failed))
    results: dict[int, bytes | None] = {position or 0: result for position, result in execute(tx, texts)}
    return [RequestLine(*row[1:], result=results.get(row[0] or 0)) for row in rows]


_USAGE = select(col(UsageRow.bucket_at), col(UsageRow.kind), cast(func.sum(col(UsageRow.tokens)), BigInteger)).group_by(
    col(UsageRow.bucket_at), col(UsageRow.kind)
)


def read_usage_by_bucket(tx: Session, since: int) -> list[tuple[int, str, int]]:
    """Return the tokens of all owners since a time, as tuples of bucket, kind and tokens."""
    statement = _USAGE.where(col(UsageRow.bucket_at) >= since).order_by(col(UsageRow.bucket_at))
    return [(at, kind, int(total or 0)) for at, kind, total in execute(tx, statement)]


def read_usage_of_session(tx: Session, session_id: SessionId, since: int, limit: int) -> list[tuple[int, str, int]]:
    """Return the tokens of a session since a time, as tuples of bucket, kind and tokens.

    At most `limit` rows are returned, from the newest buckets, oldest first.
    """
    statement = _USAGE.where(col(UsageRow.session_id) == session_id, col(UsageRow.bucket_at) >= since)
    newest = execute(tx, statement.order_by(col(UsageRow.bucket_at).desc()).limit(limit))
    return [(at, kind, int(total or 0)) for at, kind, total in newest][::-1]


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
    page = (
        select_rows(CheckpointRow, SessionRow.owner).join(ModelRow, joined).join(SessionRow, session).where(is_wanted)
    )
    rows = tx.exec(page.order_by(*newest, col(CheckpointRow.name)).limit(query.limit).offset(query.offset))

    # Totals
    size = func.coalesce(func.sum(col(CheckpointRow.size_bytes)), 0)
    totals = select(func.count(), size).select_from(CheckpointRow).join(ModelRow, joined).join(SessionRow, session)
    number, num_bytes = execute(tx, totals.where(is_wanted)).one()
    return [(row, owner) for row, owner in rows], int(number), int(num_bytes)


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


@dataclass(frozen=True, slots=True)
class SessionLine:
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
    page = select_rows(SessionRow).where(is_wanted).order_by(*newest_first).limit(query.limit).offset(query.offset)
    rows = list(tx.exec(page))

    # Runs of each session, and the total number
    counted = select(col(ModelRow.session_id), func.count()).where(
        col(ModelRow.session_id).in_([row.session_id for row in rows]), _IS_KEPT
    )
    counts = execute(tx, counted.group_by(col(ModelRow.session_id)))
    numbers = {str(session_id): number for session_id, number in counts}
    total = execute(tx, select(func.count()).select_from(SessionRow).where(is_wanted)).scalar_one()
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
    page = select_rows(ApiKeyRow).where(is_wanted).order_by(*order).limit(query.limit).offset(query.offset)
    total = execute(tx, select(func.count()).select_from(ApiKeyRow).where(is_wanted)).scalar_one()
    return list(tx.exec(page)), total
