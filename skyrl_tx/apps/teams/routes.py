"""Endpoints for usage, storage and the audit log.

A caller sees only its own usage and storage. An admin sees the usage and storage of all owners.
"""

import time
from datetime import UTC, date, datetime, timedelta
from typing import Literal

from fastapi import APIRouter

from skyrl_tx.apps.teams import billing, schemas
from skyrl_tx.apps.teams.prices import GIGABYTE, HOURS_PER_MONTH, TeamsSettings, compute_storage_cost
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath
from skyrl_tx.server.context import IncomingList
from skyrl_tx.server.errors import bad_request
from skyrl_tx.server.identity.authentication import USER_URN
from skyrl_tx.server.identity.scopes import API_PREFIX
from skyrl_tx.store import audit, checkpoints
from skyrl_tx.store.tables import AuditRow

router = APIRouter(prefix=API_PREFIX)
EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_MAX_ENTRIES = 100_000


@router.get("/billing/usage/events")
def get_usage(call: IncomingList, starting_on: datetime, ending_before: datetime) -> schemas.UsageResponse:
    """Return the usage of up to 14 days by hour, session and kind."""
    start, end = billing.check_window(starting_on, ending_before, datetime.now(UTC))
    settings, owner = call.context.settings, call.caller.owner_filter
    prices = settings.get_app_settings(TeamsSettings).prices
    return call.store.read(
        lambda tx: billing.read_usage(tx, owner, start, end, prices=prices, base_model=settings.public_model_name)
    )


@router.get("/billing/usage/checkpoints/current")
def get_storage(call: IncomingList, project_id: str | None = None) -> schemas.StorageResponse:
    """Return the current storage of checkpoints by owner and project."""
    prices = call.context.settings.get_app_settings(TeamsSettings).prices
    usage = call.store.read(
        lambda tx: checkpoints.get_usage_by_owner(tx, call.caller.owner_filter, project_id, time.time())
    )

    return schemas.StorageResponse(
        effective_rate_usd_per_gigabyte_month=prices.storage,
        data=[
            schemas.StoredItem(
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
            for owner, project, storage in usage
        ],
    )


@router.get("/audit", response_model_exclude_none=True)
def get_audit_log(call: IncomingList, event_type: EventType = "all", day: date | None = None) -> schemas.AuditResponse:
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
    return schemas.AuditResponse(entries=[_describe_entry(row) for row in rows])


def _describe_entry(row: AuditRow) -> schemas.AuditEntry:
    known = {"actor": row.actor, "key_id": row.key_id, "tinker_path": row.path, **row.details}
    purpose = row.details.get("purpose")
    return schemas.AuditEntry.model_validate(
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
