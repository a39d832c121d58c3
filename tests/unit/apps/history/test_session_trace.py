"""The timeline of a session, read back with Perfetto's own classes."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as perfetto

from skyrl_tx.apps.history import timeline, trace_pb2
from skyrl_tx.apps.history.logged_metrics import LoggedPoint
from skyrl_tx.apps.history.points import Point, PointKind
from skyrl_tx.apps.history.timeline import RequestTimes, TimelineGroup, TimelineSpan, encode_trace, make_model_group
from skyrl_tx.contract.ids import ModelId, RequestId

BEGIN, END, COUNTER = 1, 2, 4
NOW = 1_800_000_000.0


def decode_trace(groups: Iterable[TimelineGroup]) -> "perfetto.Trace":
    return perfetto.Trace.FromString(b"".join(encode_trace("my session", groups)))


def span(name: str, created: float, started: float | None, ended: float, device_s: float = 0.0) -> TimelineSpan:
    return TimelineSpan(
        name=name,
        created_at=NOW + created,
        started_at=started and NOW + started,
        ended_at=NOW + ended,
        device_s=device_s,
    )


def request(position: int, **changed: object) -> RequestTimes:
    values = {
        "position": position,
        "request_id": RequestId(f"req-{position}"),
        "owner": "ann",
        "kind": "optim_step",
        "model_id": ModelId("run-1"),
        "sampling_session_id": None,
        "seq_id": position,
        "status": "done",
        "created_at": NOW + position,
        "started_at": NOW + position + 0.25,
        "completed_at": NOW + position + 0.5,
    }
    return RequestTimes(**{**values, **changed})  # type: ignore[arg-type]


def point(position: int, kind: PointKind = "train", **values: float | None) -> Point:
    return Point(
        position=position,
        model_id=ModelId("run-1"),
        kind=kind,
        step=position,
        created_at=NOW + position,
        started_at=NOW + position + 1,
        at=NOW + position + 2,
        device_s=0.5,
        tokens=7,
        datums=1,
        values=values,
    )


def read_tracks(trace: "perfetto.Trace") -> dict[int, tuple[str, int]]:
    """Return the name and parent of each track."""
    described = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
    assert len({track.uuid for track in described}) == len(described)
    return {track.uuid: (track.name, track.parent_uuid) for track in described}


def read_slices(trace: "perfetto.Trace") -> dict[str, list[tuple[str, float, float]]]:
    """Return the slices by track title, and check that they are nested and in order."""
    tracks = read_tracks(trace)
    open_slices: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    slices: defaultdict[str, list[tuple[str, float, float]]] = defaultdict(list)
    last: defaultdict[int, int] = defaultdict(int)

    for packet in trace.packet:
        event = packet.track_event
        if not packet.HasField("track_event") or event.type == COUNTER:
            continue
        assert packet.timestamp >= last[event.track_uuid], "the events of a track are in order"
        last[event.track_uuid] = packet.timestamp
        if event.type == BEGIN:
            open_slices[event.track_uuid].append((event.name, packet.timestamp))
        else:
            name, begin = open_slices[event.track_uuid].pop()
            title = tracks[tracks[event.track_uuid][1]][0]
            slices[title].append((name, round(begin / 1e9 - NOW, 3), round(packet.timestamp / 1e9 - NOW, 3)))

    assert not any(open_slices.values()), "every slice ends"

    return dict(slices)


@pytest.mark.parametrize("name", trace_pb2.DESCRIPTOR.message_types_by_name)
def test_fields_are_those_of_perfetto(name: str) -> None:
    ours, theirs = DescriptorProto(), DescriptorProto()
    trace_pb2.DESCRIPTOR.message_types_by_name[name].CopyToProto(ours)
    getattr(perfetto, name).DESCRIPTOR.CopyToProto(theirs)
    known = {field.number: (field.name, field.type, field.label) for field in theirs.field}
    for field in ours.field:
        assert known[field.number] == (field.name, field.type, field.label)


def test_queue_and_run_are_inside_their_request() -> None:
    trace = decode_trace([TimelineGroup(title="model", spans=[span("forward_backward", 0, 1, 3, device_s=1.5)])])
    assert read_slices(trace) == {
        "model": [("queued", 0, 1), ("running", 1, 3), ("forward_backward", 0, 3)],
        "device": [("model forward_backward", 1.5, 3)],
    }
    assert read_tracks(trace)[1] == ("my session", 0)


def test_requests_at_once_get_tracks_of_their_own() -> None:
    spans = [span("a", 0, None, 2), span("b", 1, None, 3), span("c", 2, None, 4)]
    trace = decode_trace([TimelineGroup(title="sampler", spans=spans)])
    names = [name for name, _ in read_tracks(trace).values()]
    assert names == ["my session", "sampler", "requests 1", "requests 2", "device"]
    assert read_slices(trace)["sampler"] == [("a", 0, 2), ("c", 2, 4), ("b", 1, 3)]


def test_a_point_replaces_its_request_and_others_stay() -> None:
    requests = [request(1), request(2, status="failed"), request(3, status="open", completed_at=None)]
    points = [point(1, "step", **{"loss:sum": 0.5, "nan": None})]
    logged = [LoggedPoint(position=1, project="p", run="r", step=1, at=NOW + 9, values={"reward": 0.25, "x": None})]
    group = make_model_group("m", "run-1", requests, points, logged, NOW + 10)
    trace = decode_trace([group])
    assert [row[1:] for row in read_slices(trace)["m"] if row[0] == "optim_step"] == [(1, 3), (3, 10), (2, 2.5)]

    notes = [
        {note.name: note.string_value or note.int_value or note.double_value for note in event.debug_annotations}
        for packet in trace.packet
        if (event := packet.track_event).name == "optim_step"
    ]
    assert {"step": 1, "tokens": 7, "datums": 1, "device_s": 0.5, "loss:sum": 0.5} in notes
    assert {"request_id": "req-2", "status": "failed", "seq_id": 2} in notes

    tracks = read_tracks(trace)
    counts = {
        tracks[packet.track_event.track_uuid][0]: packet.track_event.double_counter_value
        for packet in trace.packet
        if packet.track_event.type == COUNTER
    }
    assert counts == {"loss:sum": 0.5, "reward": 0.25}


TIMES = st.floats(0, 100, allow_nan=False)


@given(st.lists(st.tuples(TIMES, st.none() | TIMES, TIMES, st.floats(0, 5)), max_size=30))
def test_slices_are_nested_whatever_the_clocks_say(times: list[tuple[float, float | None, float, float]]) -> None:
    """The clocks of two machines differ, and requests end in any order."""
    spans = [span("r", created, started, created + ended - 10, device) for created, started, ended, device in times]
    spans.sort(key=lambda span: span.created_at)
    found = read_slices(decode_trace([TimelineGroup(title="m", spans=spans)]))
    assert sum(row[0] == "r" for row in found.get("m", [])) == len(spans)


def test_the_largest_trace_is_bounded_and_quick() -> None:
    values = {f"metric_{number}": math.pi * number for number in range(20)}
    points = [point(number, **values) for number in range(timeline.MAX_SLICES)]
    started = time.perf_counter()
    sizes = [len(part) for part in encode_trace("t", [make_model_group("m", "run-1", [], points, [], NOW)])]
    assert sum(sizes) < 120 * 2**20 and max(sizes) < 2**20
    assert time.perf_counter() - started < 60
