"""Usage: tokens, requests and device seconds of each session, model and kind of work, in buckets of five minutes.

The engine adds to it in the transaction of the result. After two weeks the buckets are joined to hours.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from sqlalchemy import BigInteger, Boolean, ColumnElement, bindparam, cast, delete, func, literal_column, select
from sqlmodel import Session, col

from skyrl_tx.apps.teams import billing, usage
from skyrl_tx.apps.teams.billing import GIGABYTE, Prices, compute_storage_cost, compute_token_cost
from skyrl_tx.apps.teams.tables import UsageKind, UsageRow
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.contract.requests import Sample
from skyrl_tx.contract.results import ForwardBackwardOutput, OptimStepOutput, SampleOutput
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.device_cache import LiveModel
from skyrl_tx.engine.extension import ResultObserver, RetentionRule
from skyrl_tx.engine.request_log import ObserverRows, QueuedRequest
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store.database import Store, execute, execute_in_batches, is_in_batch
from skyrl_tx.store.prepared_statements import PreparedStatement, make_upsert_builder
from skyrl_tx.store.sampling_sessions import Origin
from skyrl_tx.store.tables import ModelRow, SessionRow

BUCKET_S = 300
HOUR_S = 3600
FINE_S = 14 * 86_400.0
"""Age at which five minutes are joined to hours."""
RETENTION_S = 400 * 86_400.0
MAX_ROWS = 1000
GroupColumn = Literal["owner", "session_id", "model_id", "base_model", "project_id", "key_id", "hour", "day"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of one kind that took effect."""

    kind: UsageKind
    tokens: int = 0
    requests: int = 1
    device_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Work of one kind of one group. `group` has the values of the columns of `group_by`, in their order."""

    group: tuple[Any, ...]
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
    _add_rows(
        tx,
        [
            {**common, "kind": each.kind, "tokens": each.tokens, "requests": each.requests, "device_s": each.device_s}
            for each in work
        ],
    )


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
    """Return the work from `since` until `until`, by group and kind: at most `limit` rows, ordered by group.

    `owner` None means all owners. `hour` and `day` are begins in seconds since the epoch, UTC. `project_id` and
    `key_id` are those of the session, None once it has been removed; `base_model` is the model's, None for base weights
    and once the model has been removed. Times are rounded down to buckets.
    """
    groups = [_get_group_column(name) for name in group_by]
    bucket_at = col(UsageRow.bucket_at)
    wanted = (
        select(
            *(group.label(name) for name, group in zip(group_by, groups, strict=True)),
            col(UsageRow.kind),
            cast(func.sum(col(UsageRow.tokens)), BigInteger),  # PostgreSQL sums to a decimal
            cast(func.sum(col(UsageRow.requests)), BigInteger),
            func.sum(col(UsageRow.device_s)),
        )
        .where(bucket_at >= int(since) // BUCKET_S * BUCKET_S)
        .group_by(*groups, col(UsageRow.kind))
        .order_by(*groups, col(UsageRow.kind))
        .limit(limit)
    )
    if {"project_id", "key_id"} & set(group_by):
        wanted = wanted.outerjoin_from(UsageRow, SessionRow, col(SessionRow.session_id) == col(UsageRow.session_id))
    if "base_model" in group_by:
        wanted = wanted.outerjoin_from(UsageRow, ModelRow, col(ModelRow.model_id) == col(UsageRow.model_id))
    if until is not None:
        wanted = wanted.where(bucket_at < until)
    if owner is not None:
        wanted = wanted.where(col(UsageRow.owner) == owner)
    if session_ids is not None:
        wanted = wanted.where(col(UsageRow.session_id).in_(session_ids))
    if model_id is not None:
        wanted = wanted.where(col(UsageRow.model_id) == model_id)
    return _make_totals(execute(tx, wanted))


def _make_totals(rows: Iterable[Any]) -> list[Total]:
    return [
        Total(group=tuple(group), kind=kind, tokens=tokens, requests=requests, device_s=device_s)
        for *group, kind, tokens, requests, device_s in rows
    ]


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


_IS_FINE: ColumnElement[bool] = literal_column(
    "bucket_at % 3600 <> 0", Boolean
)  # a literal, so that the partial index is used
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


def prune(tx: Session, now: float, *, retention_s: float = RETENTION_S, limit: int = MAX_ROWS) -> int:
    """Join old buckets to hours and delete those past their retention; return the number of rows that were dropped.

    Whole buckets are joined, at least one, so slightly more than `limit` rows may be.
    """
    fine = execute(tx, _FINE_BUCKETS, {"before": int(now - FINE_S), "limit": limit}).scalars()
    buckets = sorted(set(fine))
    if len(buckets) > 1:
        buckets.pop()  # it may be incomplete
    hours: list[dict[str, Any]] = []
    for row in execute_in_batches(tx, _BUCKET_ROWS, buckets):
        hours.append({**row._mapping, "bucket_at": row.bucket_at // HOUR_S * HOUR_S})
    _add_rows(tx, hours)
    execute_in_batches(tx, _DELETE_BUCKETS, buckets)
    expired = select(col(UsageRow.bucket_at)).where(col(UsageRow.bucket_at) < int(now - retention_s)).limit(limit)
    last = max(execute(tx, expired.order_by(col(UsageRow.bucket_at))).scalars(), default=None)
    removed = 0
    if last is not None:
        removed = execute(tx, delete(UsageRow).where(col(UsageRow.bucket_at) <= last)).rowcount
    return max(len(hours), removed)


@dataclass(frozen=True, slots=True)
class UsageObserver(ResultObserver):
    """Adds the work of each completed request to the usage of its session and its model."""

    store: Store
    settings: EngineSettings

    def observe_pass(
        self, queued: QueuedRequest, model: LiveModel, output: ForwardBackwardOutput, num_tokens: int, time: DeviceTime
    ) -> ObserverRows:
        """Count the tokens and the device seconds of a pass."""
        assert queued.model_pass is not None
        kind = "training" if queued.model_pass.backward else "forward"
        return _add(queued, model.model_id, [Work(kind=kind, tokens=num_tokens, device_s=time.device_s)])

    def observe_step(
        self, queued: QueuedRequest, model: LiveModel, output: OptimStepOutput, time: DeviceTime
    ) -> ObserverRows:
        """Count the device seconds of an optimizer step."""
        return _add(queued, model.model_id, [Work(kind="training", device_s=time.device_s)])

    def observe_sample(
        self, queued: QueuedRequest, request: Sample, output: SampleOutput, origin: Origin, now: float, device_s: float
    ) -> ObserverRows:
        """Count the tokens of a prompt, those that the prefix cache held, and those that were sampled."""
        num_cached = output.prompt.cache_hit_tokens
        num_sampled = sum(sequence.tokens.size for sequence in output.sequences)
        work = [
            Work(kind="prefill", tokens=request.prompt.size - num_cached),
            Work(kind="sampled", tokens=num_sampled, device_s=device_s),
        ]
        if num_cached:
            work.append(Work(kind="prefill_cached", tokens=num_cached))
        return _add(queued, origin.model_id, work)

    def observe_save(self, queued: QueuedRequest, model_id: ModelId) -> ObserverRows:
        """Count a save with a name."""
        return _add(queued, model_id, [Work(kind="checkpoint")])


def _add(queued: QueuedRequest, model_id: str, work: Sequence[Work]) -> ObserverRows:
    return lambda tx, now: usage.add(tx, queued.owner, queued.session_id, model_id, now, work)


RETENTION = (
    RetentionRule(name="usage", prune=lambda tx, clock: usage.prune(tx, clock.now)),
    RetentionRule(name="storage hours", expire=lambda tx, clock: billing.record_hour(tx, clock.now)),
)


Subject = Literal["owner", "project", "key", "session", "run", "day"]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)
MAX_LINES = 100_000
_COLUMNS: Mapping[Subject, GroupColumn] = {
    "owner": "owner",
    "project": "project_id",
    "key": "key_id",
    "session": "session_id",
    "run": "model_id",
    "day": "day",
}
_NAMES_OF_NONE: Mapping[Subject, str] = {"project": "no project", "key": "no key"}
_BASE_WEIGHTS = "base weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine:
    """The work of one subject. Costs are the sum of what has a price; None if nothing has."""

    subject: str
    training_tokens: int = 0
    """Tokens of forward and backward passes."""
    prefill_tokens: int = 0
    """Prompt tokens that were computed."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""
    sampled_tokens: int = 0
    checkpoints: int = 0
    """Saves with a name."""
    device_s: float = 0.0
    gigabyte_hours: float = 0.0
    """Storage of checkpoints, in units of 10^9 bytes for an hour; always 0 by key and by run."""
    cost_usd: float | None = None

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.training_tokens + self.prefill_tokens + self.cached_tokens + self.sampled_tokens


_FIELDS: Mapping[str, str] = {
    "training": "training_tokens",
    "forward": "training_tokens",
    "prefill": "prefill_tokens",
    "prefill_cached": "cached_tokens",
    "sampled": "sampled_tokens",
}


def read_usage_lines(
    tx: Session, owner: str | None, by: Subject, since: float, prices: Prices, *, until: float | None = None
) -> Sequence[UsageLine]:
    """Return a line for each subject with usage since a time, those with the most tokens first; days in order.

    `owner` None means all owners.
    """
    lines: dict[str, UsageLine] = {}
    for total in usage.read_totals(tx, owner, since, (_COLUMNS[by],), until=until, limit=MAX_LINES):
        name = _format_name(by, total.group[0])
        line = lines.get(name, UsageLine(subject=name))
        cost = compute_token_cost(prices, total.kind, total.tokens)
        if total.kind == "checkpoint":
            line = replace(line, checkpoints=line.checkpoints + total.requests)
        else:
            field = _FIELDS[total.kind]
            line = replace(line, **{field: getattr(line, field) + total.tokens})
        lines[name] = replace(line, device_s=line.device_s + total.device_s, cost_usd=_add_costs(line.cost_usd, cost))
    _add_storage(tx, lines, owner, by, since, until, prices)
    if by == "day":
        return sorted(lines.values(), key=lambda line: line.subject)
    return sorted(lines.values(), key=lambda line: (-line.tokens, line.subject))


def _add_storage(
    tx: Session,
    lines: dict[str, UsageLine],
    owner: str | None,
    by: Subject,
    since: float,
    until: float | None,
    prices: Prices,
) -> None:
    if by in ("key", "run"):  # storage is recorded by session
        return
    for hour in billing.read_hours(tx, owner, since, until, limit=MAX_LINES):
        values = {"owner": hour.owner, "project": hour.project_id, "session": hour.session_id, "day": hour.hour_at}
        name, stored = _format_name(by, values[by]), hour.num_bytes / GIGABYTE
        line = lines.get(name, UsageLine(subject=name))
        cost = _add_costs(line.cost_usd, compute_storage_cost(prices, stored))
        lines[name] = replace(line, gigabyte_hours=line.gigabyte_hours + stored, cost_usd=cost)


def _format_name(by: Subject, value: object) -> str:
    match by:
        case "day":
            assert isinstance(value, int)
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d")
        case "run":
            return str(value) or _BASE_WEIGHTS
        case _:
            return _NAMES_OF_NONE.get(by, "none") if value is None else str(value)


def _add_costs(total: float | None, more: float | None) -> float | None:
    return total if more is None else (total or 0.0) + more
