"""A caller's own key: exchanged for a token, described, revoked."""

import time
from http import HTTPStatus

from fastapi import APIRouter

from skyrl_tx.api.context import Incoming
from skyrl_tx.api.errors import not_found
from skyrl_tx.api.principal import ORGANIZATION
from skyrl_tx.api.schemas.auth import KeyAnswer, KeyDetails, Organization, TokenAnswer, User
from skyrl_tx.store import keys

router = APIRouter()

_ENDED = "the key has been revoked"
_NO_KEY_ASKED = KeyAnswer(
    key_id=0,
    name="any",
    note="this server asks for no keys",
    details=KeyDetails(org_details=Organization(name=ORGANIZATION), user_details=User(email=keys.LOCAL_OWNER)),
)


@router.post("/auth/token")
def token(call: Incoming) -> TokenAnswer:
    """Give a token for a key; a client shows it from then on, and reads in it who it is."""
    return TokenAnswer(jwt=call.parts.gate.token(call.caller))


@router.get("/auth/apikey/me")
def own_key(call: Incoming) -> KeyAnswer:
    """Describe the key that is shown."""
    key_id = call.caller.key_id
    if key_id is None:
        return _NO_KEY_ASKED
    row = call.store.read(lambda tx: keys.get(tx, key_id))
    if row is None:
        raise not_found(_ENDED)
    details = KeyDetails(org_details=Organization(name=ORGANIZATION), user_details=User(email=row.owner))
    return KeyAnswer(key_id=key_id, name=row.name, note=row.note, details=details)


@router.delete("/auth/apikey/me", status_code=HTTPStatus.NO_CONTENT)
def revoke_own_key(call: Incoming) -> None:
    """Revoke the key that is shown."""
    key_id = call.caller.key_id
    if key_id is None:
        raise not_found("this server asks for no keys, so there is none to revoke")
    if not call.store.write(lambda tx: keys.revoke(tx, key_id, time.time())):
        raise not_found(_ENDED)
    call.parts.gate.forget()
