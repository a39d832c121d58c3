"""The pages of client sessions: list, and one with its timeline, runs and samplers."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from starlette.responses import RedirectResponse, Response

from skyrl_tx.apps.console import queries
from skyrl_tx.apps.console.format import short_id
from skyrl_tx.apps.console.run_pages import run_views
from skyrl_tx.apps.console.views.timeline import span_lines, traffic
from skyrl_tx.apps.console.visit import Page, Pager, PageTable, Visit
from skyrl_tx.apps.history.routes import trace_url
from skyrl_tx.apps.history.session_groups import session_groups
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.server.identity import access
from skyrl_tx.store import sessions
from skyrl_tx.store.tables import SamplingSessionRow

pages = PageTable()
_PAGE_ROWS = 50
_MAX_RUNS = 50
_MAX_SAMPLERS = 50
_MAX_REQUESTS = 12
_TRAFFIC_S = 30 * 86_400
_MAX_BUCKETS = 20_000


@pages.get("/sessions")
def list_sessions(visit: Visit) -> Page:
    """Show the sessions of the visitor and its projects, to admins those of all owners, newest first."""
    offset, search = visit.whole("offset", 0), visit.query("q").strip()
    project = visit.query("project") or None
    owner = visit.caller.owner_filter
    found, total = visit.read(
        lambda tx: queries.session_page(tx, owner, project=project, search=search, limit=_PAGE_ROWS, offset=offset)
    )
    pager = Pager.of(visit, offset, _PAGE_ROWS, len(found), total)
    return Page("sessions.jinja", {"sessions": found, "pager": pager, "search": search, "project": project})


@pages.get("/sessions/{session_id}")
def show_session(visit: Visit) -> Page:
    """Show one session with its requests over time, runs and samplers."""
    session_id = visible_session(visit)
    row = visit.read(lambda tx: sessions.get(tx, session_id))
    assert row is not None
    lines = visit.read(lambda tx: queries.runs_of_session(tx, session_id, _MAX_RUNS))
    groups = visit.read(lambda tx: session_groups(tx, session_id, visit.now, _MAX_REQUESTS, with_logged=False))
    since = int(visit.now) - _TRAFFIC_S
    buckets = visit.read(lambda tx: queries.usage_of_session(tx, session_id, since, _MAX_BUCKETS))
    opened = visit.read(lambda tx: queries.open_groups(tx, row.owner))
    waiting = [group for group in opened if group.session_id == session_id]
    samplers = newest_samplers(visit, session_id)
    return Page(
        "session.jinja",
        {
            "session": row,
            "runs": run_views(visit, lines),
            "samplers": samplers,
            "requests": span_lines(groups, _MAX_REQUESTS),
            "traffic": traffic(buckets, row.created_at, visit.now),
            "waiting": sum(group.number for group in waiting),
            "address": visit.address(),
        },
    )


@pages.get("/sessions/{session_id}/trace")
def download_trace(visit: Visit) -> Response:
    """Go to a signed address of the timeline as a Perfetto trace."""
    url = trace_url(visit.context, visit.caller, visit.request, visible_session(visit))
    return RedirectResponse(url, HTTPStatus.SEE_OTHER)


def visible_session(visit: Visit) -> SessionId:
    """Return the session of the address. Raises ApiError 404 if the visitor has none of this id."""
    session_id = SessionId(visit.path["session_id"])
    return visit.read(lambda tx: access.visible_session(tx, visit.caller, session_id)).session_id


def newest_samplers(visit: Visit, session_id: SessionId) -> Sequence[SamplingSessionRow]:
    """Return the newest samplers of a session."""
    return visit.read(lambda tx: queries.samplers_of_session(tx, session_id, _MAX_SAMPLERS))


def sampler_weights(samplers: Sequence[SamplingSessionRow]) -> Mapping[str, str]:
    """Return what each sampler samples from, by its id."""
    return {
        row.sampling_session_id: row.model_path
        or (row.base_model if row.model_id is None else f"weights of {short_id(row.model_id)}")
        for row in samplers
    }
