"""Engine health as the API reports it, and admission control."""

import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.server import engine_status
from skyrl_tx.server.engine_status import AdmissionControl, EngineHealth, EngineReport
from skyrl_tx.server.errors import ApiError
from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import REQUEST_BYTES, SampleLoad
from skyrl_tx.store.futures import SubmittedRequest
from skyrl_tx.store.tables import EngineStateRow

LIMIT = 10 * REQUEST_BYTES
FULL = "database x: no space left for it on the disk"


def check(admission: AdmissionControl, owner: str, num_bytes: int) -> None:
    """Raise ApiError if a sample would be refused now."""
    with admission.reserve(owner, num_bytes):
        pass


@pytest.mark.parametrize(
    ("age_s", "status", "detail", "write_failure", "expected"),
    [
        (0, "ready", "", None, None),
        (0, "ready", "", FULL, None),
        (0, "ready", FULL, None, f"the engine waits: {FULL}"),
        (0, "starting", "", None, "the engine is starting"),
        (90, "ready", "", None, "the engine has published no status for 90 s"),
        (90, "ready", FULL, FULL, f"the engine has published no status for 90 s; {FULL}"),
    ],
)
def test_health_names_the_problem(age_s, status, detail, write_failure, expected) -> None:
    now = time.time()
    at = now - age_s
    row = SimpleNamespace(updated_at=at, status=status, detail=detail, activity="sampling", activity_since=at - 29)
    row.pauses, row.meters = None, None
    store = SimpleNamespace(read=lambda _: ([row], now), write_failure=write_failure)
    assert EngineHealth(store, silence_s=30.0).read_report() == EngineReport(problem=expected)


@pytest.mark.parametrize(
    ("status", "problem", "activity"),
    [
        ("ready", None, "the engine has been busy for 40 s: forward (compiling)"),
        ("starting", "the engine is starting; the engine has been busy for 40 s: forward (compiling)", None),
    ],
)
def test_health_names_a_long_activity(status, problem, activity) -> None:
    """A long step is not reported as a problem."""
    now = time.time()
    row = SimpleNamespace(
        updated_at=now, status=status, detail="", activity="forward (compiling)", activity_since=now - 40
    )
    row.pauses, row.meters = None, None
    health = EngineHealth(SimpleNamespace(read=lambda _: ([row], now), write_failure=None), silence_s=30.0)
    assert health.read_report() == EngineReport(problem=problem, activity=activity)


@pytest.mark.parametrize(("status", "outage"), [("ready", "vLLM has not responded"), ("starting", None)])
def test_health_names_an_outage_next_to_a_long_activity(status, outage) -> None:
    now = time.time()
    row = SimpleNamespace(updated_at=now, status=status, detail="", activity="forward", activity_since=now - 40)
    progress = "compiled 2 of 3 programs"
    row.pauses, row.meters = None, {"backend": {"outage": "vLLM has not responded", "progress": progress}}
    health = EngineHealth(SimpleNamespace(read=lambda _: ([row], now), write_failure=None), silence_s=30.0)
    report = health.read_report()
    assert (report.problem is None) == (status == "ready") and report.outage == outage
    if outage:
        assert report.detail == f"vLLM has not responded; the engine has been busy for 40 s: forward; {progress}"


@pytest.fixture
def admission(store: Store, monkeypatch: pytest.MonkeyPatch) -> AdmissionControl:
    monkeypatch.setattr(engine_status, "_LOAD_MAX_AGE_S", 0.0)
    return AdmissionControl(store)


def publish(store: Store, load: SampleLoad | None) -> None:
    store.write(
        lambda tx: engine_state.publish(
            tx,
            EngineStateRow(
                boot_id="b",
                pid=1,
                status="ready",
                capabilities={},
                base_models=[],
                load=None if load is None else asdict(load),
                updated_at=time.time(),
            ),
        )
    )


def publish_load(store: Store, num_bytes: int, position: int = 0, **others: int) -> None:
    by_owner = {"ann": num_bytes, **others}
    total = sum(by_owner.values())
    publish(store, SampleLoad(position=position, num_bytes=total, max_bytes=LIMIT, by_owner=by_owner))


def test_samples_are_admitted_until_the_engine_publishes_a_load(store: Store, admission: AdmissionControl) -> None:
    check(admission, "ann", 10**9)
    publish(store, None)
    check(admission, "ann", 10**9)


def test_submitted_samples_count_until_the_published_load_includes_them(
    store: Store, admission: AdmissionControl
) -> None:
    publish_load(store, 0)
    for position in range(1, 11):
        check(admission, "ann", 0)
        admission.record("ann", SubmittedRequest(RequestId("r"), is_new=True, position=position), 0)
    with pytest.raises(ApiError, match=f"take {LIMIT} of {LIMIT} bytes, {LIMIT} of them yours") as caught:
        check(admission, "ann", 0)
    assert caught.value.status == 429
    assert caught.value.headers == {"Retry-After": "1", "X-Tinker-Sampling-Backpressure": "1"}

    publish_load(store, 4 * REQUEST_BYTES, position=6)  # 2 completed, 4 queued, 4 not yet read by the engine
    check(admission, "ann", REQUEST_BYTES)
    with pytest.raises(ApiError):
        check(admission, "ann", REQUEST_BYTES + 1)
    publish_load(store, LIMIT, position=10)
    with pytest.raises(ApiError):
        check(admission, "ann", 0)
    publish_load(store, 0, position=10)
    check(admission, "ann", 9 * REQUEST_BYTES)


def test_sample_above_the_limit_by_itself_is_left_to_the_engine(store: Store, admission: AdmissionControl) -> None:
    publish_load(store, LIMIT)
    check(admission, "ann", LIMIT)


def num_admitted(admission: AdmissionControl, owner: str, num_bytes: int = 0) -> int:
    """Submit samples until one is refused; return the number of bytes admitted."""
    for number in range(100):
        try:
            check(admission, owner, num_bytes)
        except ApiError:
            return number * (num_bytes + REQUEST_BYTES)
        admission.record(owner, SubmittedRequest(RequestId("r"), is_new=True, position=1000 + number), num_bytes)
    raise AssertionError("none was refused")


def test_owner_below_its_share_is_admitted_next_to_one_that_fills_the_limit(
    store: Store, admission: AdmissionControl
) -> None:
    publish_load(store, LIMIT)
    assert num_admitted(admission, "bob") == LIMIT // 2, "a half each"
    assert num_admitted(admission, "ann") == 0
    publish_load(store, LIMIT // 2, bob=LIMIT // 2)
    assert num_admitted(admission, "ann") == 0, "bob's submissions count"


def test_owner_alone_may_use_the_whole_limit(store: Store, admission: AdmissionControl) -> None:
    publish_load(store, 0)
    assert num_admitted(admission, "ann") == LIMIT


def test_any_number_of_owners_takes_less_than_twice_the_limit(store: Store, admission: AdmissionControl) -> None:
    publish_load(store, LIMIT)
    admitted = [num_admitted(admission, f"owner {number}") for number in range(100)]
    assert admitted[0] == LIMIT // 2 and min(admitted[:3]) > 0
    assert LIMIT + sum(admitted) < 2 * LIMIT


def test_published_load_is_small_for_any_number_of_owners() -> None:
    by_owner = engine_state.take_largest_owners({f"owner {number}": number for number in range(10_000)})
    assert len(by_owner) == 256 and min(by_owner.values()) == 10_000 - 256


def test_samples_that_arrive_together_share_the_limit(store: Store, admission: AdmissionControl) -> None:
    publish_load(store, LIMIT - 2 * REQUEST_BYTES)
    with admission.reserve("ann", 0), admission.reserve("ann", 0), pytest.raises(ApiError):
        check(admission, "ann", 0)
    check(admission, "ann", 0)
