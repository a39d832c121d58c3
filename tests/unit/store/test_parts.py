import gc
import sys

import pytest

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store import futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.parts import in_parts


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 1000, 1024, 1025, 3000])
def test_parts_name_each_id_and_are_of_few_lengths(number: int) -> None:
    ids = [f"id-{index}" for index in range(number)]
    parts = list(in_parts(iter(ids)))
    assert {name for part in parts for name in part} == set(ids)
    assert all(len(part) in {1 << exponent for exponent in range(11)} for part in parts)
    assert sum(map(len, parts)) < 2 * number or number < 2


def test_looking_for_many_results_leaves_no_garbage(store: Store) -> None:
    """What refers to itself stays until garbage is collected, which a server does seldom."""
    ids = [RequestId(f"req-{index:032}") for index in range(50)]

    def look() -> None:
        store.read(lambda tx: futures.statuses(tx, ids))
        store.write(lambda tx: futures.mark_fetched(tx, ids, 1.0))
        store.write(lambda tx: futures.mark_attempt(tx, ids))

    look()
    gc.collect()
    before = [sys.getrefcount(name) for name in ids]
    gc.disable()
    try:
        look()
        assert [sys.getrefcount(name) for name in ids] == before
    finally:
        gc.enable()
