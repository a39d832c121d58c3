"""Leases: which engines run, as locks of their own database connections, and not by a clock.

An engine holds the advisory lock of its number on the connection that it writes on, and never connects that again. So
a lock that is free belongs to an engine that can commit nothing any more: PostgreSQL ends the transaction of a lost
connection before it releases its locks. With SQLite there is one engine, number 1, and nothing to look up.
"""

from sqlalchemy import text
from sqlmodel import Session

LOCK_CLASS = 0x736B7478
"""First key of our advisory locks of the whole database."""
ENGINE_CLASS = LOCK_CLASS + 1
"""First key of the leases; the second is the engine's number."""
MAX_ENGINES = 64
ENGINE_CHANNEL = "skyrl_tx_engine"
_KEEPER_LOCK = 4
"""Held by the one engine that removes what is old, for all."""

_HELD = text(
    "SELECT objid::int, pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND classid = :class"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_TAKE = text("SELECT pg_try_advisory_xact_lock(:class, :number)")
_BECOME_KEEPER = text("SELECT pg_try_advisory_lock(:class, :number)")
_END = text("SELECT pg_terminate_backend(:pid)")
_RING = text(f"NOTIFY {ENGINE_CHANNEL}")


def get_holders(tx: Session) -> dict[int, int]:
    """Return the numbers of the engines that run, each with the process id of its connection at the server."""
    return dict(tx.connection().execute(_HELD, {"class": ENGINE_CLASS}).all())


def take(tx: Session, number: int) -> bool:
    """Take a lease that is free, until the end of the transaction; return whether it was free.

    Until then no engine can start with this number.
    """
    return tx.connection().execute(_TAKE, {"class": ENGINE_CLASS, "number": number}).scalar_one()


def become_keeper(tx: Session) -> bool:
    """Let this engine be the one that removes what is old, as long as it runs; return False while another one is."""
    connection = tx.connection()
    if connection.dialect.name != "postgresql":
        return True
    return connection.execute(_BECOME_KEEPER, {"class": LOCK_CLASS, "number": _KEEPER_LOCK}).scalar_one()


def revoke(tx: Session, pid: int) -> None:
    """End the connection of an engine that is stuck: it loses its lease, and can commit nothing any more."""
    tx.connection().execute(_END, {"pid": pid})


def notify_engines(tx: Session) -> None:
    """Wake all engines when the transaction commits: an engine's own commits wake only the API."""
    tx.connection().execute(_RING)
