"""The pages of client sessions: list, and one with its runs and samplers."""

from skyrl_tx.api import access
from skyrl_tx.api.console.run_pages import run_views
from skyrl_tx.api.console.visit import Page, Pager, PageTable, Visit
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import console_queries, sessions

pages = PageTable()
_PAGE_ROWS = 50
_MAX_RUNS = 50
_MAX_SAMPLERS = 50


@pages.get("/sessions")
def list_sessions(visit: Visit) -> Page:
    """Show the sessions of the visitor, to admins those of all owners, newest first."""
    offset, search = visit.whole("offset", 0), visit.query("q").strip()
    project = visit.query("project") or None
    owner = visit.caller.owner_filter
    found, total = visit.read(
        lambda tx: console_queries.session_page(
            tx, owner, project=project, search=search, limit=_PAGE_ROWS, offset=offset
        )
    )
    pager = Pager.of(visit, offset, _PAGE_ROWS, len(found), total)
    return Page("sessions.jinja", {"sessions": found, "pager": pager, "search": search, "project": project})


@pages.get("/sessions/{session_id}")
def show_session(visit: Visit) -> Page:
    """Show one session with its runs and samplers."""
    session_id = SessionId(visit.path["session_id"])
    visit.read(lambda tx: access.session(tx, visit.caller, session_id))
    row = visit.read(lambda tx: sessions.get(tx, session_id))
    lines = visit.read(lambda tx: console_queries.runs_of_session(tx, session_id, _MAX_RUNS))
    samplers = visit.read(lambda tx: console_queries.samplers_of_session(tx, session_id, _MAX_SAMPLERS))
    return Page(
        "session.jinja",
        {"session": row, "runs": run_views(visit, lines), "samplers": samplers, "address": visit.address()},
    )
