"""Protection of the pages: response headers, and the check that a form was sent by a page of this server."""

import hmac
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.requests import Request

from skyrl_tx.server.errors import ApiError

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
