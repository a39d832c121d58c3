from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.apps.history.breakdown import PARTS, Compiling, Iteration, drop_pauses, split_iterations
from skyrl_tx.apps.history.timeline import TimelineSpan

TIMES = st.integers(0, 400).map(lambda tenths: tenths / 10)
NAMES = st.sampled_from(["forward_backward", "forward", "optim_step", "sample", "save_weights", "create_model"])


@st.composite
def make_spans(draw: st.DrawFn) -> TimelineSpan:
    created, queued_s, run_s = draw(TIMES), draw(TIMES), draw(TIMES)
    return TimelineSpan(
        name=draw(NAMES),
        created_at=created,
        started_at=draw(st.sampled_from([created + queued_s, None])),
        ended_at=created + queued_s + run_s,
        device_s=draw(TIMES),
    )


@given(
    st.lists(make_spans(), max_size=12),
    st.lists(st.builds(Compiling, TIMES, TIMES.map(lambda at: at + 41.0), TIMES), max_size=3),
    st.floats(0.0, 1.0),
    TIMES,
)
def test_the_parts_of_an_iteration_add_up_to_its_time(
    spans: list[TimelineSpan], compiling: list[Compiling], others_share: float, since: float
) -> None:
    found = split_iterations(spans, compiling, others_share, since)
    for iteration in found:
        assert sum(iteration.parts.values()) == pytest.approx(iteration.wall_s)
        assert list(iteration.parts) == list(PARTS) and min(iteration.parts.values()) >= -1e-9
        assert 0 <= iteration.alone_s <= iteration.wall_s and 0 <= iteration.tail_s <= iteration.wall_s

    # All iterations together last from the first one to the last optimizer step
    ends = [span.end for span in spans if span.name == "optim_step"]
    if ends and since == 0.0:
        first = min(span.created_at for span in spans if span.name != "create_model")
        assert sum(iteration.wall_s for iteration in found) == pytest.approx(max(ends) - first)


def span(
    name: str, created: float, started: float | None, end: float, device_s: float = 0.0, **values: Any
) -> TimelineSpan:
    return TimelineSpan(
        name=name, created_at=created, started_at=started, ended_at=end, device_s=device_s, annotations=values
    )


def test_each_moment_counts_for_one_part() -> None:
    (iteration,) = split_iterations(
        [
            span("save_weights", 0.0, 1.0, 2.0),
            span("sample", 2.0, 2.0, 7.0),
            span("forward_backward", 6.0, 6.5, 9.5, 2.5, datums=4),
            span("optim_step", 11.0, 11.0, 12.0, 1.0, step=1),
        ]
    )
    # From 6.5 to 7 both a sample and a pass ran, and the device did not work for the pass
    assert iteration.parts == pytest.approx(
        {"sampling": 5.0, "training": 3.5, "weights": 1.0, "compilation": 0.0, "queued": 1.0, "client": 1.5}
    )
    assert (iteration.step, iteration.passes, iteration.datums, iteration.sample_requests) == (1, 1, 4, 1)


def test_the_compiler_counts_only_for_an_iteration_that_was_slower() -> None:
    passes = [
        span("forward_backward", 0.0, 0.0, 9.0, 9.0),
        span("optim_step", 9.0, 9.0, 10.0, 1.0),
        span("forward_backward", 10.0, 10.0, 12.0, 2.0),
        span("optim_step", 12.0, 12.0, 13.0, 1.0),
    ]
    slow, fast = split_iterations(passes, [Compiling(0.0, 10.0, 5.0), Compiling(10.0, 20.0, 5.0)])
    assert (slow.parts["compilation"], slow.parts["training"]) == (5.0, 5.0)
    assert (fast.parts["compilation"], fast.parts["training"]) == (0.0, 3.0)


def test_a_pass_that_shares_the_device_waits_for_others() -> None:
    spans = [span("forward_backward", 0.0, 0.0, 9.0, 3.0), span("optim_step", 9.0, 9.0, 10.0, 1.0)]
    assert split_iterations(spans)[0].parts["queued"] == 0.0, "nobody else used the device"
    assert split_iterations(spans, others_share=1.0)[0].parts["queued"] == 6.0
    assert split_iterations(spans, others_share=0.4)[0].parts["queued"] == 4.0


def test_iterations_before_a_time_and_pauses_are_left_out() -> None:
    spans = [span("optim_step", 10.0 * number, None, 10.0 * number + 5.0, step=number) for number in range(1, 6)]
    spans.append(span("optim_step", 900.0, None, 901.0, step=6))
    found = split_iterations(spans, since=20.0)
    assert [(iteration.step, iteration.wall_s) for iteration in found] == [(3, 10.0), (4, 10.0), (5, 10.0), (6, 846.0)]
    assert [iteration.step for iteration in drop_pauses(found)] == [3, 4, 5]
    nothing: list[Iteration] = []
    assert split_iterations([]) == nothing and drop_pauses([]) == nothing
