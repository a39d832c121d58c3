"""Combine the points of a run into optimizer steps with the values of all curves, and cache the steps.

The points of one step are combined in the same way as the SDK combines the chunks of one call
(`tinker.lib.chunked_fwdbwd_helpers`).
"""

import math
import threading
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from sqlmodel import Session

from skyrl_tx.apps.history import points
from skyrl_tx.apps.history.points import LOSS_WEIGHT, Point, PointKind, SampleTotals
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.results import SHARED_TOKENS
from skyrl_tx.store.database import Store

Value = float | None
"""A number. None stands for NaN or infinity."""

_MAX_RUNS = 64
"""The steps of this many recently viewed runs stay in memory."""
_PAGE_SIZE = 5000
_BUCKETS = 250
_SAMPLED_AGAIN = 32
"""On each refresh, the sums over samples of this many newest steps are read again.

They may still grow, because asynchronous training samples from older weights for a while.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """One optimizer step of a run, with the passes before it. Steps are numbered from 1."""

    step: int
    at: float
    """When the last request of the step completed."""
    began_at: float
    """When the first request of the step arrived."""
    passes: int
    tokens: int
    datums: int
    queue_s: float
    """The longest time that a request of the step waited while no earlier request of the run ran."""
    device_s: float
    is_applied: bool
    """False if there are passes but no optimizer step yet."""
    values: Mapping[str, Value] = field(default_factory=dict[str, Value])
    """The values of the curves at this step, by the names in `CURVES`."""

    @property
    def wall_s(self) -> float:
        """Seconds from the first request of the step to its last result."""
        return self.at - self.began_at


@dataclass(frozen=True, slots=True)
class Curve:
    """Name and description of a curve, as the console shows it. `group` is a heading of the page."""

    name: str
    title: str
    help: str
    unit: str = ""
    group: str = "Training"


_MAIN, _SAMPLES, _SIZE = "Reward and loss", "Samples", "Size and time"
CURVES: tuple[Curve, ...] = (
    Curve("loss", "Loss", "loss of the step, divided by the sum of the weights of its tokens", group=_MAIN),
    Curve(
        "loss_per_token",
        "Loss per token, with prompts",
        "steps of a release before 0.3, which stored no weights: loss divided by all tokens",
        group=_MAIN,
    ),
    Curve("forward_loss", "Loss, forward only", "loss of forward-only passes, such as evaluations, divided likewise"),
    Curve("kl_to_sampler", "KL to the sampler", "mean of sampler log-probability minus trainer log-probability"),
    Curve("ratio", "Ratio", "mean of trainer probability divided by sampler probability"),
    Curve("clip_fraction", "Clip fraction", "fraction of ratios outside the clip thresholds"),
    Curve("grad_norm", "Gradient norm", "L2 norm of the gradient before clipping"),
    Curve("learning_rate", "Learning rate", "learning rate of the optimizer step"),
    Curve("loss_sum", "Loss, summed", "loss of the step as returned to the client"),
    Curve(
        "sampled_length",
        "Sampled length",
        "mean length in tokens of samples from the weights before this step",
        group=_SAMPLES,
    ),
    Curve(
        "cut_share",
        "Cut samples",
        "fraction of samples that reached max_tokens or the context limit",
        group=_SAMPLES,
    ),
    Curve(
        "surprise",
        "Surprise",
        "mean -log p of sampled tokens; near 0, all samples of a prompt are alike",
        "nats",
        group=_SAMPLES,
    ),
    Curve("tokens", "Tokens", "training tokens of the step", group=_SIZE),
    Curve(
        "shared_tokens",
        "Shared tokens",
        "training tokens that were not computed, because another example of the request begins with them",
        group=_SIZE,
    ),
    Curve("datums", "Examples", "training examples of the step", group=_SIZE),
    Curve("device_s", "Device time", "device time of the step's requests in seconds", "s", group=_SIZE),
    Curve("queue_s", "Queue time", "longest wait of a request while the run used no device", "s", group=_SIZE),
    Curve("wall_s", "Wall time", "time from the first request of the step to its last result", "s", group=_SIZE),
)
LOSSES = ("loss", "loss_per_token")
"""The curves with the loss of a step. A step has one of them."""
_MEANS = ("ratio", "kl_to_sampler", "clip_fraction")


def get_displayed_step(kind: str, step: int) -> int:
    """Return the number of the optimizer step that a point belongs to, from 1.

    A pass before the first optimizer step has `step` 0 and belongs to step 1.
    """
    return step if kind == "step" else step + 1


def compute_shared_share(steps: Sequence[OptimizerStep]) -> float | None:
    """Return the share of training tokens that were not computed, in the steps of runs that share prefixes."""
    counts = [(shared, step.tokens) for step in steps if (shared := step.values.get("shared_tokens")) is not None]
    total = sum(tokens for _, tokens in counts)
    return sum(shared for shared, _ in counts) / total if total else None


def fold_metrics(rows: Sequence[tuple[Mapping[str, Value], float]]) -> dict[str, Value]:
    """Combine the metrics of multiple requests. `rows` are pairs of metrics and weight.

    The end of a metric's name gives the reduction, for example "loss:sum". A metric is left out if
    a request does not have it, and it is None if a request has NaN or infinity.
    """
    if not rows:
        return {}
    folded: dict[str, Value] = {}
    weights = [weight for _, weight in rows]
    for name in rows[0][0]:
        reduction = name.rpartition(":")[2]
        if reduction not in ("mean", "sum", "min", "max", "slack") or not all(name in values for values, _ in rows):
            continue
        finite = [value for values, _ in rows if (value := values[name]) is not None]
        folded[name] = _reduce(reduction, finite, weights) if len(finite) == len(rows) else None
    return folded


def _reduce(reduction: str, values: Sequence[float], weights: Sequence[float]) -> Value:
    match reduction:
        case "sum":
            result = math.fsum(values) if all(map(math.isfinite, values)) else math.nan
        case "min":
            result = min(values)
        case "max":
            result = max(values)
        # "mean", and "slack", which is the maximum minus the mean
        case _:
            total = math.fsum(weights)
            is_unweighted = total <= 0
            mean = sum(
                value * (1.0 if is_unweighted else weight) / (len(values) if is_unweighted else total)
                for value, weight in zip(values, weights, strict=True)
            )
            result = mean if reduction == "mean" else max(values) - mean
    return result if math.isfinite(result) else None


def fold_points(points: Iterable[Point], before: OptimizerStep | None = None) -> list[OptimizerStep]:
    """Combine points into optimizer steps, in order of their numbers.

    `before` is the step before the first one, if it is known.
    """
    by_step: dict[int, list[Point]] = {}
    for point in points:
        by_step.setdefault(get_displayed_step(point.kind, point.step), []).append(point)

    steps: list[OptimizerStep] = []
    for number in sorted(by_step):
        before = _fold_step(number, by_step[number], before)
        steps.append(before)
    return steps


def fold_newest_points(points: Sequence[Point]) -> list[OptimizerStep]:
    """Combine the newest points of a run into optimizer steps.

    The first step is left out if there are more than two, because some of its points may be
    missing.
    """
    steps = fold_points(points)
    return steps[1:] if len(steps) > 2 else steps


def _fold_step(step: int, points: Sequence[Point], before: OptimizerStep | None) -> OptimizerStep:
    passes = [point for point in points if point.kind == "train"]
    forwards = [point for point in points if point.kind == "forward"]
    updates = [point for point in points if point.kind == "step"]

    # Forward passes between two steps are evaluations. They do not count for tokens and times of
    # the training step.
    timed = [*passes, *updates] or forwards
    trained = passes or ([] if updates else forwards)
    tokens, datums = (sum(point.tokens for point in trained), sum(point.datums for point in trained))
    wall_s = max(point.at for point in timed) - min(point.created_at for point in timed)
    queue_s = _find_longest_wait(points, {point.kind for point in timed}, 0.0 if before is None else before.at)
    device_s = sum(point.device_s for point in timed)

    # Curves
    values: dict[str, Value] = _fold_passes(passes)
    if forwards:
        losses = [value for name, value in _fold_passes(forwards).items() if name in LOSSES]
        if losses:
            values["forward_loss"] = losses[0]
    if updates:
        update = updates[-1].values
        for name, metric in (("grad_norm", "unclipped_grad_l2:mean"), ("learning_rate", "learning_rate:mean")):
            if metric in update:
                values[name] = update[metric]
    if passes or updates:
        values |= {"tokens": tokens, "datums": datums, "device_s": device_s, "queue_s": queue_s, "wall_s": wall_s}

    # A run from before an upgrade has no number of shared tokens
    shared = [number for point in passes if (number := point.values.get(SHARED_TOKENS)) is not None]
    if shared:
        values["shared_tokens"] = sum(shared)

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


def _find_longest_wait(points: Iterable[Point], kinds: Collection[PointKind], free_at: float) -> float:
    """Return how long a request of these kinds waited at most while no earlier request of the run ran.

    A client may send the optimizer step and the next pass before the current pass has finished. The
    time that they wait for the current pass does not count, because meanwhile the run uses the
    device. `free_at` is when the last request of the previous step completed.
    """
    longest_s = 0.0
    for point in sorted(points, key=lambda point: (point.started_at, point.position)):
        if point.kind in kinds:
            longest_s = max(longest_s, point.started_at - max(point.created_at, free_at))
        free_at = max(free_at, point.at)
    return longest_s


def _fold_passes(passes: Sequence[Point]) -> dict[str, Value]:
    """Return the curves of the passes of one step."""
    if not passes:
        return {}
    metrics = fold_metrics([(point.values, float(point.datums)) for point in passes])
    curves: dict[str, Value] = {}
    if "loss:sum" in metrics:
        # Rows of releases before 0.3 have no sum of weights. For policy-gradient losses, the number
        # of positions with an advantage is used instead
        total = metrics["loss:sum"]
        known = [metrics[name] for name in (LOSS_WEIGHT, "ratio_count:sum") if name in metrics]
        weight = known[0] if known else float(sum(point.tokens for point in passes))
        curves["loss_sum"] = total
        if weight != 0:
            mean = None if total is None or weight is None else total / weight
            curves["loss" if known else "loss_per_token"] = mean

    for name in _MEANS:
        count = metrics.get(f"{name}_count:sum")
        if f"{name}_count:sum" in metrics and count is not None:
            total = metrics.get(f"{name}:sum")
            if count:
                curves[name] = None if total is None else total / count
            if name == "ratio":
                curves["nonzero_advantages"] = count
    return curves


def thin_steps(steps: Sequence[OptimizerStep], names: Sequence[str], buckets: int = _BUCKETS) -> list[OptimizerStep]:
    """Reduce the steps for a chart, without losing spikes.

    The steps are divided into buckets. Of each bucket, the result has the first step, and for each
    curve the steps with the minimum and maximum of the curve. If there are at most four steps per
    bucket, all steps are returned.
    """
    if len(steps) <= buckets * 4:
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


def draw_spark(values: Sequence[Value], width: int = 120, height: int = 28) -> str:
    """Return the points of an SVG polyline through the values.

    The line fills a box of `width` times `height`. Returns an empty text for fewer than two values.
    """
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


def add_samples(step: OptimizerStep, sampled: SampleTotals) -> OptimizerStep:
    """Return a step with the curves about samples from the weights before the step."""
    curves: dict[str, Value] = {}
    if sampled.samples:
        curves["sampled_length"] = sampled.tokens / sampled.samples
        curves["cut_share"] = sampled.cut / sampled.samples
    if sampled.scored_tokens:
        curves["surprise"] = -sampled.logprob_sum / sampled.scored_tokens
    return replace(step, values={**step.values, **curves})


class RunCurves:
    """The steps of one run, in memory.

    Reading them again only reads the newest two steps from the database, because chunks of a pass can
    complete out of order. The sums over samples from the last `_SAMPLED_AGAIN` steps are also read
    again, because asynchronous training still samples from older weights.
    """

    def __init__(self, store: Store, model_id: ModelId, owner: str) -> None:
        self._store, self._model_id, self._owner = store, model_id, owner
        self._lock = threading.Lock()
        self._steps: dict[int, OptimizerStep] = {}
        self._sampled: dict[int, SampleTotals] = {}
        self._merged: list[OptimizerStep] = []
        self._after = -1
        """The next call of `read_steps` reads the points after this position."""

    def read_steps(self) -> Sequence[OptimizerStep]:
        """Return all steps of the run."""
        with self._lock:
            # Combine new points, and the newest two steps again, into steps
            found = self._read_new_points()
            numbers = [get_displayed_step(point.kind, point.step) for point in found]
            earlier = bisect_left(self._merged, min(numbers, default=0), key=lambda step: step.step)
            folded = fold_points(found, self._merged[earlier - 1] if earlier else None)
            self._steps |= {step.step: step for step in folded}
            if found:
                newest = max(numbers)
                reread = (point for point, number in zip(found, numbers, strict=True) if number >= newest - 1)
                self._after = min(point.position for point in reread) - 1

            # Read the sums over samples
            after_step = max(self._sampled, default=-1) - _SAMPLED_AGAIN
            sampled = self._store.read(
                lambda tx: points.read_sampled(tx, self._model_id, self._owner, after_step=after_step)
            )
            grown = {sums.step: sums for sums in sampled if self._sampled.get(sums.step) != sums}
            self._sampled |= grown

            # Merge the steps that changed
            changed = [step.step for step in folded] + [step + 1 for step in grown]
            if changed:
                self._merge(min(changed))
            return list(self._merged)

    def _read_new_points(self) -> list[Point]:
        found: list[Point] = []
        after = self._after

        def read_page(tx: Session) -> list[Point]:
            return points.read_points(tx, self._model_id, after, _PAGE_SIZE)

        while True:
            page = self._store.read(read_page)
            found += page
            if len(page) < _PAGE_SIZE:
                return found
            after = page[-1].position

    def _merge(self, first: int) -> None:
        """Combine the steps from number `first` on with the sums over their samples.

        Samples from the weights after step n belong to step n + 1.
        """
        kept = bisect_left(self._merged, first, key=lambda step: step.step)
        del self._merged[kept:]
        for number in sorted(number for number in self._steps if number >= first):
            step, sampled = self._steps[number], self._sampled.get(number - 1)
            self._merged.append(step if sampled is None else add_samples(step, sampled))


@lru_cache(maxsize=_MAX_RUNS)
def get_curves(store: Store, model_id: ModelId, owner: str) -> RunCurves:
    """Return the curves of a run. The curves of recently viewed runs stay in memory.

    Curves about samples, such as their length, only count samples of `owner`.
    """
    return RunCurves(store, model_id, owner)
