"""One process's door to the database: opening, writing, reading, waiting."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self, TypeVar

from sqlalchemy import Engine, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError
from sqlmodel import Session

from skyrl_tx.store import binding, schema
from skyrl_tx.store.dialect import Bell, Dialect, Role
from skyrl_tx.store.errors import StoreError, StoreInUse
from skyrl_tx.store.patience import Patience
from skyrl_tx.store.sqlite import DATABASE_NAME, Sqlite
from skyrl_tx.store.writer import GroupWriter, refused

__all__ = ["Role", "Store", "StoreError", "StoreInUse"]

T = TypeVar("T")


class Store:
    """One process's door to the database."""

    def __init__(
        self, *, dialect: Dialect, reader: Engine, writer: GroupWriter, bell: Bell, resources: ExitStack
    ) -> None:
        """For `open`; `resources` holds the rest, in the order of opening."""
        self._dialect = dialect
        self._reader = reader
        self._writer = writer
        self._bell = bell
        self._resources = resources
        self._waiting = threading.Lock()
        self._is_closed = False

    @classmethod
    def open(
        cls,
        data_dir: Path,
        *,
        role: Role,
        url: str | None = None,
        busy_timeout_s: float = 10.0,
        patience: Patience | None = None,
    ) -> Self:
        """Open, creating or migrating as needed, and take the role; any number may be a `tool` at once.

        Raises StoreInUse if the role is taken, StoreError if the database cannot serve. `url` names another file
        ("sqlite:///path") or a database of PostgreSQL ("postgresql://user@host/name"), where any number may be an
        `api`. `busy_timeout_s` is how long a write waits while another process writes. With `patience` it then tries
        again, as it does while there is no space left.
        """
        dialect = _dialect(data_dir, url, busy_timeout_s)
        with ExitStack() as stack:
            try:
                data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                binding.check(data_dir, dialect.name)
                stack.enter_context(dialect.role(role))
                write_engine = dialect.writer(role)
                stack.callback(write_engine.dispose)
                with dialect.upgrading():
                    schema.upgrade(write_engine)
                binding.note(data_dir, dialect.name)
                if role != "tool":
                    dialect.check()
                reader = dialect.reader(role)
                stack.callback(reader.dispose)
                bell = dialect.bell(role, reader)
                stack.callback(bell.close)
            except (DBAPIError, OSError, *dialect.errors) as error:
                raise dialect.explain(error) from error
            writer = GroupWriter(write_engine, explain=dialect.explain, committed=bell.ring_peer, patience=patience)
            stack.callback(writer.close)
            return cls(dialect=dialect, reader=reader, writer=writer, bell=bell, resources=stack.pop_all())

    def write(self, work: Callable[[Session], T]) -> T:
        """Run work on the writer thread and return its result once that is on disk.

        What `work` raises is raised here and undoes that work alone; StoreError: the database failed, nothing was kept.
        """
        if self._writer.is_own_thread():
            raise StoreError("write called from within a write: compose the functions in one piece of work")
        return self.write_soon(work).result()

    def write_soon(self, work: Callable[[Session], T]) -> Future[T]:
        """As `write`, without waiting."""
        return self._writer.submit(work)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run read-only work on one consistent state; any thread, never in the writers' way."""
        if self._is_closed:
            raise StoreError("the store is closed")
        with self._explained():
            try:
                return self._read(work)
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
            return self._read(work)  # the database may be there, and only this connection from before it was away

    def _read(self, work: Callable[[Session], T]) -> T:
        with Session(self._reader, expire_on_commit=False) as tx:
            return work(tx)

    @contextmanager
    def _explained(self) -> Generator[None]:
        try:
            yield
        except DataError as error:
            raise refused(error) from error
        except (DBAPIError, *self._dialect.errors) as error:
            raise self._dialect.explain(error) from error

    def give_back(self) -> bool:
        """Return some of the room that deleted rows took to the file system; whether more is left."""
        return self.write(lambda tx: self._dialect.give_back(tx.connection()))

    def wait(self, timeout_s: float) -> bool:
        """Wait until the other process committed, or `wake`; whether that was so.

        For one thread at a time. A ring may be spurious, so look and then wait again.
        """
        with self._waiting:
            return not self._is_closed and self._bell.wait(timeout_s) and not self._is_closed

    @property
    def trouble(self) -> str | None:
        """Why what was to be written last was not; None if it was."""
        failure = self._writer.failure
        return None if failure is None else str(failure)

    def wake(self) -> None:
        """End this process's own `wait`."""
        self._bell.ring_own()

    def peer_lives(self) -> bool:
        """Whether a process of the other role has this database open."""
        with self._explained():
            return self._bell.peer_lives()

    def close(self) -> None:
        """Finish queued writes, then let go of everything."""
        if self._is_closed:
            return
        self._is_closed = True
        self.wake()
        with self._waiting:
            self._resources.close()


def _dialect(data_dir: Path, url: str | None, busy_timeout_s: float) -> Dialect:
    if url is None:
        return Sqlite(data_dir / DATABASE_NAME, data_dir, busy_timeout_s)
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StoreError("database url: not a URL; postgresql://user:password@host/name is one") from None
    match parsed.get_backend_name():
        case "sqlite" if parsed.database and parsed.database != ":memory:":
            return Sqlite(Path(parsed.database), data_dir, busy_timeout_s)
        case "postgresql" | "postgres":
            try:
                from skyrl_tx.store.postgresql import Postgresql
            except ImportError as error:
                raise StoreError(
                    f"database url: PostgreSQL needs a driver ({error}): pip install 'skyrl_tx[postgres]'"
                ) from error
            return Postgresql(parsed, data_dir, busy_timeout_s)
        case _:
            raise StoreError(
                f"database url {parsed.set(query={}).render_as_string()!r}: only sqlite:///path and "
                "postgresql://user@host/name are supported"
            )
