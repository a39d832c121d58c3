"""Endpoints for usage, storage and the audit log.

A caller sees only its own usage and storage. An admin sees the usage and storage of all owners. The
SDK defines the responses in `types/billing_usage_response.py` and `types/audit_log_response.py`.
"""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from sqlmodel import Session

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.prices import (
    GIGABYTE,
    HOURS_PER_MONTH,
    Prices,
    TeamsSettings,
    compute_storage_cost,
    compute_token_cost,
    get_price_per_million,
)
from skyrl_tx.apps.teams.usage import HOUR_S, GroupColumn, StorageHour, Total
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath, SessionId
from skyrl_tx.server.context import IncomingList
from skyrl_tx.server.errors import bad_request
from skyrl_tx.server.identity.authentication import USER_URN
from skyrl_tx.server.identity.scopes import API_PREFIX
from skyrl_tx.server.schemas.base import Response
from skyrl_tx.store import audit, checkpoints, sessions
from skyrl_tx.store.tables import AuditRow

router = APIRouter(prefix=API_PREFIX)
EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_MAX_ENTRIES = 100_000
MAX_DAYS = 14
"""The longest time window of a request."""
_MAX_EVENTS = 50_000
_EVENT_COLUMNS: tuple[GroupColumn, ...] = ("hour", "session_id", "owner", "project_id", "base_model")
"""There is one event for each combination of these columns and kind of work."""


class TrainingEvent(Response):
    """Tokens of forward and backward passes."""

    type: Literal["training"] = "training"
    token_count: int


class PrefillEvent(Response):
    """Prompt tokens, computed or from the prefix cache."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SampledEvent(Response):
    """Sampled tokens."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointEvent(Response):
    """Named saves."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageEvent(Response):
    """The storage of checkpoints in one hour, in gigabytes (10^9 bytes).

    The field `free` is left out, because SDK 0.30 refuses the field. The SDK treats a missing field
    as false.
    """

    type: Literal["storage"] = "storage"
    gigabyte_hours: float


EventInfo = TrainingEvent | PrefillEvent | SampledEvent | CheckpointEvent | StorageEvent


class UsageEvent(Response):
    """The usage of one kind, for example sampled tokens, in one hour of one session.

    The cost fields are set if this kind of usage has a price.
    """

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str
    user_name: str
    session_id: str | None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: Annotated[EventInfo, Field(discriminator="type")]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, or 0 for events without tokens."""
        return getattr(self.event_info, "token_count", 0)


class UsageSession(Response):
    """The metadata that a client gave its session."""

    user_metadata: dict[str, str] | None = None


class UsageResponse(Response):
    """Hourly events, ordered by hour, and within an hour by descending tokens.

    Costs are estimated with the current prices. Invoiced costs do not exist.
    """

    data: list[UsageEvent]
    sessions: dict[str, UsageSession]
    cost_data_through: datetime | None = None


class StoredItem(Response):
    """The storage of one owner's checkpoints in one project."""

    project_id: str | None
    org_user_urn: str
    user_email: str | None = None
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class StorageResponse(Response):
    """The storage of checkpoints by project and owner."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[StoredItem]


class AuditEntry(Response):
    """One action.

    The last three fields repeat details of checkpoint events, because some SDKs read them there.
    """

    timestamp: datetime
    event: str
    event_details: dict[str, str | int | float | bool]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditResponse(Response):
    """The entries of a day, in order."""

    entries: list[AuditEntry]


@router.get("/billing/usage/events")
def get_usage(call: IncomingList, starting_on: datetime, ending_before: datetime) -> UsageResponse:
    """Return the usage of up to 14 days by hour, session and kind."""
    start, end = check_window(starting_on, ending_before, datetime.now(UTC))
    settings, owner = call.context.settings, call.caller.owner_filter
    prices = settings.get_app_settings(TeamsSettings).prices
    return call.store.read(
        lambda tx: read_usage(tx, owner, start, end, prices=prices, base_model=settings.public_model_name)
    )


@router.get("/billing/usage/checkpoints/current")
def get_storage(call: IncomingList, project_id: str | None = None) -> StorageResponse:
    """Return the current storage of checkpoints by owner and project."""
    prices = call.context.settings.get_app_settings(TeamsSettings).prices
    stored = call.store.read(
        lambda tx: checkpoints.get_usage_by_owner(tx, call.caller.owner_filter, project_id, time.time())
    )

    return StorageResponse(
        effective_rate_usd_per_gigabyte_month=prices.storage,
        data=[
            StoredItem(
                project_id=project,
                org_user_urn=f"{USER_URN}{owner}",
                user_email=owner if "@" in owner else None,
                user_name=owner,
                # What is stored now, and what it would cost in a month
                checkpoint_count=storage.num_checkpoints,
                size_bytes=storage.num_bytes,
                size_gigabytes=storage.num_bytes / GIGABYTE,
                estimated_monthly_cost_usd=compute_storage_cost(prices, storage.num_bytes / GIGABYTE * HOURS_PER_MONTH),
            )
            for owner, project, storage in stored
        ],
    )


@router.get("/audit", response_model_exclude_none=True)
def get_audit_log(call: IncomingList, event_type: EventType = "all", day: date | None = None) -> AuditResponse:
    """Return the audit log of one day in UTC. The default is today."""
    day = day or datetime.now(UTC).date()
    try:
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        end = start + timedelta(days=1)
    except OverflowError:
        raise bad_request(f"day: {day} is outside the range of dates") from None
    resources = None if event_type == "all" else {event_type.removesuffix("s")}

    rows = call.store.read(
        lambda tx: audit.list_entries(
            tx, since=start.timestamp(), until=end.timestamp(), resources=resources, limit=_MAX_ENTRIES
        )
    )
    return AuditResponse(entries=[_describe_entry(row) for row in rows])


def check_window(starting_on: datetime, ending_before: datetime, now: datetime) -> tuple[int, int]:
    """Return the start and end of a time window in seconds since the epoch.

    Both must be the start of an hour. Raises ApiError 400, which names the parameter that is wrong.
    """
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
        raise bad_request(f"{name}: {at.isoformat()} is outside the range of dates in UTC") from None
    if at.minute or at.second or at.microsecond:
        raise bad_request(
            f"{name}: {at.isoformat()} is not the start of an hour in UTC, for example 2025-11-28T14:00:00Z"
        )
    return at


def read_usage(
    tx: Session, owner: str | None, start: int, end: int, *, prices: Prices, base_model: str
) -> UsageResponse:
    """Return the events from `start` until `end`.

    `owner` None means all owners. If the usage does not name a base model, because it is for base
    weights or for a run that was removed, its events get `base_model`. Raises ApiError 400 if there
    are too many events.
    """
    # Read the usage
    totals = usage.read_totals(tx, owner, start, _EVENT_COLUMNS, until=end, limit=_MAX_EVENTS)
    stored = usage.read_storage(tx, owner, start, end, limit=_MAX_EVENTS)
    if max(len(totals), len(stored)) >= _MAX_EVENTS:
        raise bad_request(f"ending_before: the window has more than {_MAX_EVENTS:,} events; ask for a shorter one")

    # Make the events, and add the metadata of their sessions
    events = [*_make_work_events(totals, prices, base_model), *_make_storage_events(stored, prices)]
    events.sort(key=lambda event: (event.bucket_start, -event.num_tokens))
    names = {SessionId(event.session_id) for event in events if event.session_id}
    metadata = sessions.get_metadata(tx, names)
    described: dict[str, UsageSession] = {}
    for name in sorted(names):
        texts = {key: str(value) for key, value in metadata.get(name, {}).items()}
        described[name] = UsageSession(user_metadata=texts or None)
    return UsageResponse(data=events, sessions=described)


def _make_work_events(totals: Sequence[Total], prices: Prices, base_model: str) -> Iterator[UsageEvent]:
    # Add up the tokens, or the number of checkpoints, by group and kind. Forward passes count as
    # training.
    merged: dict[tuple[Any, ...], int] = {}
    for total in totals:
        kind = "training" if total.kind == "forward" else total.kind
        key = (*total.group, kind)
        amount = total.requests if kind == "checkpoint" else total.tokens
        if amount:  # an optimizer step has no tokens
            merged[key] = merged.get(key, 0) + amount

    for (hour, session_id, owner, project_id, model, kind), amount in merged.items():
        yield _make_event(
            hour,
            session_id,
            owner,
            project_id,
            base_model=base_model if model is None else model,
            event_info=_make_info(kind, amount),
            estimated_cost_usd=compute_token_cost(prices, kind, amount),
            effective_rate_usd_per_million_tokens=get_price_per_million(prices, kind),
        )


def _make_info(kind: str, amount: int) -> EventInfo:
    match kind:
        case "training":
            return TrainingEvent(token_count=amount)
        case "sampled":
            return SampledEvent(token_count=amount)
        case "checkpoint":
            return CheckpointEvent(count=amount)
        case _:
            return PrefillEvent(cached=kind == "prefill_cached", token_count=amount)


def _make_storage_events(hours: Sequence[StorageHour], prices: Prices) -> Iterator[UsageEvent]:
    for hour in hours:
        gigabyte_hours = hour.num_bytes / GIGABYTE
        yield _make_event(
            hour.hour_at,
            hour.session_id,
            hour.owner,
            hour.project_id,
            event_info=StorageEvent(gigabyte_hours=gigabyte_hours),
            estimated_cost_usd=compute_storage_cost(prices, gigabyte_hours),
            effective_rate_usd_per_gigabyte_month=prices.storage,
        )


def _make_event(hour: int, session_id: str, owner: str, project_id: str | None, **values: object) -> UsageEvent:
    return UsageEvent.model_validate(
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


def _describe_entry(row: AuditRow) -> AuditEntry:
    known = {"actor": row.actor, "key_id": row.key_id, "tinker_path": row.path, **row.details}
    return AuditEntry.model_validate(
        {
            "timestamp": datetime.fromtimestamp(row.at, UTC),
            "event": row.event,
            "event_details": {name: value for name, value in known.items() if value is not None},
            "model_id": None if row.path is None else _read_model_id(row.path),
            "tinker_path": row.path,
            "purpose": row.details.get("purpose"),
        }
    )


def _read_model_id(path: str) -> str | None:
    try:
        return CheckpointPath.parse(path).model_id
    except UserError:
        return None
