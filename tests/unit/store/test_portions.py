"""Division of a quota among several engines."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from skyrl_tx.store import portions
from skyrl_tx.store.database import Store
from skyrl_tx.store.portions import Demand, fair_portions
from skyrl_tx.store.quotas import Quota, Subject
from tests.support.waiting import until

ANN = Subject("owner", "ann")


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        (10, {1: (3, 0.0), 2: (4, 0.0)}, {1: 3, 2: 4}),
        (10, {1: (30, 0.0), 2: (2, 0.0)}, {1: 8, 2: 2}),
        (9, {1: (30, 0.0), 2: (2, 0.0), 3: (30, 1.0)}, {1: 4, 2: 2, 3: 3}),
        (5, {1: (30, 2.0), 2: (30, 1.0)}, {1: 2, 2: 3}),
        (1, {1: (1, math.inf), 2: (30, 1.0), 3: (2, 0.5)}, {1: 0, 2: 0, 3: 1}),
        (4, {1: (0, math.inf)}, {1: 0}),
    ],
    ids=["enough for all", "one wants little", "three", "oldest first", "less than engines", "nothing wanted"],
)
def test_engines_get_what_they_want_or_equal_portions(
    value: int, wanted: dict[int, tuple[int, float]], expected: dict[int, int]
) -> None:
    assert fair_portions(value, wanted) == expected


@pytest.fixture
def engines(tmp_path: Path, postgresql_url: str) -> Iterator[list[Store]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                closing(Store.open(tmp_path / "engine", role="engine", url=postgresql_url, is_shared=True))
            )
            for _ in range(2)
        ]


def take(store: Store, running: int, wanted: int, value: int = 4, since: float = 1.0) -> int:
    """Return how much an engine may run of a quota of ann."""
    quota = Quota(ANN, "samples_at_once", value)
    demand = Demand(quota=quota, num_running=running, num_wanted=wanted, waits_since=since)
    return store.write(lambda tx: portions.take(tx, store.engine, [demand]))[quota]


def test_what_one_engine_releases_another_one_gets(engines: list[Store]) -> None:
    first, second = engines
    assert take(first, 0, 1) == 4, "no other wants any"
    assert take(second, 0, 9) == 0, "all are held"
    assert take(first, 4, 9) == 2, "it starts no more than its half"
    assert take(second, 0, 9) == 0, "but runs four"
    assert take(first, 3, 9) == 2
    assert take(second, 0, 9) == 1
    assert take(first, 2, 9) == 2 and take(second, 1, 9) == 2
    first.write(lambda tx: portions.take(tx, first.engine, []))
    assert take(second, 2, 9) == 4


def test_other_quotas_do_not_count(engines: list[Store]) -> None:
    first, second = engines
    assert take(first, 0, 9) == 4
    for quota in (Quota(ANN, "training_steps_at_once", 4), Quota(Subject("key", "ann"), "samples_at_once", 4)):
        demand = Demand(quota=quota, num_running=0, num_wanted=9, waits_since=1.0)
        assert second.write(lambda tx, found=demand: portions.take(tx, 2, [found])) == {quota: 4}


def test_a_lower_quota_holds_as_soon_as_enough_has_ended(engines: list[Store]) -> None:
    first, second = engines
    assert take(first, 0, 9) == 4
    assert take(first, 4, 9, value=2) == 2 and take(second, 0, 9, value=2) == 0
    assert take(first, 2, 9, value=2) == 1 and take(second, 0, 9, value=2) == 0
    assert take(first, 1, 9, value=2) == 1 and take(second, 0, 9, value=2) == 1


def test_what_an_ended_engine_held_is_free(engines: list[Store]) -> None:
    first, second = engines
    assert take(first, 0, 9) == 4 and take(second, 0, 9) == 0
    first.close()
    until(lambda: take(second, 0, 9) == 4)  # the server ends a connection a moment later
