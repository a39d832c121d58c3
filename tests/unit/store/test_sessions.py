import math
from typing import Any

from sqlalchemy import Engine, event
from sqlmodel import Session

from skyrl_tx.contract.ids import ModelId, SamplingSessionId, SessionId
from skyrl_tx.store import models, sampling_sessions, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import ModelRow, SamplingSessionRow

UNKNOWN = SessionId("unknown")


def create(store: Store, owner: str, now: float) -> SessionId:
    return store.write(
        lambda tx: sessions.create(
            tx,
            owner=owner,
            tags=["x", "y"],
            user_metadata={"run": {"deep": [1, None]}},
            sdk_version="0.38.0",
            project_id="p",
            display_name="d",
            now=now,
        )
    )


def test_session_metadata_round_trip(store: Store) -> None:
    session_id = create(store, "ann", 3.5)
    row = store.read(lambda tx: sessions.get(tx, session_id))
    assert row is not None
    assert (row.owner, row.tags, row.user_metadata) == ("ann", ["x", "y"], {"run": {"deep": [1, None]}})
    assert (row.sdk_version, row.project_id, row.display_name) == ("0.38.0", "p", "d")
    assert (row.created_at, row.last_heartbeat_at, row.finished_at, row.finish_reason) == (3.5, 3.5, None, None)


def test_session_ids_are_random_and_fit_into_paths(store: Store) -> None:
    first, second = create(store, "ann", 1.0), create(store, "ann", 1.0)
    assert first != second and len(first) >= 32
    assert not {":", "/"} & set(first)


def test_heartbeats_never_decrease(store: Store, session_id: SessionId) -> None:
    assert store.write(lambda tx: sessions.record_heartbeat(tx, session_id, 9.0))
    assert store.write(lambda tx: sessions.record_heartbeat(tx, session_id, 8.0))
    assert store.read(lambda tx: sessions.get(tx, session_id)).last_heartbeat_at == 9.0
    assert not store.write(lambda tx: sessions.record_heartbeat(tx, UNKNOWN, 9.0))


def test_the_first_finish_reason_stays(store: Store, session_id: SessionId) -> None:
    assert store.write(lambda tx: sessions.finish(tx, session_id, "completed", 4.0))
    assert store.write(lambda tx: sessions.finish(tx, session_id, "silent", 5.0))
    row = store.read(lambda tx: sessions.get(tx, session_id))
    assert (row.finished_at, row.finish_reason) == (4.0, "completed")
    assert not store.write(lambda tx: sessions.finish(tx, UNKNOWN, "completed", 4.0))


def test_list_of_an_owner_newest_first_in_pages(store: Store) -> None:
    mine = [create(store, "ann", float(now)) for now in range(5)]
    create(store, "bob", 2.0)
    pages = [store.read(lambda tx, offset=offset: sessions.list_ids(tx, "ann", 2, offset)) for offset in (0, 2, 4)]
    assert [session_id for page in pages for session_id in page] == mine[::-1]


def test_sessions_without_heartbeat_or_requests_time_out(store: Store) -> None:
    silent, trains, samples, done, fresh = (create(store, "ann", now) for now in (4.0, 4.0, 4.0, 4.0, 20.0))

    def use(tx: Session) -> None:
        for session_id, now in ((silent, 9.0), (trains, 11.0)):
            name = ModelId(f"{session_id}:train:0")
            fields = {"base_model": "b", "spec": b"", "created_at": now, "last_request_at": now}
            models.create(tx, ModelRow(model_id=name, session_id=session_id, **fields))
        name = SamplingSessionId("s")
        fields = {"base_model": "b", "created_at": 4.0, "last_used_at": 11.0}
        sampling_sessions.create_session(tx, SamplingSessionRow(sampling_session_id=name, session_id=samples, **fields))
        sessions.finish(tx, done, "success", 5.0)

    store.write(use)
    assert store.write(lambda tx: sessions.finish_timed_out(tx, 10.0, "silent", 30.0)) == [silent]
    rows = [store.read(lambda tx, name=name: sessions.get(tx, name)) for name in (silent, trains, samples, done, fresh)]
    assert [(row.finished_at, row.finish_reason) for row in rows] == [
        (30.0, "silent"),
        (None, None),
        (None, None),
        (5.0, "success"),
        (None, None),
    ]
    assert store.write(lambda tx: sessions.finish_timed_out(tx, -math.inf, "never", 30.0)) == []


def test_heartbeats_and_housekeeping_do_not_read_metadata(store: Store, session_id: SessionId) -> None:
    """Metadata can be large, and reading it with every heartbeat would delay the writes of all sessions."""
    statements: list[str] = []

    def record(*arguments: Any) -> None:
        statements.append(arguments[2])

    event.listen(Engine, "before_cursor_execute", record)
    try:
        store.write(lambda tx: sessions.record_heartbeat(tx, session_id, 9.0))
        found = store.read(lambda tx: sessions.find(tx, session_id))
        store.write(lambda tx: sessions.set_project(tx, session_id, "p"))
        store.write(lambda tx: sessions.finish_timed_out(tx, 10.0, "silent", 30.0))
        store.write(lambda tx: sessions.finish(tx, session_id, "over", 31.0))
    finally:
        event.remove(Engine, "before_cursor_execute", record)
    assert found is not None and (found.last_heartbeat_at, found.finished_at) == (9.0, None)
    assert len(statements) >= 5 and not [
        statement for statement in statements if "user_metadata" in statement or "tags" in statement
    ]
