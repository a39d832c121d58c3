"""Keys that callers show, kept as digests; whose they are, and what was there before the first of them."""

import hashlib
import secrets

from sqlalchemy import update
from sqlmodel import Session, col, select

from skyrl_tx.store.tables import ApiKeyRow, KeyScope, RequestRow, SessionRow, StabilityRow

LOCAL_OWNER = "local"
"""Owns what is made while no keys are asked for."""
_PREFIX = "tml-"
"""The SDK takes no key without it."""
_HINT_CHARACTERS = 4


def create(tx: Session, *, owner: str, scope: KeyScope, name: str, note: str, now: float) -> tuple[str, ApiKeyRow]:
    """Make a key; return it, for the only time, and its row. The first admin key ever adopts what had no owner."""
    assert owner != LOCAL_OWNER, "that owner has no keys"
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
    if is_first_admin:
        _adopt(tx, owner)
    return key, row


def _adopt(tx: Session, owner: str) -> None:
    for table in (SessionRow, RequestRow, StabilityRow):
        tx.connection().execute(update(table).where(col(table.owner) == LOCAL_OWNER).values(owner=owner))


def find(tx: Session, key: str) -> ApiKeyRow | None:
    """Read what is known of a key; None if it was never made, or has been revoked."""
    return tx.exec(
        select(ApiKeyRow).where(ApiKeyRow.digest == _digest(key), col(ApiKeyRow.revoked_at).is_(None))
    ).first()


def get(tx: Session, key_id: int) -> ApiKeyRow | None:
    """Read what is known of a key by its number; None if there is none, or it has been revoked."""
    row = tx.get(ApiKeyRow, key_id)
    return row if row is not None and row.revoked_at is None else None


def revoke(tx: Session, key_id: int, now: float) -> bool:
    """End a key, for ever; False if there is none, or it has ended."""
    row = get(tx, key_id)
    if row is None:
        return False
    row.revoked_at = now
    tx.flush()
    return True


def list_all(tx: Session) -> list[ApiKeyRow]:
    """All keys that were ever made, oldest first."""
    return list(tx.exec(select(ApiKeyRow).order_by(col(ApiKeyRow.key_id))))


def any_made(tx: Session) -> bool:
    """Whether there has ever been a key."""
    return tx.exec(select(ApiKeyRow.key_id).limit(1)).first() is not None


def any_usable(tx: Session) -> bool:
    """Whether someone could show a key."""
    return tx.exec(select(ApiKeyRow.key_id).where(col(ApiKeyRow.revoked_at).is_(None)).limit(1)).first() is not None


def _digest(key: str) -> str:
    """A plain hash is enough: keys hold 256 random bits, so there is nothing to guess."""
    return hashlib.sha256(key.encode()).hexdigest()
