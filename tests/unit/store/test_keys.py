"""Keys: shown once, found by their digest, revoked for ever; the first admin adopts what nobody owned."""

import hashlib

import pytest

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import keys, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import KeyScope


def make(store: Store, owner: str, scope: KeyScope = "user") -> tuple[str, int]:
    key, row = store.write(lambda tx: keys.create(tx, owner=owner, scope=scope, name="k", note="", now=1.0))
    assert row.key_id is not None
    return key, row.key_id


def session_of(store: Store, owner: str) -> SessionId:
    return store.write(
        lambda tx: sessions.create(
            tx,
            owner=owner,
            tags=[],
            user_metadata=None,
            sdk_version=None,
            project_id=None,
            display_name=None,
            now=1.0,
        )
    )


def owner_of(store: Store, session_id: SessionId) -> str:
    row = store.read(lambda tx: sessions.get(tx, session_id))
    assert row is not None
    return row.owner


def test_a_key_is_found_but_not_kept(store: Store) -> None:
    assert not store.read(keys.any_made)
    key, key_id = make(store, "ann")
    row = store.read(lambda tx: keys.find(tx, key))
    assert row is not None and (row.key_id, row.owner, row.scope) == (key_id, "ann", "user")
    assert key.startswith("tml-") and len(key) > 40 and row.digest == hashlib.sha256(key.encode()).hexdigest()
    assert row.hint == key[:8] and key not in repr(row)
    assert store.read(lambda tx: keys.find(tx, key + "x")) is None


def test_a_revoked_key_is_gone_and_its_number_never_another(store: Store) -> None:
    key, key_id = make(store, "ann")
    assert store.read(keys.any_usable)
    assert store.write(lambda tx: keys.revoke(tx, key_id, 2.0))
    assert not store.write(lambda tx: keys.revoke(tx, key_id, 3.0))
    assert store.read(lambda tx: keys.find(tx, key)) is None and store.read(lambda tx: keys.get(tx, key_id)) is None
    assert store.read(keys.any_made) and not store.read(keys.any_usable)
    assert make(store, "bob")[1] > key_id
    assert [row.revoked_at for row in store.read(keys.list_all)] == [2.0, None]


def test_the_first_admin_adopts_what_was_there(store: Store) -> None:
    orphan, other = session_of(store, keys.LOCAL_OWNER), session_of(store, "ann")
    make(store, "bob")
    assert owner_of(store, orphan) == keys.LOCAL_OWNER
    make(store, "eve", "admin")
    assert owner_of(store, orphan) == "eve" and owner_of(store, other) == "ann"
    later = session_of(store, keys.LOCAL_OWNER)
    make(store, "max", "admin")
    assert owner_of(store, later) == keys.LOCAL_OWNER


def test_the_owner_of_what_nobody_owns_has_no_key(store: Store) -> None:
    with pytest.raises(AssertionError, match="no keys"):
        make(store, keys.LOCAL_OWNER)
