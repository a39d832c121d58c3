"""The numbers of pages as JSON, for charts and programs."""

from typing import Any

from starlette.responses import JSONResponse, Response

from skyrl_tx.apps.console.curve_data import curve_data
from skyrl_tx.apps.console.run_pages import find_run
from skyrl_tx.apps.console.session_pages import newest_samplers, sampler_weights, visible_session
from skyrl_tx.apps.console.views.timeline import timeline_data
from skyrl_tx.apps.console.visit import PageTable, Visit
from skyrl_tx.apps.history.session_groups import newest_spans, session_groups
from skyrl_tx.contract.ids import ModelId

pages = PageTable()
MAX_SPANS = 2000
"""Requests on a timeline."""


@pages.get("/console/data/training_runs/{run_id}/curves")
def curves(visit: Visit) -> Response:
    """Send the steps of a run, with `since` only those from that step on."""
    line = find_run(visit, ModelId(visit.path["run_id"]))
    data: dict[str, Any] = curve_data(visit, line.model_id, line.owner, visit.whole("since", 0))
    return JSONResponse(data)


@pages.get("/console/data/sessions/{session_id}/timeline")
def timeline(visit: Visit) -> Response:
    """Send the newest requests of a session, with `after` only those after a position."""
    session_id, after = visible_session(visit), visit.whole("after", 0, most=2**53)
    groups = visit.read(lambda tx: session_groups(tx, session_id, visit.now, MAX_SPANS, after=after, with_logged=False))
    weights = sampler_weights(newest_samplers(visit, session_id))
    return JSONResponse(timeline_data(newest_spans(groups, MAX_SPANS), visit.now, weights, after))
