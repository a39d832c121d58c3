"""The forms that join logged runs to a training run and separate them, and the lists that they are chosen from."""

from http import HTTPStatus

from sqlmodel import Session
from starlette.responses import RedirectResponse, Response

from skyrl_tx.apps.console.run_pages import find_run
from skyrl_tx.apps.console.visit import PageTable, Visit
from skyrl_tx.apps.history import logged_runs
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.server.errors import bad_request, not_found

pages = PageTable()
_MOST_DIGITS = 18


@pages.post("/training_runs/{run_id}/logged_runs")
def join(visit: Visit) -> Response:
    """Show a logged run in this run, or with `act` "separate" no longer."""
    run_id, logged_run_id = find_run(visit, ModelId(visit.path["run_id"])).model_id, _number(visit)
    act = visit.field("act", "join")
    if act not in ("join", "separate"):
        raise bad_request(f"act: {act!r} is neither join nor separate")

    def work(tx: Session) -> None:
        if act == "separate" and logged_runs.visible(tx, visit.caller, logged_run_id).model_id != run_id:
            raise not_found(f"logged run {logged_run_id} is not shown in this run")
        logged_runs.join(tx, visit.caller, logged_run_id, run_id if act == "join" else None)

    visit.write(work)
    return RedirectResponse(f"/training_runs/{run_id}?tab=config#logged", HTTPStatus.SEE_OTHER)


def _number(visit: Visit) -> int:
    text = visit.field("logged_run_id")
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise bad_request(f"logged_run_id: {text[:50]!r} is not a number")
    return int(text)
