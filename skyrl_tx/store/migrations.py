"""Creation of new databases and migrations of existing databases.

To change the schema, change `tables.py`, add a function that makes the same change in existing
databases to `MIGRATIONS`, and raise `schema.HEAD`. A test checks that a new and a migrated
database have the same schema. Migrations cannot be undone. Version 0001 is the schema of the first
release.

An older release uses a migrated database only if the database says so: its `compatible_from` is the
oldest version whose release can use it. A migration that only adds tables, indexes and columns with
a default or NULL leaves `schema.COMPATIBLE_FROM` as it is. Any other migration sets it to its own
version.

The tables of optional features are declared in `apps`, which this module must not import. These
tables are created by migrations only. A function that creates or changes such a table must also be
in `_APP_TABLES`.
"""

from collections.abc import Callable, Mapping

import sqlalchemy as sa
from alembic import op
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlmodel import SQLModel

from skyrl_tx.store.tables import AnswerCounterRow

VERSION = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), primary_key=True),
    sa.Column("compatible_from", sa.String(32)),
)


def create(connection: sa.Connection, head: str, compatible_from: str) -> None:
    """Create all tables in an empty database."""
    SQLModel.metadata.create_all(connection, checkfirst=False)
    with Operations.context(MigrationContext.configure(connection)):
        for migration in _APP_TABLES:
            migration()
    VERSION.create(connection)
    connection.execute(sa.insert(AnswerCounterRow))
    connection.execute(sa.insert(VERSION).values(version_num=head, compatible_from=compatible_from))


def migrate(connection: sa.Connection, version: str, head: str, compatible_from: str) -> None:
    """Run the migrations from `version` to `head`."""
    with Operations.context(MigrationContext.configure(connection)):
        for revision, migration in MIGRATIONS.items():
            if version < revision <= head:
                migration()
    connection.execute(sa.update(VERSION).values(version_num=head, compatible_from=compatible_from))


def _add_stability() -> None:
    """Add the recorded log-probabilities of sampled sequences."""
    op.create_table(
        "stability",
        sa.Column("sequence_id", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("prompt_length", sa.Integer, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
        sa.Column("last_used_at", sa.Float, nullable=False),
    )
    op.create_index("ix_stability_last_used_at", "stability", ["last_used_at"])


def _add_answer_order() -> None:
    """Add the completion order, cancellations, and copies of sampling clients."""
    op.create_table(
        "answer_counter",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    op.execute("INSERT INTO answer_counter (id, value) VALUES (1, 0)")
    op.add_column("requests", sa.Column("answer_order", sa.BigInteger))
    op.create_index("ix_requests_answers", "requests", ["answer_order"])
    op.create_index("ix_requests_sampling_session_answers", "requests", ["sampling_session_id", "answer_order"])

    op.create_table(
        "cancellations",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("request_id", sa.String, nullable=False),
        sqlite_autoincrement=True,
    )
    op.add_column("sampling_sessions", sa.Column("num_clones", sa.Integer, nullable=False, server_default="0"))


def _add_ephemeral_samplers() -> None:
    """Add the size of ephemeral samplers and whether they are in-flight."""
    op.add_column("sampling_sessions", sa.Column("size_bytes", sa.BigInteger))
    op.add_column("sampling_sessions", sa.Column("is_inflight", sa.Boolean, nullable=False, server_default=sa.false()))


def _add_keys() -> None:
    """Add API keys."""
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String, nullable=False, unique=True),
        sa.Column("hint", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("scope", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("note", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("revoked_at", sa.Float),
        sqlite_autoincrement=True,
    )


def _add_engine_load() -> None:
    """Add the memory load of the engine's queued sample requests."""
    op.add_column("engine_state", sa.Column("load", sa.JSON))


def _add_base_model_hash() -> None:
    """Add the hash of a model's base weights. It stays empty for existing models."""
    op.add_column("models", sa.Column("base_model_hash", sa.String, nullable=True))


def _add_pruned() -> None:
    """Add high-water marks of deleted requests, and checksums, which existing rows do not have."""
    op.create_table(
        "pruned",
        sa.Column("numbered_by", sa.String, primary_key=True),
        sa.Column("up_to", sa.BigInteger, nullable=False),
    )
    for name in ("body_crc", "result_crc"):
        op.add_column("requests", sa.Column(name, sa.BigInteger, nullable=True))
    is_pruned = sa.text("result IS NULL AND status <> 'open'")
    op.create_index(
        "ix_requests_pruned", "requests", ["fetched_at"], sqlite_where=is_pruned, postgresql_where=is_pruned
    )


def _add_identity() -> None:
    """Add the identity, deletion times, key expiry, crash counts and the engine's activity."""
    op.create_table(
        "identity",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("store_id", sa.String, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )

    # Deletion and expiry.
    for table in ("models", "checkpoints"):
        op.add_column(table, sa.Column("deleted_at", sa.Float))
        op.create_index(f"ix_{table}_deleted_at", table, ["deleted_at"])
    for name in ("expires_at", "last_used_at"):
        op.add_column("api_keys", sa.Column(name, sa.Float))

    # Crash counts of requests.
    op.add_column("requests", sa.Column("is_alone", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("requests", sa.Column("crashes", sa.Integer, nullable=False, server_default="0"))
    is_alone = sa.text("is_alone")
    op.create_index("ix_requests_alone", "requests", ["position"], sqlite_where=is_alone, postgresql_where=is_alone)
    op.create_index("ix_requests_session_id", "requests", ["session_id"])

    op.add_column("engine_state", sa.Column("activity", sa.String, nullable=False, server_default=""))
    op.add_column("engine_state", sa.Column("activity_since", sa.Float))


def _add_history() -> None:
    """Add curves, usage, kept samples, client metrics, notices and origins of checkpoints."""
    # Add columns to existing tables.
    op.add_column("sessions", sa.Column("key_id", sa.Integer))
    op.add_column("models", sa.Column("loaded_from", sa.String))
    op.add_column("models", sa.Column("num_steps", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("requests", sa.Column("started_at", sa.Float))
    op.add_column("requests", sa.Column("is_streamed", sa.Boolean, nullable=False, server_default=sa.false()))
    is_failed = sa.text("status = 'failed'")
    op.create_index("ix_requests_failed", "requests", ["position"], sqlite_where=is_failed, postgresql_where=is_failed)

    op.add_column("checkpoints", sa.Column("step", sa.BigInteger))
    op.add_column("checkpoints", sa.Column("copied_from", sa.String))
    op.create_index("ix_models_loaded_from", "models", ["loaded_from"])
    op.create_index("ix_checkpoints_copied_from", "checkpoints", ["copied_from"])
    op.add_column("sampling_sessions", sa.Column("step", sa.BigInteger))
    op.add_column("engine_state", sa.Column("meters", sa.JSON))

    # Create new tables.
    _add_kept_samples()
    _add_curves()
    _add_usage()
    _add_logged_runs()
    _create_core_tables("server_points", "partials", "notices")


def _create_core_tables(*names: str) -> None:
    """Create tables as `tables.py` declares them now.

    Before a later migration changes one of these tables, its original form must be written out
    here.
    """
    tables = [SQLModel.metadata.tables[name] for name in names]
    SQLModel.metadata.create_all(op.get_bind(), tables=tables, checkfirst=False)


def _add_kept_samples() -> None:
    """Add the samples that are kept for the console."""
    op.create_table(
        "kept_samples",
        # The sample request.
        sa.Column("sequence_id", sa.String, primary_key=True),
        sa.Column("request_id", sa.String, nullable=False),
        sa.Column("sample_index", sa.Integer, nullable=False),
        sa.Column("model_id", sa.String, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("num_bytes", sa.Integer, nullable=False),
        sa.Column("stop_reason", sa.String, nullable=False),
        # The training request, and the contents.
        sa.Column("trained_model_id", sa.String),
        sa.Column("trained_step", sa.BigInteger),
        sa.Column("advantage", sa.Float),
        sa.Column("kl", sa.Float),
        sa.Column("prompt", sa.LargeBinary, nullable=False),
        sa.Column("tokens", sa.LargeBinary, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_kept_samples_request_id", "kept_samples", ["request_id"])
    op.create_index("ix_kept_samples_model", "kept_samples", ["model_id", "step"])
    op.create_index("ix_kept_samples_at", "kept_samples", ["at"])


def _add_curves() -> None:
    """Add the points of the curves of runs, and sums over the samples of each step."""
    op.create_table(
        "run_points",
        sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("model_id", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("device_s", sa.Float, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("datums", sa.Integer, nullable=False),
        sa.Column("values", sa.Text, nullable=False),
    )
    op.create_index("ix_run_points_model", "run_points", ["model_id", "position", "step"])

    op.create_table(
        "sampled_steps",
        sa.Column("model_id", sa.String, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("owner", sa.String, primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("samples", "cut", "tokens", "scored_tokens")),
        sa.Column("logprob_sum", sa.Float, nullable=False),
    )


def _add_usage() -> None:
    """Add the usage by session, model and kind of work."""
    op.create_table(
        "usage",
        sa.Column("bucket_at", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("session_id", sa.String, primary_key=True),
        sa.Column("model_id", sa.String, primary_key=True),
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("device_s", sa.Float, nullable=False),
    )
    op.create_index("ix_usage_session_id", "usage", ["session_id"])
    is_fine = sa.text("bucket_at % 3600 <> 0")
    op.create_index("ix_usage_fine", "usage", ["bucket_at"], sqlite_where=is_fine, postgresql_where=is_fine)


def _add_logged_runs() -> None:
    """Add the metrics that clients log."""
    big_key = sa.BigInteger().with_variant(sa.Integer, "sqlite")

    op.create_table(
        "logged_runs",
        sa.Column("logged_run_id", big_key, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("owner", "project", "key", "name")),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("model_id", sa.String),
        # Whether the server still looks for the model of the run.
        sa.Column("seeks_model", sa.Boolean, nullable=False),
        sa.Column("num_points", sa.Integer, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("last_at", sa.Float, nullable=False),
        sa.UniqueConstraint("owner", "project", "key"),
        sqlite_autoincrement=True,
    )
    for name in ("model_id", "last_at"):
        op.create_index(f"ix_logged_runs_{name}", "logged_runs", [name])

    op.create_table(
        "logged_points",
        sa.Column("position", big_key, primary_key=True),
        sa.Column("logged_run_id", sa.BigInteger, nullable=False),
        sa.Column("log_id", sa.String, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("values", sa.JSON, nullable=False),
        sa.UniqueConstraint("logged_run_id", "log_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_logged_points_run", "logged_points", ["logged_run_id", "position"])


def _add_teams() -> None:
    """Add the storage of each hour and the audit log."""
    _add_storage_hours()
    _create_core_tables("audit")


def _add_storage_hours() -> None:
    """Add the storage of the checkpoints in each hour."""
    op.create_table(
        "storage_hours",
        sa.Column("hour_at", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("session_id", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
    )


def _add_quotas() -> None:
    """Add quotas and weights, and the pauses that engines publish."""
    op.create_table(
        "quotas",
        sa.Column("subject_kind", sa.String, primary_key=True),
        sa.Column("subject", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    op.add_column("engine_state", sa.Column("pauses", sa.JSON))


def _add_project_members() -> None:
    """Add the members of projects."""
    op.create_table(
        "project_members",
        sa.Column("project_id", sa.String, primary_key=True),
        sa.Column("owner", sa.String, primary_key=True),
        sa.Column("role", sa.String, nullable=False),
    )
    op.create_index("ix_project_members_owner", "project_members", ["owner"])


def _add_custom_losses() -> None:
    """Add the loss functions that clients upload."""
    op.create_table(
        "custom_losses",
        sa.Column("loss_id", sa.String, primary_key=True),
        sa.Column("session_id", sa.String, sa.ForeignKey("sessions.session_id"), nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("last_used_at", sa.Float, nullable=False),
    )
    for name in ("session_id", "owner", "last_used_at"):
        op.create_index(f"ix_custom_losses_{name}", "custom_losses", [name])


def _add_over() -> None:
    """Add whether work beyond a daily quota waits or fails."""
    op.add_column("quotas", sa.Column("over", sa.String, nullable=False, server_default="wait"))


def _add_engines() -> None:
    """Add engine numbers to models, requests and cancellations: engines can share a database."""
    op.execute("ALTER TABLE engine_state RENAME COLUMN id TO number")
    op.add_column("engine_state", sa.Column("host", sa.String, nullable=False, server_default=""))
    for table in ("models", "requests", "cancellations"):
        op.add_column(table, sa.Column("engine", sa.Integer, nullable=False, server_default="1"))
    op.add_column("requests", sa.Column("sampler_id", sa.String))


def _add_portions() -> None:
    """Add leases of quotas of concurrent work, which multiple engines shared. Removed in 0019."""
    op.create_table(
        "portions",
        sa.Column("engine", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("subject_kind", sa.String, primary_key=True),
        sa.Column("subject", sa.String, primary_key=True),
        sa.Column("num_held", sa.BigInteger, nullable=False),
        sa.Column("num_wanted", sa.BigInteger, nullable=False),
        sa.Column("waits_since", sa.Float, nullable=False),
    )


def _add_trainer_gap() -> None:
    """Add the gap between the log-probabilities of the sampler and the trainer for kept samples."""
    op.add_column("kept_samples", sa.Column("trainer_gap", sa.Float))


def _drop_portions() -> None:
    """Remove the leases of quotas of concurrent work. These quotas no longer exist."""
    op.drop_table("portions")


def _add_parents() -> None:
    """Add the key that created a key. Keys of earlier releases have none."""
    op.add_column("api_keys", sa.Column("parent_id", sa.Integer))


def _add_compatible_from() -> None:
    """Add the oldest version whose release can use the database."""
    op.add_column("alembic_version", sa.Column("compatible_from", sa.String(32)))


_APP_TABLES = (_add_kept_samples, _add_curves, _add_usage, _add_logged_runs, _add_storage_hours, _add_trainer_gap)
"""Functions that create the tables of optional features in a new database, in order of revision."""
MIGRATIONS: Mapping[str, Callable[[], None]] = {
    "0002": _add_stability,
    "0003": _add_answer_order,
    "0004": _add_ephemeral_samplers,
    "0005": _add_keys,
    "0006": _add_engine_load,
    "0007": _add_base_model_hash,
    "0008": _add_pruned,
    "0009": _add_identity,
    "0010": _add_history,
    "0011": _add_teams,
    "0012": _add_quotas,
    "0013": _add_project_members,
    "0014": _add_custom_losses,
    "0015": _add_over,
    "0016": _add_engines,
    "0017": _add_portions,
    "0018": _add_trainer_gap,
    "0019": _drop_portions,
    "0020": _add_parents,
    "0021": _add_compatible_from,
}
