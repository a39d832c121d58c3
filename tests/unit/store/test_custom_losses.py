import pytest

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import custom_losses, pruning, sessions
from skyrl_tx.store.database import Store

DAY = 86_400.0


def create(store: Store, session_id: SessionId, number: int = 0, body: bytes = b"loss", now: float = 10.0) -> None:
    session = store.read(lambda tx: sessions.find(tx, session_id))
    assert session is not None
    store.write(lambda tx: custom_losses.create(tx, f"loss-{number}", session, name="l", body=body, now=now))


def find(store: Store, session_id: SessionId, number: int = 0) -> bytes | None:
    return store.read(lambda tx: custom_losses.find(tx, f"loss-{number}", session_id))


def test_a_loss_belongs_to_its_session_and_survives_a_restart(open_store, store: Store, session_id: SessionId) -> None:
    create(store, session_id)
    assert find(store, session_id) == b"loss" and find(store, session_id, 1) is None
    assert find(store, SessionId("another")) is None
    store.close()
    assert find(open_store(), session_id) == b"loss"


def test_the_same_loss_is_stored_once_and_another_is_refused(store: Store, session_id: SessionId) -> None:
    create(store, session_id)
    create(store, session_id)
    with pytest.raises(UserError, match="loss-0 exists already"):
        create(store, session_id, body=b"other")
    assert find(store, session_id) == b"loss"


def test_use_extends_the_retention(store: Store, session_id: SessionId) -> None:
    create(store, session_id, 0, now=0.0)
    create(store, session_id, 1, now=0.0)
    store.write(lambda tx: custom_losses.touch(tx, "loss-1", 2 * DAY))
    assert store.write(lambda tx: custom_losses.expire(tx, custom_losses.RETENTION_S + DAY)) == 1
    assert find(store, session_id) is None and find(store, session_id, 1) == b"loss"


def test_losses_of_a_finished_session_go_before_the_session(store: Store, session_id: SessionId) -> None:
    create(store, session_id)
    store.write(lambda tx: sessions.finish(tx, session_id, "success", 10.0))
    assert store.write(lambda tx: pruning.delete_finished_sessions(tx, 100.0)) == 0
    assert store.write(lambda tx: custom_losses.expire(tx, 11.0 + custom_losses.FINISHED_RETENTION_S)) == 1
    assert store.write(lambda tx: pruning.delete_finished_sessions(tx, 100.0)) == 1


def test_losses_of_an_owner_are_bounded(store: Store, session_id: SessionId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_losses, "MAX_PER_OWNER", 1)
    create(store, session_id)
    with pytest.raises(UserError, match="the sessions of 'ann' have 1 custom losses"):
        create(store, session_id, 1)
