"""Checks of the database (reachable, schema, PostgreSQL settings, clock) and of access to the server."""

import shutil
import sqlite3
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlmodel import Session

from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.process.text import format_bytes
from skyrl_tx.store import StoreError, keys
from skyrl_tx.store.database import Store, parse_url
from skyrl_tx.store.dialect import DATABASE_NAME
from skyrl_tx.store.schema import HEAD, Schema, read_schema
from skyrl_tx.tools.doctor.findings import ExaminedServer, Finding, error, ok, warning

_LARGE_WAL_BYTES = 256 * 2**20
_CONNECTIONS = 20
"""Maximum number of PostgreSQL connections of one process: 16 readers, a writer, a listener, and a margin."""
_SLOW_ROUND_TRIP_S = 0.005
_MAX_CLOCK_GAP_S = 5.0
_SIZE_QUERY = "SELECT pg_database_size(current_database())"
_UPGRADE = "take a backup, then start the server"
_DATABASE_FIRST = "do what this command says about the database, then run it again"


def check_database(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that the database can be reached, and that this release can read it. Changes nothing."""
    settings = subject.settings
    for role, pid in subject.server_pids.items():
        yield ok("database", f"the {role} is running as process {pid}")

    # Can the database be read at all?
    try:
        described = _describe(settings)
    except (DBAPIError, StoreError, OSError, ImportError) as problem:
        cause = getattr(problem, "orig", None) or problem
        yield error(
            "database",
            f"{_describe_url(settings)} cannot be read: {' '.join(str(cause).split())}",
            "check --database-url, the permissions of the user, and whether the database is running",
        )
        return

    # Does the database exist? If there are weights but no database, the database was lost.
    if described is None:
        if any((settings.data_dir / "artifacts").glob("art-*")):
            advice = "restore the database from a backup, or start a server and then run `skyrl-tx recover`"
            yield error("database", f"{settings.data_dir} has weights but no database", advice)
        else:
            yield ok("database", f"{settings.data_dir} has no database yet; the first start creates it")
        return

    schema, findings = described
    yield from findings
    yield from _check_version(schema)


def is_current(settings: ServerSettings) -> bool:
    """Return whether this release can use the database as it is."""
    try:
        described = _describe(settings)
    except (DBAPIError, StoreError, OSError, ImportError):
        return False
    return described is not None and described[0].is_usable


def check_access(settings: ServerSettings, store: Store | None) -> Iterator[Finding]:
    """Check who can use the server. `store` is None if there is no database, or this release cannot open it."""
    if settings.make_api_settings().is_loopback:
        return
    address = f"--host {settings.host}"

    def has_key(tx: Session) -> bool:
        return bool(keys.list_usable(tx, time.time()))

    # API keys.
    if settings.no_auth:
        yield warning(
            "access",
            f"{address} with --no-auth: everybody who can reach the server is an admin",
            "create API keys and omit --no-auth",
        )

    # Without a database, there are no keys. PostgreSQL counts as a database, even if it is empty.
    elif store is None and ((path := _find_sqlite(settings)) is None or path.is_file()):
        yield warning("access", f"{address}: the database was not opened, so its keys are not known", _DATABASE_FIRST)
    elif store is None or not store.read(has_key):
        yield error(
            "access",
            f"{address} is not loopback, and there are no API keys: the server refuses to start",
            f"skyrl-tx keys create --admin NAME --data-dir {settings.data_dir}",
        )
    else:
        yield ok("access", "requests need an API key")

    # TLS.
    if settings.ssl_certfile is None and not settings.trusted_proxies:
        yield warning(
            "access",
            f"{address} without TLS: anybody who can read the network traffic sees the API keys",
            "set --ssl-certfile, or put the server behind a proxy with TLS and name the proxy with --trusted-proxies",
        )


def _describe(settings: ServerSettings) -> tuple[Schema, list[Finding]] | None:
    """Return the schema of the database and findings about the database system, or None if it does not exist yet.

    Raises the errors of the database driver.
    """
    if (path := _find_sqlite(settings)) is None:
        return _describe_postgresql(settings)
    return _describe_sqlite(path) if path.is_file() else None


def _find_sqlite(settings: ServerSettings) -> Path | None:
    """Return the path of the SQLite database, or None if the database is PostgreSQL."""
    if settings.store_url is None:
        return settings.data_dir / DATABASE_NAME
    return Path(parse_url(settings.store_url).database or "") if settings.store_url.startswith("sqlite") else None


def _describe_sqlite(path: Path) -> tuple[Schema, list[Finding]]:
    engine = create_engine(
        f"sqlite:///{path}", creator=lambda: sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)
    )
    try:
        with engine.connect() as connection:
            schema = read_schema(connection)
    finally:
        engine.dispose()

    # The size of the database and of its write-ahead log.
    log = path.with_name(f"{path.name}-wal")
    size, log_size = path.stat().st_size, log.stat().st_size if log.exists() else 0
    findings = [ok("database", f"SQLite {sqlite3.sqlite_version}, {path}: {format_bytes(size)}")]
    if log_size > _LARGE_WAL_BYTES:
        findings.append(
            warning(
                "database",
                f"its write-ahead log has grown to {format_bytes(log_size)}",
                "a program has been reading the database for a long time: find it with `fuser`, or restart the server",
            )
        )
    return schema, findings


def _describe_postgresql(settings: ServerSettings) -> tuple[Schema, list[Finding]]:
    url = parse_url(settings.store_url or "").set(drivername="postgresql+psycopg")
    engine = create_engine(url.set(query={"connect_timeout": "5", **url.query}))
    try:
        with engine.connect() as connection:
            return read_schema(connection), list(_examine_postgresql(connection, _describe_url(settings)))
    finally:
        engine.dispose()


def _examine_postgresql(connection: Connection, shown_url: str) -> Iterator[Finding]:
    def read_value(query: str) -> str:
        return str(connection.scalar(text(query)))

    # Release and settings.
    release = read_value("SHOW server_version").split()[0]
    yield ok("database", f"PostgreSQL {release}, {shown_url}: {format_bytes(int(read_value(_SIZE_QUERY)))}")
    if read_value("SELECT pg_is_in_recovery()") == "True":
        yield error("database", "it is a read-only replica", "name the primary in --database-url")
    if (encoding := read_value("SHOW server_encoding")) != "UTF8":
        yield error("database", f"its encoding is {encoding} instead of UTF8", "create a database with encoding UTF8")
    if (commit := read_value("SHOW synchronous_commit")) in ("local", "off"):
        yield warning(
            "database", f"synchronous_commit is {commit}, so a failover may lose commits", "set synchronous_commit = on"
        )

    # Connections.
    limit, used = int(read_value("SHOW max_connections")), int(read_value("SELECT count(*) FROM pg_stat_activity"))
    if limit - used < 2 * _CONNECTIONS:
        yield warning(
            "database",
            f"{used} of {limit} connections are in use, and each process of the server opens up to {_CONNECTIONS}",
            "raise max_connections",
        )

    # Latency and clock.
    times: list[float] = []
    for _ in range(10):
        started = time.perf_counter()
        connection.execute(text("SELECT 1"))
        times.append(time.perf_counter() - started)
    if (round_trip_s := statistics.median(times)) > _SLOW_ROUND_TRIP_S:
        yield warning(
            "database",
            f"a query takes {1000 * round_trip_s:.1f} ms, and every request needs multiple queries",
            "run the server and PostgreSQL in the same network",
        )
    gap_s = abs(float(read_value("SELECT extract(epoch FROM clock_timestamp())")) - time.time())
    if gap_s > _MAX_CLOCK_GAP_S:
        yield warning("database", f"its clock differs by {gap_s:.0f} s from this machine's", "synchronize both clocks")

    # Backups.
    if shutil.which("pg_dump") is None:
        yield warning(
            "database",
            "pg_dump is not installed, but `skyrl-tx backup` needs it",
            "install the PostgreSQL client programs, in the release of the PostgreSQL server or newer",
        )


def _check_version(schema: Schema) -> Iterator[Finding]:
    version = schema.version
    if version == HEAD:
        yield ok("database", f"schema {version} is current")
    elif version is None:
        yield ok("database", "it is empty; the first start creates the tables")
    elif schema.is_usable:
        yield ok("database", f"a newer release wrote schema {version}, which this release can use")
    elif version < HEAD:
        message = (
            f"schema {version} is older than {HEAD}: the next start migrates it, and then older releases cannot use it"
        )
        yield warning("database", message, _UPGRADE)
    else:
        message = f"a newer release wrote schema {version}; this release supports schemas up to {HEAD}"
        yield error("database", message, "use the newer release, or choose another data directory")


def _describe_url(settings: ServerSettings) -> str:
    """Return the path or URL of the database, without the password."""
    if settings.store_url is None:
        return str(settings.data_dir / DATABASE_NAME)
    try:
        return parse_url(settings.store_url).set(query={}).render_as_string(hide_password=True)
    except StoreError:
        return "--database-url"
