"""Endpoints for usage and storage: of the caller, to admins of all owners."""

import time
from datetime import UTC, datetime

from fastapi import APIRouter

from skyrl_tx.apps.teams import billing
from skyrl_tx.apps.teams.prices import GIGABYTE, HOURS_PER_MONTH, TeamsSettings
from skyrl_tx.apps.teams.schemas import billing as schemas
from skyrl_tx.server.context import Incoming
from skyrl_tx.server.identity.authentication import USER_URN
from skyrl_tx.store import checkpoints

router = APIRouter()


@router.get("/billing/usage/events")
def usage(call: Incoming, starting_on: datetime, ending_before: datetime) -> schemas.UsageResponse:
    """Return the usage of each hour of at most 14 days, by session and kind."""
    start, end = billing.check_window(starting_on, ending_before, datetime.now(UTC))
    settings, owner = call.context.settings, call.caller.owner_filter
    prices = settings.for_app(TeamsSettings).prices
    return call.store.read(
        lambda tx: billing.read(tx, owner, start, end, prices=prices, base_model=settings.public_model_name)
    )


@router.get("/billing/usage/checkpoints/current")
def stored(call: Incoming, project_id: str | None = None) -> schemas.StorageResponse:
    """Report the storage of checkpoints by owner and project."""
    prices = call.context.settings.for_app(TeamsSettings).prices
    found = call.store.read(
        lambda tx: checkpoints.usage_by_owner(tx, call.caller.owner_filter, project_id, time.time())
    )
    return schemas.StorageResponse(
        effective_rate_usd_per_gigabyte_month=prices.storage,
        data=[
            schemas.StoredItem(
                project_id=project,
                org_user_urn=f"{USER_URN}{owner}",
                user_name=owner,
                checkpoint_count=what.num_checkpoints,
                size_bytes=what.num_bytes,
                size_gigabytes=what.num_bytes / GIGABYTE,
                estimated_monthly_cost_usd=prices.of_storage(what.num_bytes / GIGABYTE * HOURS_PER_MONTH),
            )
            for owner, project, what in found
        ],
    )
