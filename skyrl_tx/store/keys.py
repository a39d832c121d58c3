"""API keys, stored as digests."""

import hashlib
import secrets
from collections.abc import Collection
from typing import Literal

from sqlalchemy import bindparam, or_, update
from sqlmodel import Session, col, select

from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import ApiKeyRow, KeyScope, RequestRow, SessionRow, StabilityRow

LOCAL_OWNER = "local"
"""Owner of everything that is created while authentication is disabled."""
_PREFIX = "tml-"
"""The SDK requires this prefix."""
_HINT_CHARACTERS = 4
_RECORD_USE_EVERY_S = 60.0


class KeyNotUsable(Exception):
    """A key is unknown, revoked or expired."""


def create(
    tx: Session, *, owner: str, scope: KeyScope, name: str, note: str, now: float, expires_at: float | None = None
) -> tuple[str, ApiKeyRow]:
    """Create a key; return it, for the only time, and its row.

    The first admin key takes over what belongs to `LOCAL_OWNER`.
    """
    assert owner != LOCAL_OWNER, "LOCAL_OWNER has no keys"
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
    )
    tx.add(row)
    tx.flush()
    for table in (SessionRow, RequestRow, StabilityRow) if is_first_admin else ():
        execute(tx, update(table).where(col(table.owner) == LOCAL_OWNER).values(owner=owner))
    return key, row


_FIND = select(ApiKeyRow).where(ApiKeyRow.digest == bindparam("digest"), col(ApiKeyRow.revoked_at).is_(None))


def find(tx: Session, key: str) -> ApiKeyRow | None:
    """Return the row of a key, which may have expired, or None if it is unknown or revoked."""
    return tx.exec(_FIND, params={"digest": hash_key(key)}).first()


def get(tx: Session, key_id: int) -> ApiKeyRow | None:
    """Return the row of a key by its number, which may have expired, or None if it is unknown or revoked."""
    row = tx.get(ApiKeyRow, key_id)
    return row if row is not None and row.revoked_at is None else None


def revoke(tx: Session, key_id: int, now: float) -> bool:
    """Revoke a key permanently; return False if it is unknown or already revoked."""
    row = get(tx, key_id)
    if row is None:
        return False
    row.revoked_at = now
    return True


def get_status(row: ApiKeyRow, now: float) -> Literal["valid", "expired", "revoked"]:
    """Return whether a key is accepted, or why not."""
    if row.revoked_at is not None:
        return "revoked"
    return "valid" if row.expires_at is None or row.expires_at > now else "expired"


def rotate(tx: Session, key_id: int, *, overlap_s: float, now: float) -> tuple[str, ApiKeyRow]:
    """Replace a key: create one with the same owner, scope, name, note and lifetime, and expire the old one.

    The old key stays valid for `overlap_s` seconds, unless it expires earlier. Returns what `create` returns. Raises
    KeyNotUsable.
    """
    old = get(tx, key_id)
    if old is None or get_status(old, now) != "valid":
        raise KeyNotUsable(f"key {key_id}: there is none, or it has been revoked or has expired")
    lifetime_s = None if old.expires_at is None else old.expires_at - old.created_at
    old.expires_at = now + overlap_s if old.expires_at is None else min(old.expires_at, now + overlap_s)
    return create(
        tx,
        owner=old.owner,
        scope=old.scope,
        name=old.name,
        note=old.note,
        now=now,
        expires_at=None if lifetime_s is None else now + lifetime_s,
    )


def is_use_due(row: ApiKeyRow, now: float) -> bool:
    """Return whether `record_use` should be called; at most once a minute, so that calls cost no commits."""
    return row.last_used_at is None or row.last_used_at < now - _RECORD_USE_EVERY_S


def record_use(tx: Session, key_id: int, now: float) -> None:
    """Record that a key was used."""
    execute(tx, update(ApiKeyRow).where(col(ApiKeyRow.key_id) == key_id).values(last_used_at=now))


def find_ended(tx: Session, key_ids: Collection[int], now: float) -> set[int]:
    """Return which of these keys are revoked or have expired."""
    is_over = or_(col(ApiKeyRow.revoked_at).is_not(None), col(ApiKeyRow.expires_at) <= now)
    found = tx.exec(select(ApiKeyRow.key_id).where(col(ApiKeyRow.key_id).in_(key_ids), is_over))
    return {key_id for key_id in found if key_id is not None}


def list_digests(tx: Session) -> frozenset[str]:
    """Return the digests of all keys, the revoked and expired ones included."""
    return frozenset(tx.exec(select(ApiKeyRow.digest)))


def list_all(tx: Session) -> list[ApiKeyRow]:
    """Return all keys, revoked ones included, oldest first."""
    return list(tx.exec(select(ApiKeyRow).order_by(col(ApiKeyRow.key_id))))


def has_any(tx: Session) -> bool:
    """Return whether a key was ever created."""
    return tx.exec(select(ApiKeyRow.key_id).limit(1)).first() is not None


def has_usable(tx: Session, now: float) -> bool:
    """Return whether there is a key that is neither revoked nor expired."""
    is_unexpired = or_(col(ApiKeyRow.expires_at).is_(None), col(ApiKeyRow.expires_at) > now)
    usable = select(ApiKeyRow.key_id).where(col(ApiKeyRow.revoked_at).is_(None), is_unexpired)
    return tx.exec(usable.limit(1)).first() is not None


def hash_key(key: str) -> str:
    """Hash a key; a plain hash is enough, because keys hold 256 random bits."""
    return hashlib.sha256(key.encode()).hexdigest()
