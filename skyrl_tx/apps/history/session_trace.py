"""The timeline of a session as a Perfetto trace, to open in ui.perfetto.dev.

One group of tracks for each model and each sampler, whose slices are requests: queued, then running. Slices of one
track must not overlap, so a group has as many tracks as requests at once. The slices of the device end with their
request and last as long as the device worked for it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from skyrl_tx.apps.history.logged import LoggedPoint
from skyrl_tx.apps.history.points import Point
from skyrl_tx.apps.history.tables import PointKind
from skyrl_tx.apps.history.timeline import RequestTimes
from skyrl_tx.apps.history.trace_pb2 import DebugAnnotation, Trace, TrackDescriptor, TrackEvent

MAX_SLICES = 10_000
"""Requests in a trace, of each source; the oldest are left out."""
MAX_COUNTERS = 16
"""Metrics in a trace, of each model."""
_PACKETS_PER_PART = 500
_SEQUENCE = 1
_MAX_ANNOTATIONS = 16
_KINDS: Mapping[PointKind, str] = {"train": "forward_backward", "forward": "forward", "step": "optim_step"}
_BEGIN, _END, _COUNTER = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END, TrackEvent.TYPE_COUNTER

Value = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One request on the timeline; times are seconds since the epoch."""

    name: str
    created_at: float
    started_at: float | None
    """When it began to run; None while it is queued."""
    ended_at: float
    device_s: float = 0.0
    position: int = 0
    """Order of arrival; the same in each look at the session."""
    status: str = "done"
    """`open`, `done` or `failed`."""
    annotations: Mapping[str, Value] = field(default_factory=dict[str, Value])

    @property
    def end(self) -> float:
        """The end, which is not before the beginning even if the clock was set back."""
        return max(self.created_at, self.ended_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A model or a sampler: its requests, and values over time by their name."""

    title: str
    spans: Sequence[Span]
    model_id: str | None = None
    sampling_session_id: str | None = None
    counters: Mapping[str, Sequence[tuple[float, float]]] = field(
        default_factory=dict[str, Sequence[tuple[float, float]]]
    )


def model_group(
    title: str,
    model_id: str,
    requests: Iterable[RequestTimes],
    points: Sequence[Point],
    logged: Sequence[LoggedPoint],
    now: float,
) -> Group:
    """Return the group of a model. Points outlive the requests, which add those that have no point."""
    by_position = {request.position: request_span(request, now) for request in requests}
    counters: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in points:
        by_position[row.position] = _point_span(row)
        _count(counters, row.at, row.values)
    for point in logged:
        _count(counters, point.at, point.values)
    spans = [by_position[position] for position in sorted(by_position)]
    shown = {name: counters[name] for name in sorted(counters)[:MAX_COUNTERS]}
    return Group(title=title, spans=spans, model_id=model_id, counters=shown)


def request_span(request: RequestTimes, now: float) -> Span:
    """Return a request as a span, which lasts until now while it is open."""
    annotations: dict[str, Value] = {"request_id": request.request_id, "status": request.status}
    if request.seq_id is not None:
        annotations["seq_id"] = request.seq_id
    started_at = request.started_at
    if request.status == "open" and started_at is not None and started_at <= request.created_at:
        started_at = None  # the column has the time of arrival until the request is started
    return Span(
        name=request.kind,
        created_at=request.created_at,
        started_at=started_at,
        ended_at=now if request.completed_at is None else request.completed_at,
        position=request.position,
        status=request.status,
        annotations=annotations,
    )


def trace_parts(title: str, groups: Iterable[Group]) -> Iterator[bytes]:
    """Yield the encoded trace of a session in parts; joined they are one `perfetto.protos.Trace`."""
    writer = _Writer()
    root = writer.track(title, ordering=TrackDescriptor.EXPLICIT)
    device: list[Span] = []
    for group in groups:
        parent = writer.track(group.title, parent=root)
        for number, spans in enumerate(_apart(group.spans), start=1):
            track = writer.track(f"requests {number}", parent=parent)
            for span in spans:
                writer.request(track, span)
                yield from writer.full_parts()
        for name, values in group.counters.items():
            track = writer.track(name, parent=parent, is_counter=True)
            for at, value in values:
                writer.count(track, at, value)
                yield from writer.full_parts()
        device += [_on_device(group.title, span) for span in group.spans if span.device_s > 0]
    parent = writer.track("device", parent=root)
    for number, spans in enumerate(_apart(sorted(device, key=lambda span: span.created_at)), start=1):
        track = writer.track(f"device {number}", parent=parent)
        for span in spans:
            writer.slice(track, span.name, "device", span.created_at, span.end)
            yield from writer.full_parts()
    yield writer.rest()


def _on_device(title: str, span: Span) -> Span:
    begin = max(span.created_at, span.end - span.device_s)
    name = f"{title} {span.name}"
    return Span(name=name, created_at=begin, started_at=None, ended_at=span.end)


def _apart(spans: Iterable[Span]) -> list[list[Span]]:
    """Split spans in order of arrival into lists without overlaps, as few as there are spans at once."""
    tracks: list[list[Span]] = []
    for span in spans:
        free = next((track for track in tracks if track[-1].end <= span.created_at), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tracks


def _point_span(row: Point) -> Span:
    annotations: dict[str, Value] = {"step": row.step, "tokens": row.tokens, "datums": row.datums}
    annotations |= {"device_s": row.device_s}
    annotations |= {name: value for name, value in row.values.items() if value is not None}
    return Span(
        name=_KINDS[row.kind],
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.at,
        device_s=row.device_s,
        position=row.position,
        annotations=annotations,
    )


def _count(
    counters: defaultdict[str, list[tuple[float, float]]], at: float, values: Mapping[str, float | None]
) -> None:
    for name, value in values.items():
        if value is not None and (name in counters or len(counters) < 4 * MAX_COUNTERS):
            counters[name].append((at, value))


class _Writer:
    """Encodes packets; `full_parts` hands out those so far when there are many."""

    def __init__(self) -> None:
        self._trace = Trace()
        self._num_tracks = 0

    def track(
        self,
        name: str,
        *,
        parent: int = 0,
        is_counter: bool = False,
        ordering: TrackDescriptor.ChildTracksOrdering = TrackDescriptor.UNKNOWN,
    ) -> int:
        """Begin a track; return its id."""
        self._num_tracks += 1
        packet = self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)
        described = packet.track_descriptor
        described.uuid, described.name, described.parent_uuid = self._num_tracks, name, parent
        described.child_ordering = ordering
        if is_counter:
            described.counter.SetInParent()
        return self._num_tracks

    def request(self, track: int, span: Span) -> None:
        """Write a request, and inside it the parts in which it was queued and running."""
        end = span.end
        self._event(track, _BEGIN, span.created_at, span.name, "request", span.annotations)
        if span.started_at is not None:
            started = min(max(span.started_at, span.created_at), end)
            self.slice(track, "queued", "queued", span.created_at, started)
            self.slice(track, "running", "running", started, end)
        self._event(track, _END, end)

    def slice(self, track: int, name: str, category: str, begin: float, end: float) -> None:
        """Write a slice of a track."""
        self._event(track, _BEGIN, begin, name, category)
        self._event(track, _END, end)

    def count(self, track: int, at: float, value: float) -> None:
        """Write the value of a counter."""
        self._event(track, _COUNTER, at).double_counter_value = value

    def full_parts(self) -> Iterator[bytes]:
        """Yield the packets so far, if there are enough for a part."""
        if len(self._trace.packet) >= _PACKETS_PER_PART:
            yield self.rest()

    def rest(self) -> bytes:
        """Return the packets that were not handed out."""
        data = self._trace.SerializeToString()
        self._trace.Clear()
        return data

    def _event(
        self,
        track: int,
        kind: TrackEvent.Type,
        at: float,
        name: str = "",
        category: str = "",
        annotations: Mapping[str, Value] | None = None,
    ) -> TrackEvent:
        packet = self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE, timestamp=round(at * 1e9))
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        if name:
            event.name = name
            event.categories.append(category)
        for key, value in list((annotations or {}).items())[:_MAX_ANNOTATIONS]:
            event.debug_annotations.append(_annotation(key, value))
        return event


def _annotation(name: str, value: Value) -> DebugAnnotation:
    match value:
        case int():
            return DebugAnnotation(name=name, int_value=value)
        case float():
            return DebugAnnotation(name=name, double_value=value)
        case str():
            return DebugAnnotation(name=name, string_value=value)
