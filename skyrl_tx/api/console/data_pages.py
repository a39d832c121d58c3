"""The numbers of pages as JSON, for charts and programs."""

from typing import Any

from starlette.responses import JSONResponse, Response

from skyrl_tx.api.console.curve_data import curve_data
from skyrl_tx.api.console.run_pages import find_run
from skyrl_tx.api.console.visit import PageTable, Visit
from skyrl_tx.contract.ids import ModelId

pages = PageTable()


@pages.get("/console/data/training_runs/{run_id}/curves")
def curves(visit: Visit) -> Response:
    """Send the steps of a run, with `since` only those from that step on."""
    line = find_run(visit, ModelId(visit.path["run_id"]))
    data: dict[str, Any] = curve_data(visit, line.model_id, visit.whole("since", 0))
    return JSONResponse(data)
