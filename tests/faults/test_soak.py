"""A short soak test: no request fails, and memory does not grow after warm-up."""

import pytest

from tests.support.soak.run import Plan, soak


@pytest.mark.slow
def test_a_thousand_open_polls_for_a_minute() -> None:
    plan = Plan(minutes=1.0, num_sessions=40, num_futures=1000, row_s=20.0)
    _, warm, last = soak(plan)
    assert (warm.num_5xx, last.num_5xx) == (0, 0) and not last.failures
    assert last.num_done > 50 and last.num_pending > 500
    assert last.api_bytes - warm.api_bytes < 64 * 2**20
    assert last.engine_bytes - warm.engine_bytes < 64 * 2**20
