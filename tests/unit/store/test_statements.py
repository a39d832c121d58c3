import gc
import sys

import pytest

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store import futures
from skyrl_tx.store.database import Store, split_batches


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 1000, 1024, 1025, 3000])
def test_batches_cover_all_ids_and_have_few_lengths(number: int) -> None:
    ids = [f"id-{index}" for index in range(number)]
    batches = list(split_batches(iter(ids)))
    assert {name for batch in batches for name in batch} == set(ids)
    assert all(len(batch) in {1 << exponent for exponent in range(11)} for batch in batches)
    assert sum(map(len, batches)) < 2 * number or number < 2


def test_statements_leave_no_cyclic_garbage(store: Store) -> None:
    """Cyclic garbage would stay in memory for long, because the server rarely runs the collector."""
    ids = [RequestId(f"req-{index:032}") for index in range(50)]

    def run_statements() -> None:
        store.read(lambda tx: futures.get_outcomes(tx, ids))
        store.write(lambda tx: futures.mark_fetched(tx, ids, 1.0))
        store.write(lambda tx: futures.count_delivery_attempt(tx, ids))

    run_statements()
    gc.collect()
    before = [sys.getrefcount(name) for name in ids]
    gc.disable()
    try:
        run_statements()
        assert [sys.getrefcount(name) for name in ids] == before
    finally:
        gc.enable()
