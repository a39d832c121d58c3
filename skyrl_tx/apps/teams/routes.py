"""Endpoints for usage, storage and the audit log: of the caller, to admins of all owners."""

import time
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field

from skyrl_tx.apps.teams import billing, routes
from skyrl_tx.apps.teams.billing import GIGABYTE, HOURS_PER_MONTH, TeamsSettings, compute_storage_cost
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath
from skyrl_tx.server.context import Incoming, bad_request
from skyrl_tx.server.identity.access import API_PREFIX
from skyrl_tx.server.identity.authentication import USER_URN
from skyrl_tx.server.schemas.service import Response
from skyrl_tx.store import audit, checkpoints
from skyrl_tx.store.tables import AuditRow

router = APIRouter(prefix=API_PREFIX)
EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_MAX_ENTRIES = 100_000


@router.get("/billing/usage/events")
def get_usage(call: Incoming, starting_on: datetime, ending_before: datetime) -> routes.UsageResponse:
    """Return the usage of each hour of at most 14 days, by session and kind."""
    start, end = billing.check_window(starting_on, ending_before, datetime.now(UTC))
    settings, owner = call.context.settings, call.caller.owner_filter
    prices = settings.get_app_settings(TeamsSettings).prices
    return call.store.read(
        lambda tx: billing.read_usage(tx, owner, start, end, prices=prices, base_model=settings.public_model_name)
    )


@router.get("/billing/usage/checkpoints/current")
def get_storage(call: Incoming, project_id: str | None = None) -> routes.StorageResponse:
    """Report the storage of checkpoints by owner and project."""
    prices = call.context.settings.get_app_settings(TeamsSettings).prices
    found = call.store.read(
        lambda tx: checkpoints.get_usage_by_owner(tx, call.caller.owner_filter, project_id, time.time())
    )
    return routes.StorageResponse(
        effective_rate_usd_per_gigabyte_month=prices.storage,
        data=[
            routes.StoredItem(
                project_id=project,
                org_user_urn=f"{USER_URN}{owner}",
                user_name=owner,
                checkpoint_count=what.num_checkpoints,
                size_bytes=what.num_bytes,
                size_gigabytes=what.num_bytes / GIGABYTE,
                estimated_monthly_cost_usd=compute_storage_cost(prices, what.num_bytes / GIGABYTE * HOURS_PER_MONTH),
            )
            for owner, project, what in found
        ],
    )


@router.get("/audit", response_model_exclude_none=True)
def get_audit_log(call: Incoming, event_type: EventType = "all", day: date | None = None) -> routes.AuditResponse:
    """Return what was done on one day in UTC, today by default, to checkpoints, projects and keys."""
    day = day or datetime.now(UTC).date()
    try:
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        end = start + timedelta(days=1)
    except OverflowError:
        raise bad_request(f"day: {day} is not a day that has an end") from None
    resources = None if event_type == "all" else {event_type.removesuffix("s")}
    found = call.store.read(
        lambda tx: audit.list_entries(
            tx, since=start.timestamp(), until=end.timestamp(), resources=resources, limit=_MAX_ENTRIES
        )
    )
    return routes.AuditResponse(entries=[_describe_entry(each) for each in found])


def _describe_entry(row: AuditRow) -> routes.AuditEntry:
    known = {"actor": row.actor, "key_id": row.key_id, "tinker_path": row.path, **row.details}
    purpose = row.details.get("purpose")
    return routes.AuditEntry.model_validate(
        {
            "timestamp": datetime.fromtimestamp(row.at, UTC),
            "event": row.event,
            "event_details": {name: value for name, value in known.items() if value is not None},
            "model_id": None if row.path is None else _read_model_id(row.path),
            "tinker_path": row.path,
            "purpose": purpose,
        }
    )


def _read_model_id(path: str) -> str | None:
    try:
        return CheckpointPath.parse(path).model_id
    except UserError:
        return None


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
    """Saves with a name."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageEvent(Response):
    """Checkpoints that existed for an hour, in gigabytes of 10^9 bytes.

    `free` is left out, which means false: SDK 0.30 refuses it.
    """

    type: Literal["storage"] = "storage"
    gigabyte_hours: float


EventInfo = TrainingEvent | PrefillEvent | SampledEvent | CheckpointEvent | StorageEvent


class UsageEvent(Response):
    """The usage of one kind in one hour of one session. Costs are there for kinds with a price."""

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
        """Tokens of the event; 0 for other kinds."""
        return getattr(self.event_info, "token_count", 0)


class UsageSession(Response):
    """A session as its client described it."""

    user_metadata: dict[str, str] | None = None


class UsageResponse(Response):
    """Hourly events, by hour and then by tokens. Prices are those of now, so there are no invoiced costs."""

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
    """One act. The last three fields repeat details of events about checkpoints, for SDKs that read them there."""

    timestamp: datetime
    event: str
    event_details: dict[str, str | int | float | bool]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditResponse(Response):
    """The entries of a day, in order."""

    entries: list[AuditEntry]
