"""API keys. The database stores only their digests."""

import hashlib
import secrets
from collections.abc import Collection
from typing import Literal

from sqlalchemy import (
    MetaData,
    PrimaryKeyConstraint,
    UniqueConstraint,
    bindparam,
    exists,
    func,
    or_,
    update,
)
from sqlmodel import Session, col, select

from skyrl_tx.contract.errors import UserError
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import ApiKeyRow, KeyScope

LOCAL_OWNER = "local"
"""Owner of everything that is created while authentication is disabled."""
_PREFIX = "tml-"
"""Prefix that the SDK requires."""
_HINT_CHARACTERS = 4
_RECORD_USE_EVERY_S = 60.0
MAX_CHILDREN = 100
"""How many keys one user key may create. Revoked and expired keys count too."""


class KeyNotUsable(UserError):
    """A key is unknown, revoked or expired."""


def create(
    tx: Session,
    *,
    owner: str,
    scope: KeyScope,
    name: str,
    note: str,
    now: float,
    expires_at: float | None = None,
    parent_id: int | None = None,
) -> tuple[str, ApiKeyRow]:
    """Create a key. Return the key, which cannot be read later, and its row.

    The owner of the first admin key becomes the owner of everything that belongs to `LOCAL_OWNER`.
    `parent_id` is the key that creates the new key. The new key expires when its parent expires, at
    the latest. Raises UserError if the parent may not create keys.
    """
    assert owner != LOCAL_OWNER, "LOCAL_OWNER has no keys"
    if parent_id is not None:
        parent_end = _check_parent(tx, parent_id, now)
        expires_at = min((at for at in (expires_at, parent_end) if at is not None), default=None)
    is_first_admin = scope == "admin" and tx.exec(select(ApiKeyRow).where(ApiKeyRow.scope == "admin")).first() is None

    key = _PREFIX + secrets.token_urlsafe(32)
    row = ApiKeyRow(
        digest=hash_key(key),
        hint=key[: len(_PREFIX) + _HINT_CHARACTERS],
        owner=owner,
        scope=scope,
        name=name,
        note=note,
        created_at=now,
        expires_at=expires_at,
        parent_id=parent_id,
    )
    tx.add(row)
    tx.flush()

    if is_first_admin:
        _move_local_rows(tx, owner)
    return key, row


def _check_parent(tx: Session, parent_id: int, now: float) -> float | None:
    """Return when the parent of a new key expires, or None if the parent does not expire.

    Raises UserError if the parent may not create keys.
    """
    parent = get(tx, parent_id)
    if parent is None or get_status(parent, now) != "valid":
        raise KeyNotUsable(f"key {parent_id} is revoked or expired, so it cannot create keys")
    if parent.parent_id is not None:
        raise UserError(
            f"key {parent_id} was created with key {parent.parent_id}, so it cannot create keys itself: use key "
            f"{parent.parent_id}, or ask an admin for a key"
        )

    num_children = tx.exec(select(func.count()).where(col(ApiKeyRow.parent_id) == parent_id)).one()
    if num_children >= MAX_CHILDREN:
        raise UserError(
            f"key {parent_id} has created {num_children} keys, and a key may create {MAX_CHILDREN}: ask an admin for a "
            "new key"
        )
    return parent.expires_at


def _move_local_rows(tx: Session, owner: str) -> None:
    """Give the rows of `LOCAL_OWNER` to another owner, in every table that has a column `owner`.

    The tables are read from the database, because this process may not have imported the optional
    features that declare some of them. A row is not moved if `owner` has a row with the same unique
    key already, for example as a member of the same project.
    """
    metadata = MetaData()
    metadata.reflect(tx.connection())
    for table in metadata.sorted_tables:
        if "owner" not in table.c:
            continue

        # Move a row unless it would then have the same unique key as another row.
        other = table.alias()
        keys = [key for key in table.constraints if isinstance(key, PrimaryKeyConstraint | UniqueConstraint)]
        is_free = [
            ~exists().where(
                other.c.owner == owner,
                *(other.c[column.name] == column for column in key.columns if column.name != "owner"),
            )
            for key in keys
            if "owner" in key.columns
        ]
        execute(tx, update(table).where(table.c.owner == LOCAL_OWNER, *is_free).values(owner=owner))


_IS_UNREVOKED = col(ApiKeyRow.revoked_at).is_(None)
_FIND = select(ApiKeyRow).where(ApiKeyRow.digest == bindparam("digest"), _IS_UNREVOKED)


def find(tx: Session, key: str) -> ApiKeyRow | None:
    """Return the row of a key, or None if the key is unknown or revoked.

    The key may have expired.
    """
    return tx.exec(_FIND, params={"digest": hash_key(key)}).first()


def get(tx: Session, key_id: int) -> ApiKeyRow | None:
    """Return the row of a key by its number, like `find`."""
    row = tx.get(ApiKeyRow, key_id)
    return row if row is not None and row.revoked_at is None else None


_REVOKE, _REVOKE_CHILDREN = (
    update(ApiKeyRow).where(column == bindparam("ended"), _IS_UNREVOKED).values(revoked_at=bindparam("now"))
    for column in (col(ApiKeyRow.key_id), col(ApiKeyRow.parent_id))
)


def revoke(tx: Session, key_id: int, now: float) -> bool:
    """Revoke a key and the keys that it created, permanently.

    Return False if the key is unknown or already revoked.
    """
    is_revoked = execute(tx, _REVOKE, {"ended": key_id, "now": now}).rowcount == 1
    execute(tx, _REVOKE_CHILDREN, {"ended": key_id, "now": now})
    return is_revoked


def get_status(row: ApiKeyRow, now: float) -> Literal["valid", "expired", "revoked"]:
    """Return whether a key is valid, expired or revoked."""
    if row.revoked_at is not None:
        return "revoked"
    return "valid" if row.expires_at is None or row.expires_at > now else "expired"


def rotate(tx: Session, key_id: int, *, overlap_s: float, now: float) -> tuple[str, ApiKeyRow]:
    """Create a key that replaces an old one, and let the old key expire.

    The new key has the same owner, scope, name, note, lifetime and parent. The old key, and the
    keys that the old key created, stay valid for `overlap_s` seconds, unless they expire earlier.
    Returns the new key and its row. Raises KeyNotUsable if the old key is not valid.
    """
    old = get(tx, key_id)
    if old is None or get_status(old, now) != "valid":
        raise KeyNotUsable(f"key {key_id} is unknown, revoked or expired")
    lifetime_s = None if old.expires_at is None else old.expires_at - old.created_at

    for row in (old, *tx.exec(select(ApiKeyRow).where(ApiKeyRow.parent_id == key_id))):
        row.expires_at = now + overlap_s if row.expires_at is None else min(row.expires_at, now + overlap_s)
    return create(
        tx,
        owner=old.owner,
        scope=old.scope,
        name=old.name,
        note=old.note,
        now=now,
        expires_at=None if lifetime_s is None else now + lifetime_s,
        parent_id=old.parent_id,
    )


def is_use_due(row: ApiKeyRow, now: float) -> bool:
    """Return whether `record_use` should be called.

    Uses are recorded at most once per minute, so that most requests need no commit.
    """
    return row.last_used_at is None or row.last_used_at < now - _RECORD_USE_EVERY_S


def record_use(tx: Session, key_id: int, now: float) -> None:
    """Record that a key was used."""
    execute(tx, update(ApiKeyRow).where(col(ApiKeyRow.key_id) == key_id).values(last_used_at=now))


def find_ended(tx: Session, key_ids: Collection[int], now: float) -> set[int]:
    """Return which of these keys are revoked or expired."""
    has_ended = or_(col(ApiKeyRow.revoked_at).is_not(None), col(ApiKeyRow.expires_at) <= now)
    ended = tx.exec(select(ApiKeyRow.key_id).where(col(ApiKeyRow.key_id).in_(key_ids), has_ended))
    return {key_id for key_id in ended if key_id is not None}


def list_digests(tx: Session) -> frozenset[str]:
    """Return the digests of all keys, including revoked and expired keys."""
    return frozenset(tx.exec(select(ApiKeyRow.digest)))


def list_all(tx: Session) -> list[ApiKeyRow]:
    """Return all keys, including revoked keys, oldest first."""
    return list(tx.exec(select(ApiKeyRow).order_by(col(ApiKeyRow.key_id))))


def has_any(tx: Session) -> bool:
    """Return whether a key was ever created."""
    return tx.exec(select(ApiKeyRow.key_id).limit(1)).first() is not None


def list_usable(tx: Session, now: float) -> list[ApiKeyRow]:
    """Return all keys that are neither revoked nor expired."""
    is_unexpired = or_(col(ApiKeyRow.expires_at).is_(None), col(ApiKeyRow.expires_at) > now)
    return list(tx.exec(select(ApiKeyRow).where(_IS_UNREVOKED, is_unexpired)))


def hash_key(key: str) -> str:
    """Return the digest of a key.

    A plain hash is secure enough, because a key has 256 random bits.
    """
    return hashlib.sha256(key.encode()).hexdigest()
