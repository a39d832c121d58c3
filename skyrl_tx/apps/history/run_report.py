"""`skyrl-tx runs show`: print the configuration, curves, checkpoints and problems of a run."""

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlmodel import Session

from skyrl_tx.apps.history import logged_metrics, points
from skyrl_tx.apps.history.breakdown import PARTS, Breakdown, read_breakdown
from skyrl_tx.apps.history.curves import (
    OptimizerStep,
    add_samples,
    compute_shared_share,
    fold_newest_points,
    fold_points,
)
from skyrl_tx.apps.history.hints import Hint, find_advice, read_hints
from skyrl_tx.apps.history.logged_metrics import LoggedPoint
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import Record, format_table, format_time, open_database
from skyrl_tx.process.text import make_line
from skyrl_tx.server.identity.access import decode_spec
from skyrl_tx.store import checkpoints, models, sessions
from skyrl_tx.store.tables import CheckpointRow, ModelRow

MAX_POINTS = 2000
"""The report reads this many of the newest points of a run, and as many logged points."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_NO_VALUE = "·"
_MAX_CURVES = 12
_STEP_CURVES = {"loss": "loss", "loss_per_token": "loss per token", "grad_norm": "gradient norm"}

CurvePoints = Sequence[tuple[int, float | None]]
"""Pairs of step and value. None stands for NaN or infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run with its curves, checkpoints, hints, and where its time went."""

    summary: Record
    curves: Mapping[str, CurvePoints]
    checkpoints: Sequence[Record]
    hints: Sequence[Hint]
    time: Breakdown


def show(arguments: argparse.Namespace) -> None:
    """Print a run. Raises CommandError if it does not exist."""
    with open_database(arguments) as store:
        report = store.read(lambda tx: read_report(tx, ModelId(arguments.run_id)))
    if arguments.json:
        curves = {name: [[step, value] for step, value in curve] for name, curve in report.curves.items()}
        more = {
            "curves": curves,
            "checkpoints": report.checkpoints,
            "hints": [asdict(hint) for hint in report.hints],
            "iterations": [asdict(iteration) for iteration in report.time.iterations],
        }
        print(json.dumps({**report.summary, **more}, indent=2))
    else:
        print(*format_report(report), sep="\n")


def read_report(tx: Session, model_id: ModelId) -> RunReport:
    """Read a run. Raises CommandError if it does not exist."""
    row = models.get(tx, model_id)
    if row is None:
        raise CommandError(f"run {model_id!r} does not exist; `skyrl-tx runs list` shows all runs")
    newest = points.read_newest(tx, model_id, MAX_POINTS)
    steps = fold_points(newest) if len(newest) < MAX_POINTS else fold_newest_points(newest)
    logged = _read_newest_logged(tx, model_id)
    rows = checkpoints.list_by_run(tx, model_id, time.time())
    breakdown = read_breakdown(tx, row, lambda _: True)
    return RunReport(
        summary=_make_summary(tx, row, steps),
        curves=make_curves(steps, logged),
        checkpoints=list(map(_make_checkpoint_record, rows)),
        hints=[*_find_hints(tx, model_id, steps, logged), *find_advice(breakdown)],
        time=breakdown,
    )


def _find_hints(
    tx: Session, model_id: ModelId, steps: Sequence[OptimizerStep], logged: Iterable[LoggedPoint]
) -> Sequence[Hint]:
    """Return the hints that an admin sees on the run's page in the console."""
    owner = models.get_owner(tx, model_id) or ""
    sums = {sampled.step + 1: sampled for sampled in points.read_sampled(tx, model_id, owner, limit=MAX_POINTS)}
    steps = [add_samples(step, sums[step.step]) if step.step in sums else step for step in steps]
    reward = logged_metrics.choose_reward(name for point in logged for name in point.values)
    return read_hints(tx, model_id, owner, steps, time.time(), lambda _: True, has_reward=reward is not None)


def find_name(tx: Session, model_id: ModelId, display_name: str | None) -> str | None:
    """Return the name of a run: from its logger, else the name of its session."""
    return logged_metrics.get_logger_names(tx, [model_id]).get(model_id) or display_name


def get_last_loss(steps: Sequence[OptimizerStep]) -> float | None:
    """Return the loss of the last step that has one, with six digits, as the console shows it.

    Returns None if the loss is NaN or infinite. Also returns None for runs of releases before 0.3,
    because without `LOSS_WEIGHT` only a loss per token is known.
    """
    losses = [step.values["loss"] for step in steps if "loss" in step.values]
    return None if not losses or losses[-1] is None else float(f"{losses[-1]:.6g}")


def make_curves(steps: Sequence[OptimizerStep], logged: Iterable[LoggedPoint]) -> dict[str, CurvePoints]:
    """Return the curves of a run by name: first the reward, the loss and the gradient norm."""
    metrics: dict[str, list[tuple[int, float | None]]] = {}
    for point in logged:
        for name, value in point.values.items():
            metrics.setdefault(name, []).append((point.step, value))
    reward = logged_metrics.choose_reward(metrics)
    curves: dict[str, CurvePoints] = {} if reward is None else {reward: metrics.pop(reward)}

    for name, title in _STEP_CURVES.items():
        curve = [(step.step, step.values[name]) for step in steps if name in step.values]
        if curve:
            curves[title] = curve
    return curves | {f"logged/{name}" if name in curves else name: curve for name, curve in metrics.items()}


def draw_sparkline(values: Sequence[float | None], width: int = _WIDTH) -> str:
    """Draw values with at most `width` block characters.

    Each character shows the mean of some consecutive values. It is a dot if none of them is finite.

    For example, the values 0, 1, 2 and 3 give "▁▃▆█".
    """
    # The mean of each part
    count = min(width, len(values))
    means: list[float | None] = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        numbers = [value for value in part if value is not None and math.isfinite(value)]
        means.append(math.fsum(number / len(numbers) for number in numbers) if numbers else None)

    # A block for each mean, between the minimum and the maximum
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return _NO_VALUE * count
    low, high = min(finite), max(finite)
    return "".join(_NO_VALUE if mean is None else _choose_block(mean, low, high) for mean in means)


def _choose_block(value: float, low: float, high: float) -> str:
    # Halves, because high - low can overflow
    half_range = high / 2 - low / 2
    # The minimum and the maximum are equal, or so close that half their distance is 0
    if half_range == 0:
        return _BLOCKS[len(_BLOCKS) // 2 - 1]
    share = (value / 2 - low / 2) / half_range
    return _BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))]


def format_report(report: RunReport) -> Iterator[str]:
    """Yield the lines of a report. Control characters in text from clients are replaced."""
    # Summary
    width = max(map(len, report.summary))
    for name, value in report.summary.items():
        yield f"{name.replace('_', ' '):<{width}}  {_format_value(value)}"

    # Hints
    if report.hints:
        yield ""
    for hint in report.hints:
        yield f"{hint.level}: {_format_value(hint.text)} {_format_value(hint.advice)}"

    # Curves
    if report.curves:
        yield ""
        yield from format_table(
            [_make_curve_record(name, curve) for name, curve in list(report.curves.items())[:_MAX_CURVES]]
        )
        if len(report.curves) > _MAX_CURVES:
            yield f"and {len(report.curves) - _MAX_CURVES} more metrics; --json prints all"

    # Where the time went
    if report.time.iterations:
        yield ""
        yield from format_table(_make_time_records(report.time))

    # Checkpoints
    if report.checkpoints:
        yield ""
        yield from format_table(report.checkpoints)


def _make_curve_record(name: str, curve: CurvePoints) -> Record:
    values = [value for _, value in curve]
    return {
        "metric": name,
        "first": _format_number(values[0]),
        "curve": draw_sparkline(values),
        "last": _format_number(values[-1]),
        "step": curve[-1][0],
    }


def _make_time_records(breakdown: Breakdown) -> list[Record]:
    """Return a record for each part of the time, with its share and its seconds per step."""
    records: list[Record] = []
    for part, title in PARTS.items():
        seconds = [iteration.parts[part] for iteration in breakdown.iterations]
        records.append(
            {
                "time of a step": title.lower(),
                "share": f"{breakdown.compute_share(part):.0%}",
                "seconds": _format_number(math.fsum(seconds) / len(seconds)),
                "curve": draw_sparkline(seconds),
            }
        )
    return records


def _format_value(value: object) -> str:
    return "-" if value is None else make_line(str(value))


def _make_summary(tx: Session, row: ModelRow, steps: Sequence[OptimizerStep]) -> Record:
    session, share = sessions.get(tx, row.session_id), compute_shared_share(steps)

    return {
        "run": row.model_id,
        "name": find_name(tx, row.model_id, None if session is None else session.display_name),
        "project": None if session is None else session.project_id,
        "owner": None if session is None else session.owner,
        "session": row.session_id,
        "status": row.status,
        "base_model": row.base_model,
        "rank": decode_spec(row).lora.rank,
        "loaded_from": row.loaded_from,
        # State
        "created": format_time(row.created_at),
        "last_used": format_time(row.last_request_at),
        "step": row.num_steps,
        "loss": get_last_loss(steps),
        "shared_tokens": None if share is None else f"{share:.0%}",
        "incomplete_gradient": row.poisoned_by,
        "deleted": format_time(row.deleted_at),
    }


def _make_checkpoint_record(row: CheckpointRow) -> Record:
    return {
        "path": str(row.path),
        "step": row.step,
        "made": format_time(row.created_at),
        "expires": format_time(row.expires_at),
        "bytes": row.size_bytes,
        "copied_from": row.copied_from,
    }


def _read_newest_logged(tx: Session, model_id: ModelId) -> list[LoggedPoint]:
    """Return the newest points that clients logged for a run, ordered by step."""
    newest = logged_metrics.read_last_points(tx, logged_metrics.list_run_ids(tx, model_id), limit=MAX_POINTS)
    return sorted(newest, key=lambda point: (point.step, point.position))


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
