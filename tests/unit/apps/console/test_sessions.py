import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.apps.console.sessions import list_requests, make_timeline, make_traffic
from skyrl_tx.apps.history.timeline import TimelineGroup, TimelineSpan, keep_newest_spans


def span(
    position: int, created: float = 1.0, started: float | None = 2.0, ended: float = 4.0, **more: object
) -> TimelineSpan:
    values = {"name": "sample", "created_at": created, "started_at": started, "ended_at": ended, "position": position}
    return TimelineSpan(**{**values, **more})  # type: ignore[arg-type]


MODEL = TimelineGroup(
    title="model train:0",
    model_id="session-ab:train:0",
    spans=[
        span(1, name="forward_backward", annotations={"step": 0, "tokens": 1200}, device_s=0.5),
        span(3, name="optim_step", annotations={"step": 1}),
    ],
)
SAMPLER = TimelineGroup(
    title="sampler",
    sampling_session_id="session-ab:sample:0",
    spans=[span(2, status="open", started=None, annotations={"seq_id": 7})],
)


def test_tracks_have_the_times_and_words_of_each_request() -> None:
    data = make_timeline([MODEL, SAMPLER], 9.0, {"session-ab:sample:0": "tinker://x"})
    first, second = data["tracks"]
    assert (first["title"], second["title"], second["detail"]) == ("model train:0", "sampler sample:0", "tinker://x")
    assert dict(zip(data["columns"], first["spans"][0], strict=True)) == {
        "position": 1,
        "name": "forward_backward",
        "created": 1.0,
        "started": 2.0,
        "ended": 4.0,
        "status": "done",
        "device_s": 0.5,
        "detail": "step 1, 1,200 tokens",
    }
    assert [row[-1] for row in first["spans"]] == ["step 1, 1,200 tokens", "step 1"], "a pass belongs to the next step"
    assert second["spans"][0][3] is None and second["spans"][0][-1] == "number 7"


def test_the_cursor_is_before_the_first_open_request() -> None:
    assert make_timeline([MODEL, SAMPLER], 9.0, {})["cursor"] == 1
    assert make_timeline([MODEL], 9.0, {})["cursor"] == 3
    assert make_timeline([], 9.0, {}, after=5)["cursor"] == 5


def test_times_are_in_order_though_a_clock_was_set_back() -> None:
    (track,) = make_timeline([TimelineGroup(title="", spans=[span(1, created=5.0, started=3.0, ended=4.0)])], 9.0, {})[
        "tracks"
    ]
    assert track["spans"][0][2:5] == [5.0, 5.0, 5.0]


def test_the_table_has_the_newest_requests_first() -> None:
    lines = list_requests([MODEL, SAMPLER], 2)
    assert [(line.span.position, line.queue_s, line.run_s) for line in lines] == [(3, 1.0, 2.0), (2, 3.0, None)]


@given(st.lists(st.lists(st.integers(0, 50)), max_size=4), st.integers(1, 60))
def test_the_newest_requests_of_all_tracks_are_kept(tracks: list[list[int]], limit: int) -> None:
    numbers = iter(range(1000))
    groups = [TimelineGroup(title="", spans=[span(next(numbers)) for _ in track]) for track in tracks]
    everything = sorted(span.position for group in groups for span in group.spans)
    kept = sorted(span.position for group in keep_newest_spans(groups, limit) for span in group.spans)
    assert kept == everything[-limit:]


def test_traffic_is_none_without_tokens() -> None:
    assert make_traffic([], 0.0, 10.0) is None


def test_traffic_divides_by_the_part_of_a_bar_that_has_passed() -> None:
    found = make_traffic([(300, "training", 600), (600, "training", 150), (600, "sampled", 30)], 360.0, 630.0)
    assert found is not None and (found.begin, found.end, found.bar_s) == (360.0, 630.0, 300)
    training, sampled, prefill = found.panels
    assert (training.total, training.peak) == ("750", "5 tok/s"), "150 tokens in 30 s are more than 600 in 240 s"
    assert training.bars.count("M") == 2 and sampled.bars.count("M") == 1 and prefill.bars == ""


@pytest.mark.parametrize(
    ("length_s", "bar_s"), [(3600, 300), (12 * 3600, 1800), (3 * 86_400, 7200), (30 * 86_400, 86_400)]
)
def test_long_sessions_have_wide_bars(length_s: int, bar_s: int) -> None:
    buckets = [(at, "sampled", 1) for at in range(0, length_s, 300)]
    found = make_traffic(buckets, 0.0, float(length_s))
    assert found is not None and found.bar_s == bar_s
    assert sum(len(re.findall("M", panel.bars)) for panel in found.panels) <= 60
