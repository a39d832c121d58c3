import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlmodel import Session
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results

from skyrl_tx.apps.history import points as stored_points
from skyrl_tx.apps.history.curves import (
    LOSSES,
    RunCurves,
    compute_shared_share,
    draw_spark,
    fold_metrics,
    fold_points,
    get_curves,
    thin_steps,
)
from skyrl_tx.apps.history.points import LOSS_WEIGHT, Point, PointKind, SampleTotals, read_points, read_sampled
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.results import SHARED_TOKENS
from skyrl_tx.store.database import Store
from tests.support import recorded_runs

NUMBERS = st.floats(-1e6, 1e6)
RUN = ModelId("run")


VALUES = {"loss:sum": 20.0, "num_tokens:sum": 10.0, LOSS_WEIGHT: 10.0}


def point(position: int, kind: PointKind, step: int, **changes: Any) -> Point:
    """Return a point with fixed times and sizes."""
    times = {"created_at": 0.0, "started_at": 1.0, "at": 2.0, "device_s": 0.5}
    fields = {**times, "tokens": 10, "datums": 2, "values": VALUES, **changes}
    return Point(position=position, model_id=RUN, kind=kind, step=step, **fields)


def passes(steps: int, chunks: int = 2) -> list[Point]:
    points: list[Point] = []
    for step in range(steps):
        points += [point(len(points) + chunk, "train", step) for chunk in range(chunks)]
        update = {"unclipped_grad_l2:mean": 0.5, "learning_rate:mean": 1e-4}
        points.append(point(len(points), "step", step + 1, values=update, tokens=0, datums=0))
    return points


@given(st.lists(st.tuples(NUMBERS, st.integers(1, 50)), min_size=1, max_size=5))
def test_metrics_are_folded_as_the_sdk_folds_chunks(chunks: list[tuple[float, int]]) -> None:
    names = [f"m:{reduction}" for reduction in ("mean", "sum", "min", "max", "slack")]
    outputs = [
        SimpleNamespace(metrics=dict.fromkeys(names, value), loss_fn_outputs=[None] * weight, loss_fn_output_type="")
        for value, weight in chunks
    ]
    # The SDK's function expects SDK types, but reads only these attributes.
    from tinker.lib import chunked_fwdbwd_helpers

    expected = chunked_fwdbwd_helpers._metrics_reduction(outputs)  # pyright: ignore
    folded = fold_metrics([(dict.fromkeys(names, value), float(weight)) for value, weight in chunks])
    assert folded.keys() == expected.keys() == set(names)
    for name in names:
        assert folded[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-3)
    assert combine_fwd_bwd_output_results([]).metrics == {}


def test_a_metric_that_is_not_finite_anywhere_is_none() -> None:
    assert fold_metrics([({"a:sum": 1.0}, 1.0), ({"a:sum": None}, 1.0)]) == {"a:sum": None}
    assert fold_metrics([({"a:sum": 1.0}, 1.0), ({}, 1.0)]) == {}


def test_passes_of_a_step_and_its_update_are_one_step() -> None:
    first, second = fold_points(passes(2))
    assert (first.step, second.step) == (1, 2) and first.passes == 2 and first.is_applied
    assert first.values["loss"] == 40.0 / 20.0 and first.values["grad_norm"] == 0.5 and first.tokens == 20
    assert first.values["learning_rate"] == 1e-4 and first.queue_s == 1.0 and first.wall_s == 2.0


def test_shared_tokens_of_a_step_are_added_up_and_compared_with_all_its_tokens() -> None:
    values = {**VALUES, SHARED_TOKENS: 4.0}
    earlier = fold_points(passes(1))
    shared = fold_points([point(10, "train", 1, values=values), point(11, "train", 1, values={**values, "x:sum": 1.0})])
    assert "shared_tokens" not in earlier[0].values and compute_shared_share(earlier) is None
    assert shared[0].values["shared_tokens"] == 8.0
    assert compute_shared_share([*earlier, *shared]) == 0.4, "a step before an upgrade does not count"


def test_a_policy_gradient_loss_is_divided_by_the_positions_with_an_advantage() -> None:
    values = {"loss:sum": 6.0, "num_tokens:sum": 100.0, "ratio_count:sum": 3.0, "ratio:sum": 3.3}
    (step,) = fold_points([point(1, "train", 0, values=values)])
    assert step.values["loss"] == 2.0 and step.values["ratio"] == pytest.approx(1.1)
    assert step.values["nonzero_advantages"] == 3.0 and not step.is_applied


def test_a_loss_is_divided_by_the_weights_that_are_known() -> None:
    masked = {"loss:sum": 6.0, "num_tokens:sum": 100.0, LOSS_WEIGHT: 4.0}
    old = {"loss:sum": 6.0, "num_tokens:sum": 100.0}
    steps = fold_points(
        [
            point(1, "train", 0, values=masked),
            point(2, "train", 0, values={**masked, "loss:sum": 10.0}),
            point(3, "train", 1, values=old),
            point(4, "train", 2, values={**masked, LOSS_WEIGHT: 0.0}),
            point(5, "train", 3, values={**masked, "loss:sum": None}),
        ]
    )
    losses = [{name: step.values[name] for name in LOSSES if name in step.values} for step in steps]
    assert losses == [{"loss": 2.0}, {"loss_per_token": 0.6}, {}, {"loss": None}]
    assert [step.values["loss_sum"] for step in steps] == [16.0, 6.0, 6.0, None]


def test_the_curves_of_a_recorded_run_have_the_numbers_of_its_client() -> None:
    steps = {step.step: step for step in fold_points(recorded_runs.make_points(RUN))}
    logged = {
        step: values["train_nll"] for step, _, values in recorded_runs.RECORDED["logged"] if "train_nll" in values
    }
    assert len(logged) == 60
    for number, nll in logged.items():
        assert steps[number].values["loss"] == pytest.approx(nll, rel=1e-6)
    assert all(step.device_s <= step.wall_s for step in steps.values())
    assert all(step.queue_s < 0.5 * step.device_s + 0.1 for step in steps.values()), "one user waits for no one else"


def test_a_run_that_waits_for_its_own_requests_does_not_wait_for_the_device() -> None:
    """Covers a client that sends the pass and the step of the next batch before the results of this one."""
    points = [
        point(1, "train", 0, created_at=0.0, started_at=0.25, at=10.0),
        point(2, "step", 1, created_at=0.0, started_at=10.0, at=12.0),
        point(3, "train", 1, created_at=1.0, started_at=12.5, at=20.0),
        point(4, "step", 2, created_at=1.0, started_at=25.0, at=26.0),
        point(5, "forward", 2, created_at=26.0, started_at=28.0, at=40.0),
        point(6, "train", 2, created_at=27.0, started_at=40.5, at=41.0),
    ]
    assert [step.queue_s for step in fold_points(points)] == [0.25, 5.0, 0.5]


def test_evaluations_are_curves_of_their_own() -> None:
    evaluation = point(9, "forward", 0, created_at=-50.0, at=90.0)
    (step,) = fold_points([*passes(1), evaluation])
    assert step.values["forward_loss"] == 2.0 and step.tokens == 20 and step.wall_s == 2.0 and step.passes == 2


@given(st.lists(NUMBERS, min_size=1, max_size=400), st.integers(1, 20))
def test_thinning_keeps_order_ends_and_spikes(losses: list[float], buckets: int) -> None:
    points = [
        point(index, "train", index, values={"loss:sum": loss * 10, LOSS_WEIGHT: 10.0})
        for index, loss in enumerate(losses)
    ]
    steps = fold_points(points)
    kept = thin_steps(steps, ["loss"], buckets)
    assert len(kept) <= max(4 * buckets, 1) and kept[0] == steps[0] and kept[-1] == steps[-1]
    assert [step.step for step in kept] == sorted({step.step for step in kept})
    seen = [step.values["loss"] for step in kept]
    assert max(losses) == pytest.approx(max(filter(None, seen), default=0.0), abs=1e-6) or max(losses) <= 0
    assert {max(step.values["loss"] or 0 for step in steps)} <= {value or 0 for value in seen} or max(losses) < 0


@given(st.lists(st.none() | NUMBERS, max_size=40))
def test_a_sparkline_stays_in_its_box(values: list[float | None]) -> None:
    places = [tuple(map(float, place.split(","))) for place in draw_spark(values).split()]
    assert all(0 <= x <= 120 and 0 <= y <= 28 and math.isfinite(y) for x, y in places)
    assert bool(places) == (sum(value is not None for value in values) > 1)


def write(store: Store, new: Sequence[Point]) -> None:
    store.write(lambda tx: [stored_points.add(tx, point) for point in new])


def test_only_the_newest_steps_are_read_again_and_late_chunks_are_found(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def read(*arguments: Any) -> list[Point]:
        found = read_points(*arguments)
        reads.append(len(found))
        return found

    monkeypatch.setattr(stored_points, "read_points", read)
    points = passes(10)
    late = points.pop(-2)
    write(store, points)
    run = RunCurves(store, RUN, "ann")
    assert run.read_steps() == fold_points(points)
    reads.clear()
    assert run.read_steps() == fold_points(points) and max(reads) <= 6
    write(store, [late])
    assert run.read_steps() == fold_points([*points, late])


def test_the_curves_of_recently_viewed_runs_stay_in_memory(store: Store) -> None:
    first = get_curves(store, RUN, "ann")
    assert get_curves(store, RUN, "ann") is first
    for number in range(100):
        get_curves(store, ModelId(f"other-{number}"), "ann")
    assert get_curves(store, RUN, "ann") is not first


def test_samples_of_the_weights_before_a_step_are_curves_of_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def read(tx: Session, model_id: ModelId, owner: str, *, after_step: int) -> list[SampleTotals]:
        reads.append(after_step)
        return read_sampled(tx, model_id, owner, after_step=after_step)

    def add_sampled(**sums: Any) -> None:
        store.write(lambda tx: stored_points.add_sampled(tx, RUN, "ann", SampleTotals(**sums)))

    monkeypatch.setattr(stored_points, "read_sampled", read)
    write(store, passes(40))
    add_sampled(step=2, samples=4, cut=1, tokens=40, scored_tokens=30, logprob_sum=-6.0)
    run = RunCurves(store, RUN, "ann")
    first = run.read_steps()
    assert {"sampled_length", "cut_share", "surprise"} & first[1].values.keys() == set()
    step = next(step for step in first if step.step == 3)
    assert (step.values["sampled_length"], step.values["cut_share"], step.values["surprise"]) == (10.0, 0.25, 0.2)
    add_sampled(step=38, samples=2, cut=0, tokens=10, scored_tokens=0, logprob_sum=0.0)
    add_sampled(step=2, samples=4, cut=7, tokens=0, scored_tokens=10, logprob_sum=2.0)
    again = {step.step: step.values for step in run.read_steps()}
    assert (again[3]["cut_share"], again[39]["sampled_length"]) == (1.0, 5.0) and "surprise" not in again[39]
    assert run.read_steps() == run.read_steps() and reads[-1] == 38 - 32
