"""Sample tokens a minute and sample requests a second: which sample is refused, and for how long."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.contract.requests import Rejected, Sample, SamplingParams
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.quotas import Quotas, SamplePace, Spending
from skyrl_tx.store import audit, quotas, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.quotas import Limit, Quota, Subject

ANN, KEY = Subject("owner", "ann"), Subject("key", "3")
SESSION = SessionId("session-1")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def of(value: int, subject: Subject = ANN) -> list[Quota]:
    return [Quota(subject, "sample_tokens_per_minute", value)]


def spendings(quotas: list[Quota], amount: int) -> list[Spending]:
    return [Spending(quota, amount) for quota in quotas]


def is_refused(tokens: SamplePace, quotas: list[Quota], count: int) -> int:
    """Spend an amount; return the seconds to wait if it is refused, else 0."""
    try:
        tokens.spend(spendings(quotas, count))
    except ApiError as error:
        assert error.status == 429 and error.headers is not None
        assert error.headers["X-Tinker-Sampling-Backpressure"] == "1"
        return int(error.headers["Retry-After"])
    return 0


def test_tokens_count_for_a_minute() -> None:
    clock = Clock()
    tokens = SamplePace(clock)
    assert is_refused(tokens, of(600), 600) == 0
    assert is_refused(tokens, of(600), 100) == 10
    clock.now = 9.0
    assert is_refused(tokens, of(600), 100) == 1
    clock.now = 10.0
    assert is_refused(tokens, of(600), 100) == 0
    assert is_refused(tokens, of(600), 1) == 1


def test_a_sample_above_the_quota_runs_alone_and_delays_the_next() -> None:
    clock = Clock()
    tokens = SamplePace(clock)
    assert is_refused(tokens, of(600), 1800) == 0
    assert is_refused(tokens, of(600), 1) == 60  # at most: it is 121 s
    clock.now = 119.0
    assert is_refused(tokens, of(600), 1800) == 60
    clock.now = 180.0
    assert is_refused(tokens, of(600), 1800) == 0


def test_a_refused_sample_counts_for_no_subject() -> None:
    tokens = SamplePace(Clock())
    both = of(1000) + of(100, KEY)
    assert is_refused(tokens, both, 100) == 0
    assert is_refused(tokens, both, 50) == 30
    assert is_refused(tokens, of(1000), 900) == 0, "the owner's tokens did not change"


def test_refunded_tokens_do_not_count() -> None:
    tokens = SamplePace(Clock())
    assert is_refused(tokens, of(100), 100) == 0
    tokens.refund(spendings(of(100), 100))
    assert is_refused(tokens, of(100), 100) == 0


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 300)), max_size=40))
def test_what_is_admitted_stays_within_the_rate(calls: list[tuple[float, int]]) -> None:
    clock, admitted = Clock(), 0
    tokens = SamplePace(clock)
    for pause_s, count in calls:
        clock.now += pause_s
        if not is_refused(tokens, of(300), count):
            admitted += count
        assert admitted <= 300 * (1 + clock.now / 60) + 1e-6


def test_requests_count_for_a_second_whatever_their_size() -> None:
    clock = Clock()
    pace, three = SamplePace(clock), [Quota(ANN, "sample_requests_per_second", 3)]
    assert [is_refused(pace, three, 1) for _ in range(4)] == [0, 0, 0, 1]
    clock.now = 0.34
    assert [is_refused(pace, three, 1) for _ in range(2)] == [0, 1]
    clock.now = 10.0
    assert [is_refused(pace, three, 1) for _ in range(4)] == [0, 0, 0, 1], "a pause saves up no more than a second's"


def a_sample(max_tokens: int | None = 10, prompt: int = 5, num_samples: int = 2) -> Sample:
    params = SamplingParams(seed=1, max_tokens=max_tokens)
    return Sample(prompt=np.zeros(prompt, np.int32), num_samples=num_samples, sampler=None, params=params)


def send(limits: Quotas, request: Sample | Rejected, *, is_new: bool = True) -> None:
    with limits.sampling("ann", 3, SESSION, "", request) as note_stored:
        if is_new:
            note_stored()


def set_quota(
    store: Store, limits: Quotas, subject: str, value: int, limit: Limit = "sample_tokens_per_minute"
) -> None:
    about = Subject.parse(subject)
    store.write(lambda tx: quotas.put(tx, about, limit, value, audit.OPERATOR, 1.0))
    limits.view = type(limits.view)(store)
    limits.view.refresh()


def test_without_quotas_nothing_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Quotas(store)
    limits.view.refresh()
    monkeypatch.setattr(Store, "read", lambda *_: pytest.fail("a query"))
    for _ in range(100):
        send(limits, a_sample(10**6))


def test_prompt_and_possible_new_tokens_count(store: Store) -> None:
    limits = Quotas(store)
    set_quota(store, limits, "ann", 50)
    send(limits, a_sample())  # 25
    send(limits, a_sample(), is_new=False)
    send(limits, Rejected(kind="sample", message="wrong"))
    send(limits, a_sample())
    with pytest.raises(ApiError, match=r"ann has asked for 50 of 50 sample tokens a minute, .* for 25 more"):
        send(limits, a_sample())
    with limits.sampling("bob", None, SESSION, "", a_sample(10**6)):
        pass


def test_keys_and_projects_have_quotas_of_their_own(store: Store) -> None:
    limits = Quotas(store)
    store.write(lambda tx: sessions.create(tx, owner="ann", now=1.0, session_id=SESSION, project_id="math"))
    set_quota(store, limits, "project:math", 30)
    send(limits, a_sample())
    with pytest.raises(ApiError, match="project math has asked"):
        send(limits, a_sample())
    set_quota(store, limits, "key:3", 20)
    set_quota(store, limits, "project:math", 1000)
    send(limits, a_sample())
    with pytest.raises(ApiError, match="key 3 has asked"):
        send(limits, a_sample())


def test_requests_a_second_bound_samples_and_name_the_limit(store: Store) -> None:
    limits = Quotas(store)
    set_quota(store, limits, "ann", 2, "sample_requests_per_second")
    set_quota(store, limits, "ann", 10**6)
    send(limits, a_sample())
    send(limits, a_sample(), is_new=False)
    send(limits, Rejected(kind="sample", message="wrong"))
    send(limits, a_sample())
    reason = (
        "sample_requests_per_second: ann has sent 2 sample requests in a second, as many as it may, and this is one"
    )
    with pytest.raises(ApiError, match=reason):
        send(limits, a_sample())
