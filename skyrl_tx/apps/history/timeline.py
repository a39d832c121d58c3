"""The timeline of a session: when its requests arrived, started and ended, per model and sampler.

Completed passes and optimizer steps are read from the points of their run. Points have the same
times as the requests, are kept longer, and do not have the large bodies of passes. `encode_trace`
writes a timeline as a Perfetto trace.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import Select, literal_column, select
from sqlmodel import Session, col

from skyrl_tx.apps.history import logged_metrics, points
from skyrl_tx.apps.history.logged_metrics import LoggedPoint
from skyrl_tx.apps.history.points import Point, PointKind
from skyrl_tx.apps.history.trace_pb2 import DebugAnnotation, Trace, TrackDescriptor, TrackEvent
from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId, SessionId
from skyrl_tx.store import models
from skyrl_tx.store.database import execute, execute_in_batches, is_in_batch
from skyrl_tx.store.tables import RequestRow

MAX_COUNTERS = 32
"""Limit on the metrics per model that become counters."""
MAX_SLICES = 10_000
"""Limit on the requests in a trace, per source. The oldest are left out."""
_MAX_GROUPS = 200
"""Limit on the models of a session, and on its samplers. The oldest ones are left out."""
_MAX_LOGGED_BYTES = 32 * 2**20
"""Limit on the size of the logged values of a session, as JSON.

Each model of the session gets an equal part of the limit.
"""
_WITH_POINTS = ("model_pass", "optim_step")
_ROWS_PER_RESULT = 5
"""To find n requests without points, the newest n times this many rows are searched."""
_MAX_PASSES = 200
"""Limit on the open and failed requests that are read.

SQLite has to read the large body of each of these requests too.
"""
_KINDS: Mapping[PointKind, str] = {"train": "forward_backward", "forward": "forward", "step": "optim_step"}

_PACKETS_PER_PART = 500
_SEQUENCE = 1
_MAX_ANNOTATIONS = 16
_BEGIN, _END, _COUNTER = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END, TrackEvent.TYPE_COUNTER

Value = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """A stored request without its body and result. Times are seconds since the epoch."""

    position: int
    request_id: RequestId
    owner: str
    kind: str
    model_id: ModelId | None
    sampling_session_id: SamplingSessionId | None
    seq_id: int | None
    status: str
    created_at: float
    started_at: float | None
    completed_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """One request on the timeline. Times are seconds since the epoch."""

    name: str
    created_at: float
    started_at: float | None
    """When the request started to run, or None while it is queued."""
    ended_at: float
    device_s: float = 0.0
    position: int = 0
    """The position of the request, which gives the order of arrival and never changes."""
    status: str = "done"
    """`open`, `done` or `failed`."""
    annotations: Mapping[str, Value] = field(default_factory=dict[str, Value])

    @property
    def end(self) -> float:
        """The end of the span. Never before the beginning, even if the clock was set back."""
        return max(self.created_at, self.ended_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineGroup:
    """The requests of a model or of a sampler. `counters` are pairs of time and value, by name."""

    title: str
    spans: Sequence[TimelineSpan]
    model_id: str | None = None
    sampling_session_id: str | None = None
    counters: Mapping[str, Sequence[tuple[float, float]]] = field(
        default_factory=dict[str, Sequence[tuple[float, float]]]
    )


def read_session_groups(
    tx: Session, session_id: SessionId, now: float, limit: int, *, after: int = 0, with_logged: bool = True
) -> list[TimelineGroup]:
    """Return the newest requests of a session, grouped by model and sampler.

    At most `limit` rows are read from each source. `after` leaves out requests up to a position.
    `with_logged` adds the metrics that the client logged.
    """
    # Group the stored requests
    by_model: defaultdict[ModelId, list[RequestTimes]] = defaultdict(list)
    by_sampler: defaultdict[str | None, list[TimelineSpan]] = defaultdict(list)
    for row in read_requests_of_session(tx, session_id, limit, after):
        if row.model_id is not None:
            by_model[row.model_id].append(row)
        else:
            by_sampler[row.sampling_session_id].append(make_request_span(row, now))

    # Models, newest first: the limit is used up by the newest models
    groups: list[TimelineGroup] = []
    remaining = limit
    trained = models.list_by_session(tx, session_id)[-_MAX_GROUPS:]
    max_bytes = _MAX_LOGGED_BYTES // max(len(trained), 1)
    for model in reversed(trained):
        passes = (
            points.read_points(tx, model.model_id, after, remaining)
            if after
            else points.read_newest(tx, model.model_id, remaining)
        )
        logged_runs = logged_metrics.list_run_ids(tx, model.model_id) if with_logged else []
        logged_points = logged_metrics.read_points(tx, logged_runs, limit=remaining, max_bytes=max_bytes)

        title = f"model {model.model_id.partition(':')[2] or model.model_id}"
        requests = by_model[model.model_id]
        groups.append(make_model_group(title, model.model_id, requests, passes, logged_points, now))
        remaining = max(0, remaining - len(passes) - len(logged_points))
    groups.reverse()

    # Samplers
    for name, spans in list(by_sampler.items())[-_MAX_GROUPS:]:
        title = "other requests" if name is None else f"sampler {name}"
        groups.append(TimelineGroup(title=title, spans=spans, sampling_session_id=name))
    return groups


def keep_newest_spans(groups: list[TimelineGroup], limit: int) -> list[TimelineGroup]:
    """Drop old spans, so that the groups have at most `limit` spans in total."""
    positions = sorted((span.position for group in groups for span in group.spans), reverse=True)
    if len(positions) <= limit:
        return groups
    first = positions[limit - 1] if limit else positions[0] + 1
    return [replace(group, spans=[span for span in group.spans if span.position >= first]) for group in groups]


def make_model_group(
    title: str,
    model_id: str,
    requests: Iterable[RequestTimes],
    passes: Sequence[Point],
    metrics: Sequence[LoggedPoint],
    now: float,
) -> TimelineGroup:
    """Return the group of a model.

    Points are preferred to requests, because they are kept longer. Requests without a point, for
    example open requests, are added.
    """
    by_position = {request.position: make_request_span(request, now) for request in requests}
    counters: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in passes:
        by_position[row.position] = _make_point_span(row)
        _add_count(counters, row.at, row.values)
    for point in metrics:
        _add_count(counters, point.at, point.values)
    spans = [by_position[position] for position in sorted(by_position)]
    shown = {name: counters[name] for name in sorted(counters)[:MAX_COUNTERS]}
    return TimelineGroup(title=title, spans=spans, model_id=model_id, counters=shown)


def make_request_span(request: RequestTimes, now: float) -> TimelineSpan:
    """Make a span of a request. If the request is open, the span ends at `now`."""
    annotations: dict[str, Value] = {"request_id": request.request_id, "status": request.status}
    if request.seq_id is not None:
        annotations["seq_id"] = request.seq_id

    # Until a request starts, its column `started_at` has the time of arrival
    started_at = request.started_at
    if request.status == "open" and started_at is not None and started_at <= request.created_at:
        started_at = None

    return TimelineSpan(
        name=request.kind,
        created_at=request.created_at,
        started_at=started_at,
        ended_at=now if request.completed_at is None else request.completed_at,
        position=request.position,
        status=request.status,
        annotations=annotations,
    )


def _make_point_span(row: Point) -> TimelineSpan:
    annotations: dict[str, Value] = {"step": row.step, "tokens": row.tokens, "datums": row.datums}
    annotations |= {"device_s": row.device_s}
    annotations |= {name: value for name, value in row.values.items() if value is not None}
    return TimelineSpan(
        name=_KINDS[row.kind],
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.at,
        device_s=row.device_s,
        position=row.position,
        annotations=annotations,
    )


def _add_count(
    counters: defaultdict[str, list[tuple[float, float]]], at: float, values: Mapping[str, float | None]
) -> None:
    for name, value in values.items():
        if value is not None and (name in counters or len(counters) < 4 * MAX_COUNTERS):
            counters[name].append((at, value))


_TIMES = select(*(getattr(RequestRow, name) for name in RequestTimes.__dataclass_fields__)).where(
    is_in_batch(col(RequestRow.position))
)


def read_times(tx: Session, positions: Iterable[int]) -> list[RequestTimes]:
    """Return the requests at these positions, in order of arrival."""
    times = [RequestTimes(**row._mapping) for row in execute_in_batches(tx, _TIMES, positions)]
    return sorted(times, key=lambda request: request.position)


def read_requests_of_session(tx: Session, session_id: SessionId, limit: int, after: int = 0) -> list[RequestTimes]:
    """Return the newest requests of a session after a position, in order of arrival.

    The result does not have completed requests with a point, nor requests whose rows were deleted.
    """
    # Requests of kinds without points
    is_in_session = (col(RequestRow.session_id) == session_id) & (col(RequestRow.position) > after)
    newest = _select_columns().where(is_in_session).limit(limit * _ROWS_PER_RESULT).subquery().c
    without_points = select(newest.position).where(newest.kind.not_in(_WITH_POINTS)).limit(limit)
    positions = set(execute(tx, without_points.order_by(newest.position.desc())).scalars())

    # Open and failed requests of any kind
    for status in ("open", "failed"):
        has_status = is_in_session & (col(RequestRow.status) == literal_column(f"'{status}'"))
        positions |= {position for position, _ in execute(tx, _select_columns().where(has_status).limit(_MAX_PASSES))}

    return read_times(tx, sorted(positions, reverse=True)[:limit])


def _select_columns() -> Select[int | None, str]:
    """Return a query for requests, newest first. It only reads columns before the large body."""
    return select(col(RequestRow.position), col(RequestRow.kind)).order_by(col(RequestRow.position).desc())


def encode_trace(title: str, groups: Iterable[TimelineGroup]) -> Iterator[bytes]:
    """Encode the trace of a session. The parts, joined, are one `perfetto.protos.Trace`."""
    writer = _TraceWriter()
    root = writer.begin_track(title, ordering=TrackDescriptor.EXPLICIT)
    device: list[TimelineSpan] = []
    for group in groups:
        parent = writer.begin_track(group.title, parent=root)

        # Requests that overlap are on different tracks
        for number, spans in enumerate(_split_overlaps(group.spans), start=1):
            track = writer.begin_track(f"requests {number}", parent=parent)
            for span in spans:
                writer.write_request(track, span)
                yield from writer.take_full_parts()

        # Metrics over time
        for name, values in group.counters.items():
            track = writer.begin_track(name, parent=parent, is_counter=True)
            for at, value in values:
                writer.write_count(track, at, value)
                yield from writer.take_full_parts()
        device += [_make_device_span(group.title, span) for span in group.spans if span.device_s > 0]

    # The device
    parent = writer.begin_track("device", parent=root)
    for number, spans in enumerate(_split_overlaps(sorted(device, key=lambda span: span.created_at)), start=1):
        track = writer.begin_track(f"device {number}", parent=parent)
        for span in spans:
            writer.write_slice(track, span.name, "device", span.created_at, span.end)
            yield from writer.take_full_parts()
    yield writer.take_rest()


def _make_device_span(title: str, span: TimelineSpan) -> TimelineSpan:
    begin = max(span.created_at, span.end - span.device_s)
    name = f"{title} {span.name}"
    return TimelineSpan(name=name, created_at=begin, started_at=None, ended_at=span.end)


def _split_overlaps(spans: Iterable[TimelineSpan]) -> list[list[TimelineSpan]]:
    """Split spans, in order of arrival, into lists whose spans do not overlap."""
    tracks: list[list[TimelineSpan]] = []
    for span in spans:
        free = next((track for track in tracks if track[-1].end <= span.created_at), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tracks


class _TraceWriter:
    """Collects the packets of a trace, and encodes them in parts to limit memory."""

    def __init__(self) -> None:
        self._trace = Trace()
        self._num_tracks = 0

    def begin_track(
        self,
        name: str,
        *,
        parent: int = 0,
        is_counter: bool = False,
        ordering: TrackDescriptor.ChildTracksOrdering = TrackDescriptor.UNKNOWN,
    ) -> int:
        """Begin a track and return its id."""
        self._num_tracks += 1
        packet = self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)
        described = packet.track_descriptor
        described.uuid, described.name, described.parent_uuid = self._num_tracks, name, parent
        described.child_ordering = ordering
        if is_counter:
            described.counter.SetInParent()
        return self._num_tracks

    def write_request(self, track: int, span: TimelineSpan) -> None:
        """Write a request, with slices for the times when it was queued and when it ran."""
        end = span.end
        self._write_event(track, _BEGIN, span.created_at, span.name, "request", span.annotations)
        if span.started_at is not None:
            started = min(max(span.started_at, span.created_at), end)
            self.write_slice(track, "queued", "queued", span.created_at, started)
            self.write_slice(track, "running", "running", started, end)
        self._write_event(track, _END, end)

    def write_slice(self, track: int, name: str, category: str, begin: float, end: float) -> None:
        """Write a slice on a track."""
        self._write_event(track, _BEGIN, begin, name, category)
        self._write_event(track, _END, end)

    def write_count(self, track: int, at: float, value: float) -> None:
        """Write the value of a counter."""
        self._write_event(track, _COUNTER, at).double_counter_value = value

    def take_full_parts(self) -> Iterator[bytes]:
        """Yield the encoded packets if there are enough for a part."""
        if len(self._trace.packet) >= _PACKETS_PER_PART:
            yield self.take_rest()

    def take_rest(self) -> bytes:
        """Encode and remove all collected packets."""
        data = self._trace.SerializeToString()
        self._trace.Clear()
        return data

    def _write_event(
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
            event.debug_annotations.append(_make_annotation(key, value))
        return event


def _make_annotation(name: str, value: Value) -> DebugAnnotation:
    match value:
        case int():
            return DebugAnnotation(name=name, int_value=value)
        case float():
            return DebugAnnotation(name=name, double_value=value)
        case str():
            return DebugAnnotation(name=name, string_value=value)
