"""Who is asking. Every row belongs to an owner, and every look-up is made for one."""

import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, cast

import jwt
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from sqlmodel import Session

from skyrl_tx.api.errors import ApiError
from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.api.signing import SigningKey
from skyrl_tx.store import keys
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreUnreachable
from skyrl_tx.store.keys import LOCAL_OWNER
from skyrl_tx.store.tables import ApiKeyRow

_REMEMBERED_S = 1.0
"""How late a new or a revoked key may be noticed."""
_MAX_REMEMBERED = 1000
_TOKEN_LIFETIME_S = 12 * 3600
"""Long, as a token is no better than its key: that one is looked up with every use."""
_ALGORITHM = "HS256"
USER_URN = "tml:user:"
ORGANIZATION = "self-hosted"
"""What clients are told where they ask for the name of a business."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The owner in whose name a call is made; an admin sees what is anyone's."""

    owner: str
    is_admin: bool = False
    key_id: int | None = None

    def may_see(self, owner: str | None) -> bool:
        """Whether what belongs to that owner exists for this caller; None: there is no such thing."""
        return owner is not None and (self.is_admin or owner == self.owner)

    @property
    def reach(self) -> str | None:
        """The owner to whom look-ups are confined; None: they are not."""
        return None if self.is_admin else self.owner


ANYONE = Principal(LOCAL_OWNER, is_admin=True)
"""Everyone, where no keys are asked for: the server listens where only its user is, or was told to trust all."""


class Gate:
    """Admits callers by a key, or by a token that was given for one; nothing else of them is believed."""

    def __init__(self, settings: ApiSettings, store: Store, signing_key: SigningKey) -> None:
        self._settings = settings
        self._store = store
        self._secret = signing_key.sign("token")
        self._remembered: dict[str, tuple[Principal, float]] = {}

    def remembered(self, credential: str) -> Principal | None:
        """The principal that `admit` found a moment ago, without a look at the database."""
        if self._settings.no_auth:
            return ANYONE
        principal, until = self._remembered.get(credential, (None, 0.0))
        return principal if until > time.monotonic() else None

    def admit(self, credential: str) -> Principal:
        """Find out who shows this; raises ApiError 401 if it opens nothing."""
        principal = self.remembered(credential) or self._found(credential)
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered[credential] = principal, time.monotonic() + _REMEMBERED_S
        return principal

    def _found(self, credential: str) -> Principal:
        try:
            return self._store.read(lambda tx: self._look(tx, credential))
        except StoreUnreachable:
            # Whom this process knows is told what is wrong in the way of what was called; nothing else can be had now.
            known, _ = self._remembered.get(credential, (None, 0.0))
            if known is None:
                raise
            return known

    def forget(self) -> None:
        """Look at the database anew for everyone who calls next."""
        self._remembered.clear()

    def token(self, principal: Principal) -> str:
        """Write a token for a principal: the form in which clients want to read who they are."""
        now = int(time.time())
        claims = {
            "sub": f"{USER_URN}{principal.owner}",
            "org_id": ORGANIZATION,
            "email": principal.owner if "@" in principal.owner else "",
            "iat": now,
            "exp": now + _TOKEN_LIFETIME_S,
            "key_id": principal.key_id,
        }
        return jwt.encode(claims, self._secret, algorithm=_ALGORITHM)  # pyright: ignore[reportUnknownMemberType]

    def _look(self, tx: Session, credential: str) -> Principal:
        if self._settings.is_loopback and not keys.any_made(tx):
            return ANYONE
        if not credential:
            raise _refused("X-API-Key: missing; this server asks for a key, made with `skyrl-tx keys create`")
        if credential.startswith("tml-"):
            row = keys.find(tx, credential)
            if row is None:
                raise _refused("X-API-Key: this server knows no such key, or it has been revoked")
        else:
            row = keys.get(tx, self._key_of(credential))
            if row is None:
                raise _refused("X-API-Key: the key that this token was made for has been revoked", is_token=True)
        return _principal_of(row)

    def _key_of(self, token: str) -> int:
        try:
            claims: dict[str, object] = jwt.decode(  # pyright: ignore[reportUnknownMemberType]
                token, self._secret, algorithms=[_ALGORITHM]
            )
        except jwt.PyJWTError as error:
            raise _refused(f"X-API-Key: neither a key nor a token of this server ({error})", is_token=True) from error
        key_id = claims.get("key_id")
        if not isinstance(key_id, int):
            raise _refused("X-API-Key: this token is of a time when no keys were asked for", is_token=True)
        return key_id


def _principal_of(row: ApiKeyRow) -> Principal:
    return Principal(row.owner, is_admin=row.scope == "admin", key_id=row.key_id)


def _refused(detail: str, *, is_token: bool = False) -> ApiError:
    """Write a 401; the word about tokens has the SDK fetch a new one (RFC 6750, section 3)."""
    challenge = 'Bearer error="invalid_token"' if is_token else "Bearer"
    return ApiError(HTTPStatus.UNAUTHORIZED, detail, headers={"WWW-Authenticate": challenge})


async def principal(request: Request) -> Principal:
    """Find out who calls."""
    gate = cast(Gate, request.app.state.gate)
    credential = request.headers.get("x-api-key", "")
    return gate.remembered(credential) or await run_in_threadpool(gate.admit, credential)


Caller = Annotated[Principal, Depends(principal)]
