import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text
from sqlmodel import SQLModel

from skyrl_tx.store import schema
from skyrl_tx.store.database import Store, StoreError

OPEN_TWICE = """
import sys
from pathlib import Path
from skyrl_tx.store.database import Store
for _ in range(2):
    Store.open(Path(sys.argv[1]), role="api").close()
    print("alembic" in sys.modules)
    for name in [name for name in sys.modules if name.startswith("alembic")]:
        del sys.modules[name]
"""


def test_the_migrations_make_the_tables_that_the_code_expects(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'new.db'}")
    schema.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, SQLModel.metadata) == []
    engine.dispose()


def test_head_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).with_name("migrations")))
    assert ScriptDirectory.from_config(config).get_heads() == [schema.HEAD]


def test_a_database_that_is_up_to_date_opens_without_alembic(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", OPEN_TWICE, tmp_path], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["True", "False"]


def test_a_database_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    Store.open(tmp_path, role="api").close()
    engine = create_engine(f"sqlite:///{tmp_path / 'skyrl_tx.db'}")
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(StoreError, match=r"skyrl_tx\.db has schema version '9999'.*0001.*newer release"):
        Store.open(tmp_path, role="api")


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'skyrl_tx.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE engine_state (id INTEGER)"))  # the last that the baseline makes
    with pytest.raises(StoreError, match="engine_state already exists"):
        Store.open(tmp_path, role="api")
    assert inspect(engine).get_table_names() == ["engine_state"]
    engine.dispose()


def test_a_database_of_the_first_release_is_brought_up_to_date(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'skyrl_tx.db'}")
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).with_name("migrations")))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.execute(text("INSERT INTO snapshots VALUES ('run', 'art', 7, 1.0)"))
    Store.open(tmp_path, role="api").close()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT effect_order FROM snapshots")).scalar_one() == 7
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == schema.HEAD
        assert compare_metadata(MigrationContext.configure(connection), SQLModel.metadata) == []
    engine.dispose()
