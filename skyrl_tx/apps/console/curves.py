"""The curves of runs as the pages and the charts read them."""

from collections.abc import Iterator, Sequence
from typing import Any

from skyrl_tx.apps.console import queries
from skyrl_tx.apps.console.visit import Visit
from skyrl_tx.apps.history import points
from skyrl_tx.apps.history.curves import CURVES, CurveCache, OptimizerStep, thin_steps
from skyrl_tx.contract.ids import CheckpointKind, ModelId

_CURVES = CurveCache()
"""One for each process, like its store."""
_MAX_LOGGED = 5000
_MAX_LOGGED_NAMES = 60
_MAX_MARKS = 500
_NAMES = [curve.name for curve in CURVES]


def read_steps(visit: Visit, model_id: ModelId, owner: str) -> Sequence[OptimizerStep]:
    """Return all steps of a run that the visitor may see, with its owner's samples from its weights."""
    return _CURVES.read_steps(
        f"{id(visit.context)} {model_id}",
        lambda after, limit: visit.read(lambda tx: points.read_points(tx, model_id, after, limit)),
        lambda after: visit.read(lambda tx: points.read_sampled(tx, model_id, owner, after_step=after)),
    )


def read_logged(visit: Visit, model_id: ModelId, since: int = 0) -> dict[str, dict[str, list[Any]]]:
    """Return the metrics that the client logged itself, from a step on: for each name its steps, times and values."""
    logged = visit.read(lambda tx: queries.list_logged_steps(tx, model_id, _MAX_LOGGED))
    curves: dict[str, dict[str, list[Any]]] = {}
    for point in logged:
        for name, value in point.values.items() if point.step >= since else ():
            if name not in curves and len(curves) >= _MAX_LOGGED_NAMES:
                continue
            curve = curves.setdefault(name, {"step": [], "time": [], "value": []})
            curve["step"].append(point.step)
            curve["time"].append(point.at)
            curve["value"].append(value)
    return curves


def make_columns(visit: Visit, model_id: ModelId, owner: str, since: int) -> dict[str, Any]:
    """Return the steps from `since` on as columns. A reader replaces its own steps from there on."""
    steps = read_steps(visit, model_id, owner)
    total = len(steps)
    if since:
        steps = [step for step in steps if step.step >= since]
    kept = thin_steps(steps, _NAMES)

    # Curves that no step has are left out.
    there = {name for step in kept for name in step.values}
    marks = visit.read(lambda tx: queries.list_checkpoints_of_runs(tx, [model_id], _MAX_MARKS, visit.now))

    return {
        "run": model_id,
        "since": since,
        "total": total,
        "step": [step.step for step in kept],
        "time": [step.at for step in kept],
        "curves": {name: [step.values.get(name) for step in kept] for name in _NAMES if name in there},
        "titles": {
            curve.name: {"title": curve.title, "help": curve.help, "unit": curve.unit}
            for curve in CURVES
            if curve.name in there
        },
        "logged": read_logged(visit, model_id, since),
        "checkpoints": [
            {"name": row.name, "kind": row.kind, "step": row.step, "time": row.created_at}
            for row in marks
            if row.kind != CheckpointKind.EXTERNAL
        ],
    }


def make_rows(visit: Visit, model_id: ModelId, owner: str) -> Iterator[list[object]]:
    """Yield the heads of a table of all steps, then a row for each step."""
    logged = read_logged(visit, model_id)
    yield ["step", "time", *_NAMES, *(f"logged/{name}" for name in logged)]
    by_step = [dict(zip(curve["step"], curve["value"], strict=True)) for curve in logged.values()]
    for step in read_steps(visit, model_id, owner):
        measured = [step.values.get(name) for name in _NAMES]
        yield [step.step, f"{step.at:.3f}", *measured, *(values.get(step.step) for values in by_step)]
