"""Curve points are read by cursor and thinned by whole steps.

Values that are not finite are null.
"""

import math

from skyrl_tx.apps.history import points
from skyrl_tx.apps.history.points import Point, PointKind
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store.database import Store

RUN, OTHER = ModelId("run"), ModelId("other")


def point(position: int, step: int, kind: PointKind = "train", model_id: ModelId = RUN, **values: float) -> Point:
    return Point(
        position=position,
        model_id=model_id,
        kind=kind,
        step=step,
        created_at=1.0,
        started_at=2.0,
        at=3.0,
        device_s=0.5,
        tokens=10,
        datums=2,
        values=values,
    )


def add(store: Store, *new: Point) -> None:
    store.write(lambda tx: [points.add(tx, new_point) for new_point in new])


def positions(found: list[Point]) -> list[int]:
    return [new_point.position for new_point in found]


def test_series_continues_after_a_cursor(store: Store) -> None:
    add(store, *(point(position, position // 2) for position in range(1, 8)), point(8, 0, model_id=OTHER))
    first = store.read(lambda tx: points.read_points(tx, RUN, 0, 3))
    assert positions(first) == [1, 2, 3]
    assert positions(store.read(lambda tx: points.read_points(tx, RUN, first[-1].position))) == [4, 5, 6, 7]
    assert store.read(lambda tx: points.read_points(tx, ModelId("unknown"))) == []


def test_point_is_read_as_it_was_written(store: Store) -> None:
    new = point(2**40, 3, "step", **{"loss:sum": 1.25, "step:max": 1e-12})
    add(store, new)
    assert store.read(lambda tx: points.read_points(tx, RUN)) == [new]


def test_values_that_are_not_finite_become_null(store: Store) -> None:
    add(store, point(1, 0, **{"loss:sum": math.nan, "a:max": math.inf, "b:min": -math.inf, "c:sum": 1.0}))
    (found,) = store.read(lambda tx: points.read_points(tx, RUN))
    assert found.values == {"loss:sum": None, "a:max": None, "b:min": None, "c:sum": 1.0}


def test_newest_points_of_one_kind_are_in_order_of_arrival(store: Store) -> None:
    add(store, *(point(position, position // 2, "step" if position % 2 else "train") for position in range(1, 9)))
    assert positions(store.read(lambda tx: points.read_newest(tx, RUN, 3))) == [6, 7, 8]
    assert positions(store.read(lambda tx: points.read_newest(tx, RUN, 2, "step"))) == [5, 7]


def test_every_second_step_of_the_older_half_is_superfluous(store: Store) -> None:
    add(store, *(point(position, position // 2) for position in range(2, 42)), point(50, 0, model_id=OTHER))
    assert store.read(lambda tx: points.find_superfluous(tx, RUN, 40)) == []
    found = store.read(lambda tx: points.find_superfluous(tx, RUN, 39))
    assert found == [4, 5, 8, 9, 12, 13, 16, 17, 20, 21], "steps 2, 4, 6, 8 and 10 of the older 21 points"
    store.write(lambda tx: points.remove(tx, found))
    assert positions(store.read(lambda tx: points.read_points(tx, RUN)))[:6] == [2, 3, 6, 7, 10, 11]
    assert store.read(lambda tx: points.find_superfluous(tx, RUN, 39)) == []


def test_run_without_steps_is_thinned_too(store: Store) -> None:
    add(store, *(point(position, 0) for position in range(1, 41)))
    found = store.read(lambda tx: points.find_superfluous(tx, RUN, 39))
    assert found == list(range(2, 22, 2))


def test_points_go_with_their_runs(store: Store) -> None:
    add(store, point(1, 0), point(2, 0, model_id=OTHER))
    store.write(lambda tx: points.remove_runs(tx, [RUN]))
    assert store.read(lambda tx: points.read_points(tx, RUN)) == []
    assert positions(store.read(lambda tx: points.read_points(tx, OTHER))) == [2]
