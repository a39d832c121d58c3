"""Split the time of a run into sampling, training, waiting for the client, and other parts.

An iteration of a run lasts from the end of one optimizer step to the end of the next. At each
moment one part is chosen by the requests of the run that are open. For example, while a sample
request runs and no training request does, the part is `sampling`. While no request is open, the
part is `client`. So the parts of an iteration add up to its wall time.

The times are read from rows that the server stores anyway. Training requests are read from the
points of the run, which are kept with it. Sample requests are kept for about an hour, so older
iterations of a run that samples are left out.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from sqlalchemy import select
from sqlmodel import Session, col

from skyrl_tx.apps.history import kept_samples, points
from skyrl_tx.apps.history.timeline import (
    TimelineSpan,
    make_model_group,
    make_request_span,
    read_requests_of_session,
)
from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import Total
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.store import engine_state, models
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import ModelRow, SamplingSessionRow

Part = Literal["training", "sampling", "weights", "queued", "compilation", "client"]
PARTS: Mapping[Part, str] = {
    "sampling": "Sampling",
    "training": "Training",
    "weights": "Saving and loading weights",
    "compilation": "Compilation",
    "queued": "Queue",
    "client": "Waiting for the client",
}
"""The parts of an iteration, each with its title."""

_PRIORITY: tuple[Part, ...] = ("training", "sampling", "weights", "queued", "client")
"""If multiple kinds of requests are open, the first part counts."""
_KINDS: Mapping[str, Part] = {
    "forward_backward": "training",
    "forward": "training",
    "model_pass": "training",
    "optim_step": "training",
    "sample": "sampling",
    "save_weights": "weights",
    "load_weights": "weights",
}
_SLOWED_BY_COMPILER: tuple[Part, ...] = ("training", "sampling")
_TAIL = 8
"""Sampling is in its tail while at most one of this many requests of the iteration is still running."""
_PAUSE = 10.0
"""An iteration that took this many times the median is a pause of the client, and is left out."""
_MAX_ITERATIONS = 50
_MAX_POINTS = 2000
_MAX_REQUESTS = 4000
_MAX_GAUGES = 3000
_SAMPLING = ("sampled", "prefill", "prefill_cached")
"""Kinds of usage of sample requests."""
_OTHERS = "other owners"


@dataclass(frozen=True, slots=True)
class DeviceUser:
    """Another user of the device beside a given run, and its device time.

    This is another owner with all their runs, another run of the same owner, or the same owner's samples of the base
    model.
    """

    name: str
    """A name that the reader of the hint is allowed to see."""
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration of a run."""

    step: int
    """The number of the optimizer step that ends the iteration."""
    wall_s: float
    parts: Mapping[Part, float]
    """Seconds of each part, in the order of `PARTS`."""
    passes: int
    """Number of forward_backward requests."""
    datums: int
    """Number of examples in these requests."""
    sample_requests: int
    alone_s: float
    """Seconds of sampling if at most one sample request ran at a time, else 0."""
    tail_s: float
    """Seconds of sampling in which only the last few requests were running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The iterations of a run, and what else the server knows about the time of these iterations."""

    iterations: Sequence[Iteration]
    decode_fill: float | None = None
    """Mean share of the decode rows that were in use while anything was decoded."""
    batch_fill: float | None = None
    """Share of the positions of micro-batches that held a token."""
    has_single_samples: bool = False
    """Whether requests asked for one sample each, and multiple requests had the same prompt."""
    other_users: Sequence[DeviceUser] = ()

    @property
    def wall_s(self) -> float:
        """Seconds of all iterations."""
        return sum(iteration.wall_s for iteration in self.iterations)

    def compute_share(self, part: Part) -> float:
        """Return the share of a part in the time of all iterations."""
        seconds = sum(iteration.parts[part] for iteration in self.iterations)
        return seconds / self.wall_s if self.iterations else 0.0


@dataclass(frozen=True, slots=True)
class Compiling:
    """How many seconds the server compiled in a period."""

    began_at: float
    ended_at: float
    compile_s: float


@dataclass(slots=True)
class _Sums:
    """Sums over one iteration."""

    seconds: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    both_s: float = 0.0
    """Seconds in which both training and sample requests ran."""
    device_s: float = 0.0
    """Device time of the training requests."""
    compile_s: float = 0.0
    sampling: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Periods of the part `sampling`: seconds, and the number of running requests."""
    passes: int = 0
    datums: int = 0
    sample_requests: int = 0

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    def move(self, source: Part, target: Part, seconds: float) -> None:
        self.seconds[source] -= seconds
        self.seconds[target] += seconds


def split_iterations(
    spans: Sequence[TimelineSpan],
    compiling: Sequence[Compiling] = (),
    others_share: float = 0.0,
    since: float = 0.0,
) -> list[Iteration]:
    """Split the time of a run into iterations and parts.

    Args:
        spans: The requests of the run, and the sample requests of its session.
        compiling: When the server compiled. Only the extra time of an iteration counts, compared with
            the fastest iteration, because compilation in the background delays nobody.
        others_share: Share of the device time that other runs and owners used. While a training request
            runs, the device may work for them.
        since: Leave out iterations that began earlier, for example because their sample requests are
            deleted.
    """
    # Iterations end with optimizer steps
    spans = [span for span in spans if span.name in _KINDS]
    steps = sorted(
        (span for span in spans if span.name == "optim_step" and span.status == "done"), key=lambda span: span.end
    )
    if not steps:
        return []
    cuts = [min(span.created_at for span in spans), *(span.end for span in steps)]
    first = bisect_left(cuts, since)
    cuts, steps = cuts[first:], steps[first:]
    if not steps:
        return []
    iterations = _measure_iterations([span for span in spans if span.end > cuts[0]], cuts, compiling)

    # Compilation
    for part in _SLOWED_BY_COMPILER:
        fastest_s = min(sums.seconds[part] for sums in iterations)
        for sums in iterations:
            compile_s = min(sums.seconds[part] - fastest_s, sums.compile_s)
            sums.move(part, "compilation", compile_s)
            sums.compile_s -= compile_s

    # Time of training requests in which the device worked for other requests
    for sums in iterations:
        elsewhere_s = max(sums.seconds["training"] - sums.device_s, 0.0)
        sampling_s = min(elsewhere_s, sums.both_s)
        sums.move("training", "sampling", sampling_s)
        sums.move("training", "queued", min(elsewhere_s - sampling_s, others_share * sums.wall_s))

    return [_make_iteration(step, sums) for step, sums in zip(steps, iterations, strict=True) if sums.wall_s > 0]


def _measure_iterations(
    spans: Sequence[TimelineSpan], cuts: Sequence[float], compiling: Sequence[Compiling]
) -> list[_Sums]:
    """Measure the iterations between `cuts`. Their parts are chosen by the open requests alone."""
    iterations = [_Sums() for _ in cuts]  # the last one is incomplete, and left out

    # Requests that arrived, and the device time of requests that ended
    for span in spans:
        arrived_in, ended_in = (iterations[max(bisect_left(cuts, at) - 1, 0)] for at in (span.created_at, span.end))
        arrived_in.sample_requests += _KINDS[span.name] == "sampling"
        ended_in.device_s += span.device_s
        if span.name == "forward_backward":
            arrived_in.passes += 1
            arrived_in.datums += int(span.annotations.get("datums", 0))

    # Wall time
    for index, seconds, counts in _sweep(spans, cuts):
        sums = iterations[index]
        part: Part = next(filter(counts.__getitem__, _PRIORITY))
        sums.seconds[part] += seconds
        if part == "sampling":
            sums.sampling.append((seconds, counts["sampling"]))
        elif part == "training" and counts["sampling"]:
            sums.both_s += seconds

    # Compilation
    for period in compiling:
        length_s = period.ended_at - period.began_at
        for sums, begin, end in zip(iterations, cuts, cuts[1:], strict=False):
            overlap_s = min(period.ended_at, end) - max(period.began_at, begin)
            sums.compile_s += period.compile_s * max(overlap_s, 0.0) / length_s
    return iterations[:-1]


def _sweep(spans: Sequence[TimelineSpan], cuts: Sequence[float]) -> Iterator[tuple[int, float, Counter[str]]]:
    """Yield periods with equal open requests: index of the iteration, seconds, and requests by part.

    The caller must not keep the counts.
    """
    # A request is queued until it starts, then it runs
    changes = [(cut, "iterations", 1) for cut in cuts]
    for span in spans:
        started = span.end if span.started_at is None else min(max(span.started_at, span.created_at), span.end)
        kind = _KINDS[span.name]
        changes += [(span.created_at, "queued", 1), (started, "queued", -1), (started, kind, 1), (span.end, kind, -1)]

    # Go through the changes in order of time
    counts = Counter({"client": 1})
    before = cuts[0]
    for at, name, change in sorted(changes):
        if at > before and counts["iterations"] < len(cuts):
            yield counts["iterations"] - 1, at - before, counts
        before = max(before, at)
        counts[name] += change


def _make_iteration(step: TimelineSpan, sums: _Sums) -> Iteration:
    most = max((running for _, running in sums.sampling), default=0)
    return Iteration(
        step=int(step.annotations.get("step", 0)),
        wall_s=sums.wall_s,
        parts=sums.seconds,
        passes=sums.passes,
        datums=sums.datums,
        sample_requests=sums.sample_requests,
        alone_s=sums.seconds["sampling"] if most == 1 else 0.0,
        tail_s=sum(seconds for seconds, running in sums.sampling if running <= most // _TAIL),
    )


def drop_pauses(iterations: Sequence[Iteration]) -> list[Iteration]:
    """Leave out iterations that took so much longer than usual that the client must have paused."""
    usual_s = median(iteration.wall_s for iteration in iterations) if iterations else 0.0
    return [iteration for iteration in iterations if iteration.wall_s <= _PAUSE * usual_s]


def read_breakdown(tx: Session, run: ModelRow, may_see: Callable[[str], bool]) -> Breakdown:
    """Read the newest iterations of a run.

    `may_see` tells whether the reader may see the name of an owner.
    """
    # Requests
    model_id, session_id, owner = run.model_id, run.session_id, models.get_owner(tx, run.model_id) or ""
    newest = points.read_newest(tx, model_id, _MAX_POINTS)
    ends = [point.at for point in newest if point.kind == "step"]
    if not ends:
        return Breakdown(iterations=[])
    now = newest[-1].at
    rows = read_requests_of_session(tx, session_id, _MAX_REQUESTS)
    training = make_model_group("", model_id, [row for row in rows if row.model_id == model_id], newest, (), now).spans
    foreign = _list_samplers_of_other_runs(tx, session_id, model_id)
    sampling = [
        make_request_span(row, now) for row in rows if row.kind == "sample" and row.sampling_session_id not in foreign
    ]

    # All requests since this time are known
    sampled = points.read_sampled(tx, model_id, owner, limit=2)
    since = min(span.created_at for span in training) if len(newest) < _MAX_POINTS else ends[0]
    if len(ends) > _MAX_ITERATIONS:
        since = max(since, ends[-_MAX_ITERATIONS - 1])
    if sampling:
        since = max(since, min(span.created_at for span in sampling))
    elif sampled or any(total.kind in _SAMPLING for total in usage.read_totals(tx, None, 0, session_ids={session_id})):
        return Breakdown(iterations=[])

    # The server in this time
    gauges = [(at, values) for at, values in engine_state.list_gauges(tx, since, _MAX_GAUGES) if at <= ends[-1]]
    compiling = [
        Compiling(at - engine_state.PERIOD_S, at, engine_state.PERIOD_S * values["compile_share"])
        for at, values in gauges
        if values.get("compile_share")
    ]
    users = find_device_users(tx, since, model_id, owner, may_see, until=ends[-1])
    others_share = sum(user.device_s for user in users) / max(ends[-1] - since, 1.0)
    iterations = split_iterations([*training, *sampling], compiling, min(others_share, 1.0), since)

    return Breakdown(
        iterations=drop_pauses(iterations),
        decode_fill=_compute_decode_fill([values for _, values in gauges]),
        batch_fill=_compute_batch_fill([values for _, values in gauges]),
        has_single_samples=any(kept_samples.has_repeated_prompts(tx, model_id, row.step, owner) for row in sampled),
        other_users=users,
    )


def _list_samplers_of_other_runs(tx: Session, session_id: SessionId, model_id: ModelId) -> set[str]:
    """Return the samplers of a session with weights of another run of this session.

    Other samplers, for example of base weights, may be the teacher or the reference of the run.
    """
    others = {row.model_id for row in models.list_by_session(tx, session_id)} - {model_id}
    paths = tuple(f"tinker://{other}/" for other in others)
    columns = col(SamplingSessionRow.sampling_session_id), col(SamplingSessionRow.model_id)
    statement = select(*columns, col(SamplingSessionRow.model_path))
    rows = execute(tx, statement.where(col(SamplingSessionRow.session_id) == session_id)) if others else ()
    return {name for name, model, path in rows if model in others or (path or "").startswith(paths)}


def _compute_decode_fill(gauges: Sequence[Mapping[str, float]]) -> float | None:
    """Return the mean share of the decode rows that were in use while any of them was, or None."""
    fills = [
        values["decode_slots_used"] / values["decode_slots"] for values in gauges if values.get("decode_slots_used")
    ]
    return math.fsum(fills) / len(fills) if fills else None


def _compute_batch_fill(gauges: Sequence[Mapping[str, float]]) -> float | None:
    """Return the share of the positions of micro-batches that held a token, or None."""
    rows = [values for values in gauges if "padding_tokens_per_s" in values]
    tokens = math.fsum(values.get("training_tokens_per_s", 0.0) for values in rows)
    padding = math.fsum(values["padding_tokens_per_s"] for values in rows)
    return tokens / (tokens + padding) if tokens else None


def find_device_users(
    tx: Session,
    since: float,
    model_id: ModelId,
    owner: str,
    may_see: Callable[[str], bool],
    until: float | None = None,
) -> Sequence[DeviceUser]:
    """Return the users of the device since a time, except for the given run, heaviest user first.

    `may_see` tells whether the reader may see the name of an owner.
    """
    totals = usage.read_totals(tx, None, since, ("owner", "model_id"), until=until)
    return sum_device_users(totals, model_id, owner, may_see)


def sum_device_users(
    totals: Sequence[Total], model_id: str, owner: str, may_see: Callable[[str], bool]
) -> list[DeviceUser]:
    """Add up device seconds by user (see `DeviceUser`), without the given run.

    All owners whose names the reader may not see count as one user, "other owners".
    """
    seconds: dict[str, float] = {}
    for total in totals:
        user, model = total.group
        if user == owner and model == model_id:
            continue
        if user != owner:
            name = str(user) if may_see(user) else _OTHERS
        else:
            name = f"{owner}'s run {model}" if model else f"{owner}'s samples of base weights"
        seconds[name] = seconds.get(name, 0.0) + total.device_s
    users = [DeviceUser(name, device_s) for name, device_s in seconds.items() if device_s > 0]
    return sorted(users, key=lambda user: (-user.device_s, user.name))
