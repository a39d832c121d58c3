"""Endpoints for the caller's API key."""

import time
from http import HTTPStatus

from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.server.context import Incoming
from skyrl_tx.server.errors import not_found
from skyrl_tx.server.identity.authentication import ORGANIZATION
from skyrl_tx.server.schemas import service as schemas
from skyrl_tx.store import audit, keys

router = APIRouter()

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

    def work(tx: Session) -> bool:
        now = time.time()
        is_revoked = keys.revoke(tx, key_id, now)
        if is_revoked:
            audit.record(tx, "organization_key_revoked", call.caller.actor, now, key=key_id, owner=call.caller.owner)
        return is_revoked

    if not call.store.write(work):
        raise not_found(_REVOKED)
    call.context.authenticator.clear_cache()
