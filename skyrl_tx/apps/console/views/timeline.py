"""View models of a session: its requests over time, and its tokens over time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_tx.apps.console.format import count, short_id
from skyrl_tx.apps.history.curves.series import displayed_step
from skyrl_tx.apps.history.session_trace import Group, Span
from skyrl_tx.apps.teams.usage import BUCKET_S, FINE_S, HOUR_S

_MAX_BARS = 60
_BAR_S = (BUCKET_S, 600, 1800, HOUR_S, 2 * HOUR_S, 6 * HOUR_S, 24 * HOUR_S)
_WIDTH, _HEIGHT = 300.0, 64.0
_PANELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("Training", frozenset({"training", "forward"})),
    ("Sampled", frozenset({"sampled"})),
    ("Prefill", frozenset({"prefill", "prefill_cached"})),
)
Bucket = tuple[int, str, int]
"""Begin of five minutes or of an hour, kind of work, tokens."""


def timeline_data(groups: Sequence[Group], now: float, weights: Mapping[str, str], after: int = 0) -> dict[str, Any]:
    """Return requests as tracks for the drawing. `weights` describes what each sampler samples from.

    A reader keeps the requests that it has, by their position, and asks for those after `cursor`.
    """
    spans = [span for group in groups for span in group.spans]
    positions = [span.position for span in spans]
    is_open = [span.position for span in spans if span.status == "open"]
    return {
        "now": now,
        "cursor": min(is_open) - 1 if is_open else max(positions, default=after),
        "columns": ["position", "name", "created", "started", "ended", "status", "device_s", "detail"],
        "tracks": [
            {
                "key": group.model_id or group.sampling_session_id or "",
                "title": track_title(group),
                "detail": weights.get(group.sampling_session_id or "", ""),
                "spans": [_row(span) for span in group.spans],
            }
            for group in groups
        ],
    }


def track_title(group: Group) -> str:
    """Return the name of a track."""
    name = group.model_id or group.sampling_session_id
    if name is None:
        return "other requests"
    kind = "sampler" if group.model_id is None else "model"
    return f"{kind} {name.partition(':')[2] or short_id(name)}"


def _row(span: Span) -> list[object]:
    started = None if span.started_at is None else round(min(max(span.started_at, span.created_at), span.end), 3)
    times = (round(span.created_at, 3), started, round(span.end, 3))
    return [span.position, span.name, *times, span.status, round(span.device_s, 3), span_detail(span)]


def span_detail(span: Span) -> str:
    """Return what else is known of a request than its times."""
    known = span.annotations
    words: list[str] = []
    if isinstance(step := known.get("step"), int):
        words.append(f"step {displayed_step('step' if span.name == 'optim_step' else span.name, step)}")
    elif "seq_id" in known:
        words.append(f"number {known['seq_id']}")
    if tokens := known.get("tokens"):
        words.append(f"{tokens:,} tokens")
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class SpanLine:
    """One request in a table."""

    track: str
    model_id: str | None
    span: Span
    detail: str
    queue_s: float
    run_s: float | None


def span_lines(groups: Iterable[Group], limit: int) -> list[SpanLine]:
    """Return the newest requests of all tracks, newest first."""
    lines = [_line(group, span) for group in groups for span in group.spans]
    return sorted(lines, key=lambda line: -line.span.position)[:limit]


def _line(group: Group, span: Span) -> SpanLine:
    started = span.end if span.started_at is None else min(max(span.started_at, span.created_at), span.end)
    run_s = None if span.started_at is None else span.end - started
    queue_s = started - span.created_at
    return SpanLine(track_title(group), group.model_id, span, span_detail(span), queue_s, run_s)


@dataclass(frozen=True, slots=True)
class Panel:
    """Tokens of one kind of work over time. `bars` is an SVG path of 300 x 64."""

    title: str
    total: str
    peak: str
    bars: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """The tokens of a session over time, between two times."""

    panels: Sequence[Panel]
    begin: float
    end: float
    bar_s: int


def traffic(buckets: Sequence[Bucket], began: float, now: float) -> Traffic | None:
    """Return the tokens over time, by kind of work, of a session that began at a time; None without any."""
    if not buckets:
        return None
    begin = min(at for at, _, _ in buckets)
    last = max(at for at, _, _ in buckets)
    least = HOUR_S if begin < now - FINE_S else BUCKET_S  # old rows are those of whole hours
    bar_s = next((bar for bar in _BAR_S if bar >= least and last - begin < _MAX_BARS * bar), _BAR_S[-1])
    begin -= begin % bar_s
    number = min((last - begin) // bar_s + 1, 2 * _MAX_BARS)
    ends = [begin + bar_s * (index + 1) for index in range(number)]
    # The first bar and the newest one are not full: their tokens were processed in a part of it.
    lengths = [max(min(end, now) - max(end - bar_s, began), 1.0) for end in ends]
    panels: list[Panel] = []
    for title, kinds in _PANELS:
        totals = [0] * number
        for at, kind, tokens in buckets:
            if kind in kinds:
                totals[min((at - begin) // bar_s, number - 1)] += tokens
        rates = [total / length for total, length in zip(totals, lengths, strict=True)]
        peak = max(rates)
        panels.append(Panel(title, count(sum(totals)), f"{count(peak)} tok/s", _bars(rates, peak)))
    return Traffic(panels, max(begin, began), min(ends[-1], now), bar_s)


def _bars(rates: Sequence[float], peak: float) -> str:
    width = _WIDTH / max(len(rates), 6)
    parts: list[str] = []
    for index, rate in enumerate(rates):
        if rate:
            top = _HEIGHT - max(rate / peak * (_HEIGHT - 4), 1.5)
            parts.append(f"M{index * width + 0.5:.1f},{_HEIGHT:.0f}V{top:.1f}h{max(width - 1, 0.5):.1f}V{_HEIGHT:.0f}z")
    return "".join(parts)
