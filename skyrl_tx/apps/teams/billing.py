"""The usage of a time window as Tinker reports it: hourly events, and the storage of the checkpoints that exist.

The fields are those of the SDK (`types/billing_usage_response.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import delete, exists, insert, literal, select
from sqlmodel import Session, col

from skyrl_tx.apps.teams import billing, routes, usage
from skyrl_tx.apps.teams.tables import StorageHourRow
from skyrl_tx.apps.teams.usage import HOUR_S, RETENTION_S, GroupColumn, Total
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.server.context import bad_request
from skyrl_tx.server.identity.authentication import USER_URN
from skyrl_tx.store import sessions
from skyrl_tx.store.checkpoints import is_visible, sum_bytes
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import CheckpointRow, ModelRow, SessionRow

HOURS_PER_MONTH = 720
"""Hours of the month in which Tinker prices storage (SDK, `types/billing_usage_response.py`)."""


GIGABYTE = 10**9


_MILLION = 10**6


class Prices(BaseModel):
    """Prices in US dollars. Work without a price has no cost in reports."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    training: float | None = Field(default=None, ge=0)
    """US dollars for a million tokens of forward and backward passes; default: no costs are shown."""
    sampled: float | None = Field(default=None, ge=0)
    """US dollars for a million sampled tokens."""
    prefill: float | None = Field(default=None, ge=0)
    """US dollars for a million prompt tokens that were computed."""
    prefill_cached: float | None = Field(default=None, ge=0)
    """US dollars for a million prompt tokens that the prefix cache held."""
    storage: float | None = Field(default=None, ge=0)
    """US dollars for a gigabyte (10^9 bytes) of checkpoints during a month of 720 hours."""


class TeamsSettings(BaseModel):
    """Settings of usage reports."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    prices: Prices = Prices()
    """Prices in reports of usage; without one, reports show no cost."""


def get_price_per_million(prices: Prices, kind: str) -> float | None:
    """Return the price of a million tokens of a kind of `UsageRow`; None without one, and for other kinds."""
    match kind:
        case "training" | "forward":
            return prices.training
        case "sampled" | "prefill" | "prefill_cached":
            return getattr(prices, kind)
        case _:
            return None


def compute_token_cost(prices: Prices, kind: str, tokens: int) -> float | None:
    """Return the cost of tokens of a kind, if it has a price."""
    price = get_price_per_million(prices, kind)
    return None if price is None else price * tokens / _MILLION


def compute_storage_cost(prices: Prices, gigabyte_hours: float) -> float | None:
    """Return the cost of storage, if it has a price."""
    return None if prices.storage is None else prices.storage * gigabyte_hours / HOURS_PER_MONTH


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageHour:
    """The bytes of a session's checkpoints during one hour; `project_id` is the session's now."""

    hour_at: int
    session_id: SessionId
    owner: str
    project_id: str | None
    num_bytes: int


def record_hour(tx: Session, now: float) -> bool:
    """Record the storage of the current hour, unless that was done; return whether it was done now."""
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


def read_hours(
    tx: Session, owner: str | None, since: float, until: float | None = None, *, limit: int = 10_000
) -> Sequence[StorageHour]:
    """Return the recorded hours from `since` until `until`, in order; `owner` None means all owners."""
    row = StorageHourRow
    wanted = (
        select(col(row.hour_at), col(row.session_id), col(row.owner), col(SessionRow.project_id), col(row.num_bytes))
        .outerjoin(SessionRow, col(SessionRow.session_id) == col(row.session_id))
        .where(col(row.hour_at) >= int(since) // HOUR_S * HOUR_S)
        .order_by(col(row.hour_at), col(row.session_id))
        .limit(limit)
    )
    if until is not None:
        wanted = wanted.where(col(row.hour_at) < until)
    if owner is not None:
        wanted = wanted.where(col(row.owner) == owner)
    return [
        StorageHour(hour_at=hour_at, session_id=session_id, owner=of_owner, project_id=project_id, num_bytes=num_bytes)
        for hour_at, session_id, of_owner, project_id, num_bytes in execute(tx, wanted)
    ]


MAX_DAYS = 14


_MAX_EVENTS = 50_000


_GROUP: tuple[GroupColumn, ...] = ("hour", "session_id", "owner", "project_id", "base_model")


def check_window(starting_on: datetime, ending_before: datetime, now: datetime) -> tuple[int, int]:
    """Return the begin and the end of a window in seconds. Raises ApiError 400 naming the wrong bound."""
    start, end = _parse_hour("starting_on", starting_on), _parse_hour("ending_before", ending_before)
    if start > now:
        raise bad_request(f"starting_on: {start.isoformat()} is in the future")
    if end <= start:
        raise bad_request(f"ending_before: {end.isoformat()} is not after starting_on, {start.isoformat()}")
    if end - start > timedelta(days=MAX_DAYS):
        raise bad_request(f"ending_before: {end.isoformat()} is more than {MAX_DAYS} days after starting_on")
    return int(start.timestamp()), int(end.timestamp())


def _parse_hour(name: str, at: datetime) -> datetime:
    try:
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except OverflowError:
        raise bad_request(f"{name}: {at.isoformat()} is not a time that exists in UTC") from None
    if at.minute or at.second or at.microsecond:
        raise bad_request(f"{name}: {at.isoformat()} is not the begin of an hour in UTC")
    return at


def read_usage(
    tx: Session, owner: str | None, start: int, end: int, *, prices: Prices, base_model: str
) -> routes.UsageResponse:
    """Return the events from `start` until `end`; `owner` None means all owners.

    `base_model` names what was sampled from base weights, and the model of removed runs. Raises ApiError 400 if there
    are too many events.
    """
    totals = usage.read_totals(tx, owner, start, _GROUP, until=end, limit=_MAX_EVENTS)
    stored = billing.read_hours(tx, owner, start, end, limit=_MAX_EVENTS)
    if max(len(totals), len(stored)) >= _MAX_EVENTS:
        raise bad_request(f"ending_before: the window has more than {_MAX_EVENTS:,} events; ask for a shorter one")
    events = [*_make_work_events(totals, prices, base_model), *_make_storage_events(stored, prices)]
    events.sort(key=lambda event: (event.bucket_start, -event.num_tokens))
    names = {SessionId(event.session_id) for event in events if event.session_id}
    found = sessions.get_metadata(tx, names)
    metadata = {name: {key: str(value) for key, value in found.get(name, {}).items()} for name in sorted(names)}
    return routes.UsageResponse(
        data=events, sessions={name: routes.UsageSession(user_metadata=metadata[name] or None) for name in metadata}
    )


def _make_work_events(totals: Sequence[Total], prices: Prices, base_model: str) -> Iterator[routes.UsageEvent]:
    merged: dict[tuple[object, ...], int] = {}
    for total in totals:
        kind = "training" if total.kind == "forward" else total.kind  # forward passes cost as training does
        key = (*total.group, kind)
        amount = total.requests if kind == "checkpoint" else total.tokens
        if amount:  # an optimizer step has no tokens
            merged[key] = merged.get(key, 0) + amount
    for (hour, session_id, owner, project_id, model, kind), amount in merged.items():
        yield _make_event(
            int(str(hour)),
            str(session_id),
            str(owner),
            None if project_id is None else str(project_id),
            base_model=base_model if model is None else str(model),
            event_info=_make_info(str(kind), amount),
            estimated_cost_usd=compute_token_cost(prices, str(kind), amount),
            effective_rate_usd_per_million_tokens=get_price_per_million(prices, str(kind)),
        )


def _make_info(kind: str, amount: int) -> routes.EventInfo:
    match kind:
        case "training":
            return routes.TrainingEvent(token_count=amount)
        case "sampled":
            return routes.SampledEvent(token_count=amount)
        case "checkpoint":
            return routes.CheckpointEvent(count=amount)
        case _:
            return routes.PrefillEvent(cached=kind == "prefill_cached", token_count=amount)


def _make_storage_events(hours: Sequence[StorageHour], prices: Prices) -> Iterator[routes.UsageEvent]:
    for hour in hours:
        gigabyte_hours = hour.num_bytes / GIGABYTE
        yield _make_event(
            hour.hour_at,
            hour.session_id,
            hour.owner,
            hour.project_id,
            event_info=routes.StorageEvent(gigabyte_hours=gigabyte_hours),
            estimated_cost_usd=compute_storage_cost(prices, gigabyte_hours),
            effective_rate_usd_per_gigabyte_month=prices.storage,
        )


def _make_event(hour: int, session_id: str, owner: str, project_id: str | None, **values: object) -> routes.UsageEvent:
    return routes.UsageEvent.model_validate(
        {
            "bucket_start": datetime.fromtimestamp(hour, UTC),
            "bucket_end": datetime.fromtimestamp(hour + HOUR_S, UTC),
            "user_id": f"{USER_URN}{owner}",
            "user_name": owner,
            "session_id": session_id,
            "project_id": project_id,
            **values,
        }
    )
