"""All tables of the code, and databases with the schema of an earlier or a later release."""

import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlmodel import SQLModel

from skyrl_tx.apps.history import kept_samples, logged_metrics, points
from skyrl_tx.apps.teams import usage
from skyrl_tx.store import schema
from skyrl_tx.store.tables import AppTable

assert kept_samples and logged_metrics and points and usage  # their import declares the tables of features
ALL_TABLES = [SQLModel.metadata, AppTable.metadata]


def create(connection: sa.Connection, revision: str) -> None:
    """Create the tables of the first release, and migrate them up to a revision."""
    op = Operations(MigrationContext.configure(connection))
    _create_first(op)
    version = sa.Table("alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))
    version.create(connection)
    connection.execute(sa.insert(version).values(version_num="0001"))
    for number, migration in schema.MIGRATIONS.items():
        if number <= revision:
            migration(op)
    connection.execute(sa.update(version).values(version_num=revision))


def use_next_release(monkeypatch: pytest.MonkeyPatch, compatible_from: str = schema.COMPATIBLE_FROM) -> None:
    """Act as the next release, whose migration adds a column, a table and an index."""

    def add_next(op: Operations) -> None:
        op.add_column("requests", sa.Column("priority", sa.Integer, nullable=False, server_default="5"))
        op.create_table("next_things", sa.Column("thing_id", sa.Integer, primary_key=True))
        op.create_index("ix_requests_priority", "requests", ["priority"])

    following = f"{int(schema.HEAD) + 1:04}"
    monkeypatch.setattr(schema, "MIGRATIONS", {**schema.MIGRATIONS, following: add_next})
    monkeypatch.setattr(schema, "HEAD", following)
    monkeypatch.setattr(schema, "COMPATIBLE_FROM", compatible_from)


def _create_partial_index(op: Operations, name: str, column: str, where: str) -> None:
    op.create_index(name, "requests", [column], sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def _create_first(op: Operations) -> None:
    """Create the tables of the first release."""
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("project_id", sa.String),
        sa.Column("display_name", sa.String),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("user_metadata", sa.JSON, nullable=False),
        sa.Column("sdk_version", sa.String),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("last_heartbeat_at", sa.Float, nullable=False),
        sa.Column("finished_at", sa.Float),
        sa.Column("finish_reason", sa.String),
    )
    op.create_index("ix_sessions_owner", "sessions", ["owner"])
    op.create_table(
        "models",
        sa.Column("model_id", sa.String, primary_key=True),
        sa.Column("session_id", sa.String, sa.ForeignKey("sessions.session_id"), nullable=False),
        sa.Column("base_model", sa.String, nullable=False),
        sa.Column("spec", sa.LargeBinary, nullable=False),
        sa.Column("user_metadata", sa.JSON),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("last_request_at", sa.Float, nullable=False),
        sa.Column("effect_order", sa.Integer, nullable=False),
        sa.Column("poisoned_by", sa.String),
    )
    op.create_index("ix_models_session_id", "models", ["session_id"])
    op.create_table(
        "requests",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("request_id", sa.String, nullable=False, unique=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("session_id", sa.String, sa.ForeignKey("sessions.session_id"), nullable=False),
        sa.Column("model_id", sa.String),
        sa.Column("seq_id", sa.BigInteger),
        sa.Column("sampling_session_id", sa.String),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("effect_order", sa.Integer),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("result", sa.LargeBinary),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("completed_at", sa.Float),
        sa.Column("fetched_at", sa.Float),
        sqlite_autoincrement=True,
    )
    _create_partial_index(op, "ix_requests_open", "position", "status = 'open'")
    op.create_index("ix_requests_model_effect", "requests", ["model_id", "effect_order"])
    _create_partial_index(op, "ix_requests_loads", "position", "kind = 'load_weights'")
    _create_partial_index(op, "ix_requests_prunable", "fetched_at", "result IS NOT NULL")
    op.create_table(
        "sampling_sessions",
        sa.Column("sampling_session_id", sa.String, primary_key=True),
        sa.Column("session_id", sa.String, sa.ForeignKey("sessions.session_id"), nullable=False),
        sa.Column("base_model", sa.String, nullable=False),
        sa.Column("model_path", sa.String),
        sa.Column("sampler_id", sa.String),
        sa.Column("model_id", sa.String),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("last_used_at", sa.Float, nullable=False),
        sa.Column("request_id", sa.String),
    )
    op.create_index("ix_sampling_sessions_session_id", "sampling_sessions", ["session_id"])
    op.create_index("ix_sampling_sessions_model_id", "sampling_sessions", ["model_id"])
    op.create_table(
        "checkpoints",
        sa.Column("model_id", sa.String, primary_key=True),
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("artifact_id", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("public", sa.Boolean, nullable=False),
        sa.Column("user_metadata", sa.JSON),
    )
    op.create_index("ix_checkpoints_expires_at", "checkpoints", ["expires_at"])
    op.create_table(
        "snapshots",
        sa.Column("model_id", sa.String, primary_key=True),
        sa.Column("artifact_id", sa.String, nullable=False),
        sa.Column("effect_order", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "engine_state",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("boot_id", sa.String, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("capabilities", sa.JSON, nullable=False),
        sa.Column("base_models", sa.JSON, nullable=False),
        sa.Column("detail", sa.String, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
    )
