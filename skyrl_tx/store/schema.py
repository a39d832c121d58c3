"""The schema of a database: whether this release can use it, and its migration.

Only a server migrates a database, and only while no other server has it open. Commands refuse the
schema of an older release, so that a command of a newer release never changes a database under a
running server.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, inspect, text

from skyrl_tx.store import SchemaOutdated, StoreError, StoreInUse
from skyrl_tx.store.dialect import Dialect

HEAD = "0021"
"""Newest revision in `migrations`. It is repeated here because importing alembic takes 0.3 s."""
COMPATIBLE_FROM = "0021"
"""The oldest revision whose release can use a database of revision `HEAD`."""
_SERVERS_POLL_S = 0.1
_SERVERS_END_S = 3.0
"""How long a migration waits for other servers to end.

PostgreSQL may notice only after a moment that a process has ended.
"""


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema that a database has."""

    version: str | None
    """None for an empty database."""
    compatible_from: str | None = None
    """The oldest revision whose release can use the database; None before revision 0021."""

    @property
    def is_usable(self) -> bool:
        """Whether this release can use the database as it is."""
        if self.version is None:
            return False
        return self.version == HEAD or (self.compatible_from or self.version) <= HEAD < self.version


def read_schema(connection: Connection) -> Schema:
    """Read the schema of a database. Raises StoreError if it belongs to another program."""
    tables = inspect(connection).get_table_names()
    is_versioned = "alembic_version" in tables
    row = connection.execute(text("SELECT * FROM alembic_version")).mappings().first() if is_versioned else None
    schema = Schema(None) if row is None else Schema(row["version_num"], row.get("compatible_from"))
    if not schema.is_usable and tables and not {"alembic_version", "sessions", "requests"} <= set(tables):
        raise StoreError(
            f"database {connection.engine.url.database} belongs to another program: it has the tables "
            f"{', '.join(tables[:5])}; choose another data directory"
        )
    return schema


def check_schema(engine: Engine, *, creates: bool, accepts_older: bool) -> bool:
    """Check that a command can use the database, and return whether an older release wrote it.

    An empty database gets its tables with `creates`, and raises StoreError otherwise. A database of
    an older release is left as it is with `accepts_older`, and raises SchemaOutdated otherwise.
    """
    with engine.begin() as connection:
        schema = read_schema(connection)
        if schema.version is None and creates:
            _create_tables(connection)
        elif schema.version is None:
            raise StoreError(f"database {connection.engine.url.database} is empty: no server has stored anything there")
        elif not schema.is_usable:
            _check_older(connection, schema.version)
            if not accepts_older:
                raise SchemaOutdated(
                    f"database {connection.engine.url.database} has schema version {schema.version!r} of an older "
                    f"release: run the release that wrote it, or start the server, which migrates it to {HEAD!r}"
                )
            return True
        return False


def upgrade(engine: Engine, find_server: Callable[[Connection], str | None] = lambda _: None) -> None:
    """Create the tables or upgrade them to HEAD, in one transaction.

    Raises StoreInUse if `find_server` finds a server that has the database open, and StoreError if
    the database belongs to a newer release or to another program.
    """
    with engine.begin() as connection:
        schema = read_schema(connection)
        if schema.is_usable:
            return
        if schema.version is None:
            _create_tables(connection)
            return
        _check_older(connection, schema.version)
        if (server := find_server(connection)) is not None:
            raise StoreInUse(
                f"database {connection.engine.url.database} has schema version {schema.version!r} of an older release, "
                f"and cannot be migrated to {HEAD!r} while a server uses it: {server}; stop all processes of the older "
                "release first"
            )
        from skyrl_tx.store import migrations

        migrations.migrate(connection, schema.version, HEAD, COMPATIBLE_FROM)


def upgrade_without_servers(engine: Engine, dialect: Dialect) -> None:
    """Upgrade the tables. Raises StoreInUse if other servers do not end within `_SERVERS_END_S`."""
    end = time.monotonic() + _SERVERS_END_S
    while True:
        try:
            return upgrade(engine, dialect.find_server)
        except StoreInUse:
            if time.monotonic() >= end:
                raise
        time.sleep(_SERVERS_POLL_S)


def _create_tables(connection: Connection) -> None:
    from skyrl_tx.store import migrations

    migrations.create(connection, HEAD, COMPATIBLE_FROM)


def _check_older(connection: Connection, version: str) -> None:
    """Raise StoreError unless the version is older than HEAD."""
    if not "0001" <= version < HEAD:
        raise StoreError(
            f"database {connection.engine.url.database} has schema version {version!r}, but this release supports "
            f"0001 to {HEAD}: run the newer release that wrote it, or choose another data directory"
        )
