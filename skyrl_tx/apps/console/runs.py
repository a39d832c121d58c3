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
from skyrl_tx.apps.history.advice import MIN_ITERATIONS, find_advice
from skyrl_tx.apps.history.breakdown import PARTS, Breakdown
from skyrl_tx.apps.history.curves import (
    CURVES,
    LOSSES,
    CurveCache,
    OptimizerStep,
    Value,
    compute_shared_share,
    draw_spark,
    fold_newest_points,
    thin_steps,
)
from skyrl_tx.apps.history.hints import DeviceUser, Hint, find_device_users, find_hints, find_slow_since
from skyrl_tx.apps.history.run_time import read_breakdown
from skyrl_tx.apps.history.tables import LoggedRunRow
from skyrl_tx.apps.teams import usage
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import CheckpointKind, ModelId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.contract.results import Failure
from skyrl_tx.server.errors import bad_request, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.submission.validation import quote_value
from skyrl_tx.store import sessions

pages = PageTable()
_PAGE_ROWS = 25
_SPARK_POINTS = 120
_SPARK_REWARDS = 400
_SPARK_BUCKETS = 30
_WHOLE_STEPS = 2000
"""The list shows the newest part of a curve if the run has more than this many steps."""
_STEP_ROWS = 100
_REQUESTS = 30
_CHECKPOINTS = 200
_LOGGED_RUNS = 50
_MAX_COMPARED = 8
_MOST_DIGITS = 18
_ACTIVE_S = 60.0
_STATES = {"unloaded": "ended", "creating": "loading"}
_TABS = ("curves", "time", "samples", "steps", "checkpoints", "requests", "config")
_CURVES = CurveCache()
_MAX_LOGGED = 5000
_MAX_LOGGED_NAMES = 60
_MAX_MARKS = 500
_NAMES = [curve.name for curve in CURVES]


@pages.get("/training_runs", menu="Runs")
def list_runs(visit: Visit) -> Page:
    """List the runs of the visitor and its projects, or all runs for an admin."""
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
    tab = visit.get_query("tab", "curves")
    if tab not in _TABS:
        raise bad_request(f"tab: {tab!r} must be one of {', '.join(_TABS)}")

    # The heading, which is the same on all tabs
    steps = read_steps(visit, line.model_id, line.owner)
    (run,) = describe_runs(visit, [line])
    saved = visit.read(lambda tx: queries.list_checkpoints_of_runs(tx, [line.model_id], _CHECKPOINTS, visit.now))
    values: dict[str, object] = {
        "run": run,
        "tab": tab,
        "tabs": _TABS,
        "hints": _find_hints(visit, line, steps, has_reward=run.reward is not None),
        "num_steps": len(steps),
        "shared_share": compute_shared_share(steps),
        "has_sampler": any(row.kind == CheckpointKind.SAMPLER for row in saved),
    }

    # The tab
    match tab:
        case "steps":
            newest_first = steps[::-1][visit.offset : visit.offset + _STEP_ROWS]
            kept = visit.read(lambda tx: kept_samples.list_steps(tx, line.model_id, samples.find_owner(visit, line)))
            values["steps"] = newest_first
            values["pager"] = visit.make_pager(_STEP_ROWS, len(newest_first), len(steps))
            values["curves"] = _list_curves(steps)
            values["sampled"] = {step + 1 for step, _ in kept if step is not None}
        case "samples":
            values |= samples.read_tab(visit, line)
        case "checkpoints":
            values["checkpoints"] = [(row, line.owner, True) for row in saved[::-1]]
        case "requests":
            lines = visit.read(lambda tx: queries.list_requests_of_model(tx, line.model_id, _REQUESTS))
            values["requests"] = [describe_request(request) for request in lines]

        case "time":
            row = visit.read(lambda tx: access.find_visible_run(tx, visit.caller, line.model_id))
            values |= describe_time(visit.read(lambda tx: read_breakdown(tx, row, visit.caller.can_act_for)))

        case "config":
            row = visit.read(lambda tx: access.find_visible_run(tx, visit.caller, line.model_id))
            values["is_own"] = visit.caller.can_act_for(line.owner)
            values["session"] = visit.read(lambda tx: sessions.get(tx, line.session_id))
            values["metadata"] = row.user_metadata or {}
            values["joined"], values["free"] = visit.read(lambda tx: _list_logged(tx, visit, line))

        case _:
            values["curves"] = _list_curves(steps)
    return Page("run.jinja", values)


def _find_run(visit: Visit, model_id: str | None = None) -> RunLine:
    """Return a run, by default the run in the URL.

    Raises ApiError 404 if the visitor cannot see it.
    """
    run_id = ModelId(visit.path["run_id"] if model_id is None else model_id)
    visit.read(lambda tx: access.find_visible_run(tx, visit.caller, run_id))
    line = visit.read(lambda tx: queries.get_run(tx, run_id))
    if line is None:
        raise not_found(f"run {quote_value(run_id)} does not exist")
    return line


def _list_logged(tx: Session, visit: Visit, line: RunLine) -> tuple[list[LoggedRunRow], list[LoggedRunRow]]:
    """Return the logged runs that belong to a run, and the owner's newest unassigned logged runs.

    The second list is empty if the visitor may not change the run.
    """
    joined = logged_metrics.list_runs(tx, line.owner, model_id=line.model_id, limit=_LOGGED_RUNS)
    if not visit.caller.can_act_for(line.owner):
        return joined, []
    return joined, logged_metrics.list_runs(tx, line.owner, is_free=True, limit=_LOGGED_RUNS)


def _find_hints(visit: Visit, line: RunLine, steps: Sequence[OptimizerStep], *, has_reward: bool) -> Sequence[Hint]:
    since = find_slow_since(steps)
    users: Sequence[DeviceUser] = ()
    if since is not None:
        users = visit.read(lambda tx: find_device_users(tx, since, line.model_id, line.owner, visit.caller.can_act_for))
    return find_hints(steps, visit.now, users, has_reward=has_reward)


def describe_time(breakdown: Breakdown) -> dict[str, object]:
    """Return the values of the tab with the time of a run: a stacked bar per step, and advice."""
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

    `since` is the first step to send.
    """
    line = _find_run(visit)
    return make_json_response(make_columns(visit, line.model_id, line.owner, visit.get_int("since", 0)))


@pages.get("/training_runs/{run_id}/curves.csv")
def send_table(visit: Visit) -> Response:
    """Send the curves of a run as CSV, with one row per step."""
    line = _find_run(visit)
    return make_csv_response("curves.csv", make_rows(visit, line.model_id, line.owner))


@pages.get("/compare")
def compare(visit: Visit) -> Page:
    """Show the curves of multiple runs in the same charts."""
    requested = visit.request.query_params.getlist("run") + visit.get_query("runs").split(",")
    ids = list(dict.fromkeys(name for name in requested if name))[: _MAX_COMPARED + 1]
    if len(ids) > _MAX_COMPARED:
        raise bad_request(f"runs: select at most {_MAX_COMPARED} runs to compare")
    lines = [_find_run(visit, model_id) for model_id in ids]
    return Page("compare.jinja", {"runs": describe_runs(visit, lines), "max_runs": _MAX_COMPARED})


@pages.post("/training_runs/{run_id}/logged_runs")
def join_logged(visit: Visit) -> Response:
    """Assign a logged run to this run. With `act` "separate", remove it from this run."""
    # Check the fields of the form
    run_id, text = _find_run(visit).model_id, visit.get_field("logged_run_id")
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
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

    line: RunLine
    name: str
    rank: int
    optimizer: str
    state: str
    step: int
    loss: float | None
    is_per_token: bool
    """Whether `loss` comes from the curve `loss_per_token`, because the run has no weights."""
    loss_spark: str
    reward: float | None
    reward_spark: str
    tokens: int | None


def describe_runs(visit: Visit, lines: Sequence[RunLine]) -> list[RunView]:
    """Describe runs, with their newest loss and reward."""
    tokens = visit.read(lambda tx: _count_tokens(tx, lines))
    names = visit.read(lambda tx: logged_metrics.get_logger_names(tx, [line.model_id for line in lines]))
    return [_describe_run(visit, line, names, tokens.get(line.model_id)) for line in lines]


def _count_tokens(tx: Session, lines: Sequence[RunLine]) -> dict[str, int]:
    """Return the training tokens of each run."""
    ids = {line.session_id for line in lines}
    totals = usage.read_totals(tx, None, 0, ("model_id",), session_ids=ids) if ids else []
    return {total.group[0]: total.tokens for total in totals if total.kind == "training"}


def _describe_run(visit: Visit, line: RunLine, logger_names: Mapping[str, str | None], tokens: int | None) -> RunView:
    spec = codec.decode(line.spec)
    assert isinstance(spec, ModelSpec)

    # Small curves of the loss, and of the reward if the client logged one
    if line.num_steps <= _WHOLE_STEPS:
        steps = thin_steps(read_steps(visit, line.model_id, line.owner), LOSSES, _SPARK_BUCKETS)
    else:
        steps = fold_newest_points(visit.read(lambda tx: points.read_newest(tx, line.model_id, _SPARK_POINTS)))
    loss_name, losses = list_losses(steps)
    has_metrics = line.model_id in logger_names
    metrics = visit.read(lambda tx: queries.list_logged_steps(tx, line.model_id, _SPARK_REWARDS)) if has_metrics else []
    reward = logged_metrics.choose_reward(name for point in metrics for name in point.values)
    rewards = [value for point in metrics if reward is not None and (value := point.values.get(reward)) is not None]

    return RunView(
        line=line,
        name=logger_names.get(line.model_id) or line.display_name or shorten_id(line.model_id),
        rank=spec.lora.rank,
        optimizer=spec.optimizer,
        state=find_state(line.status, line.last_request_at, visit.now, has_finished=line.finished_at is not None),
        step=max(line.num_steps, max((step.step for step in steps if step.is_applied), default=0)),
        loss=losses[-1] if losses else None,
        is_per_token=loss_name != "loss",
        loss_spark=draw_spark(losses),
        reward=rewards[-1] if rewards else None,
        reward_spark=draw_spark(rewards),
        tokens=tokens,
    )


def list_losses(steps: Sequence[OptimizerStep]) -> tuple[str, list[Value]]:
    """Return the name and the values of a run's loss.

    A step that is not completed counts only if the run has completed none, because headings show
    the loss next to the number of the last completed step.
    """
    completed = [step for step in steps if step.is_applied] or steps
    known = [(name, step.values[name]) for step in completed for name in LOSSES if name in step.values]
    newest = known[-1][0] if known else "loss"
    return newest, [value for name, value in known if name == newest]


def find_state(status: str, last_request_at: float, now: float, *, has_finished: bool = False) -> str:
    """Return the state of a run in one word.

    `has_finished` tells whether its session has finished.
    """
    if status != "ready":
        return _STATES.get(status, status)
    if has_finished:
        return "ended"
    return "training" if now - last_request_at < _ACTIVE_S else "idle"


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as it appears in lists."""

    line: RequestLine
    problem: str
    category: str
    queue_s: float | None
    run_s: float | None


def describe_request(line: RequestLine) -> RequestView:
    """Describe a request, including the error if it failed."""
    # The error of a failed request
    problem = category = ""
    if line.status == "failed" and line.result is not None:
        try:
            result = codec.decode(line.result)
        except codec.CodecError:
            problem = "the stored error cannot be read"
        else:
            if isinstance(result, Failure):
                problem, category = result.message, result.category

    # How long it waited and ran
    started = line.started_at
    return RequestView(
        line=line,
        problem=problem,
        category=category,
        queue_s=None if started is None else started - line.created_at,
        run_s=None if started is None or line.completed_at is None else line.completed_at - started,
    )


def read_steps(visit: Visit, model_id: ModelId, owner: str) -> Sequence[OptimizerStep]:
    """Return all steps of a run, with the sums over its owner's samples.

    The visitor must be allowed to see the run.
    """
    return _CURVES.read_steps(
        f"{id(visit.context)} {model_id}",
        lambda after, limit: visit.read(lambda tx: points.read_points(tx, model_id, after, limit)),
        lambda after: visit.read(lambda tx: points.read_sampled(tx, model_id, owner, after_step=after)),
    )


def read_logged(visit: Visit, model_id: ModelId, since: int = 0) -> dict[str, dict[str, list[Any]]]:
    """Return the metrics that clients logged from a step on.

    For each name, there are lists of steps, times and values. The reward comes first.
    """
    logged = visit.read(lambda tx: queries.list_logged_steps(tx, model_id, _MAX_LOGGED))
    logged = [point for point in logged if point.step >= since]
    names = list(dict.fromkeys(name for point in logged for name in point.values))
    reward = logged_metrics.choose_reward(names)
    names.sort(key=lambda name: name != reward)
    curves: dict[str, dict[str, list[Any]]] = {}
    for name in names[:_MAX_LOGGED_NAMES]:
        having = [point for point in logged if name in point.values]
        curves[name] = {
            "step": [point.step for point in having],
            "time": [point.at for point in having],
            "value": [point.values[name] for point in having],
        }
    return curves


def make_columns(visit: Visit, model_id: ModelId, owner: str, since: int) -> dict[str, Any]:
    """Return the curves of a run as columns, for the steps from `since` on.

    A reader that polls replaces its own steps from `since` on by the result.
    """
    # Steps
    steps = read_steps(visit, model_id, owner)
    total = len(steps)
    if since:
        steps = [step for step in steps if step.step >= since]
    kept = thin_steps(steps, _NAMES)

    # Curves without values are left out
    logged = read_logged(visit, model_id, since)
    present = {name for step in kept for name in step.values}
    marks = visit.read(lambda tx: queries.list_checkpoints_of_runs(tx, [model_id], _MAX_MARKS, visit.now))

    return {
        "run": model_id,
        "since": since,
        "total": total,
        "step": [step.step for step in kept],
        "time": [step.at for step in kept],
        "curves": {name: [step.values.get(name) for step in kept] for name in _NAMES if name in present},
        "titles": {
            curve.name: {"title": curve.title, "help": curve.help, "unit": curve.unit, "group": curve.group}
            for curve in CURVES
            if curve.name in present
        },
        # Besides the curves
        "logged": logged,
        "reward": logged_metrics.choose_reward(logged),
        "checkpoints": [
            {"name": row.name, "kind": row.kind, "step": row.step, "time": row.created_at}
            for row in marks
            if row.kind != CheckpointKind.EXTERNAL
        ],
    }


def make_rows(visit: Visit, model_id: ModelId, owner: str) -> Iterator[list[object]]:
    """Yield the header of a table of all steps, then one row per step."""
    logged = read_logged(visit, model_id)
    yield ["step", "time", *_NAMES, *(f"logged/{name}" for name in logged)]
    by_step = [dict(zip(curve["step"], curve["value"], strict=True)) for curve in logged.values()]
    for step in read_steps(visit, model_id, owner):
        measured = [step.values.get(name) for name in _NAMES]
        yield [step.step, f"{step.at:.3f}", *measured, *(values.get(step.step) for values in by_step)]
