"""A minute of what `make soak` does for fifteen, smaller: nothing fails, and the API's memory comes to rest."""

import pytest

from skyrl_tx.testing.soak import Plan, soak


@pytest.mark.slow
def test_a_minute_of_waiting_futures() -> None:
    plan = Plan(minutes=1.0, num_sessions=40, num_futures=1000, row_s=20.0)
    _, warm, last = soak(plan)
    assert (warm.num_5xx, last.num_5xx) == (0, 0) and not last.failures
    assert last.num_done > 50 and last.num_waiting > 500
    assert last.api_bytes - warm.api_bytes < 64 * 2**20
    assert last.engine_bytes - warm.engine_bytes < 64 * 2**20
