"""What a hosted business would charge: nothing. What is stored is counted all the same."""

import time
from datetime import datetime

from fastapi import APIRouter

from skyrl_tx.api.context import Incoming
from skyrl_tx.api.principal import USER_URN
from skyrl_tx.api.schemas.billing import StorageAnswer, StoredItem, UsageAnswer
from skyrl_tx.store import storage

router = APIRouter()

_GIGABYTE = 10**9


@router.get("/billing/usage/events")
def usage(call: Incoming, starting_on: datetime, ending_before: datetime) -> UsageAnswer:
    """No usage is billed, in any hour."""
    return UsageAnswer()


@router.get("/billing/usage/checkpoints/current")
def stored(call: Incoming, project_id: str | None = None) -> StorageAnswer:
    """What the caller's checkpoints take (an admin: everyone's), at a price of zero."""
    found = call.store.read(lambda tx: storage.of_owners(tx, call.caller.reach, project_id, time.time()))
    return StorageAnswer(
        data=[
            StoredItem(
                project_id=project,
                org_user_urn=f"{USER_URN}{owner}",
                user_name=owner,
                checkpoint_count=what.num_checkpoints,
                size_bytes=what.num_bytes,
                size_gigabytes=what.num_bytes / _GIGABYTE,
            )
            for owner, project, what in found
        ]
    )
