"""API keys, stored as digests."""

import hashlib
import secrets

from sqlalchemy import update
from sqlmodel import Session, col, select

from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import ApiKeyRow, KeyScope, RequestRow, SessionRow, StabilityRow

LOCAL_OWNER = "local"
"""Owner of everything that is created while authentication is disabled."""
_PREFIX = "tml-"
"""The SDK requires this prefix."""
_HINT_CHARACTERS = 4


def create(tx: Session, *, owner: str, scope: KeyScope, name: str, note: str, now: float) -> tuple[str, ApiKeyRow]:
    """Create a key; return it, for the only time, and its row.

    The first admin key takes over what belongs to `LOCAL_OWNER`.
    """
    assert owner != LOCAL_OWNER, "LOCAL_OWNER has no keys"
    is_first_admin = scope == "admin" and tx.exec(select(ApiKeyRow).where(ApiKeyRow.scope == "admin")).first() is None
    key = _PREFIX + secrets.token_urlsafe(32)
    row = ApiKeyRow(
        digest=_digest(key),
        hint=key[: len(_PREFIX) + _HINT_CHARACTERS],
        owner=owner,
        scope=scope,
        name=name,
        note=note,
        created_at=now,
    )
    tx.add(row)
    tx.flush()
    for table in (SessionRow, RequestRow, StabilityRow) if is_first_admin else ():
        execute(tx, update(table).where(col(table.owner) == LOCAL_OWNER).values(owner=owner))
    return key, row


def find(tx: Session, key: str) -> ApiKeyRow | None:
    """Return the row of a key, or None if it is unknown or revoked."""
    return tx.exec(
        select(ApiKeyRow).where(ApiKeyRow.digest == _digest(key), col(ApiKeyRow.revoked_at).is_(None))
    ).first()


def get(tx: Session, key_id: int) -> ApiKeyRow | None:
    """Return the row of a key by its number, or None if it is unknown or revoked."""
    row = tx.get(ApiKeyRow, key_id)
    return row if row is not None and row.revoked_at is None else None


def revoke(tx: Session, key_id: int, now: float) -> bool:
    """Revoke a key permanently; return False if it is unknown or already revoked."""
    row = get(tx, key_id)
    if row is None:
        return False
    row.revoked_at = now
    return True


def list_all(tx: Session) -> list[ApiKeyRow]:
    """Return all keys, revoked ones included, oldest first."""
    return list(tx.exec(select(ApiKeyRow).order_by(col(ApiKeyRow.key_id))))


def any_made(tx: Session) -> bool:
    """Return whether a key was ever created."""
    return tx.exec(select(ApiKeyRow.key_id).limit(1)).first() is not None


def any_usable(tx: Session) -> bool:
    """Return whether there is a key that is not revoked."""
    return tx.exec(select(ApiKeyRow.key_id).where(col(ApiKeyRow.revoked_at).is_(None)).limit(1)).first() is not None


def _digest(key: str) -> str:
    """Hash a key; a plain hash is enough, because keys hold 256 random bits."""
    return hashlib.sha256(key.encode()).hexdigest()
