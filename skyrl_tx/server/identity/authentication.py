"""Authentication: who calls, and the server's secret for signed tokens and URLs.

A caller sends an API key or a token (JWT) that was issued for a key, and becomes a `Principal` with
an owner. All queries are limited to the rows of that owner.
"""

import hashlib
import hmac
import logging
import math
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, cast

import jwt
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from sqlmodel import Session

from skyrl_tx.server.errors import ApiError, Refusal
from skyrl_tx.server.http.connections import get_client_network
from skyrl_tx.server.identity.scopes import ADMIN_ONLY, FULL_SCOPES, check_scope
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import StoreUnreachable, keys
from skyrl_tx.store.audit import Actor
from skyrl_tx.store.database import Store
from skyrl_tx.store.keys import LOCAL_OWNER
from skyrl_tx.store.tables import ApiKeyRow, KeyScope

_log = logging.getLogger(__name__)
_KEY_FILE = "signing.key"
_KEY_BYTES = 32
_CACHE_S = 1.0
"""Maximum time in seconds until a new or revoked key takes effect."""
_MAX_CACHED = 1000
_TOKEN_LIFETIME_S = 12 * 3600
"""Lifetime of a token in seconds.

It can be long, because the server looks up the token's key with every use. A revoked key ends its
tokens, too.
"""
_ALGORITHM = "HS256"
_FORGIVE_S = 3.0
"""Seconds after which one wrong key is forgiven."""
_MAX_NETWORKS = 10_000

OWNER = "skyrl_tx.owner"
"""Key of the caller's owner in the ASGI scope of an authenticated request. Used for logging."""
USER_URN = "tml:user:"
ORGANIZATION = "self-hosted"
"""The name of the organization in tokens and key descriptions."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The secret of a data directory. Signatures stay valid after a restart of the server."""

    secret: bytes

    @classmethod
    def from_data_dir(cls, data_dir: Path) -> "SigningKey":
        """Read the key of a data directory, or create one.

        Raises ValueError if the file of the key does not have 32 bytes.
        """
        path = data_dir / _KEY_FILE
        if not path.exists():
            _write_once(path, secrets.token_bytes(_KEY_BYTES))
        secret = path.read_bytes()
        if len(secret) != _KEY_BYTES:
            raise ValueError(
                f"{path} holds {len(secret)} bytes, not a key of {_KEY_BYTES} bytes; delete it to create a new one"
            )
        return cls(secret)

    def sign(self, *parts: str) -> str:
        """Return the signature of these parts in this order. The first part names the purpose."""
        message = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()

    def verify(self, signature: str, *parts: str) -> bool:
        """Return whether this is the signature of these parts."""
        return hmac.compare_digest(self.sign(*parts).encode(), signature.encode())


def _write_once(path: Path, content: bytes) -> None:
    """Create a private file atomically. Does nothing if the file exists."""
    with NamedTemporaryFile(dir=path.parent) as file:  # readable by its owner only
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(file.name, path)


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller. An admin sees the rows of all owners."""

    owner: str
    scope: KeyScope = "user"
    key_id: int | None = None
    parent_key_id: int | None = None
    """Number of the key that created the caller's key, or None if an admin created it.

    The work of the caller counts for the quotas of that key, see `quota_key_id`.
    """

    @property
    def quota_key_id(self) -> int | None:
        """Number of the key whose quotas the caller's work counts for."""
        return self.parent_key_id or self.key_id

    @property
    def actor(self) -> Actor:
        """The caller as it appears in the audit log."""
        return Actor(self.owner, self.key_id)

    @property
    def is_admin(self) -> bool:
        """Whether the caller sees the rows of all owners."""
        return self.scope == "admin"

    @property
    def has_full_scope(self) -> bool:
        """Whether the caller may call all routes, except those for admins only.

        For other scopes, `scopes.get_scopes` decides.
        """
        return self.scope in FULL_SCOPES

    def can_act_for(self, owner: str | None) -> bool:
        """Return whether the caller has the rights of an owner. False if `owner` is None.

        Callers pass None if the row does not exist.
        """
        return owner is not None and (self.is_admin or owner == self.owner)

    @property
    def owner_filter(self) -> str | None:
        """The owner to limit queries to. None for an admin, who sees the rows of all owners."""
        return None if self.is_admin else self.owner


LOCAL_ADMIN = Principal(LOCAL_OWNER, "admin")
"""The caller of every request while authentication is disabled.

That is the case with --no-auth, and on loopback until the first key is created.
"""


class FailedKeys:
    """Limits wrong keys per network, so that guessing keys costs the server almost nothing.

    Each network has a token bucket: `limit` wrong keys at once, and one more every three seconds.
    For example, with `limit=20` a client may send 20 wrong keys at once. With `limit=0`, nothing is
    limited. The server remembers 10,000 networks and forgets the least recently recorded ones.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._forgiven_at: OrderedDict[str, float] = OrderedDict()
        """The time at which the bucket of a network will be full again."""

    def get_wait_s(self, address: str) -> float:
        """Return the number of seconds until another wrong key is allowed, or 0 if it is now."""
        if not self._limit:
            return 0.0
        with self._lock:
            left_s = self._forgiven_at.get(get_client_network(address), 0.0) - self._clock()
        return max(0.0, left_s - (self._limit - 1) * _FORGIVE_S)

    def record(self, address: str) -> None:
        """Record a wrong key."""
        network, now = get_client_network(address), self._clock()
        with self._lock:
            self._forgiven_at[network] = max(now, self._forgiven_at.pop(network, now)) + _FORGIVE_S
            if len(self._forgiven_at) > _MAX_NETWORKS:
                self._forgiven_at.popitem(last=False)


class Authenticator:
    """Authenticates callers by an API key or a token."""

    def __init__(self, settings: ApiSettings, store: Store, signing_key: SigningKey) -> None:
        self._settings = settings
        self._is_loopback = settings.is_loopback
        self._store = store
        self._secret = signing_key.sign("token")
        self._cache: dict[str, tuple[Principal, float]] = {}
        self._requires_key = not (settings.no_auth or self._is_loopback)
        self._failed = FailedKeys(settings.failed_key_limit)
        self._issued: tuple[frozenset[str], float] = frozenset(), -math.inf

    def requires_key(self) -> bool:
        """Return whether callers need a key.

        On loopback, this reads the database until the first key exists.
        """
        if not self._requires_key and not self._settings.no_auth:
            self._requires_key = self._store.read(keys.has_any)  # once True, it stays True
        return self._requires_key

    def get_cached(self, credential: str) -> Principal | None:
        """Return the principal that `authenticate` found within the last second. Runs no query."""
        if self._settings.no_auth:
            return LOCAL_ADMIN
        principal, until = self._cache.get(credential, (None, 0.0))
        return principal if until > time.monotonic() else None

    def authenticate(self, credential: str, address: str) -> Principal:
        """Authenticate a credential.

        Raises:
            ApiError: 401 if the credential is invalid. 429 if it was never issued and too many
                wrong keys came from this address. Valid credentials are still accepted from the
                address, because users may share it.
        """
        if (cached := self.get_cached(credential)) is not None:
            return cached

        if (wait_s := self._failed.get_wait_s(address)) and not self._is_issued(credential):
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "X-API-Key: too many wrong keys came from this address",
                headers={"Retry-After": str(math.ceil(wait_s))},
                reason="throttled",
            )

        valid_until = time.monotonic() + _CACHE_S  # starts before the query, and only a query extends it
        try:
            principal = self._store.read(lambda tx: self.find_principal(tx, credential))
        except StoreUnreachable:
            # The database is down. A known caller gets the endpoint's own error.
            known, _ = self._cache.get(credential, (None, 0.0))
            if known is None:
                raise
            return known
        except ApiError:
            if credential and not self._is_issued(credential):
                self._failed.record(address)
            raise

        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[credential] = principal, valid_until
        return principal

    def _is_issued(self, credential: str) -> bool:
        """Return whether this server ever issued a credential.

        Runs at most one query per second.
        """
        if not credential.startswith("tml-"):
            try:
                self._read_claims(credential, verify_exp=False)
            except jwt.PyJWTError:
                return False
            return True
        digests, read_at = self._issued
        if read_at < time.monotonic() - _CACHE_S:
            digests = self._store.read(keys.list_digests)
            self._issued = digests, time.monotonic()
        return keys.hash_key(credential) in digests

    def clear_cache(self) -> None:
        """Forget all cached principals, so that the next calls query the database."""
        self._cache.clear()

    def issue_token(self, principal: Principal) -> str:
        """Issue a JWT for a principal. The SDK reads the caller's identity from its claims."""
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

    def find_principal(self, tx: Session, credential: str) -> Principal:
        """Look up the principal of a credential.

        Raises ApiError 401 if the credential is invalid.
        """
        if self._is_disabled(tx):
            return LOCAL_ADMIN
        if not credential:
            raise _make_unauthorized_error(
                "X-API-Key: missing; this server asks for a key, made with `skyrl-tx keys create`",
                reason="missing_key",
            )

        if credential.startswith("tml-"):
            row = keys.find(tx, credential)
            if row is None:
                raise _make_unauthorized_error("X-API-Key: unknown or revoked key")
        else:
            row = keys.get(tx, self._read_key_id(credential))
            if row is None:
                raise _make_unauthorized_error(
                    "X-API-Key: the key of this token has been revoked", is_token=True, reason="ended_key"
                )
        return self._use_key(row, is_token=not credential.startswith("tml-"))

    def find_key_principal(self, tx: Session, key_id: int | None) -> Principal | None:
        """Look up the principal of a key by the key's number.

        `key_id` is None if authentication was disabled when the number was recorded. Returns None
        if the key has ended, or if `key_id` is None and authentication is enabled now.
        """
        if key_id is None:
            return LOCAL_ADMIN if self._is_disabled(tx) else None
        row = keys.get(tx, key_id)
        if row is None or keys.get_status(row, time.time()) != "valid":
            return None
        return Principal(row.owner, row.scope, row.key_id, row.parent_id)

    def _is_disabled(self, tx: Session) -> bool:
        return self._settings.no_auth or (self._is_loopback and not keys.has_any(tx))

    def _use_key(self, row: ApiKeyRow, *, is_token: bool) -> Principal:
        """Return the principal of a key, and record the use.

        Raises ApiError 401 if the key has expired.
        """
        now = time.time()
        if row.expires_at is not None and keys.get_status(row, now) == "expired":
            at = datetime.fromtimestamp(row.expires_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            raise _make_unauthorized_error(
                f"X-API-Key: this key expired at {at}; ask for a new one", is_token=is_token, reason="ended_key"
            )
        assert row.key_id is not None
        if keys.is_use_due(row, now):
            self._store.write_soon(lambda tx, used=row.key_id: keys.record_use(tx, used, now)).add_done_callback(
                _log_failure
            )
        return Principal(row.owner, row.scope, row.key_id, row.parent_id)

    def _read_key_id(self, token: str) -> int:
        """Return the key id in a token. Raises ApiError 401 if the token is invalid."""
        try:
            key_id = self._read_claims(token).get("key_id")
        except jwt.PyJWTError as error:
            raise _make_unauthorized_error(
                f"X-API-Key: neither a key nor a token of this server ({error})", is_token=True
            ) from error
        if not isinstance(key_id, int):
            raise _make_unauthorized_error(
                "X-API-Key: this token was issued while authentication was disabled", is_token=True
            )
        return key_id

    def _read_claims(self, token: str, *, verify_exp: bool = True) -> dict[str, object]:
        """Return the claims of a token of this server. Raises jwt.PyJWTError for other tokens."""
        return jwt.decode(  # pyright: ignore[reportUnknownMemberType]
            token, self._secret, algorithms=[_ALGORITHM], options={"verify_exp": verify_exp}
        )


def _log_failure(written: Future[None]) -> None:
    if (error := written.exception()) is not None:
        _log.warning("could not record the last use of an API key: %s", error)


def _make_unauthorized_error(detail: str, *, is_token: bool = False, reason: Refusal = "wrong_key") -> ApiError:
    """Return a 401. With `is_token`, the SDK then fetches a new token (RFC 6750, section 3)."""
    challenge = 'Bearer error="invalid_token"' if is_token else "Bearer"
    return ApiError(HTTPStatus.UNAUTHORIZED, detail, headers={"WWW-Authenticate": challenge}, reason=reason)


async def authenticate_request(request: Request) -> Principal:
    """Authenticate the caller of a request.

    Raises:
        ApiError: 401 or 429 as in `Authenticator.authenticate`. 403 if the scope of the key does
            not allow the route.
    """
    return await authenticate_credential(request, read_credential(request))


async def authenticate_credential(request: Request, credential: str) -> Principal:
    """Authenticate a caller by a credential. Raises the errors of `authenticate_request`."""
    authenticator = cast(Authenticator, request.app.state.authenticator)
    principal = authenticator.get_cached(credential)
    if principal is None:
        address = "" if request.client is None else request.client.host
        principal = await run_in_threadpool(authenticator.authenticate, credential, address)
    request.scope[OWNER] = principal.owner
    if not principal.has_full_scope or (request.scope["path"] in ADMIN_ONLY and not principal.is_admin):
        check_scope(principal.scope, request)
    return principal


def read_credential(request: Request) -> str:
    """Return the credential of a request. "" if there is none.

    The SDK sends the credential as X-API-Key. OpenAI clients send the credential as a bearer token.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")


Caller = Annotated[Principal, Depends(authenticate_request)]
