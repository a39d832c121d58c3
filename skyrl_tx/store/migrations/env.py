"""How alembic runs our migrations: always on a connection, and in a transaction, that `schema.upgrade` made."""

from alembic import context
from sqlmodel import SQLModel

from skyrl_tx.store import tables

assert tables.SessionRow.metadata is SQLModel.metadata
context.configure(
    connection=context.config.attributes["connection"], target_metadata=SQLModel.metadata, render_as_batch=True
)
context.run_migrations()
