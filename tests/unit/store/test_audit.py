"""The audit log: written in the same transaction as the change, read by time and resource, and pruned."""

import pytest

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import audit, sessions
from skyrl_tx.store.audit import Actor
from skyrl_tx.store.database import Store

ANN = Actor("ann", 3)
PATH = "tinker://session-a:train:0/weights/x"


def record(store: Store, event: audit.Event, at: float, **details: audit.Detail) -> None:
    store.write(lambda tx: audit.record(tx, event, ANN, at, path=PATH, **details))


def events(store: Store, **where) -> list[tuple[str, float]]:
    return [(row.event, row.at) for row in store.read(lambda tx: audit.list_entries(tx, **where))]


def test_an_entry_has_actor_path_and_details(store: Store) -> None:
    record(store, "checkpoint_read", 5.0, purpose="load", omitted=None)
    (row,) = store.read(audit.list_entries)
    assert (row.actor, row.key_id, row.path, row.details) == ("ann", 3, PATH, {"purpose": "load"})


def test_entries_of_a_time_and_of_resources(store: Store) -> None:
    for at, event in enumerate(("checkpoint_create", "run_delete", "organization_login", "checkpoint_delete")):
        record(store, event, float(at))
    assert events(store, since=1.0, until=3.0) == [("run_delete", 1.0), ("organization_login", 2.0)]
    assert events(store, resources=["checkpoint"]) == [("checkpoint_create", 0.0), ("checkpoint_delete", 3.0)]
    assert [at for _, at in events(store, resources=["run", "organization"])] == [1.0, 2.0]
    assert events(store, resources=["check%"]) == []
    assert [at for _, at in events(store, newest_first=True, limit=2)] == [3.0, 2.0]


def test_entries_of_an_actor_and_of_an_event_are_found_among_many_others(store: Store) -> None:
    record(store, "checkpoint_delete", 0.0)
    for at in range(1, 4):
        store.write(lambda tx, at=at: audit.record(tx, "checkpoint_create", Actor("bob"), float(at)))
    assert [at for _, at in events(store, actor="ann", newest_first=True, limit=2)] == [0.0]
    assert [at for _, at in events(store, event="checkpoint_create", limit=2)] == [1.0, 2.0]
    assert events(store, actor="bob", event="checkpoint_delete") == []


def test_pages_go_back_by_position(store: Store) -> None:
    for at in range(5):
        record(store, "checkpoint_create", float(at))
    newest = store.read(lambda tx: audit.list_entries(tx, newest_first=True, limit=2))
    assert [at for _, at in events(store, newest_first=True, limit=2, before=newest[-1].position)] == [2.0, 1.0]


def test_an_act_that_fails_leaves_no_entry(store: Store) -> None:
    def work(tx) -> None:
        audit.record(tx, "checkpoint_delete", ANN, 1.0)
        raise LookupError("there is none")

    with pytest.raises(LookupError):
        store.write(work)
    assert events(store) == []


def test_old_entries_are_deleted_a_few_at_a_time(store: Store) -> None:
    for at in range(6):
        record(store, "checkpoint_create", float(at))
    assert store.write(lambda tx: audit.expire(tx, 4.0, limit=3)) == 3
    assert store.write(lambda tx: audit.expire(tx, 4.0, limit=3)) == 1
    assert [at for _, at in events(store)] == [4.0, 5.0]


def test_the_actor_of_a_session_has_its_key(store: Store) -> None:
    session_id = store.write(lambda tx: sessions.create(tx, owner="ann", key_id=7, now=1.0))
    assert store.read(lambda tx: audit.get_actor(tx, session_id, "ann")) == Actor("ann", 7)
    assert store.read(lambda tx: audit.get_actor(tx, SessionId("gone"), "ann")) == Actor("ann", None)
