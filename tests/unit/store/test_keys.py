"""API keys: digests, revocation, and the first admin key."""

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
    return store.write(lambda tx: sessions.create(tx, owner=owner, now=1.0))


def owner_of(store: Store, session_id: SessionId) -> str:
    row = store.read(lambda tx: sessions.get(tx, session_id))
    assert row is not None
    return row.owner


def test_a_key_is_found_by_its_digest(store: Store) -> None:
    assert not store.read(keys.any_made)
    key, key_id = make(store, "ann")
    row = store.read(lambda tx: keys.find(tx, key))
    assert row is not None and (row.key_id, row.owner, row.scope) == (key_id, "ann", "user")
    assert key.startswith("tml-") and len(key) > 40 and row.digest == hashlib.sha256(key.encode()).hexdigest()
    assert row.hint == key[:8] and key not in repr(row)
    assert store.read(lambda tx: keys.find(tx, key + "x")) is None


def test_revocation_is_permanent_and_numbers_are_not_reused(store: Store) -> None:
    key, key_id = make(store, "ann")
    assert store.read(keys.any_usable)
    assert store.write(lambda tx: keys.revoke(tx, key_id, 2.0))
    assert not store.write(lambda tx: keys.revoke(tx, key_id, 3.0))
    assert store.read(lambda tx: keys.find(tx, key)) is None and store.read(lambda tx: keys.get(tx, key_id)) is None
    assert store.read(keys.any_made) and not store.read(keys.any_usable)
    assert make(store, "bob")[1] > key_id
    assert [row.revoked_at for row in store.read(keys.list_all)] == [2.0, None]


def test_the_first_admin_key_takes_over_local_sessions(store: Store) -> None:
    unowned, other = session_of(store, keys.LOCAL_OWNER), session_of(store, "ann")
    make(store, "bob")
    assert owner_of(store, unowned) == keys.LOCAL_OWNER
    make(store, "eve", "admin")
    assert owner_of(store, unowned) == "eve" and owner_of(store, other) == "ann"
    later = session_of(store, keys.LOCAL_OWNER)
    make(store, "max", "admin")
    assert owner_of(store, later) == keys.LOCAL_OWNER


def test_the_local_owner_has_no_keys(store: Store) -> None:
    with pytest.raises(AssertionError, match="no keys"):
        make(store, keys.LOCAL_OWNER)
