from dataclasses import replace

import pytest

from skyrl_tx.apps.history import logged_metrics
from skyrl_tx.apps.history.logged_metrics import LoggedRun, NewLoggedPoint
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store.database import Store

RUN = LoggedRun(owner="ann", project="gsm8k", key="a1", name="first")
DAY = 86_400.0


def point(number: int, **values: float | None) -> NewLoggedPoint:
    return NewLoggedPoint(log_id=f"log-{number}", step=number, values=values or {"reward": number / 10})


def write(store: Store, *points: NewLoggedPoint, run: LoggedRun = RUN, now: float = 10.0) -> int:
    return store.write(lambda tx: logged_metrics.add_points(tx, logged_metrics.open_run(tx, run, now), points, now))


def steps(store: Store, owner: str | None = "ann", **wanted: int) -> list[int]:
    def read(tx) -> list[int]:
        runs = [row.logged_run_id for row in logged_metrics.list_runs(tx, owner)]
        return [found.step for found in logged_metrics.read_points(tx, runs, **wanted)]

    return store.read(read)


def test_points_are_stored_once(store: Store) -> None:
    assert write(store, point(1), point(2, reward=None, accuracy=1.0)) == 2
    assert write(store, point(2), point(2), point(3), point(3, reward=9.0), now=11.0) == 1
    (run,) = store.read(lambda tx: logged_metrics.list_runs(tx, "ann"))
    assert (run.num_points, run.last_at, run.created_at, run.name) == (3, 11.0, 10.0, "first")
    found = store.read(lambda tx: logged_metrics.read_points(tx, [run.logged_run_id or 0]))
    assert [(row.step, row.at, row.values) for row in found] == [
        (1, 10.0, {"reward": 0.1}),
        (2, 10.0, {"reward": None, "accuracy": 1.0}),
        (3, 11.0, {"reward": 0.3}),
    ]


def test_equal_log_ids_of_two_runs_are_two_points(store: Store) -> None:
    other = LoggedRun(owner="ann", project="gsm8k", key="a2", name="first")
    assert write(store, point(1)) == write(store, point(1), run=other) == 1
    assert len(store.read(lambda tx: logged_metrics.list_runs(tx, "ann", project="gsm8k"))) == 2


def test_owners_are_apart(store: Store) -> None:
    write(store, point(1))
    write(store, point(2), run=LoggedRun(owner="bob", project="gsm8k", key="a1", name="first"))
    assert (steps(store, "ann"), steps(store, "bob"), steps(store, None)) == ([1], [2], [1, 2])


def test_a_page_ends_when_its_values_are_long(store: Store) -> None:
    write(store, *[point(number, **{"x" * 1000: 1.0}) for number in range(7)])
    run_ids = [row.logged_run_id or 0 for row in store.read(lambda tx: logged_metrics.list_runs(tx, "ann"))]
    assert steps(store, max_bytes=3500) == [0, 1, 2]
    assert steps(store, max_bytes=10) == [0], "a reader always continues"

    last = store.read(lambda tx: logged_metrics.read_points(tx, run_ids))[-1].position
    assert store.read(lambda tx: logged_metrics.has_points(tx, run_ids, after=last - 1))
    assert not store.read(lambda tx: logged_metrics.has_points(tx, run_ids, after=last))


def test_a_reader_continues_after_its_cursor(store: Store) -> None:
    write(store, *map(point, range(7)))
    assert steps(store, limit=3) == [0, 1, 2]
    (run,) = store.read(lambda tx: logged_metrics.list_runs(tx, "ann"))
    first = store.read(lambda tx: logged_metrics.read_points(tx, [run.logged_run_id or 0], limit=3))
    assert steps(store, after=first[-1].position) == [3, 4, 5, 6]


def test_a_long_run_loses_every_second_old_point(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_metrics, "MAX_POINTS", 8)
    write(store, *map(point, range(8)))
    assert steps(store) == [*range(8)]
    write(store, point(8))
    assert steps(store) == [1, 3, 5, 6, 7, 8]
    for number in range(9, 40):
        write(store, point(number))
    kept = steps(store)
    assert len(kept) <= 8 and kept[-4:] == [36, 37, 38, 39]
    (run,) = store.read(lambda tx: logged_metrics.list_runs(tx, "ann"))
    assert run.num_points == len(kept)


def test_a_large_run_is_thinned_by_its_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_metrics, "MAX_BYTES", 2000)
    for number in range(100):
        write(store, point(number, **{"x" * 60: 1.0}))
    (run,) = store.read(lambda tx: logged_metrics.list_runs(tx, "ann"))
    assert 10 < run.num_points < 35 and run.num_bytes <= 2000
    assert steps(store)[-1] == 99


def test_an_owner_has_a_limited_number_of_runs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_metrics, "MAX_RUNS", 1)
    write(store, point(1))
    with pytest.raises(UserError, match="ann has 1 logged runs, and the limit is 1"):
        write(store, point(1), run=LoggedRun(owner="ann", project="p", key="k", name="n"))
    assert write(store, point(1), run=LoggedRun(owner="bob", project="p", key="k", name="n")) == 1


def test_old_runs_are_pruned_by_their_last_point(store: Store) -> None:
    write(store, *map(point, range(5)), now=10.0)
    write(store, point(1), run=LoggedRun(owner="ann", project="p", key="new", name="new"), now=100 * DAY)
    before = 100 * DAY - logged_metrics.RETENTION_S
    assert store.write(lambda tx: logged_metrics.prune(tx, before, limit=3)) == 3
    assert store.write(lambda tx: logged_metrics.prune(tx, before, limit=3)) == 2
    assert store.write(lambda tx: logged_metrics.prune(tx, before, limit=3)) == 0
    assert [row.name for row in store.read(lambda tx: logged_metrics.list_runs(tx, None))] == ["new"]


def test_points_of_a_model_are_those_of_all_its_runs(store: Store) -> None:
    model_id = ModelId("run-1")
    write(store, point(1), run=replace(RUN, model_id=model_id))
    write(store, point(2), run=LoggedRun(owner="ann", project="", key=model_id, name="m", model_id=model_id))
    write(store, point(3), run=LoggedRun(owner="ann", project="", key="else", name="m"))
    read = store.read(lambda tx: logged_metrics.read_points(tx, logged_metrics.list_run_ids(tx, model_id)))
    assert [(found.project, found.run, found.step) for found in read] == [("gsm8k", "first", 1), ("", "m", 2)]
    store.write(lambda tx: logged_metrics.forget_models(tx, [model_id]))
    assert store.read(lambda tx: logged_metrics.read_points(tx, logged_metrics.list_run_ids(tx, model_id))) == []
    store.write(lambda tx: logged_metrics.prune(tx, 1.0, limit=100))
    assert [run.key for run in store.read(lambda tx: logged_metrics.list_runs(tx, "ann"))] == ["else"]


def test_the_first_config_stays(store: Store) -> None:
    for config in (None, {"lora_rank": 8}, {"lora_rank": 16}):
        store.write(lambda tx, config=config: logged_metrics.open_run(tx, RUN, 1.0, config))
    (run,) = store.read(lambda tx: logged_metrics.list_runs(tx, "ann"))
    assert run.config == {"lora_rank": 8}
