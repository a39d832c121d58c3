"""API keys: digests, revocation, and the first admin key."""

import hashlib

import pytest
from sqlalchemy import Table, insert, select

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import keys, sessions
from skyrl_tx.store.database import Store, execute
from skyrl_tx.store.tables import ApiKeyRow, KeyScope
from tests.support.old_schemas import ALL_TABLES

OWNED_TABLES = [table for metadata in ALL_TABLES for table in metadata.sorted_tables if "owner" in table.c]
SHARED_KEY_TABLES = ("logged_runs", "project_members", "sampled_steps")
"""Tables in which the owner is part of a unique key."""
VALUES: dict[type, object] = {int: 1, float: 1.0, bool: True, bytes: b"1", dict: {}}


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
    assert store.read(lambda tx: keys.list_usable(tx, 2.5))
    assert store.write(lambda tx: keys.revoke(tx, key_id, 2.0))
    assert not store.write(lambda tx: keys.revoke(tx, key_id, 3.0))
    assert store.read(lambda tx: keys.find(tx, key)) is None and store.read(lambda tx: keys.get(tx, key_id)) is None
    assert store.read(keys.has_any) and not store.read(lambda tx: keys.list_usable(tx, 2.5))
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


def insert_row(store: Store, table: Table, owner: str) -> None:
    """Insert a row with an owner and the same values in all other columns without a default."""
    values = {
        column.name: VALUES.get(column.type.python_type, "1")
        for column in table.columns
        if not column.nullable and column is not table.autoincrement_column
    }
    store.write(lambda tx: execute(tx, insert(table), {**values, "owner": owner}))


def list_owners(store: Store, table: Table) -> list[str]:
    return sorted(store.read(lambda tx: execute(tx, select(table.c.owner)).scalars().all()))


def test_the_first_admin_key_takes_over_the_rows_of_all_tables(store: Store) -> None:
    assert {"sessions", "kept_samples", "usage"} < {table.name for table in OWNED_TABLES}
    for table in OWNED_TABLES:
        insert_row(store, table, keys.LOCAL_OWNER)
    make(store, "eve", "admin")
    for table in OWNED_TABLES:
        assert set(list_owners(store, table)) == {"eve"}, table.name


def test_a_row_that_the_first_admin_has_already_is_not_taken_over(store: Store) -> None:
    shared = [table for table in OWNED_TABLES if table.name in SHARED_KEY_TABLES]
    for table in shared:
        for owner in ("eve", keys.LOCAL_OWNER):
            insert_row(store, table, owner)
    make(store, "eve", "admin")
    assert [list_owners(store, table) for table in shared] == [["eve", keys.LOCAL_OWNER]] * len(SHARED_KEY_TABLES)


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
    assert not store.read(lambda tx: keys.list_usable(tx, 120.0)) and store.read(lambda tx: keys.list_usable(tx, 105.0))


def test_rotation_keeps_the_lifetime_and_never_prolongs_the_old_key(store: Store) -> None:
    _, old = store.write(
        lambda tx: keys.create(tx, owner="ann", scope="user", name="k", note="", now=100.0, expires_at=130.0)
    )
    _, new = store.write(lambda tx: keys.rotate(tx, old.key_id or 0, overlap_s=1e6, now=120.0))
    assert new.expires_at == 150.0
    assert [row.expires_at for row in store.read(keys.list_all)] == [130.0, 150.0]


def make_child(store: Store, parent_id: int, expires_at: float | None = None, now: float = 2.0) -> ApiKeyRow:
    _, row = store.write(
        lambda tx: keys.create(
            tx, owner="ann", scope="user", name="c", note="", now=now, expires_at=expires_at, parent_id=parent_id
        )
    )
    return row


def list_ends(store: Store) -> list[float | None]:
    """Return when each key ends, oldest key first."""
    return [row.expires_at if row.revoked_at is None else row.revoked_at for row in store.read(keys.list_all)]


def test_a_key_ends_with_the_key_that_created_it(store: Store) -> None:
    _, parent_id = make(store, "ann")
    make(store, "ann")
    make_child(store, parent_id)
    make_child(store, parent_id, expires_at=5.0)
    store.write(lambda tx: keys.rotate(tx, parent_id, overlap_s=10.0, now=3.0))
    assert list_ends(store) == [13.0, None, 13.0, 5.0, None]
    assert make_child(store, parent_id, expires_at=50.0, now=4.0).expires_at == 13.0
    assert store.write(lambda tx: keys.revoke(tx, parent_id, 4.0))
    assert list_ends(store) == [4.0, None, 4.0, 4.0, None, 4.0]


def test_a_replaced_child_still_ends_with_its_parent(store: Store) -> None:
    _, parent_id = make(store, "ann")
    child = make_child(store, parent_id, expires_at=102.0)
    _, new = store.write(lambda tx: keys.rotate(tx, child.key_id or 0, overlap_s=1.0, now=50.0))
    assert (new.parent_id, new.expires_at) == (parent_id, 150.0)
    store.write(lambda tx: keys.revoke(tx, parent_id, 60.0))
    assert not store.read(lambda tx: keys.list_usable(tx, 60.0))


def test_only_valid_keys_without_a_parent_create_keys_and_not_too_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "MAX_CHILDREN", 2)
    _, parent_id = make(store, "ann")
    child = make_child(store, parent_id)
    with pytest.raises(UserError, match=f"created with key {parent_id}, so it cannot create keys"):
        make_child(store, child.key_id or 0)
    store.write(lambda tx: keys.revoke(tx, child.key_id or 0, 2.0))
    make_child(store, parent_id)
    with pytest.raises(UserError, match=f"key {parent_id} has created 2 keys"):
        make_child(store, parent_id)
    store.write(lambda tx: keys.revoke(tx, parent_id, 3.0))
    with pytest.raises(UserError, match="revoked or expired"):
        make_child(store, parent_id)


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
