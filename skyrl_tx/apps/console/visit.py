"""The interface between the console and its pages.

A page is a function that takes a `Visit` and returns a `Page` or a response. Each module registers
its pages in a `PageTable`.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlencode

from sqlmodel import Session
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from skyrl_tx.apps.console.login import PAGE_HEADERS, ConsoleSessions, Visitor
from skyrl_tx.apps.console.queries import ListQuery
from skyrl_tx.server.context import ApiContext
from skyrl_tx.server.errors import ApiError, bad_request
from skyrl_tx.server.identity.authentication import Principal

T = TypeVar("T")
_MAX_OFFSET = 10_000_000


@dataclass(frozen=True, slots=True)
class Page:
    """A page to render: a template with its values."""

    template: str
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def see_other(path: str) -> Response:
    """Return a redirect to another page with GET (status 303), for example after a form was processed."""
    return RedirectResponse(path, HTTPStatus.SEE_OTHER, headers=PAGE_HEADERS)


def make_csv_response(filename: str, rows: Iterable[Iterable[object]], line_end: str = "\r\n") -> Response:
    """Return rows as a CSV file to download."""
    text = io.StringIO()
    csv.writer(text, lineterminator=line_end).writerows(rows)
    headers = {"Content-Disposition": f'attachment; filename="{filename}"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


@dataclass(frozen=True, slots=True)
class Pager:
    """The range of rows that one page of a list shows, and links to the pages before and after it."""

    first: int
    """The number of the first row on the page, counted from 1; 0 if the page has no rows."""
    last: int
    total: int
    previous_url: str | None
    next_url: str | None


@dataclass(frozen=True, slots=True)
class Visit:
    """A request of a visitor who is logged in: for a page, or with a form that the visitor sent."""

    context: ApiContext
    sessions: ConsoleSessions
    visitor: Visitor
    request: Request
    form: Mapping[str, Sequence[str]]
    """The values of each field of the form. Empty if the request is for a page."""
    now: float

    @property
    def caller(self) -> Principal:
        """The principal of the visitor."""
        return self.visitor.principal

    @property
    def path_parameters(self) -> Mapping[str, str]:
        """The parameters in the path by name, for example `run_id` for "/training_runs/{run_id}"."""
        return self.request.path_params

    @property
    def offset(self) -> int:
        """How many rows of a list come before the current page, from the query parameter `offset`."""
        return self.get_int("offset", 0)

    def require_admin(self, reason: str) -> None:
        """Raise ApiError 403 with the reason unless the visitor is an admin."""
        if not self.caller.is_admin:
            raise ApiError(HTTPStatus.FORBIDDEN, reason)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run a read transaction."""
        return self.context.store.read(work)

    def write(self, work: Callable[[Session], T]) -> T:
        """Run a write transaction, and wait for its commit."""
        return self.context.store.write(work)

    def get_query(self, name: str, default: str = "") -> str:
        """Return a query parameter, truncated to 500 characters."""
        return self.request.query_params.get(name, default)[:500]

    def get_int(self, name: str, default: int, *, minimum: int = 0, maximum: int = _MAX_OFFSET) -> int:
        """Return a query parameter as an integer, or `default` if the URL does not have it.

        Raises ApiError 400 if it is no integer from `minimum` to `maximum`.
        """
        text = self.get_query(name)
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 18) or not minimum <= int(text) <= maximum:
            raise bad_request(f"{name}: {text[:50]!r} must be a whole number from {minimum} to {maximum}")
        return int(text)

    def get_field(self, name: str, default: str = "") -> str:
        """Return the last value of a field of the form, without white space around it."""
        return self.form.get(name, [default])[-1].strip()

    def get_fields(self, name: str) -> Sequence[str]:
        """Return all values of a field that occurs multiple times in the form."""
        return self.form.get(name, [])

    def make_url(self, **changes: object) -> str:
        """Return the URL of this page with changed query parameters.

        A value of None removes a parameter.
        """
        parameters = {**self.request.query_params, **changes}
        kept = {name: value for name, value in parameters.items() if value is not None}
        return self.request.url.path + ("?" + urlencode(kept) if kept else "")

    def make_list_query(self, limit: int) -> ListQuery:
        """Return the query for a page of a list, with the filters and the offset in the URL.

        It selects only rows that the visitor may see, at most `limit`.
        """
        return ListQuery(
            owner=self.caller.owner_filter,
            search=self.get_query("q").strip(),
            project=self.get_query("project") or None,
            limit=limit,
            offset=self.offset,
        )

    def make_pager(self, limit: int, shown: int, total: int) -> Pager:
        """Return the pager of a list with `total` rows.

        The current page shows `shown` rows. Other pages show up to `limit` rows.
        """
        offset = self.offset
        return Pager(
            first=offset + 1 if shown else 0,
            last=offset + shown,
            total=total,
            previous_url=self.make_url(offset=max(offset - limit, 0) or None) if offset else None,
            next_url=self.make_url(offset=offset + limit) if offset + shown < total else None,
        )


Handler = Callable[[Visit], Page | Response]
"""A function that answers a visit."""


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """A link in the menu at the top of all pages."""

    path: str
    title: str
    is_for_admins: bool


class PageTable:
    """The pages of one module. Handlers are registered with the decorators `get` and `post`."""

    def __init__(self) -> None:
        self.routes: list[tuple[str, str, Handler]] = []
        """Method, path and handler of each page or form."""
        self.menu: list[MenuEntry] = []

    def get(self, path: str, *, menu: str | None = None, is_for_admins: bool = False) -> Callable[[Handler], Handler]:
        """Return a decorator that registers the handler of a page.

        With a title in `menu`, the page is also added to the menu.
        """
        if menu is not None:
            self.menu.append(MenuEntry(path, menu, is_for_admins))
        return self._add("GET", path)

    def post(self, path: str) -> Callable[[Handler], Handler]:
        """Return a decorator that registers the handler of a form.

        Visitors with a read-only key cannot send forms.
        """
        return self._add("POST", path)

    def _add(self, method: str, path: str) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            self.routes.append((method, path, handler))
            return handler

        return add
