"""The published status of engines, and requests that wait because of a published pause."""

import pytest

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store import engine_state, futures, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.tables import EngineStateRow


def publish(store: Store, detail: str, now: float) -> None:
    row = EngineStateRow(
        boot_id="boot",
        pid=7,
        status="ready",
        capabilities={"max_context_length": 64, "devices": ["cpu"]},
        base_models=["tiny"],
        detail=detail,
        updated_at=now,
    )
    store.write(lambda tx: engine_state.publish(tx, row))


def test_the_latest_status_is_visible_to_the_api(open_store) -> None:
    api, engine = open_store("api"), open_store("engine")
    assert api.read(engine_state.get) is None
    publish(engine, "compiling", 1.0)
    publish(engine, "", 2.0)
    row = api.read(engine_state.get)
    assert (row.boot_id, row.pid, row.status, row.detail, row.updated_at) == ("boot", 7, "ready", "", 2.0)
    assert (row.capabilities, row.base_models) == ({"max_context_length": 64, "devices": ["cpu"]}, ["tiny"])


def row(number: int, status: str = "ready", updated_at: float = 100.0, meters: object = None) -> EngineStateRow:
    return EngineStateRow(
        number=number,
        boot_id=f"boot {number}",
        pid=number,
        status=status,
        capabilities={},
        base_models=[],
        meters=meters,
        updated_at=updated_at,
    )


def test_the_main_engine_is_one_that_executes_requests() -> None:
    assert engine_state.choose_main_engine([]) is None
    rows = [row(1, updated_at=50.0), row(2, "starting", 101.0), row(3, updated_at=99.0)]
    assert engine_state.choose_main_engine(rows).number == 3
    assert engine_state.choose_main_engine(rows[:2]).number == 2, "one that was ready once is silent now"


def test_meters_of_several_engines_are_added() -> None:
    assert engine_state.sum_meters([]) is None and engine_state.sum_meters([row(1)]) is None
    one, other = (
        {"totals": {"a": n, "b": 0.5}, "devices": [n], "name": "x", "trainer_gap_max_nats": n / 8} for n in (1, 2)
    )
    rows = [row(1, meters=one), row(2, meters=other | {"more": 3}), row(3, updated_at=1.0, meters=one)]
    expected = {"totals": {"a": 3, "b": 1.0}, "devices": [1, 2], "name": "x", "more": 3, "trainer_gap_max_nats": 0.25}
    assert engine_state.sum_meters(rows) == expected, "an engine that has ended does not count"


def test_an_engine_is_known_by_its_run(open_store) -> None:
    store = open_store("api")
    for found in (row(1), row(2)):
        store.write(lambda tx, found=found: engine_state.publish(tx, found))
    assert store.read(lambda tx: engine_state.find_number(tx, "boot 2")) == 2
    assert store.read(lambda tx: engine_state.find_number(tx, "boot 3")) is None
    assert engine_state.make_boot_id() != engine_state.make_boot_id()


TRAINING, SAMPLING = "training_tokens_per_day", "sample_tokens_per_day"


def pause(kind: str, name: str, limit: str) -> Pause:
    return Pause(subject_kind=kind, subject=name, limit=limit, reason=f"{kind} {name}: {limit}")  # type: ignore[arg-type]


def submit(store: Store, kind: str) -> RequestId:
    """Submit a request of owner ann with API key 3 in the project math."""

    def work(tx) -> RequestId:
        session_id = sessions.create(tx, owner="ann", now=1.0, key_id=3, project_id="math")
        new = NewRequest(key="", kind=kind, owner="ann", session_id=session_id, body=b"")
        return futures.submit(tx, new, 1.0).request_id

    return store.write(work)


@pytest.mark.parametrize(
    ("kind", "limit", "other"), [("model_pass", TRAINING, SAMPLING), ("sample", SAMPLING, TRAINING)]
)
@pytest.mark.parametrize(("subject", "name"), [("owner", "ann"), ("key", "3"), ("project", "math")])
def test_a_request_waits_for_pauses_of_its_owner_key_and_project(
    store: Store, kind: str, limit: str, other: str, subject: str, name: str
) -> None:
    request_id = submit(store, kind)
    own = pause(subject, name, limit)
    others = [pause("owner", "bob", limit), pause("key", "4", limit), pause("project", "m", limit)]
    others.append(pause(subject, name, other))

    def reason(*found: Pause) -> str | None:
        return store.read(lambda tx: engine_state.find_wait_reason(tx, request_id, found))

    assert reason(*others) is None
    assert reason(*others, own) == own.reason
    store.write(lambda tx: futures.count_delivery_attempt(tx, [request_id]))
    assert reason(own) is None, "it has started"


def test_pauses_of_several_engines_are_listed_once() -> None:
    one, two = pause("owner", "ann", TRAINING), pause("key", "3", SAMPLING)
    published = [
        {
            "subject_kind": known_pause.subject_kind,
            "subject": known_pause.subject,
            "limit": known_pause.limit,
            "reason": known_pause.reason,
        }
        for known_pause in (one, two)
    ]
    rows = [
        EngineStateRow(number=n, boot_id="b", pid=1, status="ready", capabilities={}, base_models=[], updated_at=1.0)
        for n in (1, 2, 3)
    ]
    rows[0].pauses, rows[1].pauses = published, published[:1]

    assert engine_state.collect_pauses(*rows, None) == (one, two)
