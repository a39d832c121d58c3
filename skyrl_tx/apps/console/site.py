"""The console as a part of the HTTP application: routes, log-in, rendering, and errors as pages."""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from skyrl_tx import __version__
from skyrl_tx.apps.console import (
    audit_pages,
    checkpoint_pages,
    data_pages,
    format,
    key_pages,
    logged_pages,
    overview_pages,
    playground_pages,
    project_pages,
    quota_pages,
    run_pages,
    session_pages,
    usage_pages,
)
from skyrl_tx.apps.console.guard import FORM_TOKEN, SECURITY_HEADERS, check_form
from skyrl_tx.apps.console.login import ConsoleSessions, FailedLogins, Visitor
from skyrl_tx.apps.console.playground import playground_routes
from skyrl_tx.apps.console.static_files import StaticFiles
from skyrl_tx.apps.console.text import visible
from skyrl_tx.apps.console.visit import Handler, Page, PageTable, Visit
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.server.context import ApiContext, Call, base_url
from skyrl_tx.server.errors import ApiError, bad_request
from skyrl_tx.server.http.body import BodyLimits, read_body
from skyrl_tx.server.identity.authentication import OWNER
from skyrl_tx.store import audit
from skyrl_tx.store.errors import StoreError, ValueRefused

Form = Mapping[str, list[str]]
Endpoint = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(__name__)
TABLES: tuple[PageTable, ...] = (
    overview_pages.pages,
    run_pages.pages,
    logged_pages.pages,
    data_pages.pages,
    checkpoint_pages.pages,
    session_pages.pages,
    usage_pages.pages,
    project_pages.pages,
    quota_pages.pages,
    audit_pages.pages,
    key_pages.pages,
    playground_pages.pages,
)
_THREADS = 4
"""Pages that are made at once: they never take the threads of training requests."""
_FORM_LIMITS = BodyLimits(max_bytes=2**18)
_MAX_FIELDS = 2000
_DATA = "/console/data/"
_NO_STORE = {**SECURITY_HEADERS, "Cache-Control": "no-store"}


def create_routes(context: ApiContext) -> list[Route]:
    """Return the routes of the console."""
    console = Console(context)
    routes = [
        Route("/", console.home, methods=["GET"]),
        Route("/login", console.login_page, methods=["GET"]),
        Route("/login", console.log_in, methods=["POST"]),
        Route("/logout", console.log_out, methods=["POST"]),
        Route("/console/static/{digest}/{name:path}", console.static.serve, methods=["GET"]),
    ]
    for table in TABLES:
        for method, path, handler in table.entries:
            routes.append(Route(path, console.endpoint(handler, is_form=method == "POST"), methods=[method]))
    return [*routes, *playground_routes(context)]


def describe_session(call: Call, request: Request, session_id: SessionId) -> str | None:
    """Return a line with the address of a session's page."""
    if call.settings.no_console:
        return None
    return f"live: {base_url(call.settings, request)}/sessions/{session_id}"


class Console:
    """The console of one API process. It keeps no state of its own."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._sessions = ConsoleSessions(context.authenticator, context.store, context.signing_key)
        self._limiter = CapacityLimiter(_THREADS)
        self._failed_logins = FailedLogins(context.store)
        self.static = StaticFiles.load()
        self._templates = _environment(self.static)

    def endpoint(self, handler: Handler, *, is_form: bool) -> Endpoint:
        """Return the endpoint of a page or of a form."""

        async def serve(request: Request) -> Response:
            return await self._serve(request, partial(self._answer, handler, request, is_form=is_form))

        return serve

    async def home(self, request: Request) -> Response:
        """Go to the overview."""
        return _see_other("/overview")

    async def login_page(self, request: Request) -> Response:
        """Show the form for a key, unless the visitor is known."""

        def work(_: Form) -> Response:
            then = request.query_params.get("next", "")
            if self._sessions.visitor(request) is not None:
                return _see_other(_own_path(then))
            return self._render(request, None, _login_page(then))

        return await self._serve(request, work)

    async def log_in(self, request: Request) -> Response:
        """Exchange a key for a cookie."""

        def work(form: Form) -> Response:
            check_form(request, "", "")  # there is no session yet, so only the origin counts
            address = "" if request.client is None else request.client.host
            then = form.get("next", [""])[-1]
            try:
                principal = self._sessions.log_in(form.get("key", [""])[-1].strip(), address)
            except ApiError as error:
                self._failed_logins.record(error.detail, address)
                return self._render(request, None, _login_page(then, error))
            self._context.store.write(
                lambda tx: audit.record(tx, "organization_login", principal.actor, time.time(), address=address)
            )
            response = _see_other(_own_path(then))
            self._sessions.set_cookie(request, response, principal)
            return response

        return await self._serve(request, work)

    async def log_out(self, request: Request) -> Response:
        """Forget the cookie."""

        def work(form: Form) -> Response:
            visitor = self._sessions.visitor(request)
            if visitor is not None:
                check_form(request, form.get(FORM_TOKEN, [""])[-1], visitor.form_token)
            response = _see_other("/login")
            self._sessions.clear_cookie(request, response)
            return response

        return await self._serve(request, work)

    async def _serve(self, request: Request, work: Callable[[Form], Response]) -> Response:
        """Run work with the form of a request in a thread; its errors become pages."""
        try:
            form: Form = await _read_form(request) if request.method == "POST" else {}
            return await to_thread.run_sync(work, form, limiter=self._limiter)
        except ClientDisconnect:
            raise
        except Exception as error:
            return await to_thread.run_sync(self._error, request, error, limiter=self._limiter)

    def _answer(self, handler: Handler, request: Request, form: Form, *, is_form: bool) -> Response:
        visitor = self._visitor(request)
        if visitor is None:
            if is_form or "hx-request" in request.headers or request.url.path.startswith(_DATA):
                raise ApiError(HTTPStatus.UNAUTHORIZED, "your console session has ended: log in again")
            return _see_other("/login?" + urlencode({"next": request.url.path + _query(request)}))
        request.scope[OWNER] = visitor.principal.owner  # for the log
        if is_form:
            check_form(request, form.get(FORM_TOKEN, [""])[-1], visitor.form_token)
            if not visitor.may_change:
                raise ApiError(HTTPStatus.FORBIDDEN, f"a key of scope {visitor.principal.scope} only reads")
        visit = Visit(self._context, self._sessions, visitor, request, form, time.time())
        answer = handler(visit)
        if isinstance(answer, Page):
            return self._render(request, visit, answer)
        for name, value in _NO_STORE.items():
            answer.headers.setdefault(name, value)
        return answer

    def _visitor(self, request: Request) -> Visitor | None:
        """Return who asks; programs may send a key for the data of charts, as they do for the API."""
        key = request.headers.get("x-api-key", "")
        if not key or not request.url.path.startswith(_DATA):
            return self._sessions.visitor(request)
        address = "" if request.client is None else request.client.host
        return Visitor(self._sessions.log_in(key, address), "")

    def _error(self, request: Request, error: Exception) -> Response:
        about = {"owner": request.scope.get(OWNER)}
        match error:
            case ApiError():
                page = Page("error.jinja", {"detail": error.detail}, error.status, error.headers or {})
            case UserError() | ValueRefused():
                page = Page("error.jinja", {"detail": str(error)}, HTTPStatus.BAD_REQUEST)
            case StoreError():
                _log.error("%s %s: %s", request.method, request.url.path, error, extra=about)
                detail = "the database is not available; the server's log says why"
                page = Page("error.jinja", {"detail": detail}, HTTPStatus.SERVICE_UNAVAILABLE)
            case _:
                reference = secrets.token_hex(4)
                failed = "%s %s failed (reference %s)"
                _log.error(failed, request.method, request.url.path, reference, exc_info=error, extra=about)
                detail = f"internal error; the server's log has it under reference {reference}"
                page = Page("error.jinja", {"detail": detail}, HTTPStatus.INTERNAL_SERVER_ERROR)
        if request.url.path.startswith(_DATA):
            return JSONResponse(dict(page.values), page.status, headers={**_NO_STORE, **page.headers})
        return self._render(request, None, page)

    def _render(self, request: Request, visit: Visit | None, page: Page) -> Response:
        now = time.time()
        values: dict[str, Any] = {
            "visitor": None if visit is None else visit.visitor,
            "viewer": None if visit is None else visit.caller,
            "path": request.url.path,
            "now": now,
            "version": __version__,
            "form_token_name": FORM_TOKEN,
            "status": page.status,
        }
        html = self._templates.get_template(page.template).render(values | dict(page.values))
        return Response(html, page.status, headers={**_NO_STORE, **page.headers}, media_type="text/html; charset=utf-8")


def _environment(static: StaticFiles) -> Environment:
    """Return the templates: text of users is escaped, made visible and bounded wherever it is written."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = cast(dict[str, object], environment.globals)  # pyright: ignore[reportUnknownMemberType]
    names["static"] = static.address
    filters: dict[str, Callable[..., object]] = {
        "count": format.count,
        "number": format.number,
        "size": format.size,
        "duration": format.duration,
        "ago": format.ago,
        "moment": format.moment,
        "iso": format.iso,
        "short_id": format.short_id,
        "clip": visible,
        "segment": _segment,
    }
    environment.filters.update(filters)
    return environment


def _segment(text: str) -> str:
    """Return text as one part of a path."""
    return quote(text, safe=":")


def _finalize(value: object) -> object:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


async def _read_form(request: Request) -> Form:
    """Receive the fields of a form. Raises ApiError 400 or 413."""
    body = await read_body(request, _FORM_LIMITS)
    try:
        return parse_qs(body.data().decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise bad_request(f"this form cannot be read: {error}") from error


def _login_page(then: str, error: ApiError | None = None) -> Page:
    values = {"next": _own_path(then), "problem": error and error.detail}
    if error is None:
        return Page("login.jinja", values)
    kept = {name: value for name, value in (error.headers or {}).items() if name == "Retry-After"}
    return Page("login.jinja", values, error.status, kept)


def _own_path(path: str) -> str:
    """Return a path of this server to go to; the overview instead of anything that may lead elsewhere."""
    parts = urlsplit(path) if len(path) < 1000 and "\\" not in path and path.isprintable() else None
    is_own = parts is not None and not parts.scheme and not parts.netloc and path.startswith("/") and path[1:2] != "/"
    return path if is_own and not path.startswith(("/login", "/logout")) else "/overview"


def _query(request: Request) -> str:
    return f"?{request.url.query}" if request.url.query else ""


def _see_other(path: str) -> Response:
    return RedirectResponse(path, HTTPStatus.SEE_OTHER, headers=_NO_STORE)
