"""The page of the audit log, for admins."""

from http import HTTPStatus

from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.server.errors import ApiError
from skyrl_tx.store import audit

pages = PageTable()
_PAGE_ROWS = 100
_RESOURCES = ("checkpoint", "run", "project", "organization")


@pages.get("/audit")
def show(visit: Visit) -> Page:
    """Show who did what, the newest first. Raises ApiError 403 for visitors who are no admins."""
    if not visit.caller.is_admin:
        raise ApiError(HTTPStatus.FORBIDDEN, "the audit log is for admins")
    resource, before = visit.query("resource"), visit.whole("before", 0, most=2**53)
    rows = visit.read(
        lambda tx: audit.entries(
            tx,
            resources=[resource] if resource in _RESOURCES else None,
            before=before or None,
            limit=_PAGE_ROWS + 1,
            newest_first=True,
        )
    )
    shown = rows[:_PAGE_ROWS]
    return Page(
        "audit.jinja",
        {
            "entries": shown,
            "resource": resource,
            "resources": _RESOURCES,
            "first": visit.address(before=None) if before else None,
            "older": visit.address(before=shown[-1].position) if len(rows) > _PAGE_ROWS else None,
        },
    )
