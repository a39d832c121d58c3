"""Which schema a database has, and bringing it to ours.

To change the schema: change `tables.py`, add `migrations/versions/v0002_….py` that does the same to what exists, and
raise HEAD. A test compares the two.
"""

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from skyrl_tx.store.errors import StoreError

HEAD = "0008"
"""The newest revision in `migrations`; kept here so that an up-to-date database opens without alembic's 0.3 s."""


def upgrade(engine: Engine) -> None:
    """Bring the database to HEAD, in one transaction.

    Raises StoreError for one that a newer release or another program wrote.
    """
    with engine.begin() as connection:
        version = _version(connection)
        if version != HEAD:
            _migrate(connection, version)


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _refuse_foreign(connection: Connection) -> None:
    tables = inspect(connection).get_table_names()
    if tables and not {"alembic_version", "sessions", "requests"} <= set(tables):
        raise StoreError(
            f"database {connection.engine.url.database} belongs to another program: it has the tables "
            f"{', '.join(tables[:5])}; choose another data directory"
        )


def _migrate(connection: Connection, version: str | None) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    _refuse_foreign(connection)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = [revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()]
    if version is not None and version not in known:
        raise StoreError(
            f"database {connection.engine.url.database} has schema version {version!r}, this release knows "
            f"{', '.join(known)}: a newer release wrote it; run that one, or choose another data directory"
        )
    command.upgrade(config, "head")
