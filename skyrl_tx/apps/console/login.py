"""Log-in to the console, session cookies, security headers, and protection against forged forms."""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import jwt
from sqlmodel import Session
from starlette.requests import Request
from starlette.responses import Response

from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.connections import get_client_network
from skyrl_tx.server.identity.authentication import Authenticator, Principal, SigningKey
from skyrl_tx.store import audit
from skyrl_tx.store.audit import Actor
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import KeyScope

LIFETIME_S = 12 * 3600
_FAILED_LOGIN_EVERY_S = 1.0
_ALGORITHM = "HS256"
_AUDIENCE = "console"
_KEY_PREFIX = "tml-"
VIEWING_SCOPES: frozenset[KeyScope] = frozenset({"admin", "user", "read"})
"""Keys of these scopes can log in."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "font-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    # With `no-referrer`, browsers would send our own forms with `Origin: null` (Fetch, section 4.6)
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
PAGE_HEADERS = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
"""Headers of all responses except scripts and styles."""
FORM_TOKEN = "form_token"
"""Name of the form field with the token of the console session."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """The person who looks at a page. Every form of the console session must have `form_token`."""

    principal: Principal
    form_token: str

    @property
    def is_keyless(self) -> bool:
        """Whether the visitor has no key. Such a visitor is an admin, because no key is required."""
        return self.principal.key_id is None

    @property
    def may_change(self) -> bool:
        """Whether the visitor may send forms. Keys of scope `read` may not."""
        return self.principal.has_full_scope


class ConsoleSessions:
    """Issues and reads the session cookie.

    The cookie is a JWT with the id of the visitor's API key. The key is looked up on each request,
    so revoking it ends the session. The JWT is signed with a separate secret, so a cookie cannot be
    used for the API, nor an API token as a cookie.
    """

    def __init__(self, authenticator: Authenticator, store: Store, signing_key: SigningKey) -> None:
        self._authenticator = authenticator
        self._store = store
        self._signing_key = signing_key
        self._secret = signing_key.sign("console")
        # Browsers share cookies between all ports of a host. The name keeps servers on one host
        # apart.
        self._name = f"skyrl-{signing_key.sign('console-cookie')[:8]}"

    def authenticate_key(self, key: str, address: str) -> Principal:
        """Return the principal of a key that a visitor logs in with.

        Raises ApiError 401 for a wrong key, 429 after too many wrong keys, and 403 if the scope of
        the key does not allow to log in.
        """
        if not key.startswith(_KEY_PREFIX):
            raise ApiError(HTTPStatus.UNAUTHORIZED, f"this is not an API key: API keys begin with {_KEY_PREFIX}")
        try:
            principal = self._authenticator.authenticate(key, address)
        except ApiError as error:
            detail = error.detail.removeprefix("X-API-Key: ")
            raise ApiError(error.status, detail, error.headers) from error
        if principal.scope not in VIEWING_SCOPES:
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                f"you cannot log in to the console with a key of scope {principal.scope}; use a key of scope admin, "
                "user or read",
            )
        return principal

    def name_visitor(self, request: Request) -> str:
        """Return a name for the visitor who sent a request: the key in the cookie, or the network.

        The database is not read, so the key may be revoked or may have expired.
        """
        key_id = self._read_claims(request).get("key_id")
        address = "" if request.client is None else request.client.host
        return get_client_network(address) if key_id is None else f"key {key_id}"

    def find_visitor(self, request: Request) -> Visitor | None:
        """Return the visitor who sent a request, or None if the visitor has to log in."""
        # A server without keys admits everyone
        keyless = self._store.read(lambda tx: self._authenticator.find_key_principal(tx, None))
        if keyless is not None:
            return Visitor(keyless, self._signing_key.sign("console-form", "keyless"))

        # Look up the key in the cookie
        claims = self._read_claims(request)
        key_id, session = claims.get("key_id"), claims.get("jti")
        if not isinstance(key_id, int) or not isinstance(session, str):
            return None
        principal = self._store.read(lambda tx: self._authenticator.find_key_principal(tx, key_id))
        if principal is None or principal.scope not in VIEWING_SCOPES:
            return None
        return Visitor(principal, self._signing_key.sign("console-form", session))

    def set_cookie(self, request: Request, response: Response, principal: Principal) -> None:
        """Start a console session: set its cookie in a response."""
        now = int(time.time())
        claims = {
            "aud": _AUDIENCE,
            "iat": now,
            "exp": now + LIFETIME_S,
            "jti": secrets.token_hex(16),
            "key_id": principal.key_id,
        }
        token = jwt.encode(claims, self._secret, algorithm=_ALGORITHM)  # pyright: ignore[reportUnknownMemberType]

        response.set_cookie(
            self._get_cookie_name(request),
            token,
            max_age=LIFETIME_S,
            path="/",
            secure=_is_secure(request),
            httponly=True,
            # Links from other sites work with "lax". This is safe because no GET request changes
            # anything.
            samesite="lax",
        )

    def clear_cookie(self, request: Request, response: Response) -> None:
        """End a console session: delete its cookie in a response."""
        response.delete_cookie(
            self._get_cookie_name(request), path="/", secure=_is_secure(request), httponly=True, samesite="lax"
        )

    def _get_cookie_name(self, request: Request) -> str:
        return f"__Host-{self._name}" if _is_secure(request) else self._name

    def _read_claims(self, request: Request) -> dict[str, object]:
        """Return the claims of the cookie, empty if there is none, or it is invalid or has expired."""
        token = request.cookies.get(self._get_cookie_name(request), "")
        try:
            return jwt.decode(  # pyright: ignore[reportUnknownMemberType]
                token, self._secret, algorithms=[_ALGORITHM], audience=_AUDIENCE
            )
        except jwt.PyJWTError:
            return {}


class FailedLogins:
    """Records failed log-ins in the audit log, at most one per second.

    Each entry has the number of failed log-ins that were not recorded since the previous entry.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._recorded_at = 0.0
        self._num_omitted = 0

    def record(self, reason: str, address: str) -> None:
        """Record a failed log-in. `reason` must not contain the key."""
        now = self._clock()
        with self._lock:
            if 0 <= now - self._recorded_at < _FAILED_LOGIN_EVERY_S:
                self._num_omitted += 1
                return
            self._recorded_at, omitted, self._num_omitted = now, self._num_omitted, 0

        def work(tx: Session) -> None:
            audit.record(
                tx,
                "organization_login_failed",
                Actor("unknown"),
                now,
                reason=reason,
                address=address,
                omitted_before=omitted or None,
            )

        self._store.write(work)


def _is_secure(request: Request) -> bool:
    return request.url.scheme == "https"


def check_form(request: Request, sent_token: str, token: str) -> None:
    """Raise ApiError 403 unless a form comes from this server and from the same console session."""
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    is_own_site = site == "same-origin"
    host = request.headers.get("host", "").lower()
    is_own_origin = origin is not None and origin.partition("://")[2].lower() == host
    if not (is_own_site if site is not None else is_own_origin) or (origin is not None and not is_own_origin):
        raise ApiError(HTTPStatus.FORBIDDEN, "this form was sent by a page of another site, so it was refused")
    if not hmac.compare_digest(sent_token.encode(), token.encode()):
        raise ApiError(
            HTTPStatus.FORBIDDEN, "this form belongs to an earlier console session: reload the page and send it again"
        )
