"""Endpoints for the caller's API key, usage and storage."""

import time
from datetime import datetime
from http import HTTPStatus

from fastapi import APIRouter

from skyrl_tx.api.authentication import ORGANIZATION, USER_URN
from skyrl_tx.api.context import Incoming
from skyrl_tx.api.errors import not_found
from skyrl_tx.api.schemas import service as schemas
from skyrl_tx.store import checkpoints, keys

router = APIRouter()

_GIGABYTE = 10**9
_REVOKED = "the key has been revoked"
_AUTH_DISABLED = "authentication is disabled on this server"


@router.post("/auth/token")
def token(call: Incoming) -> dict[str, str]:
    """Exchange an API key for a token (JWT)."""
    return {"jwt": call.context.authenticator.issue_token(call.caller)}


@router.get("/auth/apikey/me")
def own_key(call: Incoming) -> schemas.KeyResponse:
    """Describe the caller's API key."""
    key_id = call.caller.key_id
    details = {"org_details": {"name": ORGANIZATION}, "user_details": {"email": call.caller.owner}}
    if key_id is None:
        return schemas.KeyResponse(key_id=0, name="any", note=_AUTH_DISABLED, details=details)
    row = call.store.read(lambda tx: keys.get(tx, key_id))
    if row is None:
        raise not_found(_REVOKED)
    return schemas.KeyResponse(key_id=key_id, name=row.name, note=row.note, details=details)


@router.delete("/auth/apikey/me", status_code=HTTPStatus.NO_CONTENT)
def revoke_own_key(call: Incoming) -> None:
    """Revoke the caller's API key."""
    key_id = call.caller.key_id
    if key_id is None:
        raise not_found(f"{_AUTH_DISABLED}: there is no key to revoke")
    if not call.store.write(lambda tx: keys.revoke(tx, key_id, time.time())):
        raise not_found(_REVOKED)
    call.context.authenticator.clear_cache()


@router.get("/billing/usage/events")
def usage(call: Incoming, starting_on: datetime, ending_before: datetime) -> dict[str, object]:
    """Return billed usage, which is empty."""
    return {"data": [], "sessions": {}, "cost_data_through": None}


@router.get("/billing/usage/checkpoints/current")
def stored(call: Incoming, project_id: str | None = None) -> schemas.StorageResponse:
    """Report the storage of checkpoints by owner and project; an admin sees all owners."""
    found = call.store.read(
        lambda tx: checkpoints.usage_by_owner(tx, call.caller.owner_filter, project_id, time.time())
    )
    return schemas.StorageResponse(
        data=[
            schemas.StoredItem(
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
