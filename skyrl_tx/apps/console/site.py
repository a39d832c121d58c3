"""The console's routes: log-in, calls to the handlers of pages, rendering, and error pages."""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlencode

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from skyrl_tx import __version__
from skyrl_tx.apps.console import checkpoints, health, keys, overview, playground, runs, sessions, teams
from skyrl_tx.apps.console.login import FORM_TOKEN, PAGE_HEADERS, ConsoleSessions, FailedLogins, Visitor, check_form
from skyrl_tx.apps.console.rendering import StaticFiles, load_templates
from skyrl_tx.apps.console.visit import Handler, Page, PageTable, Visit, see_other
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.server.context import ApiCall, ApiContext, get_base_url
from skyrl_tx.server.errors import ApiError, bad_request, not_found
from skyrl_tx.server.http.body import BodyLimits, read_body
from skyrl_tx.server.identity.authentication import OWNER
from skyrl_tx.server.shares import OwnerBudget
from skyrl_tx.server.submission.validation import check_text, quote_value
from skyrl_tx.store import StoreError, ValueRefused, audit

Form = Mapping[str, list[str]]
Endpoint = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(__name__)
TABLES: tuple[PageTable, ...] = (
    overview.pages,
    runs.pages,
    checkpoints.pages,
    playground.pages,
    sessions.pages,
    teams.pages,
    keys.pages,
    health.pages,
)
"""The pages of all modules, in the order of the menu."""
_THREADS = 4
"""Number of threads that render pages. They are separate from the threads of API requests.

A visitor can use one of them at a time. Python runs only one thread at a time (GIL), so a second
thread would not finish the visitor's pages earlier, but would delay the requests of other owners.
"""
_FORM_LIMITS = BodyLimits(max_bytes=2**18)
_MAX_FIELDS = 2000
_DATA_PREFIX = "/console/data/"
"""Paths with data of charts. Programs can read it, too, and errors are JSON."""
_API_PREFIXES = ("/api/", "/v1/", "/console/", "/trackio/")
"""Paths without pages. An unknown path with such a prefix gets no error page, but the API's error."""


def create_routes(context: ApiContext) -> list[Route]:
    """Create the routes of the console."""
    console = Console(context)
    routes = [
        Route("/", console.redirect_to_overview, methods=["GET"]),
        Route("/login", console.show_login, methods=["GET"]),
        Route("/login", console.log_in, methods=["POST"]),
        Route("/logout", console.log_out, methods=["POST"]),
        Route("/console/static/{digest}/{name:path}", console.static.serve, methods=["GET"]),
    ]
    for table in TABLES:
        for method, path, handler in table.routes:
            routes.append(Route(path, console.make_endpoint(handler, is_form=method == "POST"), methods=[method]))
    unknown = UnknownPageRoute("/{path:path}", console.show_unknown, methods=["GET"])
    return [*routes, *playground.create_routes(context), unknown]


def describe_session(call: ApiCall, request: Request, session_id: SessionId) -> str | None:
    """Return a line with the URL of a session's page, which the SDK logs when it creates the session.

    Returns None if the console is disabled.
    """
    if call.settings.no_console:
        return None
    return f"live: {get_base_url(call.settings, request)}/sessions/{session_id}"


class UnknownPageRoute(Route):
    """A route for the error page of unknown paths. It matches only if a browser asks for a page.

    The match is partial, so the route is used only if no other route matches. With a full match, a
    path that exists for another method only would get this page instead of status 405.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return a partial match for a page, or no match."""
        match, child = super().matches(scope)
        is_page = "text/html" in Headers(scope=scope).get("accept", "") and not scope["path"].startswith(_API_PREFIXES)
        return (Match.PARTIAL if match is Match.FULL and is_page else Match.NONE), child


class Console:
    """The console of one API process.

    It has no state except caches, so any API process can serve any request.
    """

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._sessions = ConsoleSessions(context.authenticator, context.store, context.signing_key)
        self._limiter = CapacityLimiter(_THREADS)
        self._page_budget = OwnerBudget(_THREADS, per_owner=1, unit="pages")
        self._failed_logins = FailedLogins(context.store)
        self.static = StaticFiles.load()
        self._templates = load_templates(self.static)
        self._menu = [entry for table in TABLES for entry in table.menu]

    def make_endpoint(self, handler: Handler, *, is_form: bool) -> Endpoint:
        """Create the endpoint that calls the handler of a page or a form."""

        async def serve(request: Request) -> Response:
            return await self._serve(request, partial(self._call_handler, handler, request, is_form=is_form))

        return serve

    async def redirect_to_overview(self, request: Request) -> Response:
        """Redirect to the overview."""
        return see_other("/overview")

    async def show_unknown(self, request: Request) -> Response:
        """Show that there is no page at this path."""
        return self._make_error_page(request, not_found(f"there is no page {quote_value(request.url.path)}"))

    async def show_login(self, request: Request) -> Response:
        """Show the log-in form, or redirect a visitor who is logged in already."""

        def work(_: Form) -> Response:
            next_path = request.query_params.get("next", "")
            if self._sessions.find_visitor(request) is not None:
                return see_other(_check_own_path(next_path))
            return self._render(request, None, _make_login_page(next_path))

        return await self._serve(request, work)

    async def log_in(self, request: Request) -> Response:
        """Check an API key, and start a console session."""

        def work(form: Form) -> Response:
            # There is no session yet, so this only checks that the form is from this site
            check_form(request, "", "")
            address = "" if request.client is None else request.client.host
            next_path = form.get("next", [""])[-1]
            try:
                principal = self._sessions.authenticate_key(form.get("key", [""])[-1].strip(), address)
            except ApiError as error:
                self._failed_logins.record(error.detail, address)
                return self._render(request, None, _make_login_page(next_path, error))

            # Record the log-in and set the cookie
            self._context.store.write(
                lambda tx: audit.record(tx, "organization_login", principal.actor, time.time(), address=address)
            )
            response = see_other(_check_own_path(next_path))
            self._sessions.set_cookie(request, response, principal)
            return response

        return await self._serve(request, work)

    async def log_out(self, request: Request) -> Response:
        """End the console session."""

        def work(form: Form) -> Response:
            visitor = self._sessions.find_visitor(request)
            if visitor is not None:
                check_form(request, form.get(FORM_TOKEN, [""])[-1], visitor.form_token)
            response = see_other("/login")
            self._sessions.clear_cookie(request, response)
            return response

        return await self._serve(request, work)

    async def _serve(self, request: Request, work: Callable[[Form], Response]) -> Response:
        """Read the form of a request, and call `work` with it in a thread.

        Errors become error pages.
        """
        try:
            form: Form = await _read_form(request) if request.method == "POST" else {}
            async with self._page_budget.reserve(self._sessions.name_visitor(request)):
                return await to_thread.run_sync(work, form, limiter=self._limiter)
        except ClientDisconnect:
            raise
        except Exception as error:
            return await to_thread.run_sync(self._make_error_page, request, error, limiter=self._limiter)

    def _call_handler(self, handler: Handler, request: Request, form: Form, *, is_form: bool) -> Response:
        # Authenticate. Only requests for whole pages are redirected to the log-in, because scripts
        # and forms would take the log-in page for their result.
        visitor = self._find_visitor(request)
        if visitor is None:
            if is_form or "hx-request" in request.headers or request.url.path.startswith(_DATA_PREFIX):
                raise ApiError(HTTPStatus.UNAUTHORIZED, "your console session has ended; log in again")
            return see_other("/login?" + urlencode({"next": request.url.path + _get_query(request)}))
        request.scope[OWNER] = visitor.principal.owner  # for the log

        # Check a form
        if is_form:
            check_form(request, form.get(FORM_TOKEN, [""])[-1], visitor.form_token)
            if not visitor.may_change:
                raise ApiError(
                    HTTPStatus.FORBIDDEN, f"a key of scope {visitor.principal.scope} may read, but not change anything"
                )

        # Call the handler
        visit = Visit(self._context, self._sessions, visitor, request, form, time.time())
        answer = handler(visit)
        if isinstance(answer, Page):
            return self._render(request, visit, answer)
        for name, value in PAGE_HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    def _find_visitor(self, request: Request) -> Visitor | None:
        """Return the visitor, or None if there is no console session.

        For the data of charts, programs can send an API key instead of the session's cookie.
        """
        key = request.headers.get("x-api-key", "")
        if not key or not request.url.path.startswith(_DATA_PREFIX):
            return self._sessions.find_visitor(request)
        address = "" if request.client is None else request.client.host
        return Visitor(self._sessions.authenticate_key(key, address), "")

    def _make_error_page(self, request: Request, error: Exception) -> Response:
        """Return an error page, or JSON if the request was for the data of charts.

        Errors that the visitor did not cause are logged.
        """
        about = {"owner": request.scope.get(OWNER)}
        match error:
            # Mistakes of the visitor
            case ApiError():
                page = Page("error.jinja", {"detail": error.detail}, error.status, error.headers or {})
            case UserError() | ValueRefused():
                page = Page("error.jinja", {"detail": str(error)}, HTTPStatus.BAD_REQUEST)

            # Problems of the server
            case StoreError():
                _log.error("%s %s: %s", request.method, request.url.path, error, extra=about)
                detail = "the database is not available; see the server's log"
                page = Page("error.jinja", {"detail": detail}, HTTPStatus.SERVICE_UNAVAILABLE)
            case _:
                reference = secrets.token_hex(4)
                message = "%s %s failed (reference %s)"
                _log.error(message, request.method, request.url.path, reference, exc_info=error, extra=about)
                detail = f"internal error; search the server's log for reference {reference}"
                page = Page("error.jinja", {"detail": detail}, HTTPStatus.INTERNAL_SERVER_ERROR)

        if request.url.path.startswith(_DATA_PREFIX):
            return JSONResponse(dict(page.values), page.status, headers={**PAGE_HEADERS, **page.headers})
        return self._render(request, None, page)

    def _render(self, request: Request, visit: Visit | None, page: Page) -> Response:
        now = time.time()
        values: dict[str, Any] = {
            "visitor": None if visit is None else visit.visitor,
            "viewer": None if visit is None else visit.caller,
            "menu": self._menu,
            "path": request.url.path,
            "now": now,
            "version": __version__,
            "form_token_name": FORM_TOKEN,
            "status": page.status,
        }
        html = self._templates.get_template(page.template).render(values | dict(page.values))
        return Response(
            html, page.status, headers={**PAGE_HEADERS, **page.headers}, media_type="text/html; charset=utf-8"
        )


async def _read_form(request: Request) -> Form:
    """Read the fields of a form.

    Raises ApiError 400 if they are malformed, and 413 if they are too large.
    """
    body = await read_body(request, _FORM_LIMITS)
    try:
        form = parse_qs(body.decompress().decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise bad_request(f"the form cannot be read: {error}") from error
    for name, values in form.items():
        for text in (name, *values):
            check_text(text, f"field {quote_value(name)}")
    return form


def _make_login_page(next_path: str, error: ApiError | None = None) -> Page:
    """Return the log-in form. After the log-in, the visitor is sent to `next_path`."""
    values = {"next": _check_own_path(next_path), "problem": error and error.detail}
    if error is None:
        return Page("login.jinja", values)
    kept = {name: value for name, value in (error.headers or {}).items() if name == "Retry-After"}
    return Page("login.jinja", values, error.status, kept)


def _check_own_path(path: str) -> str:
    """Return `path` if it is a path on this server, otherwise the path of the overview.

    A link to the log-in page can contain any `next` path. Without this check, it could send the
    visitor to another site after the log-in (open redirect).
    """
    is_plain = len(path) < 1000 and "\\" not in path and path.isprintable()
    is_own = is_plain and path.startswith("/") and path[1:2] != "/"
    return path if is_own and not path.startswith(("/login", "/logout")) else "/overview"


def _get_query(request: Request) -> str:
    return f"?{request.url.query}" if request.url.query else ""
