"""Curves of a run: its points folded into steps, thinned for charts, and kept in memory between looks.

Rows of one step are combined as the SDK combines the chunks of one call (`tinker.lib.chunked_fwdbwd_helpers`).
"""

import math
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from skyrl_tx.apps.history.points import Point, SampledStep

Value = float | None
"""A number; None for NaN and infinity."""

_MAX_RUNS = 64
_PAGE = 5000
_BUCKETS = 250
_SAMPLED_AGAIN = 32
"""Steps of the weights whose samples are read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """One optimizer step of a run: its passes and its update together. Steps are numbered from 1."""

    step: int
    at: float
    """When the last request of the step was completed."""
    began_at: float
    """When the first request of the step arrived."""
    passes: int
    tokens: int
    datums: int
    queue_s: float
    """The longest time that a request of the step waited for the device."""
    device_s: float
    is_applied: bool
    """Whether the optimizer step has been made."""
    values: Mapping[str, Value] = field(default_factory=dict[str, Value])
    """The curves by name; see `CURVES`."""

    @property
    def wall_s(self) -> float:
        """Seconds from the first request of the step to its last result."""
        return self.at - self.began_at


@dataclass(frozen=True, slots=True)
class Curve:
    """Name and description of a curve."""

    name: str
    title: str
    help: str
    unit: str = ""


CURVES: tuple[Curve, ...] = (
    Curve("loss", "Loss per token", "loss of the step divided by the tokens that it is summed over"),
    Curve("forward_loss", "Loss per token, forward only", "the same for passes without a backward pass: evaluations"),
    Curve("kl_to_sampler", "KL to the sampler", "mean log-probability of the sampler minus that of the model"),
    Curve("ratio", "Ratio", "mean probability of the model divided by that of the sampler"),
    Curve("clip_fraction", "Clip fraction", "share of the ratios outside the clip thresholds"),
    Curve("grad_norm", "Gradient norm", "L2 norm of the gradient before clipping"),
    Curve("learning_rate", "Learning rate", "of the optimizer step"),
    Curve("loss_sum", "Loss, summed", "loss of the step as the client got it"),
    Curve("sampled_length", "Sampled length", "mean tokens of the samples from the weights that the step began with"),
    Curve("cut_share", "Cut samples", "share of these samples that ended at max_tokens"),
    Curve("surprise", "Surprise", "mean -log p of their tokens: 0 means that the model is certain of each", "nats"),
    Curve("tokens", "Tokens", "tokens that the passes of the step trained on"),
    Curve("datums", "Examples", "examples of the step"),
    Curve("device_s", "Device time", "seconds of the device that the step took", "s"),
    Curve("queue_s", "Queue time", "the longest time that a request of the step waited for the device", "s"),
    Curve("wall_s", "Wall time", "seconds from the first request of the step to its last result", "s"),
)
_STEP_NAMES = frozenset({"tokens", "datums", "device_s", "queue_s", "wall_s"})
_MEANS = ("ratio", "kl_to_sampler", "clip_fraction")


def get_displayed_step(kind: str, step: int) -> int:
    """Return the number, from 1, of the optimizer step that a point belongs to."""
    return step if kind == "step" else step + 1


def fold_metrics(rows: Sequence[tuple[Mapping[str, Value], float]]) -> dict[str, Value]:
    """Combine metrics of several requests, each with its weight, by the reduction that each name ends with.

    A metric that one of the requests lacks is left out, and one that is not finite anywhere is None.
    """
    if not rows:
        return {}
    folded: dict[str, Value] = {}
    weights = [weight for _, weight in rows]
    for name in rows[0][0]:
        reduction = name.rpartition(":")[2]
        if reduction not in ("mean", "sum", "min", "max", "slack") or not all(name in values for values, _ in rows):
            continue
        found = [value for values, _ in rows if (value := values[name]) is not None]
        folded[name] = _reduce(reduction, found, weights) if len(found) == len(rows) else None
    return folded


def _reduce(reduction: str, values: Sequence[float], weights: Sequence[float]) -> Value:
    match reduction:
        case "sum":
            result = math.fsum(values) if all(map(math.isfinite, values)) else math.nan
        case "min":
            result = min(values)
        case "max":
            result = max(values)
        case _:
            total = math.fsum(weights)
            even = total <= 0
            mean = sum(
                value * (1.0 if even else weight) / (len(values) if even else total)
                for value, weight in zip(values, weights, strict=True)
            )
            result = mean if reduction == "mean" else max(values) - mean
    return result if math.isfinite(result) else None


def fold_points(points: Iterable[Point]) -> list[OptimizerStep]:
    """Fold points into steps, in order of their numbers."""
    by_step: dict[int, list[Point]] = {}
    for point in points:
        by_step.setdefault(get_displayed_step(point.kind, point.step), []).append(point)
    return [_fold_step(step, by_step[step]) for step in sorted(by_step)]


def fold_newest_points(points: Sequence[Point]) -> list[OptimizerStep]:
    """Fold the newest points of a run; the first step is left out, because some of its points may be missing."""
    steps = fold_points(points)
    return steps[1:] if len(steps) > 2 else steps


def _fold_step(step: int, points: Sequence[Point]) -> OptimizerStep:
    passes = [point for point in points if point.kind == "train"]
    forwards = [point for point in points if point.kind == "forward"]
    updates = [point for point in points if point.kind == "step"]
    # Evaluations between two steps belong to no training: they change neither its tokens nor its times.
    timed = [*passes, *updates] or forwards
    trained = passes or ([] if updates else forwards)
    tokens, datums = (sum(point.tokens for point in trained), sum(point.datums for point in trained))
    wall_s = max(point.at for point in timed) - min(point.created_at for point in timed)
    queue_s = max(max(point.started_at - point.created_at, 0.0) for point in timed)
    device_s = sum(point.device_s for point in timed)
    values: dict[str, Value] = _fold_passes(passes)
    if forwards:
        values["forward_loss"] = _fold_passes(forwards).get("loss")
    if updates:
        update = updates[-1].values
        for name, metric in (("grad_norm", "unclipped_grad_l2:mean"), ("learning_rate", "learning_rate:mean")):
            if metric in update:
                values[name] = update[metric]
    if passes or updates:
        values |= {"tokens": tokens, "datums": datums, "device_s": device_s, "queue_s": queue_s, "wall_s": wall_s}
    return OptimizerStep(
        step=step,
        at=max(point.at for point in timed),
        began_at=min(point.created_at for point in timed),
        passes=len(passes),
        tokens=tokens,
        datums=datums,
        queue_s=queue_s,
        device_s=device_s,
        is_applied=bool(updates),
        values=values,
    )


def _fold_passes(passes: Sequence[Point]) -> dict[str, Value]:
    """Return the curves of the passes of one step."""
    if not passes:
        return {}
    metrics = fold_metrics([(point.values, float(point.datums)) for point in passes])
    curves: dict[str, Value] = {}
    if "loss:sum" in metrics:
        total = metrics["loss:sum"]
        # A policy-gradient loss counts the positions that have an advantage; others are summed over all tokens.
        counted = metrics.get("ratio_count:sum") or metrics.get("num_tokens:sum")
        counted = counted or float(sum(point.tokens for point in passes))
        curves["loss_sum"] = total
        curves["loss"] = total / counted if total is not None and counted else None
    for name in _MEANS:
        count = metrics.get(f"{name}_count:sum")
        if f"{name}_count:sum" in metrics and count is not None:
            total = metrics.get(f"{name}:sum")
            if count:
                curves[name] = None if total is None else total / count
            if name == "ratio":
                curves["advantages"] = count
    return curves


def thin_steps(steps: Sequence[OptimizerStep], names: Sequence[str], buckets: int = _BUCKETS) -> list[OptimizerStep]:
    """Return at most a few steps a bucket: the first, the last, and for each curve its least and its greatest.

    So that spikes stay. Few steps are returned as they are.
    """
    most = buckets * 4
    if len(steps) <= most:
        return list(steps)
    kept: set[int] = {0, len(steps) - 1}
    for bucket in range(buckets):
        first, end = bucket * len(steps) // buckets, (bucket + 1) * len(steps) // buckets
        kept.add(first)
        for name in names:
            values = [
                (value, index) for index in range(first, end) if (value := steps[index].values.get(name)) is not None
            ]
            if values:
                kept |= {min(values)[1], max(values)[1]}
    return [steps[index] for index in sorted(kept)]


def smooth(values: Sequence[Value], weight: float) -> list[Value]:
    """Return the exponential moving average, without the bias towards 0 of its first values."""
    average = total = 0.0
    smoothed: list[Value] = []
    for value in values:
        if value is None:
            smoothed.append(None)
            continue
        average, total = weight * average + (1 - weight) * value, weight * total + (1 - weight)
        smoothed.append(average / total if total else value)
    return smoothed


def draw_spark(values: Sequence[Value], width: int = 120, height: int = 28) -> str:
    """Return the points of an SVG polyline through the values, which fills a box; empty for fewer than two values."""
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(value for _, value in known), max(value for _, value in known)
    span = high - low
    last = len(values) - 1

    def format_point(index: int, value: float) -> str:
        y = height - 3 - (value - low) / span * (height - 6) if span else height / 2
        return f"{index / last * (width - 4) + 2:.1f},{y:.1f}"

    return " ".join(format_point(index, value) for index, value in known)


def add_samples(step: OptimizerStep, sampled: SampledStep) -> OptimizerStep:
    """Return a step with the curves of the samples from the weights that it began with."""
    curves: dict[str, Value] = {}
    if sampled.samples:
        curves["sampled_length"] = sampled.tokens / sampled.samples
        curves["cut_share"] = sampled.cut / sampled.samples
    if sampled.scored_tokens:
        curves["surprise"] = -sampled.logprob_sum / sampled.scored_tokens
    return replace(step, values={**step.values, **curves})


class CurveCache:
    """The folded steps of the runs that were looked at last; each look reads only the rows of the newest steps."""

    def __init__(self, max_runs: int = _MAX_RUNS) -> None:
        self._max_runs = max_runs
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, _CachedRun] = OrderedDict()

    def read_steps(
        self,
        model_id: str,
        read: Callable[[int, int], Sequence[Point]],
        read_sampled: Callable[[int], Sequence[SampledStep]] = lambda _: (),
    ) -> Sequence[OptimizerStep]:
        """Return all steps of a run.

        `read(after, limit)` returns its points after a position, in order; `read_sampled(after)` the sums over its
        samples after a step of the weights.
        """
        with self._lock:
            run = self._runs.pop(model_id, None) or _CachedRun()
            self._runs[model_id] = run
            while len(self._runs) > self._max_runs:
                self._runs.popitem(last=False)
        return run.refresh(read, read_sampled)


class _CachedRun:
    """The steps of one run. The newest two are read again: chunks of a pass may arrive in another order.

    So are the samples from the weights of the last steps, which asynchronous training uses for a while.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, OptimizerStep] = {}
        self._sampled: dict[int, SampledStep] = {}
        self._merged: list[OptimizerStep] = []
        self._after = -1
        """The position after which points are read again."""

    def refresh(
        self, read: Callable[[int, int], Sequence[Point]], read_sampled: Callable[[int], Sequence[SampledStep]]
    ) -> Sequence[OptimizerStep]:
        with self._lock:
            points: list[Point] = []
            after = self._after
            while page := read(after, _PAGE):
                points.extend(page)
                if len(page) < _PAGE:
                    break
                after = page[-1].position
            folded = fold_points(points)
            for step in folded:
                self._steps[step.step] = step
            if points:
                newest = max(get_displayed_step(point.kind, point.step) for point in points)
                again = [point.position for point in points if get_displayed_step(point.kind, point.step) >= newest - 1]
                self._after = min(again) - 1
            again = max(self._sampled, default=-1) - _SAMPLED_AGAIN
            grown = {each.step: each for each in read_sampled(again) if self._sampled.get(each.step) != each}
            self._sampled |= grown
            changed = [step.step for step in folded] + [step + 1 for step in grown]
            self._merge(min(changed, default=None))
            return list(self._merged)

    def _merge(self, first: int | None) -> None:
        """Combine the steps from a number on with their samples; the weights of step n sample for step n + 1."""
        if first is None:
            return
        kept = bisect_left(self._merged, first, key=lambda step: step.step)
        del self._merged[kept:]
        for number in sorted(number for number in self._steps if number >= first):
            step, sampled = self._steps[number], self._sampled.get(number - 1)
            self._merged.append(step if sampled is None else add_samples(step, sampled))
