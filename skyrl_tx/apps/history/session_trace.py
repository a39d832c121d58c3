"""The timeline of a session as a Perfetto trace, to open in ui.perfetto.dev.

One group of tracks for each model and each sampler, whose slices are requests: queued, then running. Slices of one
track must not overlap, so a group has as many tracks as requests at once. The slices of the device end with their
request and last as long as the device worked for it.
"""

from collections.abc import Iterable, Iterator, Mapping

from skyrl_tx.apps.history.timeline import TimelineGroup, TimelineSpan, Value
from skyrl_tx.apps.history.trace_pb2 import DebugAnnotation, Trace, TrackDescriptor, TrackEvent

MAX_SLICES = 10_000
"""Requests in a trace, of each source; the oldest are left out."""
_PACKETS_PER_PART = 500
_SEQUENCE = 1
_MAX_ANNOTATIONS = 16
_BEGIN, _END, _COUNTER = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END, TrackEvent.TYPE_COUNTER


def encode_trace(title: str, groups: Iterable[TimelineGroup]) -> Iterator[bytes]:
    """Yield the encoded trace of a session in parts; joined they are one `perfetto.protos.Trace`."""
    writer = _Writer()
    root = writer.begin_track(title, ordering=TrackDescriptor.EXPLICIT)
    device: list[TimelineSpan] = []
    for group in groups:
        parent = writer.begin_track(group.title, parent=root)
        for number, spans in enumerate(_split_overlaps(group.spans), start=1):
            track = writer.begin_track(f"requests {number}", parent=parent)
            for span in spans:
                writer.write_request(track, span)
                yield from writer.take_full_parts()
        for name, values in group.counters.items():
            track = writer.begin_track(name, parent=parent, is_counter=True)
            for at, value in values:
                writer.write_count(track, at, value)
                yield from writer.take_full_parts()
        device += [_make_device_span(group.title, span) for span in group.spans if span.device_s > 0]
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
    """Split spans in order of arrival into lists without overlaps, as few as there are spans at once."""
    tracks: list[list[TimelineSpan]] = []
    for span in spans:
        free = next((track for track in tracks if track[-1].end <= span.created_at), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tracks


class _Writer:
    """Encodes packets; `take_full_parts` hands out those so far when there are many."""

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
        """Begin a track; return its id."""
        self._num_tracks += 1
        packet = self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)
        described = packet.track_descriptor
        described.uuid, described.name, described.parent_uuid = self._num_tracks, name, parent
        described.child_ordering = ordering
        if is_counter:
            described.counter.SetInParent()
        return self._num_tracks

    def write_request(self, track: int, span: TimelineSpan) -> None:
        """Write a request, and inside it the parts in which it was queued and running."""
        end = span.end
        self._write_event(track, _BEGIN, span.created_at, span.name, "request", span.annotations)
        if span.started_at is not None:
            started = min(max(span.started_at, span.created_at), end)
            self.write_slice(track, "queued", "queued", span.created_at, started)
            self.write_slice(track, "running", "running", started, end)
        self._write_event(track, _END, end)

    def write_slice(self, track: int, name: str, category: str, begin: float, end: float) -> None:
        """Write a slice of a track."""
        self._write_event(track, _BEGIN, begin, name, category)
        self._write_event(track, _END, end)

    def write_count(self, track: int, at: float, value: float) -> None:
        """Write the value of a counter."""
        self._write_event(track, _COUNTER, at).double_counter_value = value

    def take_full_parts(self) -> Iterator[bytes]:
        """Yield the packets so far, if there are enough for a part."""
        if len(self._trace.packet) >= _PACKETS_PER_PART:
            yield self.take_rest()

    def take_rest(self) -> bytes:
        """Return the packets that were not handed out."""
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
