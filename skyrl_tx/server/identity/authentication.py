"""Authentication: API keys and tokens to principals, a limit for wrong keys, and the key that signs tokens and URLs.

Every row has an owner, and every query is made for one.
"""

import hashlib
import hmac
import ipaddress
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
from skyrl_tx.server.identity.scopes import ADMIN_ONLY, FULL_SCOPES, check_scope
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import keys
from skyrl_tx.store.audit import Actor
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreUnreachable
from skyrl_tx.store.keys import LOCAL_OWNER
from skyrl_tx.store.tables import ApiKeyRow, KeyScope

_log = logging.getLogger(__name__)
_KEY_FILE = "signing.key"
_KEY_BYTES = 32
_CACHE_S = 1.0
"""The longest time until a new or a revoked key is noticed."""
_MAX_CACHED = 1000
_TOKEN_LIFETIME_S = 12 * 3600
"""Long, because a token is worth no more than its key, which is looked up with every use."""
_ALGORITHM = "HS256"
_FORGIVE_S = 3.0
"""Seconds after which one wrong key is forgiven."""
_MAX_NETWORKS = 10_000
_IPV6_PREFIX = 64
"""A customer gets at least that many IPv6 addresses."""
OWNER = "skyrl_tx.owner"
"""Key of the caller's owner in the ASGI scope of an authenticated request, for the log."""
USER_URN = "tml:user:"
ORGANIZATION = "self-hosted"
"""The organization name in tokens and key descriptions."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The secret of a data directory. Signatures stay valid when the server restarts."""

    secret: bytes

    @classmethod
    def from_data_dir(cls, data_dir: Path) -> "SigningKey":
        """Read the directory's key, or create it. Raises ValueError for a file of another length."""
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
        """Return the signature of these parts, in this order. The first part names the purpose."""
        message = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()

    def verify(self, signature: str, *parts: str) -> bool:
        """Whether `sign` returns this signature for these parts."""
        return hmac.compare_digest(self.sign(*parts).encode(), signature.encode())


def _write_once(path: Path, content: bytes) -> None:
    """Create a private file atomically; a file that exists already stays."""
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

    @property
    def actor(self) -> Actor:
        """The caller as the audit log names it."""
        return Actor(self.owner, self.key_id)

    @property
    def is_admin(self) -> bool:
        """Whether the caller sees the rows of all owners."""
        return self.scope == "admin"

    @property
    def has_full_scope(self) -> bool:
        """Whether every route but those of admins alone is allowed; `scopes` lists those of other scopes."""
        return self.scope in FULL_SCOPES

    def can_act_for(self, owner: str | None) -> bool:
        """Whether the caller may do what that owner may. `owner` None: there is no such row."""
        return owner is not None and (self.is_admin or owner == self.owner)

    @property
    def owner_filter(self) -> str | None:
        """The owner whose rows queries are limited to; None for an admin, who sees all."""
        return None if self.is_admin else self.owner


LOCAL_ADMIN = Principal(LOCAL_OWNER, "admin")
"""Every caller while authentication is disabled: with --no-auth, or on loopback until the first key is created."""


class FailedKeys:
    """Limits wrong keys from one network, so that guessing them costs the server next to nothing.

    A token bucket of `limit` failures for each network, one refilled every three seconds.

    A `limit` of 0 counts nothing. Of the networks beyond 10,000 the least recently recorded are forgotten.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._forgiven_at: OrderedDict[str, float] = OrderedDict()
        """When the bucket of a network is full again."""

    def get_wait_s(self, address: str) -> float:
        """Return in how many seconds another failure is allowed; 0 if it is allowed now."""
        if not self._limit:
            return 0.0
        with self._lock:
            left_s = self._forgiven_at.get(_get_network(address), 0.0) - self._clock()
        return max(0.0, left_s - (self._limit - 1) * _FORGIVE_S)

    def record(self, address: str) -> None:
        """Record a wrong key."""
        network, now = _get_network(address), self._clock()
        with self._lock:
            self._forgiven_at[network] = max(now, self._forgiven_at.pop(network, now)) + _FORGIVE_S
            if len(self._forgiven_at) > _MAX_NETWORKS:
                self._forgiven_at.popitem(last=False)


def _get_network(address: str) -> str:
    """Return an IPv4 address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket, or no address
        return address
    return address if parsed.version == 4 else str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))


class Authenticator:
    """Authenticates callers by an API key, or by a token that was issued for one."""

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
        """Whether every caller needs a key. Reads the database on loopback until the first key exists."""
        if not self._requires_key and not self._settings.no_auth:
            self._requires_key = self._store.read(keys.has_any)  # never false again
        return self._requires_key

    def get_cached(self, credential: str) -> Principal | None:
        """Return the principal that `authenticate` found within the last second, without a query."""
        if self._settings.no_auth:
            return LOCAL_ADMIN
        principal, until = self._cache.get(credential, (None, 0.0))
        return principal if until > time.monotonic() else None

    def authenticate(self, credential: str, address: str) -> Principal:
        """Authenticate a credential. Raises ApiError 401 if it is invalid.

        Raises 429 for one that was never issued, if too many such came from the client's address. Valid ones are
        accepted from there all the same: users may share an address.
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
        valid_until = time.monotonic() + _CACHE_S  # counted from before the query, and never prolonged without one
        try:
            principal = self._store.read(lambda tx: self.find_principal(tx, credential))
        except StoreUnreachable:
            # A known caller gets the endpoint's own error for a database that is down; others get nothing.
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
        """Return whether this server ever issued a credential. Costs at most one query a second in all."""
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
        """Query the database for every credential again."""
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
        """Look up the principal of a credential. Raises ApiError 401 if it is invalid."""
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
        """Look up the principal of a key by its number, None while authentication is disabled; None if it has ended."""
        if key_id is None:
            return LOCAL_ADMIN if self._is_disabled(tx) else None
        row = keys.get(tx, key_id)
        if row is None or keys.get_status(row, time.time()) != "valid":
            return None
        return Principal(row.owner, row.scope, row.key_id)

    def _is_disabled(self, tx: Session) -> bool:
        return self._settings.no_auth or (self._is_loopback and not keys.has_any(tx))

    def _use_key(self, row: ApiKeyRow, *, is_token: bool) -> Principal:
        """Return the principal of a key that has not expired, and record its use. Raises ApiError 401 otherwise."""
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
        return Principal(row.owner, row.scope, row.key_id)

    def _read_key_id(self, token: str) -> int:
        """Return the key id in a token. Raises ApiError 401 for an invalid token."""
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
        """Return the claims of a token that this server signed. Raises jwt.PyJWTError otherwise."""
        return jwt.decode(  # pyright: ignore[reportUnknownMemberType]
            token, self._secret, algorithms=[_ALGORITHM], options={"verify_exp": verify_exp}
        )


def _log_failure(written: Future[None]) -> None:
    if (error := written.exception()) is not None:
        _log.warning("the use of an API key was not recorded: %s", error)


def _make_unauthorized_error(detail: str, *, is_token: bool = False, reason: Refusal = "wrong_key") -> ApiError:
    """Return a 401. `invalid_token` makes the SDK fetch a new token (RFC 6750, section 3)."""
    challenge = 'Bearer error="invalid_token"' if is_token else "Bearer"
    return ApiError(HTTPStatus.UNAUTHORIZED, detail, headers={"WWW-Authenticate": challenge}, reason=reason)


async def authenticate_request(request: Request) -> Principal:
    """Authenticate the caller of a request. Raises ApiError 401, 429 or, if its key's scope is too narrow, 403."""
    return await authenticate_credential(
        request, request.headers.get("x-api-key") or _read_bearer_token(request.headers.get("authorization", ""))
    )


async def authenticate_credential(request: Request, credential: str) -> Principal:
    """Authenticate a caller by a credential of its request. Raises as `authenticate_request` does."""
    authenticator = cast(Authenticator, request.app.state.authenticator)
    principal = authenticator.get_cached(credential)
    if principal is None:
        address = "" if request.client is None else request.client.host
        principal = await run_in_threadpool(authenticator.authenticate, credential, address)
    request.scope[OWNER] = principal.owner
    if not principal.has_full_scope or (request.scope["path"] in ADMIN_ONLY and not principal.is_admin):
        check_scope(principal.scope, request)
    return principal


def _read_bearer_token(authorization: str) -> str:
    """Return the credential of an Authorization header, as clients of OpenAI's API send it; "" if there is none."""
    scheme, _, credential = authorization.partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else ""


Caller = Annotated[Principal, Depends(authenticate_request)]
