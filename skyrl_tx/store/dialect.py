"""What a kind of database does in its own way; `Store` is what all of them have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import ClassVar, Literal

from sqlalchemy import Connection, Engine

from skyrl_tx.store.errors import StoreError

Role = Literal["api", "engine", "tool"]
PEER: Mapping[Role, Role] = {"api": "engine", "engine": "api", "tool": "engine"}
"""Whom a process wakes when it has committed something."""


class Bell(ABC):
    """How the processes on one database wake each other."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait until the peer committed, or `ring_own`; whether that was so. For one thread at a time; never raises."""

    @abstractmethod
    def ring_own(self) -> None:
        """End this process's own `wait`, or its next."""

    @abstractmethod
    def ring_peer(self) -> None:
        """Wake the peer, after each commit."""

    @abstractmethod
    def peer_lives(self) -> bool:
        """Whether a process of the peer's role has the database open."""

    @abstractmethod
    def close(self) -> None:
        """Take the bell down."""


class Dialect(ABC):
    """One database, not yet open. What fails on its side is raised as one of `errors` or as SQLAlchemy's DBAPIError."""

    errors: ClassVar[tuple[type[Exception], ...]]
    """What the driver itself raises."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """What the database is called, without secrets; None: it is the data directory's own."""

    @abstractmethod
    def role(self, role: Role) -> AbstractContextManager[None]:
        """Hold a role, as far as the data directory is concerned; raises StoreInUse naming who plays it."""

    @abstractmethod
    def upgrading(self) -> AbstractContextManager[None]:
        """Keep other processes from bringing the schema up to date meanwhile."""

    @abstractmethod
    def writer(self, role: Role) -> Engine:
        """One connection, invalidated by every error that ends its transaction; StoreInUse as above when it is made.

        Transactions on it, in whatever process, come one after the other: what one has read stays so until it commits.
        """

    @abstractmethod
    def reader(self, role: Role) -> Engine:
        """Connections that cannot write; a transaction sees one state."""

    @abstractmethod
    def check(self) -> None:
        """Raise StoreError for a database that is not to be served from."""

    @abstractmethod
    def bell(self, role: Role, reader: Engine) -> Bell:
        """Hang up a bell; `reader` may be used to look around."""

    def give_back(self, connection: Connection) -> bool:
        """Return some of the room that deleted rows took to the file system; whether more is left.

        Not needed where the database does so by itself.
        """
        return False

    @abstractmethod
    def explain(self, error: BaseException) -> StoreError:
        """Say in words what failed, and in which database."""
