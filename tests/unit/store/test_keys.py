"""API keys: digests, revocation, and the first admin key."""

import hashlib

import pytest

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import keys, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import ApiKeyRow, KeyScope


def make(store: Store, owner: str, scope: KeyScope = "user") -> tuple[str, int]:
    key, row = store.write(lambda tx: keys.create(tx, owner=owner, scope=scope, name="k", note="", now=1.0))
    assert row.key_id is not None
    return key, row.key_id


def create_session(store: Store, owner: str) -> SessionId:
    return store.write(lambda tx: sessions.create(tx, owner=owner, now=1.0))


def get_owner(store: Store, session_id: SessionId) -> str:
    row = store.read(lambda tx: sessions.get(tx, session_id))
    assert row is not None
    return row.owner


def test_a_key_is_found_by_its_digest(store: Store) -> None:
    assert not store.read(keys.has_any)
    key, key_id = make(store, "ann")
    row = store.read(lambda tx: keys.find(tx, key))
    assert row is not None and (row.key_id, row.owner, row.scope) == (key_id, "ann", "user")
    assert key.startswith("tml-") and len(key) > 40 and row.digest == hashlib.sha256(key.encode()).hexdigest()
    assert row.hint == key[:8] and key not in repr(row)
    assert store.read(lambda tx: keys.find(tx, key + "x")) is None


def test_revocation_is_permanent_and_numbers_are_not_reused(store: Store) -> None:
    key, key_id = make(store, "ann")
    assert store.read(lambda tx: keys.has_usable(tx, 2.5))
    assert store.write(lambda tx: keys.revoke(tx, key_id, 2.0))
    assert not store.write(lambda tx: keys.revoke(tx, key_id, 3.0))
    assert store.read(lambda tx: keys.find(tx, key)) is None and store.read(lambda tx: keys.get(tx, key_id)) is None
    assert store.read(keys.has_any) and not store.read(lambda tx: keys.has_usable(tx, 2.5))
    assert make(store, "bob")[1] > key_id
    assert [row.revoked_at for row in store.read(keys.list_all)] == [2.0, None]


def test_the_first_admin_key_takes_over_local_sessions(store: Store) -> None:
    unowned, other = create_session(store, keys.LOCAL_OWNER), create_session(store, "ann")
    make(store, "bob")
    assert get_owner(store, unowned) == keys.LOCAL_OWNER
    make(store, "eve", "admin")
    assert get_owner(store, unowned) == "eve" and get_owner(store, other) == "ann"
    later = create_session(store, keys.LOCAL_OWNER)
    make(store, "max", "admin")
    assert get_owner(store, later) == keys.LOCAL_OWNER


def test_rotation_replaces_a_key_after_an_overlap(store: Store) -> None:
    (key, key_id), now = make(store, "ann", "sample"), 100.0
    new, row = store.write(lambda tx: keys.rotate(tx, key_id, overlap_s=10.0, now=now))
    assert new != key and (row.owner, row.scope, row.name, row.expires_at) == ("ann", "sample", "k", None)
    old = store.read(lambda tx: keys.find(tx, key))
    assert old is not None and old.expires_at == 110.0
    assert [keys.get_status(old, at) for at in (109.0, 110.0)] == ["valid", "expired"]
    assert store.read(lambda tx: keys.find_ended(tx, [key_id, row.key_id or 0], 110.0)) == {key_id}
    with pytest.raises(keys.KeyNotUsable, match="unknown, revoked or expired"):
        store.write(lambda tx: keys.rotate(tx, key_id, overlap_s=10.0, now=110.0))
    store.write(lambda tx: keys.revoke(tx, row.key_id or 0, 120.0))
    assert not store.read(lambda tx: keys.has_usable(tx, 120.0)) and store.read(lambda tx: keys.has_usable(tx, 105.0))


def test_rotation_keeps_the_lifetime_and_never_prolongs_the_old_key(store: Store) -> None:
    _, old = store.write(
        lambda tx: keys.create(tx, owner="ann", scope="user", name="k", note="", now=100.0, expires_at=130.0)
    )
    _, new = store.write(lambda tx: keys.rotate(tx, old.key_id or 0, overlap_s=1e6, now=120.0))
    assert new.expires_at == 150.0
    assert [row.expires_at for row in store.read(keys.list_all)] == [130.0, 150.0]


def test_use_is_recorded_once_a_minute(store: Store) -> None:
    key, key_id = make(store, "ann")

    def row() -> ApiKeyRow:
        found = store.read(lambda tx: keys.find(tx, key))
        assert found is not None
        return found

    assert keys.is_use_due(row(), 100.0)
    store.write(lambda tx: keys.record_use(tx, key_id, 100.0))
    assert row().last_used_at == 100.0
    assert not keys.is_use_due(row(), 160.0) and keys.is_use_due(row(), 160.5)


def test_the_local_owner_has_no_keys(store: Store) -> None:
    with pytest.raises(AssertionError, match="no keys"):
        make(store, keys.LOCAL_OWNER)
