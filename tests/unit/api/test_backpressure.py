"""When samples are told to come later."""

import time

import pytest

from skyrl_tx.api import backpressure
from skyrl_tx.api.backpressure import SampleBudget
from skyrl_tx.api.errors import ApiError
from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import REQUEST_BYTES, SampleLoad

LIMIT = 10 * REQUEST_BYTES


@pytest.fixture
def budget(store: Store, monkeypatch: pytest.MonkeyPatch) -> SampleBudget:
    monkeypatch.setattr(backpressure, "_LOOK_EVERY_S", 0.0)
    return SampleBudget(store)


def say(store: Store, load: SampleLoad | None) -> None:
    store.write(
        lambda tx: engine_state.publish(
            tx, boot_id="b", pid=1, status="ready", capabilities={}, base_models=[], load=load, now=time.time()
        )
    )


def holds(store: Store, num_bytes: int, position: int = 0) -> None:
    say(store, SampleLoad(position=position, num_bytes=num_bytes, max_bytes=LIMIT))


def test_nothing_is_refused_while_the_engine_has_said_nothing(store: Store, budget: SampleBudget) -> None:
    budget.check(10**9)
    say(store, None)
    budget.check(10**9)


def test_what_was_submitted_since_counts_until_the_engine_counts_it(store: Store, budget: SampleBudget) -> None:
    holds(store, 0)
    for position in range(1, 11):
        budget.check(0)
        budget.note(position, 0)
    with pytest.raises(ApiError, match=f"take {LIMIT} bytes of {LIMIT}") as caught:
        budget.check(0)
    assert caught.value.status == 429
    assert caught.value.headers == {"Retry-After": "1", "X-Tinker-Sampling-Backpressure": "1"}
    holds(store, 4 * REQUEST_BYTES, position=6)  # two were answered, four wait, four it has not read
    budget.check(REQUEST_BYTES)
    with pytest.raises(ApiError):
        budget.check(REQUEST_BYTES + 1)
    holds(store, LIMIT, position=10)
    with pytest.raises(ApiError):
        budget.check(0)
    holds(store, 0, position=10)
    budget.check(9 * REQUEST_BYTES)


def test_one_that_never_fits_is_left_to_the_engine_to_refuse(store: Store, budget: SampleBudget) -> None:
    holds(store, LIMIT)
    budget.check(LIMIT)
