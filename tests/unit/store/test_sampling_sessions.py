import pytest

from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId, SamplingSessionId, SessionId
from skyrl_tx.store import sampling_sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import SamplingSessionRow


def row(session_id: SessionId, name: str, *, model: str | None = "run", now: float = 1.0) -> SamplingSessionRow:
    return SamplingSessionRow(
        sampling_session_id=SamplingSessionId(name),
        session_id=session_id,
        base_model="base",
        sampler_id=SamplerId(f"art-{name}"),
        model_id=None if model is None else ModelId(model),
        created_at=now,
        last_used_at=now,
    )


def get(store: Store, name: str) -> SamplingSessionRow | None:
    return store.read(lambda tx: sampling_sessions.get(tx, SamplingSessionId(name)))


def test_create_ignores_an_existing_id(store: Store, session_id: SessionId) -> None:
    assert store.write(lambda tx: sampling_sessions.create_session(tx, row(session_id, "s", now=1.0)))
    assert not store.write(lambda tx: sampling_sessions.create_session(tx, row(session_id, "s", now=2.0)))
    assert get(store, "s").created_at == 1.0
    assert get(store, "t") is None


def test_a_use_never_decreases_the_last_use(store: Store, session_id: SessionId) -> None:
    store.write(lambda tx: sampling_sessions.create_session(tx, row(session_id, "s")))
    store.write(lambda tx: sampling_sessions.record_use(tx, SamplingSessionId("s"), 9.0))
    store.write(lambda tx: sampling_sessions.record_use(tx, SamplingSessionId("s"), 8.0))
    assert get(store, "s").last_used_at == 9.0
    store.write(lambda tx: sampling_sessions.record_use(tx, SamplingSessionId("unknown"), 9.0))
    assert get(store, "unknown") is None


def test_release_of_old_unused_ephemeral_samplers(store: Store, session_id: SessionId) -> None:
    for number in range(6):
        new = row(session_id, f"run-{number}", now=float(number))
        store.write(lambda tx, new=new: sampling_sessions.create_session(tx, new))
    for name, model in (("other", "other run"), ("named", None)):
        new = row(session_id, name, model=model, now=0.0)
        store.write(lambda tx, new=new: sampling_sessions.create_session(tx, new))
    store.write(lambda tx: sampling_sessions.record_use(tx, SamplingSessionId("run-0"), 50.0))
    assert store.write(lambda tx: sampling_sessions.release_unused(tx, 40.0, keep_newest=3)) == [
        "art-run-2",
        "art-run-1",
    ]
    assert get(store, "run-1").sampler_id is None
    assert get(store, "run-0").sampler_id == "art-run-0"
    assert store.write(lambda tx: sampling_sessions.release_unused(tx, 40.0, keep_newest=3)) == []


def test_a_byte_budget_releases_the_least_recently_used_first(store: Store, session_id: SessionId) -> None:
    for number, model in enumerate(("run", "run", "run", "other")):
        new = row(session_id, f"s-{number}", model=model, now=float(number))
        store.write(lambda tx, new=new: sampling_sessions.create_session(tx, new))
        sampler = SamplerId(f"art-s-{number}")
        store.write(lambda tx, new=new, sampler=sampler: sampling_sessions.set_size(tx, new.model_id, sampler, 100))
    store.write(lambda tx: sampling_sessions.record_use(tx, SamplingSessionId("s-0"), 50.0))
    assert store.write(lambda tx: sampling_sessions.release_unused(tx, 0.0, max_bytes=400)) == []
    assert store.write(lambda tx: sampling_sessions.release_unused(tx, 0.0, max_bytes=399)) == ["art-s-1"]
    assert store.write(lambda tx: sampling_sessions.release_unused(tx, 0.0, max_bytes=0)) == ["art-s-0"]
    assert [get(store, f"s-{number}").sampler_id for number in (2, 3)] == ["art-s-2", "art-s-3"], "the newest stay"


def test_inflight_sessions_of_a_model_share_a_sampler(store: Store, session_id: SessionId) -> None:
    for number, is_inflight in enumerate((True, True, False)):
        new = row(session_id, f"s-{number}")
        new.is_inflight, new.request_id = is_inflight, RequestId(f"req-{number}")
        store.write(lambda tx, new=new: sampling_sessions.create_session(tx, new))

    model, newest = ModelId("run"), SamplerId("art-new")
    store.write(lambda tx: sampling_sessions.update_inflight(tx, model, newest))
    store.write(lambda tx: sampling_sessions.set_size(tx, model, newest, 100))
    assert [get(store, f"s-{number}").sampler_id for number in range(3)] == [newest, newest, "art-s-2"]
    assert {
        (session.model_id, session.sampler_id, session.request_id)
        for session in store.read(sampling_sessions.list_ephemeral)
    } == {
        (model, newest, "req-0"),
        (model, newest, "req-1"),
        (model, "art-s-2", "req-2"),
    }
    assert store.write(lambda tx: sampling_sessions.release_unused(tx, 9.0, keep_newest=1, max_bytes=100)) == [
        "art-s-2"
    ]
    assert {session.sampler_id for session in store.read(sampling_sessions.list_ephemeral)} == {newest}


def test_clones_are_numbered(store: Store, session_id: SessionId) -> None:
    store.write(lambda tx: sampling_sessions.create_session(tx, row(session_id, "s")))
    assert [store.write(lambda tx: sampling_sessions.add_clone(tx, SamplingSessionId("s"))) for _ in range(2)] == [1, 2]
    with pytest.raises(LookupError, match="'unknown'"):
        store.write(lambda tx: sampling_sessions.add_clone(tx, SamplingSessionId("unknown")))
