"""The schema of a database: whether this release can use it, its creation and its migration.

Only a server migrates a database, and only while no other server has it open. Commands refuse the
schema of an older release, so that a command of a newer release never changes a database under a
running server.

To change the schema, change `tables.py`, and add a function that makes the same change in existing
databases to `MIGRATIONS`. A test checks that a new and a migrated database have the same schema.
Migrations cannot be undone. Version 0001 is the schema of the first release.

An older release uses a migrated database only if the database says so: its `compatible_from` is the
oldest version whose release can use it. A migration that only adds tables, indexes and columns with
a default or NULL leaves `COMPATIBLE_FROM` as it is. Any other migration sets it to its own version.

The tables of optional features are declared in `apps`, which this module must not import. These
tables are created by migrations only. A function that creates or changes such a table must also be
in `_APP_TABLES`.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlmodel import SQLModel

from skyrl_tx.store import SchemaOutdated, StoreError, StoreInUse
from skyrl_tx.store.dialect import Dialect
from skyrl_tx.store.tables import BIG_KEY, AnswerCounterRow

if TYPE_CHECKING:
    from alembic.operations import Operations

COMPATIBLE_FROM = "0021"
"""The oldest revision whose release can use a database of revision `HEAD`."""
_SERVERS_POLL_S = 0.1
_SERVERS_END_S = 3.0
"""How long a migration waits for other servers to end.

PostgreSQL may notice only after a moment that a process has ended.
"""
_VERSION = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), primary_key=True),
    sa.Column("compatible_from", sa.String(32)),
)


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
    tables = sa.inspect(connection).get_table_names()
    is_versioned = "alembic_version" in tables
    row = connection.execute(sa.text("SELECT * FROM alembic_version")).mappings().first() if is_versioned else None
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

        op = _open_operations(connection)
        for revision, migration in MIGRATIONS.items():
            if schema.version < revision:
                migration(op)
        connection.execute(sa.update(_VERSION).values(version_num=HEAD, compatible_from=COMPATIBLE_FROM))


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
    """Create all tables in an empty database."""
    SQLModel.metadata.create_all(connection, checkfirst=False)
    op = _open_operations(connection)
    for migration in _APP_TABLES:
        migration(op)
    _VERSION.create(connection)
    connection.execute(sa.insert(AnswerCounterRow))
    connection.execute(sa.insert(_VERSION).values(version_num=HEAD, compatible_from=COMPATIBLE_FROM))


def _open_operations(connection: Connection) -> "Operations":
    """Return alembic's operations on a database. The import is late, because it takes 0.3 s."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    return Operations(MigrationContext.configure(connection))


def _check_older(connection: Connection, version: str) -> None:
    """Raise StoreError unless the version is older than HEAD."""
    if not "0001" <= version < HEAD:
        raise StoreError(
            f"database {connection.engine.url.database} has schema version {version!r}, but this release supports "
            f"0001 to {HEAD}: run the newer release that wrote it, or choose another data directory"
        )


def _create_core_tables(op: "Operations", *names: str) -> None:
    """Create tables as `tables.py` declares them now.

    Before a later migration changes one of these tables, its original form must be written out
    here.
    """
    tables = [SQLModel.metadata.tables[name] for name in names]
    SQLModel.metadata.create_all(op.get_bind(), tables=tables, checkfirst=False)


def _make_required(kind: type[sa.types.TypeEngine[Any]], *names: str) -> Iterator[sa.Column[Any]]:
    """Yield columns of one type that are never NULL."""
    return (sa.Column(name, kind, nullable=False) for name in names)


def _add_answer_order(op: "Operations") -> None:
    """Add the completion order, cancellations, and copies of sampling clients."""
    _create_core_tables(op, "answer_counter")
    op.execute(sa.insert(AnswerCounterRow))
    op.add_column("requests", sa.Column("answer_order", sa.BigInteger))
    op.create_index("ix_requests_answers", "requests", ["answer_order"])
    op.create_index("ix_requests_sampling_session_answers", "requests", ["sampling_session_id", "answer_order"])

    op.create_table(
        "cancellations",
        sa.Column("position", BIG_KEY, primary_key=True),
        *_make_required(sa.String, "request_id"),
        sqlite_autoincrement=True,
    )
    op.add_column("sampling_sessions", sa.Column("num_clones", sa.Integer, nullable=False, server_default="0"))


def _add_ephemeral_samplers(op: "Operations") -> None:
    """Add the size of ephemeral samplers and whether they are in-flight."""
    op.add_column("sampling_sessions", sa.Column("size_bytes", sa.BigInteger))
    op.add_column("sampling_sessions", sa.Column("is_inflight", sa.Boolean, nullable=False, server_default=sa.false()))


def _add_keys(op: "Operations") -> None:
    """Add API keys."""
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String, nullable=False, unique=True),
        *_make_required(sa.String, "hint", "owner", "scope", "name", "note"),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("revoked_at", sa.Float),
        sqlite_autoincrement=True,
    )


def _add_pruned(op: "Operations") -> None:
    """Add high-water marks of deleted requests, and checksums, which existing rows do not have."""
    _create_core_tables(op, "pruned")
    for name in ("body_crc", "result_crc"):
        op.add_column("requests", sa.Column(name, sa.BigInteger, nullable=True))
    _create_partial_index(op, "ix_requests_pruned", "fetched_at", "result IS NULL AND status <> 'open'")


def _create_partial_index(op: "Operations", name: str, column: str, where: str, table: str = "requests") -> None:
    op.create_index(name, table, [column], sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def _add_identity(op: "Operations") -> None:
    """Add the identity, deletion times, key expiry, crash counts and the engine's activity."""
    _create_core_tables(op, "identity")

    # Deletion and expiry.
    for table in ("models", "checkpoints"):
        op.add_column(table, sa.Column("deleted_at", sa.Float))
        op.create_index(f"ix_{table}_deleted_at", table, ["deleted_at"])
    for name in ("expires_at", "last_used_at"):
        op.add_column("api_keys", sa.Column(name, sa.Float))

    # Crash counts of requests.
    op.add_column("requests", sa.Column("is_alone", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("requests", sa.Column("crashes", sa.Integer, nullable=False, server_default="0"))
    _create_partial_index(op, "ix_requests_alone", "position", "is_alone")
    op.create_index("ix_requests_session_id", "requests", ["session_id"])

    op.add_column("engine_state", sa.Column("activity", sa.String, nullable=False, server_default=""))
    op.add_column("engine_state", sa.Column("activity_since", sa.Float))


def _add_history(op: "Operations") -> None:
    """Add curves, usage, kept samples, client metrics, notices and origins of checkpoints."""
    # Add columns to existing tables.
    op.add_column("sessions", sa.Column("key_id", sa.Integer))
    op.add_column("models", sa.Column("loaded_from", sa.String))
    op.add_column("models", sa.Column("num_steps", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("requests", sa.Column("started_at", sa.Float))
    op.add_column("requests", sa.Column("is_streamed", sa.Boolean, nullable=False, server_default=sa.false()))
    _create_partial_index(op, "ix_requests_failed", "position", "status = 'failed'")

    op.add_column("checkpoints", sa.Column("step", sa.BigInteger))
    op.add_column("checkpoints", sa.Column("copied_from", sa.String))
    op.create_index("ix_models_loaded_from", "models", ["loaded_from"])
    op.create_index("ix_checkpoints_copied_from", "checkpoints", ["copied_from"])
    op.add_column("sampling_sessions", sa.Column("step", sa.BigInteger))
    op.add_column("engine_state", sa.Column("meters", sa.JSON))

    # Create new tables.
    _add_kept_samples(op)
    _add_curves(op)
    _add_usage(op)
    _add_logged_runs(op)
    _create_core_tables(op, "server_points", "partials", "notices")


def _add_kept_samples(op: "Operations") -> None:
    """Add the samples that are kept for the console."""
    op.create_table(
        "kept_samples",
        # The sample request.
        sa.Column("sequence_id", sa.String, primary_key=True),
        *_make_required(sa.String, "request_id"),
        *_make_required(sa.Integer, "sample_index"),
        *_make_required(sa.String, "model_id"),
        sa.Column("step", sa.BigInteger),
        *_make_required(sa.String, "owner"),
        *_make_required(sa.Float, "at"),
        *_make_required(sa.Integer, "num_bytes"),
        *_make_required(sa.String, "stop_reason"),
        # The training request, and the contents.
        sa.Column("trained_model_id", sa.String),
        sa.Column("trained_step", sa.BigInteger),
        sa.Column("advantage", sa.Float),
        sa.Column("kl", sa.Float),
        *_make_required(sa.LargeBinary, "prompt", "tokens", "logprobs"),
    )
    op.create_index("ix_kept_samples_request_id", "kept_samples", ["request_id"])
    op.create_index("ix_kept_samples_model", "kept_samples", ["model_id", "step"])
    op.create_index("ix_kept_samples_at", "kept_samples", ["at"])


def _add_curves(op: "Operations") -> None:
    """Add the points of the curves of runs, and sums over the samples of each step."""
    op.create_table(
        "run_points",
        sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
        *_make_required(sa.String, "model_id", "kind"),
        *_make_required(sa.BigInteger, "step"),
        *_make_required(sa.Float, "created_at", "started_at", "at", "device_s"),
        *_make_required(sa.BigInteger, "tokens"),
        *_make_required(sa.Integer, "datums"),
        *_make_required(sa.Text, "values"),
    )
    op.create_index("ix_run_points_model", "run_points", ["model_id", "position", "step"])

    op.create_table(
        "sampled_steps",
        sa.Column("model_id", sa.String, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("owner", sa.String, primary_key=True),
        *_make_required(sa.BigInteger, "samples", "cut", "tokens", "scored_tokens"),
        *_make_required(sa.Float, "logprob_sum"),
    )


def _add_usage(op: "Operations") -> None:
    """Add the usage by session, model and kind of work."""
    op.create_table(
        "usage",
        sa.Column("bucket_at", sa.BigInteger, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.String, primary_key=True) for name in ("session_id", "model_id", "kind")),
        *_make_required(sa.String, "owner"),
        *_make_required(sa.BigInteger, "tokens", "requests"),
        *_make_required(sa.Float, "device_s"),
    )
    op.create_index("ix_usage_session_id", "usage", ["session_id"])
    _create_partial_index(op, "ix_usage_fine", "bucket_at", "bucket_at % 3600 <> 0", table="usage")


def _add_logged_runs(op: "Operations") -> None:
    """Add the metrics that clients log."""
    op.create_table(
        "logged_runs",
        sa.Column("logged_run_id", BIG_KEY, primary_key=True),
        *_make_required(sa.String, "owner", "project", "key", "name"),
        *_make_required(sa.JSON, "config"),
        sa.Column("model_id", sa.String),
        *_make_required(sa.Boolean, "seeks_model"),  # whether the server still looks for the model of the run
        *_make_required(sa.Integer, "num_points"),
        *_make_required(sa.BigInteger, "num_bytes"),
        *_make_required(sa.Float, "created_at", "last_at"),
        sa.UniqueConstraint("owner", "project", "key"),
        sqlite_autoincrement=True,
    )
    for name in ("model_id", "last_at"):
        op.create_index(f"ix_logged_runs_{name}", "logged_runs", [name])

    op.create_table(
        "logged_points",
        sa.Column("position", BIG_KEY, primary_key=True),
        *_make_required(sa.BigInteger, "logged_run_id"),
        *_make_required(sa.String, "log_id"),
        *_make_required(sa.BigInteger, "step"),
        *_make_required(sa.Float, "at"),
        *_make_required(sa.JSON, "values"),
        sa.UniqueConstraint("logged_run_id", "log_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_logged_points_run", "logged_points", ["logged_run_id", "position"])


def _add_storage_hours(op: "Operations") -> None:
    """Add the storage of the checkpoints in each hour."""
    op.create_table(
        "storage_hours",
        sa.Column("hour_at", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("session_id", sa.String, primary_key=True),
        *_make_required(sa.String, "owner"),
        *_make_required(sa.BigInteger, "num_bytes"),
    )


def _add_teams(op: "Operations") -> None:
    """Add the storage of each hour and the audit log."""
    _add_storage_hours(op)
    _create_core_tables(op, "audit")


def _add_quotas(op: "Operations") -> None:
    """Add quotas and weights, and the pauses that engines publish."""
    op.create_table(
        "quotas",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("subject_kind", "subject", "name")),
        *_make_required(sa.BigInteger, "value"),
    )
    op.add_column("engine_state", sa.Column("pauses", sa.JSON))


def _add_engines(op: "Operations") -> None:
    """Add engine numbers to models, requests and cancellations: engines can share a database."""
    op.execute("ALTER TABLE engine_state RENAME COLUMN id TO number")
    op.add_column("engine_state", sa.Column("host", sa.String, nullable=False, server_default=""))
    for table in ("models", "requests", "cancellations"):
        op.add_column(table, sa.Column("engine", sa.Integer, nullable=False, server_default="1"))
    op.add_column("requests", sa.Column("sampler_id", sa.String))


def _add_portions(op: "Operations") -> None:
    """Add leases of quotas of concurrent work, which multiple engines shared. Removed in 0019."""
    op.create_table(
        "portions",
        sa.Column("engine", sa.Integer, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.String, primary_key=True) for name in ("name", "subject_kind", "subject")),
        *_make_required(sa.BigInteger, "num_held", "num_wanted"),
        *_make_required(sa.Float, "waits_since"),
    )


def _add_trainer_gap(op: "Operations") -> None:
    """Add the gap between the log-probabilities of the sampler and the trainer for kept samples."""
    op.add_column("kept_samples", sa.Column("trainer_gap", sa.Float))


_APP_TABLES = (_add_kept_samples, _add_curves, _add_usage, _add_logged_runs, _add_storage_hours, _add_trainer_gap)
"""Functions that create the tables of optional features in a new database, in order of revision."""
MIGRATIONS: Mapping[str, Callable[["Operations"], None]] = {
    # Log-probabilities of sampled sequences.
    "0002": lambda op: _create_core_tables(op, "stability"),
    "0003": _add_answer_order,
    "0004": _add_ephemeral_samplers,
    "0005": _add_keys,
    # The memory load of the engine's queued sample requests.
    "0006": lambda op: op.add_column("engine_state", sa.Column("load", sa.JSON)),
    # The hash of a model's base weights. It stays empty for existing models.
    "0007": lambda op: op.add_column("models", sa.Column("base_model_hash", sa.String)),
    "0008": _add_pruned,
    "0009": _add_identity,
    "0010": _add_history,
    "0011": _add_teams,
    "0012": _add_quotas,
    "0013": lambda op: _create_core_tables(op, "project_members"),
    "0014": lambda op: _create_core_tables(op, "custom_losses"),
    # Whether work beyond a daily quota waits or fails.
    "0015": lambda op: op.add_column("quotas", sa.Column("over", sa.String, nullable=False, server_default="wait")),
    "0016": _add_engines,
    "0017": _add_portions,
    "0018": _add_trainer_gap,
    "0019": lambda op: op.drop_table("portions"),  # these quotas no longer exist
    # The key that created a key. Keys of earlier releases have none.
    "0020": lambda op: op.add_column("api_keys", sa.Column("parent_id", sa.Integer)),
    # The oldest version whose release can use the database.
    "0021": lambda op: op.add_column("alembic_version", sa.Column("compatible_from", sa.String(32))),
}
HEAD = max(MIGRATIONS)
"""The newest revision."""
