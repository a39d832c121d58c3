"""The pages of runs: list, one run with its tabs, compare."""

import csv
import io
from collections.abc import Iterable, Sequence

from sqlmodel import Session
from starlette.responses import Response

from skyrl_tx.apps.console import queries, sample_views
from skyrl_tx.apps.console.curve_data import logged_curves, run_steps
from skyrl_tx.apps.console.queries import RunLine
from skyrl_tx.apps.console.views.runs import RunView, request_view, reward_of, run_view
from skyrl_tx.apps.console.visit import Page, Pager, PageTable, Visit
from skyrl_tx.apps.history import kept_samples, logged, points
from skyrl_tx.apps.history.curves.device_users import device_users
from skyrl_tx.apps.history.curves.hints import Hint, hints, slow_since
from skyrl_tx.apps.history.curves.series import CURVES, Step, newest_steps, thin
from skyrl_tx.apps.history.tables import LoggedRunRow
from skyrl_tx.apps.teams import usage
from skyrl_tx.contract.ids import CheckpointKind, ModelId
from skyrl_tx.server.errors import bad_request, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.submission.validation import shown
from skyrl_tx.store import sessions

pages = PageTable()
PAGE_ROWS = 25
_SPARK_POINTS = 120
_SPARK_REWARDS = 400
_SPARK_BUCKETS = 30
_WHOLE_STEPS = 2000
"""Steps up to which a list shows the whole curve of a run; of longer ones the newest part."""
_STEP_ROWS = 100
_REQUESTS = 30
_CHECKPOINTS = 200
_LOGGED_RUNS = 50
MAX_COMPARED = 8
TABS = ("curves", "samples", "steps", "checkpoints", "requests", "config")


@pages.get("/training_runs")
def list_runs(visit: Visit) -> Page:
    """Show the runs of the visitor and its projects, to admins those of all owners, the last used first."""
    offset = visit.whole("offset", 0)
    search, project = visit.query("q").strip(), visit.query("project") or None
    owner = visit.caller.owner_filter
    lines, total = visit.read(
        lambda tx: queries.runs(tx, owner, project=project, search=search, limit=PAGE_ROWS, offset=offset)
    )
    return Page(
        "runs.jinja",
        {
            "runs": run_views(visit, lines),
            "pager": Pager.of(visit, offset, PAGE_ROWS, len(lines), total),
            "search": search,
            "project": project,
            "address": visit.address(),
        },
    )


def run_views(visit: Visit, lines: Sequence[RunLine]) -> list[RunView]:
    """Describe runs, with their last steps."""
    ids = [line.model_id for line in lines]
    tokens = visit.read(lambda tx: _tokens(tx, lines))
    names = visit.read(lambda tx: queries.logged_names(tx, ids))
    views: list[RunView] = []
    for line in lines:
        if line.num_steps <= _WHOLE_STEPS:
            steps = thin(run_steps(visit, line.model_id, line.owner), ("loss",), _SPARK_BUCKETS)
        else:
            found = visit.read(lambda tx, run=line: points.newest(tx, run.model_id, _SPARK_POINTS))
            steps = newest_steps(found)
        logged = (
            visit.read(lambda tx, run=line: queries.logged_points(tx, run.model_id, _SPARK_REWARDS))
            if line.model_id in names
            else []
        )
        rewards = [reward for point in logged if (reward := reward_of(point.values)) is not None]
        views.append(
            run_view(
                line,
                steps=steps,
                rewards=rewards,
                logged_name=names.get(line.model_id),
                tokens=tokens.get(line.model_id),
                now=visit.now,
            )
        )
    return views


def _tokens(tx: Session, lines: Sequence[RunLine]) -> dict[str, int]:
    """Return the tokens that each run trained."""
    ids = {line.session_id for line in lines}
    found = usage.totals(tx, None, 0, ("model_id",), session_ids=ids) if ids else []
    return {total.group[0]: total.tokens for total in found if total.kind == "training"}


def find_run(visit: Visit, model_id: ModelId) -> RunLine:
    """Find a run that the visitor sees. Raises ApiError 404 if there is none."""
    visit.read(lambda tx: access.visible_run(tx, visit.caller, model_id))
    line = visit.read(lambda tx: queries.run(tx, model_id))
    if line is None:
        raise not_found(f"model {shown(model_id)} does not exist")
    return line


@pages.get("/training_runs/{run_id}")
def show_run(visit: Visit) -> Page:
    """Show one run: its curves, or another tab."""
    line = find_run(visit, ModelId(visit.path["run_id"]))
    tab = visit.query("tab", "curves")
    if tab not in TABS:
        raise bad_request(f"tab: {tab!r} is not one of {', '.join(TABS)}")
    steps = run_steps(visit, line.model_id, line.owner)
    (run,) = run_views(visit, [line])
    saved = visit.read(lambda tx: queries.checkpoints_of_runs(tx, [line.model_id], _CHECKPOINTS, visit.now))
    values: dict[str, object] = {
        "run": run,
        "tab": tab,
        "tabs": TABS,
        "hints": _hints(visit, line, steps),
        "num_steps": len(steps),
        "has_sampler": any(row.kind == CheckpointKind.SAMPLER for row in saved),
    }
    match tab:
        case "steps":
            offset = visit.whole("offset", 0)
            newest_first = steps[::-1][offset : offset + _STEP_ROWS]
            values["steps"] = newest_first
            values["pager"] = Pager.of(visit, offset, _STEP_ROWS, len(newest_first), len(steps))
            values["curves"] = _shown_curves(steps)
            kept = visit.read(
                lambda tx: kept_samples.steps(tx, line.model_id, sample_views.owner_of_samples(visit, line))
            )
            values["sampled"] = {step + 1 for step, _ in kept if step is not None}
        case "samples":
            values |= sample_views.values(visit, line)
        case "checkpoints":
            values["checkpoints"] = [(row, line.owner, True) for row in saved[::-1]]
        case "requests":
            found = visit.read(lambda tx: queries.requests_of_model(tx, line.model_id, _REQUESTS))
            values["requests"] = [request_view(each) for each in found]
        case "config":
            values["is_own"] = visit.caller.acts_for(line.owner)
            values["session"] = visit.read(lambda tx: sessions.get(tx, line.session_id))
            values["metadata"] = (
                visit.read(lambda tx: access.visible_run(tx, visit.caller, line.model_id)).user_metadata or {}
            )
            values["joined"], values["free"] = visit.read(lambda tx: _logged_runs(tx, visit, line))
        case _:
            values["curves"] = _shown_curves(steps)
    return Page("run.jinja", values)


def _logged_runs(tx: Session, visit: Visit, line: RunLine) -> tuple[list[LoggedRunRow], list[LoggedRunRow]]:
    """Return the logged runs that are shown in a run, and for its owner the newest ones that are shown in none."""
    joined = logged.list_runs(tx, line.owner, model_id=line.model_id, limit=_LOGGED_RUNS)
    if not visit.caller.acts_for(line.owner):
        return joined, []
    return joined, logged.list_runs(tx, line.owner, is_free=True, limit=_LOGGED_RUNS)


def _hints(visit: Visit, line: RunLine, steps: Sequence[Step]) -> Sequence[Hint]:
    since = slow_since(steps)
    if since is None:
        return hints(steps, visit.now)
    users = visit.read(lambda tx: device_users(tx, since, line.model_id, line.owner, visit.caller.acts_for))
    return hints(steps, visit.now, users)


def _shown_curves(steps: Sequence[Step]) -> list[tuple[str, str]]:
    """Return name and title of the curves that a run has."""
    there = {name for step in steps for name in step.values}
    return [(curve.name, curve.title) for curve in CURVES if curve.name in there]


@pages.get("/training_runs/{run_id}/curves.csv")
def curves_csv(visit: Visit) -> Response:
    """Send all steps of a run as a table."""
    line = find_run(visit, ModelId(visit.path["run_id"]))
    steps = run_steps(visit, line.model_id, line.owner)
    names = [curve.name for curve in CURVES]
    logged_metrics = logged_curves(visit, line.model_id)
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["step", "time", *names, *(f"logged/{name}" for name in logged_metrics)])
    by_step = {name: dict(zip(curve["step"], curve["value"], strict=True)) for name, curve in logged_metrics.items()}
    for step in steps:
        row: Iterable[object] = (step.values.get(name) for name in names)
        table.writerow([step.step, f"{step.at:.3f}", *row, *(by_step[name].get(step.step) for name in logged_metrics)])
    headers = {"Content-Disposition": 'attachment; filename="curves.csv"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


@pages.get("/compare")
def compare(visit: Visit) -> Page:
    """Show the curves of several runs in one plot."""
    asked = visit.request.query_params.getlist("run") + visit.query("runs").split(",")
    ids = list(dict.fromkeys(ModelId(name) for name in asked if name))[: MAX_COMPARED + 1]
    if len(ids) > MAX_COMPARED:
        raise bad_request(f"runs: at most {MAX_COMPARED} runs are compared at once")
    lines = [find_run(visit, model_id) for model_id in ids]
    return Page("compare.jinja", {"runs": run_views(visit, lines), "most": MAX_COMPARED})
