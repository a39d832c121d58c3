"""Console sessions: who looks at a page, proven by a cookie that is good for pages alone."""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

import jwt
from sqlmodel import Session
from starlette.requests import Request
from starlette.responses import Response

from skyrl_tx.server.errors import ApiError
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


@dataclass(frozen=True, slots=True)
class Visitor:
    """The person who looks at a page, and the token that forms of this console session carry."""

    principal: Principal
    form_token: str

    @property
    def is_keyless(self) -> bool:
        """Whether the visitor came without a key, as an admin of a server that requires none."""
        return self.principal.key_id is None

    @property
    def may_change(self) -> bool:
        """Whether the visitor may send forms, which keys of scope `read` may not."""
        return self.principal.has_full_scope


class ConsoleSessions:
    """Issues and reads the cookie: a JWT that names the key of the visitor, which is looked up with every use.

    It is signed with a secret of its own, so that it is no credential of the API, and an API token is no cookie.
    """

    def __init__(self, authenticator: Authenticator, store: Store, signing_key: SigningKey) -> None:
        self._authenticator = authenticator
        self._store = store
        self._signing_key = signing_key
        self._secret = signing_key.sign("console")
        # Browsers share cookies between the ports of a host. Servers of other data directories use other names.
        self._name = f"skyrl-{signing_key.sign('console-cookie')[:8]}"

    def log_in(self, key: str, address: str) -> Principal:
        """Return the principal of a key. Raises ApiError 401, 429 after too many wrong keys, or 403 for its scope."""
        if not key.startswith(_KEY_PREFIX):
            raise ApiError(HTTPStatus.UNAUTHORIZED, f"that is no API key: keys begin with {_KEY_PREFIX}")
        try:
            principal = self._authenticator.authenticate(key, address)
        except ApiError as error:
            detail = error.detail.removeprefix("X-API-Key: ")
            raise ApiError(error.status, detail, error.headers) from error
        if principal.scope not in VIEWING_SCOPES:
            raise ApiError(HTTPStatus.FORBIDDEN, f"a key of scope {principal.scope} does not admit to the console")
        return principal

    def find_visitor(self, request: Request) -> Visitor | None:
        """Return who sent a request; None for a visitor who has to log in."""
        keyless = self._store.read(lambda tx: self._authenticator.find_key_principal(tx, None))
        if keyless is not None:
            return Visitor(keyless, self._signing_key.sign("console-form", "keyless"))
        claims = self._read_claims(request.cookies.get(self._get_cookie_name(request), ""))
        key_id, session = claims.get("key_id"), claims.get("jti")
        if not isinstance(key_id, int) or not isinstance(session, str):
            return None
        principal = self._store.read(lambda tx: self._authenticator.find_key_principal(tx, key_id))
        if principal is None or principal.scope not in VIEWING_SCOPES:
            return None
        return Visitor(principal, self._signing_key.sign("console-form", session))

    def set_cookie(self, request: Request, response: Response, principal: Principal) -> None:
        """Begin a console session with a response."""
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
            samesite="lax",  # so that a link in a chat opens; no GET has an effect
        )

    def clear_cookie(self, request: Request, response: Response) -> None:
        """End a console session with a response."""
        response.delete_cookie(
            self._get_cookie_name(request), path="/", secure=_is_secure(request), httponly=True, samesite="lax"
        )

    def _get_cookie_name(self, request: Request) -> str:
        return f"__Host-{self._name}" if _is_secure(request) else self._name

    def _read_claims(self, token: str) -> dict[str, object]:
        """Return the claims of a cookie; none if it is not one of this server or has expired."""
        try:
            return jwt.decode(  # pyright: ignore[reportUnknownMemberType]
                token, self._secret, algorithms=[_ALGORITHM], audience=_AUDIENCE
            )
        except jwt.PyJWTError:
            return {}


class FailedLogins:
    """Records failed log-ins in the audit log: at most one a second, with the number of those before it."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._recorded_at = 0.0
        self._num_omitted = 0

    def record(self, reason: str, address: str) -> None:
        """Record one; the reason never holds the key."""
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
    # Not `no-referrer`: with it browsers send the forms of our own pages with `Origin: null` (Fetch, section 4.6).
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
NO_STORE = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
"""The headers of everything but scripts and styles."""
FORM_TOKEN = "form_token"
"""The name of the field with the token of a form."""


def check_form(request: Request, sent_token: str, token: str) -> None:
    """Raise ApiError 403 unless a page of this server sent the form, to the session that the page was made for."""
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    is_own_site = site == "same-origin"
    is_own_origin = origin is not None and urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()
    if not (is_own_site if site is not None else is_own_origin) or (origin is not None and not is_own_origin):
        raise ApiError(HTTPStatus.FORBIDDEN, "this form was not sent by a page of this server")
    if not hmac.compare_digest(sent_token.encode(), token.encode()):
        raise ApiError(HTTPStatus.FORBIDDEN, "this form is too old: reload the page and send it again")
