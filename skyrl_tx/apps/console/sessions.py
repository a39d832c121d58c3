"""The pages of sessions: the list, and one session with its timeline, tokens, runs and samplers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from skyrl_tx.apps.console import queries
from skyrl_tx.apps.console.rendering import format_count, shorten_id
from skyrl_tx.apps.console.runs import describe_runs
from skyrl_tx.apps.console.visit import Page, PageTable, Visit, see_other
from skyrl_tx.apps.history.curves import get_displayed_step
from skyrl_tx.apps.history.routes import make_trace_url
from skyrl_tx.apps.history.timeline import TimelineGroup, TimelineSpan, keep_newest_spans, read_session_groups
from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import BUCKET_S, FINE_S, HOUR_S
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.server.identity import access
from skyrl_tx.store import sessions
from skyrl_tx.store.tables import SamplingSessionRow

pages = PageTable()
_PAGE_ROWS = 50
_MAX_RUNS = 50
_MAX_SAMPLERS = 50
_SHOWN_SAMPLERS = 8
"""The page shows this many samplers, and all with `?samplers=all`.

A session can have many, because a client that trains creates a sampler in each step.
"""
_MAX_REQUESTS = 12
_MAX_SPANS = 2000
"""Limit on the requests on a timeline."""
_TRAFFIC_S = 30 * 86_400
_MAX_BARS = 60
_BAR_S = (BUCKET_S, 600, 1800, HOUR_S, 2 * HOUR_S, 6 * HOUR_S, 24 * HOUR_S)
_WIDTH, _HEIGHT = 300.0, 64.0
_PANELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("Training", frozenset({"training", "forward"})),
    ("Sampled", frozenset({"sampled"})),
    ("Prefill", frozenset({"prefill", "prefill_cached"})),
)
Bucket = tuple[int, str, int]
"""Start of a bucket of five minutes or an hour, kind of work, and tokens."""


@pages.get("/sessions", menu="Sessions")
def list_sessions(visit: Visit) -> Page:
    """List the sessions of the visitor and its projects, or all sessions for an admin."""
    query = visit.make_list_query(_PAGE_ROWS)
    lines, total = visit.read(lambda tx: queries.read_session_page(tx, query))
    pager = visit.make_pager(_PAGE_ROWS, len(lines), total)
    values = {"sessions": lines, "pager": pager, "search": query.search, "project": query.project}
    return Page("sessions.jinja", values)


@pages.get("/sessions/{session_id}")
def show_session(visit: Visit) -> Page:
    """Show one session with its timeline, tokens over time, runs and samplers."""
    session_id = _find_session(visit)
    row = visit.read(lambda tx: sessions.get(tx, session_id))
    assert row is not None
    lines = visit.read(lambda tx: queries.list_runs_of_session(tx, session_id, _MAX_RUNS))
    samplers = _read_samplers(visit, session_id)

    # Requests, and tokens over time
    groups = visit.read(lambda tx: read_session_groups(tx, session_id, visit.now, _MAX_REQUESTS, with_logged=False))
    since = int(visit.now) - _TRAFFIC_S
    buckets = visit.read(lambda tx: usage.read_buckets(tx, since, session_id))
    open_groups = visit.read(lambda tx: queries.list_open_groups(tx, row.owner))
    waiting = [group for group in open_groups if group.session_id == session_id]

    return Page(
        "session.jinja",
        {
            "session": row,
            "runs": describe_runs(visit, lines),
            "samplers": samplers,
            "shown_samplers": _MAX_SAMPLERS if visit.get_query("samplers") == "all" else _SHOWN_SAMPLERS,
            "requests": list_requests(groups, _MAX_REQUESTS),
            "traffic": make_traffic(buckets, row.created_at, visit.now),
            "waiting": sum(group.number for group in waiting),
            "address": visit.make_url(),
        },
    )


@pages.get("/sessions/{session_id}/trace")
def download_trace(visit: Visit) -> Response:
    """Redirect to a signed URL that downloads the timeline as a Perfetto trace."""
    return see_other(make_trace_url(visit.context, visit.caller, visit.request, _find_session(visit)))


@pages.get("/console/data/sessions/{session_id}/timeline")
def send_timeline(visit: Visit) -> Response:
    """Send the newest requests of a session as JSON, for the drawing.

    `after` leaves out requests up to a position.
    """
    session_id, after = _find_session(visit), visit.get_int("after", 0, maximum=2**53)
    groups = visit.read(
        lambda tx: read_session_groups(tx, session_id, visit.now, _MAX_SPANS, after=after, with_logged=False)
    )
    weights = _describe_weights(_read_samplers(visit, session_id))
    return JSONResponse(make_timeline(keep_newest_spans(groups, _MAX_SPANS), visit.now, weights, after))


def _find_session(visit: Visit) -> SessionId:
    """Return the id of the session in the URL.

    Raises ApiError 404 if the visitor cannot see the session.
    """
    session_id = SessionId(visit.path_parameters["session_id"])
    return visit.read(lambda tx: access.find_session(tx, visit.caller, session_id, access.MEMBERS)).session_id


def _read_samplers(visit: Visit, session_id: SessionId) -> Sequence[SamplingSessionRow]:
    """Return the newest samplers of a session."""
    return visit.read(lambda tx: queries.list_samplers_of_session(tx, session_id, _MAX_SAMPLERS))


def _describe_weights(samplers: Sequence[SamplingSessionRow]) -> Mapping[str, str]:
    """Return a description of each sampler's weights, by the sampler's id."""
    return {
        row.sampling_session_id: row.model_path
        or (row.base_model if row.model_id is None else f"weights of {shorten_id(row.model_id)}")
        for row in samplers
    }


def make_timeline(
    groups: Sequence[TimelineGroup], now: float, weights: Mapping[str, str], after: int = 0
) -> dict[str, Any]:
    """Return requests as tracks for the drawing. `weights` describes the weights of each sampler.

    The script in the page stores requests by position, and polls with `after=cursor`. The cursor is
    before the oldest open request, so that the next response has this request again.
    """
    spans = [span for group in groups for span in group.spans]
    positions = [span.position for span in spans]
    open_positions = [span.position for span in spans if span.status == "open"]

    return {
        "now": now,
        "cursor": min(open_positions) - 1 if open_positions else max(positions, default=after),
        "columns": ["position", "name", "created", "started", "ended", "status", "device_s", "detail"],
        "tracks": [
            {
                "key": group.model_id or group.sampling_session_id or "",
                "title": _name_track(group),
                "detail": weights.get(group.sampling_session_id or "", ""),
                "spans": [_list_span(span) for span in group.spans],
            }
            for group in groups
        ],
    }


def _name_track(group: TimelineGroup) -> str:
    """Return the name of a model's or sampler's track."""
    name = group.model_id or group.sampling_session_id
    if name is None:
        return "other requests"
    kind = "sampler" if group.model_id is None else "model"
    return f"{kind} {name.partition(':')[2] or shorten_id(name)}"


def _list_span(span: TimelineSpan) -> list[object]:
    started = None if span.started_at is None else round(min(max(span.started_at, span.created_at), span.end), 3)
    times = (round(span.created_at, 3), started, round(span.end, 3))
    return [span.position, span.name, *times, span.status, round(span.device_s, 3), _describe_span(span)]


def _describe_span(span: TimelineSpan) -> str:
    """Describe a request in a few words, for example "step 3, 1,024 tokens"."""
    annotations = span.annotations
    words: list[str] = []
    if isinstance(step := annotations.get("step"), int):
        words.append(f"step {get_displayed_step('step' if span.name == 'optim_step' else span.name, step)}")
    elif "seq_id" in annotations:
        words.append(f"number {annotations['seq_id']}")
    if tokens := annotations.get("tokens"):
        words.append(f"{tokens:,} tokens")
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class SpanLine:
    """A request in a table."""

    track: str
    model_id: str | None
    span: TimelineSpan
    detail: str
    queue_s: float
    run_s: float | None


def list_requests(groups: Iterable[TimelineGroup], limit: int) -> list[SpanLine]:
    """Return the newest requests of all tracks, newest first."""
    lines = [_describe_request(group, span) for group in groups for span in group.spans]
    return sorted(lines, key=lambda line: -line.span.position)[:limit]


def _describe_request(group: TimelineGroup, span: TimelineSpan) -> SpanLine:
    started = span.end if span.started_at is None else min(max(span.started_at, span.created_at), span.end)
    run_s = None if span.started_at is None else span.end - started
    queue_s = started - span.created_at
    return SpanLine(_name_track(group), group.model_id, span, _describe_span(span), queue_s, run_s)


@dataclass(frozen=True, slots=True)
class Panel:
    """The tokens of one kind of work over time. `bars` is an SVG path in a box of 300 x 64."""

    title: str
    total: str
    peak: str
    bars: str


@dataclass(frozen=True, slots=True)
class SessionTraffic:
    """The tokens of a session over time. Each bar covers `bar_s` seconds."""

    panels: Sequence[Panel]
    begin: float
    end: float
    bar_s: int


def make_traffic(buckets: Sequence[Bucket], began: float, now: float) -> SessionTraffic | None:
    """Return the tokens over time by kind of work, or None if there are none.

    `began` is the start of the session.
    """
    if not buckets:
        return None

    # Choose the length of a bar. Old buckets have been merged into hours.
    begin = min(at for at, _, _ in buckets)
    last = max(at for at, _, _ in buckets)
    min_bar_s = HOUR_S if begin < now - FINE_S else BUCKET_S
    bar_s = next((bar for bar in _BAR_S if bar >= min_bar_s and last - begin < _MAX_BARS * bar), _BAR_S[-1])
    begin -= begin % bar_s
    number = min((last - begin) // bar_s + 1, 2 * _MAX_BARS)
    ends = [begin + bar_s * (index + 1) for index in range(number)]

    # The first and the last bar are incomplete, so their rates use the time that they really cover
    lengths = [max(min(end, now) - max(end - bar_s, began), 1.0) for end in ends]
    panels: list[Panel] = []
    for title, kinds in _PANELS:
        totals = [0] * number
        for at, kind, tokens in buckets:
            if kind in kinds:
                totals[min((at - begin) // bar_s, number - 1)] += tokens
        rates = [total / length for total, length in zip(totals, lengths, strict=True)]
        peak = max(rates)
        panels.append(Panel(title, format_count(sum(totals)), f"{format_count(peak)} tok/s", _draw_bars(rates, peak)))
    return SessionTraffic(panels, max(begin, began), min(ends[-1], now), bar_s)


def _draw_bars(rates: Sequence[float], peak: float) -> str:
    width = _WIDTH / max(len(rates), 6)
    parts: list[str] = []
    for index, rate in enumerate(rates):
        if rate:
            top = _HEIGHT - max(rate / peak * (_HEIGHT - 4), 1.5)
            parts.append(f"M{index * width + 0.5:.1f},{_HEIGHT:.0f}V{top:.1f}h{max(width - 1, 0.5):.1f}V{_HEIGHT:.0f}z")
    return "".join(parts)
