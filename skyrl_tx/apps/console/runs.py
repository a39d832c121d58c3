"""The pages of training runs: the list, one run with its tabs, and the comparison of runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session
from starlette.responses import Response

from skyrl_tx.apps.chat.reply import make_json_response
from skyrl_tx.apps.console import queries, samples
from skyrl_tx.apps.console.queries import RequestLine, RunLine
from skyrl_tx.apps.console.rendering import format_duration, shorten_id, stack_bars
from skyrl_tx.apps.console.visit import Page, PageTable, Visit, make_csv_response, see_other
from skyrl_tx.apps.history import kept_samples, logged_metrics, points
from skyrl_tx.apps.history.breakdown import PARTS, Breakdown, read_breakdown
from skyrl_tx.apps.history.curves import (
    CURVES,
    LOSSES,
    OptimizerStep,
    Value,
    compute_shared_share,
    draw_spark,
    fold_newest_points,
    get_curves,
    thin_steps,
)
from skyrl_tx.apps.history.hints import MIN_ITERATIONS, find_advice, read_hints
from skyrl_tx.apps.history.logged_metrics import LoggedRunRow
from skyrl_tx.apps.history.timeline import RequestTimes
from skyrl_tx.apps.teams import usage
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import CheckpointKind, ModelId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.contract.results import Failure
from skyrl_tx.server.errors import bad_request, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.submission.validation import quote_value
from skyrl_tx.store.database import get_existing
from skyrl_tx.store.tables import ModelRow, SessionRow

pages = PageTable()
_TABS = ("curves", "time", "samples", "steps", "checkpoints", "requests", "config")
_ACTIVE_S = 60.0
"""A run with a request in this time is "training". Later it is "idle"."""
_STATES = {"unloaded": "ended", "creating": "loading"}
"""How the console names the status of a run, if it does not use the name in the database."""
_MAX_DIGITS = 18
"""The longest number that a form may have. Every database can store such a number."""
_CURVE_NAMES = [curve.name for curve in CURVES]

# Rows of tables
_PAGE_ROWS = 25
_STEP_ROWS = 100
_MAX_REQUESTS = 30
_MAX_CHECKPOINTS = 200
_MAX_LOGGED_RUNS = 50

# Small curves in lists
_MAX_STEPS_OF_WHOLE_CURVE = 2000
"""Lists show the whole loss curve of a run up to this many steps. Of longer runs, they show the newest part."""
_SPARK_POINTS = 120
"""How many of the newest training requests and optimizer steps make up this newest part."""
_SPARK_BUCKETS = 30
_SPARK_REWARDS = 400

# Charts
_MAX_COMPARED_RUNS = 8
_MAX_LOGGED_STEPS = 5000
_MAX_LOGGED_NAMES = 60
_MAX_CHECKPOINT_MARKS = 500


@pages.get("/training_runs", menu="Runs")
def list_runs(visit: Visit) -> Page:
    """List the runs of the visitor and of the visitor's projects, or all runs for an admin."""
    query = visit.make_list_query(_PAGE_ROWS)
    lines, total = visit.read(lambda tx: queries.list_runs(tx, query))
    return Page(
        "runs.jinja",
        {
            "runs": describe_runs(visit, lines),
            "pager": visit.make_pager(_PAGE_ROWS, len(lines), total),
            "search": query.search,
            "project": query.project,
            "address": visit.make_url(),
        },
    )


@pages.get("/training_runs/{run_id}")
def show_run(visit: Visit) -> Page:
    """Show one tab of a run, by default its curves."""
    line = _find_run(visit)
    model_id, owner = line.row.model_id, line.session.owner
    tab = visit.get_query("tab", "curves")
    if tab not in _TABS:
        raise bad_request(f"tab: {tab!r} must be one of {', '.join(_TABS)}")

    # The heading, which is the same on all tabs
    steps = read_steps(visit, model_id, owner)
    (run,) = describe_runs(visit, [line])
    saved = visit.read(lambda tx: queries.list_checkpoints_of_runs(tx, [model_id], _MAX_CHECKPOINTS, visit.now))
    may_see, has_reward = visit.caller.can_act_for, run.reward is not None
    hints = visit.read(lambda tx: read_hints(tx, model_id, owner, steps, visit.now, may_see, has_reward=has_reward))
    values: dict[str, object] = {
        "run": run,
        "tab": tab,
        "tabs": _TABS,
        "hints": hints,
        "num_steps": len(steps),
        "shared_share": compute_shared_share(steps),
        "has_sampler": any(row.kind == CheckpointKind.SAMPLER for row in saved),
    }

    # The tab
    match tab:
        case "steps":
            newest_first = steps[::-1][visit.offset : visit.offset + _STEP_ROWS]
            kept = visit.read(lambda tx: kept_samples.list_steps(tx, model_id, samples.find_owner(visit, line)))
            values["steps"] = newest_first
            values["pager"] = visit.make_pager(_STEP_ROWS, len(newest_first), len(steps))
            values["curves"] = _list_curves(steps)
            # Step 1 trains on samples from the weights after 0 steps, and so on
            values["sampled"] = {step + 1 for step, _ in kept if step is not None}
        case "samples":
            values |= samples.read_tab(visit, line)
        case "checkpoints":
            values["checkpoints"] = [(row, owner, True) for row in saved[::-1]]
        case "requests":
            lines = visit.read(lambda tx: queries.list_requests_of_model(tx, model_id, _MAX_REQUESTS))
            values["requests"] = [describe_request(request) for request in lines]

        case "time":
            values |= describe_time(visit.read(lambda tx: read_breakdown(tx, line.row, visit.caller.can_act_for)))
        case "config":
            values["is_own"] = visit.caller.can_act_for(owner)
            values["joined"], values["free"] = visit.read(lambda tx: _list_logged(tx, visit, line))

        case _:
            values["curves"] = _list_curves(steps)
    return Page("run.jinja", values)


def _find_run(visit: Visit, model_id: str | None = None) -> RunLine:
    """Return a run, by default the run in the URL.

    Raises ApiError 404 if the visitor cannot see it.
    """
    run_id = ModelId(visit.path_parameters["run_id"] if model_id is None else model_id)

    def work(tx: Session) -> RunLine:
        row = access.find_visible_run(tx, visit.caller, run_id)
        if row.deleted_at is not None:
            raise not_found(f"run {quote_value(run_id)} does not exist")
        return RunLine(row, get_existing(tx, SessionRow, row.session_id))

    return visit.read(work)


def _list_logged(tx: Session, visit: Visit, line: RunLine) -> tuple[list[LoggedRunRow], list[LoggedRunRow]]:
    """Return two lists of logged runs: those assigned to a run, and the owner's newest unassigned ones.

    A logged run has the metrics that a client's logger sent, for example trackio. The second list
    is empty if the visitor may not change the run.
    """
    joined = logged_metrics.list_runs(tx, line.session.owner, model_id=line.row.model_id, limit=_MAX_LOGGED_RUNS)
    if not visit.caller.can_act_for(line.session.owner):
        return joined, []
    return joined, logged_metrics.list_runs(tx, line.session.owner, is_free=True, limit=_MAX_LOGGED_RUNS)


def describe_time(breakdown: Breakdown) -> dict[str, object]:
    """Return the template values of the tab "time": a stacked bar per step, and advice."""
    rows: list[tuple[str, Mapping[str, float]]] = []
    for iteration in breakdown.iterations:
        parts = [f"{title} {format_duration(iteration.parts[part])}" for part, title in PARTS.items()]
        rows.append((f"Step {iteration.step}: {', '.join(parts)}", {**iteration.parts}))
    longest_s = max((iteration.wall_s for iteration in breakdown.iterations), default=0.0)
    advice = find_advice(breakdown)
    shown: dict[str, object] = {"time": breakdown, "parts": PARTS, "bars": stack_bars(rows), "longest_s": longest_s}
    return shown | {"advice": advice, "min_steps": MIN_ITERATIONS}


def _list_curves(steps: Sequence[OptimizerStep]) -> list[tuple[str, str]]:
    """Return the names and titles of the curves that have values."""
    present = {name for step in steps for name in step.values}
    return [(curve.name, curve.title) for curve in CURVES if curve.name in present]


@pages.get("/console/data/training_runs/{run_id}/curves")
def send_curves(visit: Visit) -> Response:
    """Send the curves of a run as JSON, for charts and programs.

    With the query parameter `since`, only the steps from this number on are sent.
    """
    line = _find_run(visit)
    since = visit.get_int("since", 0)
    return make_json_response(make_curve_columns(visit, line.row.model_id, line.session.owner, since))


@pages.get("/training_runs/{run_id}/curves.csv")
def send_curves_csv(visit: Visit) -> Response:
    """Send the curves of a run as CSV, with one row per step."""
    line = _find_run(visit)
    return make_csv_response("curves.csv", make_csv_rows(visit, line.row.model_id, line.session.owner))


@pages.get("/compare")
def compare(visit: Visit) -> Page:
    """Show the curves of multiple runs in the same charts."""
    requested = visit.request.query_params.getlist("run") + visit.get_query("runs").split(",")
    ids = list(dict.fromkeys(name for name in requested if name))[: _MAX_COMPARED_RUNS + 1]
    if len(ids) > _MAX_COMPARED_RUNS:
        raise bad_request(f"runs: select at most {_MAX_COMPARED_RUNS} runs to compare")
    lines = [_find_run(visit, model_id) for model_id in ids]
    return Page("compare.jinja", {"runs": describe_runs(visit, lines), "max_runs": _MAX_COMPARED_RUNS})


@pages.post("/training_runs/{run_id}/logged_runs")
def join_logged(visit: Visit) -> Response:
    """Assign a logged run to this run. If the field `act` is "separate", remove it from this run."""
    # Check the fields of the form
    run_id, text = _find_run(visit).row.model_id, visit.get_field("logged_run_id")
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise bad_request(f"logged_run_id: {text[:50]!r} must be a number")
    act = visit.get_field("act", "join")
    if act not in ("join", "separate"):
        raise bad_request(f"act: {act!r} must be join or separate")

    # Change the assignment
    def work(tx: Session) -> None:
        logged_run_id = int(text)
        if act == "separate" and logged_metrics.find_logged_run(tx, visit.caller, logged_run_id).model_id != run_id:
            raise not_found(f"logged run {logged_run_id} does not belong to this run")
        logged_metrics.join_logged_run(tx, visit.caller, logged_run_id, run_id if act == "join" else None)

    visit.write(work)
    return see_other(f"/training_runs/{run_id}?tab=config#logged")


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as it appears in lists and headings."""

    row: ModelRow
    session: SessionRow
    name: str
    spec: ModelSpec
    state: str
    step: int
    loss: float | None
    is_per_token: bool
    """Whether `loss` is the loss divided by all tokens.

    Releases before 0.3 did not store the loss weights of tokens, which other losses are divided by.
    """
    loss_spark: str
    reward: float | None
    reward_spark: str
    tokens: int | None


def describe_runs(visit: Visit, lines: Sequence[RunLine]) -> list[RunView]:
    """Describe runs, with their newest loss and reward."""
    tokens = visit.read(lambda tx: _count_tokens(tx, lines))
    names = visit.read(lambda tx: logged_metrics.get_logger_names(tx, [line.row.model_id for line in lines]))
    return [_describe_run(visit, line, names, tokens.get(line.row.model_id)) for line in lines]


def _count_tokens(tx: Session, lines: Sequence[RunLine]) -> dict[str, int]:
    """Return the training tokens of each run."""
    ids = {line.row.session_id for line in lines}
    totals = usage.read_totals(tx, None, 0, ("model_id",), session_ids=ids) if ids else []
    return {total.group[0]: total.tokens for total in totals if total.kind == "training"}


def _describe_run(visit: Visit, line: RunLine, logger_names: Mapping[str, str | None], tokens: int | None) -> RunView:
    row, session, model_id = line.row, line.session, line.row.model_id

    # Small curves of the loss, and of the reward if the client logged metrics
    if row.num_steps <= _MAX_STEPS_OF_WHOLE_CURVE:
        steps = thin_steps(read_steps(visit, model_id, session.owner), LOSSES, _SPARK_BUCKETS)
    else:
        steps = fold_newest_points(visit.read(lambda tx: points.read_newest(tx, model_id, _SPARK_POINTS)))
    loss_name, losses = list_losses(steps)
    has_metrics = model_id in logger_names
    metrics = visit.read(lambda tx: logged_metrics.read_last_steps(tx, model_id, _SPARK_REWARDS)) if has_metrics else []
    reward = logged_metrics.choose_reward(name for point in metrics for name in point.values)
    rewards = [value for point in metrics if reward is not None and (value := point.values.get(reward)) is not None]

    return RunView(
        row=row,
        session=session,
        name=logger_names.get(model_id) or session.display_name or shorten_id(model_id),
        spec=access.decode_spec(row),
        state=find_state(row.status, row.last_request_at, visit.now, has_finished=session.finished_at is not None),
        step=max(row.num_steps, max((step.step for step in steps if step.is_applied), default=0)),
        loss=losses[-1] if losses else None,
        is_per_token=loss_name != "loss",
        loss_spark=draw_spark(losses),
        reward=rewards[-1] if rewards else None,
        reward_spark=draw_spark(rewards),
        tokens=tokens,
    )


def list_losses(steps: Sequence[OptimizerStep]) -> tuple[str, list[Value]]:
    """Return the name and the values of a run's loss.

    The newest step is left out while it has passes but no `optim_step` yet, because headings show
    the loss next to the number of the last completed step. It is used if there is no other step.
    """
    completed = [step for step in steps if step.is_applied] or steps
    known = [(name, step.values[name]) for step in completed for name in LOSSES if name in step.values]
    newest = known[-1][0] if known else "loss"
    return newest, [value for name, value in known if name == newest]


def find_state(status: str, last_request_at: float, now: float, *, has_finished: bool = False) -> str:
    """Return the state of a run in one word, for example "training" or "idle".

    `status` is the status in the database. `has_finished` tells whether the client has finished the
    session of the run.
    """
    if status != "ready":
        return _STATES.get(status, status)
    if has_finished:
        return "ended"
    return "training" if now - last_request_at < _ACTIVE_S else "idle"


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as it appears in lists."""

    line: RequestTimes
    problem: str
    category: str
    queue_s: float | None
    run_s: float | None


def describe_request(line: RequestLine) -> RequestView:
    """Describe a request, including the error if it failed."""
    # The error of a failed request
    times = line.times
    problem = category = ""
    if times.status == "failed" and line.result is not None:
        try:
            result = codec.decode(line.result)
        except codec.CodecError:
            problem = "the stored error cannot be read"
        else:
            if isinstance(result, Failure):
                problem, category = result.message, result.category

    # How long it waited and ran
    started = times.started_at
    return RequestView(
        line=times,
        problem=problem,
        category=category,
        queue_s=None if started is None else started - times.created_at,
        run_s=None if started is None or times.completed_at is None else times.completed_at - started,
    )


def read_steps(visit: Visit, model_id: ModelId, owner: str) -> Sequence[OptimizerStep]:
    """Return all optimizer steps of a run with the values of their curves.

    The caller must have checked that the visitor may see the run.
    """
    return get_curves(visit.context.store, model_id, owner).read_steps()


def read_logged_metrics(visit: Visit, model_id: ModelId, since: int = 0) -> dict[str, dict[str, list[Any]]]:
    """Return the metrics that clients logged for the steps from `since` on.

    For each name, there are lists of steps, times and values. The reward comes first.
    """
    logged = visit.read(lambda tx: logged_metrics.read_last_steps(tx, model_id, _MAX_LOGGED_STEPS))
    logged = [point for point in logged if point.step >= since]
    names = list(dict.fromkeys(name for point in logged for name in point.values))
    reward = logged_metrics.choose_reward(names)
    names.sort(key=lambda name: name != reward)
    curves: dict[str, dict[str, list[Any]]] = {}
    for name in names[:_MAX_LOGGED_NAMES]:
        with_value = [point for point in logged if name in point.values]
        curves[name] = {
            "step": [point.step for point in with_value],
            "time": [point.at for point in with_value],
            "value": [point.values[name] for point in with_value],
        }
    return curves


def make_curve_columns(visit: Visit, model_id: ModelId, owner: str, since: int) -> dict[str, Any]:
    """Return the curves of a run for the steps from `since` on, with one list of values per curve.

    A chart that polls for new steps asks with the last step that it has as `since`, because that
    step may have changed. It replaces its steps from `since` on with the result.
    """
    # Read the steps, and leave some out if there are too many for a chart
    steps = read_steps(visit, model_id, owner)
    total = len(steps)
    if since:
        steps = [step for step in steps if step.step >= since]
    kept = thin_steps(steps, _CURVE_NAMES)

    # Read logged metrics and checkpoints. Curves without values are left out below.
    logged = read_logged_metrics(visit, model_id, since)
    present = {name for step in kept for name in step.values}
    marks = visit.read(lambda tx: queries.list_checkpoints_of_runs(tx, [model_id], _MAX_CHECKPOINT_MARKS, visit.now))

    return {
        "run": model_id,
        "since": since,
        "total": total,
        "step": [step.step for step in kept],
        "time": [step.at for step in kept],
        "curves": {name: [step.values.get(name) for step in kept] for name in _CURVE_NAMES if name in present},
        "titles": {
            curve.name: {"title": curve.title, "help": curve.help, "unit": curve.unit, "group": curve.group}
            for curve in CURVES
            if curve.name in present
        },
        # What charts draw in addition to the curves
        "logged": logged,
        "reward": logged_metrics.choose_reward(logged),
        "checkpoints": [
            {"name": row.name, "kind": row.kind, "step": row.step, "time": row.created_at}
            for row in marks
            if row.kind != CheckpointKind.EXTERNAL
        ],
    }


def make_csv_rows(visit: Visit, model_id: ModelId, owner: str) -> Iterator[list[object]]:
    """Yield the header of a table of all steps, then one row per step."""
    logged = read_logged_metrics(visit, model_id)
    yield ["step", "time", *_CURVE_NAMES, *(f"logged/{name}" for name in logged)]
    by_step = [dict(zip(curve["step"], curve["value"], strict=True)) for curve in logged.values()]
    for step in read_steps(visit, model_id, owner):
        measured = [step.values.get(name) for name in _CURVE_NAMES]
        yield [step.step, f"{step.at:.3f}", *measured, *(values.get(step.step) for values in by_step)]
