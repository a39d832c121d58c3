"""Leases show which engines are running.

A lease is a PostgreSQL advisory lock, so no clock is involved. Each engine holds the lock of its
number on its write connection, and never reconnects this connection. If the lock is free, the
engine can no longer commit anything, because PostgreSQL rolls back the transaction of a lost
connection before it releases the locks of the connection. With SQLite there is only engine 1 and no
lease.
"""

from sqlalchemy import text
from sqlmodel import Session

LOCK_CLASS = 0x736B7478
"""First key of the advisory locks that concern the whole database."""
ENGINE_CLASS = LOCK_CLASS + 1
"""First key of the leases. The second key is the engine's number."""
MAX_ENGINES = 64
ENGINE_CHANNEL = "skyrl_tx_engine"
_KEEPER_LOCK = 4
"""Second key of the lock of the keeper, the engine that removes old data for all engines."""

_HOLDERS = text(
    "SELECT objid::int, pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND classid = :class"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_TAKE = text("SELECT pg_try_advisory_xact_lock(:class, :number)")
_BECOME_KEEPER = text("SELECT pg_try_advisory_lock(:class, :number)")
_TERMINATE = text("SELECT pg_terminate_backend(:pid)")
_NOTIFY_ENGINES = text(f"NOTIFY {ENGINE_CHANNEL}")


def get_holders(tx: Session) -> dict[int, int]:
    """Return the PostgreSQL process id of each running engine's connection, by engine number."""
    return dict(tx.connection().execute(_HOLDERS, {"class": ENGINE_CLASS}).all())


def take(tx: Session, number: int) -> bool:
    """Take the lease of a number until the end of the transaction, and return whether it was free.

    No engine can start with this number during the transaction.
    """
    return tx.connection().execute(_TAKE, {"class": ENGINE_CLASS, "number": number}).scalar_one()


def become_keeper(tx: Session) -> bool:
    """Make this engine the keeper, which removes old data.

    Return False if another engine is the keeper. The engine stays the keeper until it exits. With
    SQLite the only engine is always the keeper.
    """
    connection = tx.connection()
    if connection.dialect.name != "postgresql":
        return True
    return connection.execute(_BECOME_KEEPER, {"class": LOCK_CLASS, "number": _KEEPER_LOCK}).scalar_one()


def revoke(tx: Session, pid: int) -> None:
    """Close the connection of a stuck engine.

    The engine loses its lease and cannot commit anything afterwards.
    """
    tx.connection().execute(_TERMINATE, {"pid": pid})


def notify_engines(tx: Session) -> None:
    """Wake all engines when the transaction commits.

    Other commits of an engine wake only the API processes.
    """
    tx.connection().execute(_NOTIFY_ENGINES)
