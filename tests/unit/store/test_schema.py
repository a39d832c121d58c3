import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text

from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.store import SchemaOutdated, StoreError, StoreInUse, futures, models, schema, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.dialect import PEER, Role, lock_role
from tests.support import old_schemas

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


@pytest.mark.parametrize("is_new", [True, False])
def test_migrations_create_the_tables_of_the_code(tmp_path: Path, is_new: bool) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'new.db'}")
    if not is_new:
        with engine.begin() as connection:
            old_schemas.create(connection, "0001")
    schema.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, old_schemas.ALL_TABLES) == []
        assert connection.execute(text("SELECT * FROM answer_counter")).all() == [(1, 0)]
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == schema.HEAD
    engine.dispose()


def test_head_is_the_newest_migration() -> None:
    assert [*schema.MIGRATIONS] == revisions()[1:]


def test_a_current_database_opens_without_alembic(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", OPEN_TWICE, tmp_path], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["True", "False"]


def test_a_database_of_a_newer_release_is_refused_unchanged(tmp_path: Path) -> None:
    Store.open(tmp_path, role="api").close()
    engine = create_engine(f"sqlite:///{tmp_path / 'skyrl_tx.db'}")
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999', compatible_from = '9998'"))
    engine.dispose()
    with pytest.raises(StoreError, match=r"skyrl_tx\.db has schema version '9999'.*0001.*newer release"):
        Store.open(tmp_path, role="api")


def test_this_release_continues_on_a_compatible_database_of_the_next_one(tmp_path: Path, monkeypatch) -> None:
    write_old_database(tmp_path / "skyrl_tx.db", schema.HEAD)
    with monkeypatch.context() as patched:
        old_schemas.use_next_release(patched)
        Store.open(tmp_path, role="api").close()
        version = schema.HEAD
    assert version > schema.HEAD

    with closing(Store.open(tmp_path, role="api")) as api, closing(Store.open(tmp_path, role="engine")) as engine:
        session_id = api.write(lambda tx: sessions.create(tx, owner="ann", now=1.0))
        new = futures.NewRequest(key="", kind="sample", owner="ann", session_id=session_id, body=b"b")
        submitted = api.write(lambda tx: futures.submit(tx, new, 5.0))
        engine.write(
            lambda tx: futures.complete(tx, submitted.request_id, b"answer", failed=False, effect_order=None, now=6.0)
        )
    with closing(Store.open(tmp_path, role="tool", creates=False)) as tool:
        found = tool.read(lambda tx: tx.connection().execute(text("SELECT priority FROM requests ORDER BY position")))
        assert found.scalars().all() == [5, 5, 5]
        assert tool.read(lambda tx: schema.read_schema(tx.connection())).version == version, "not migrated back"


def test_a_database_that_is_not_compatible_with_this_release_is_refused(tmp_path: Path, monkeypatch) -> None:
    Store.open(tmp_path, role="api").close()
    with monkeypatch.context() as patched:
        old_schemas.use_next_release(patched, compatible_from=f"{int(schema.HEAD) + 1:04}")
        Store.open(tmp_path, role="api").close()
    with pytest.raises(StoreError, match=r"run the newer release that wrote it"):
        Store.open(tmp_path, role="tool")


def test_only_a_server_migrates(tmp_path: Path) -> None:
    write_old_database(tmp_path / "skyrl_tx.db", "0017")
    with pytest.raises(
        SchemaOutdated, match=r"version '0017' of an older release: run the release .* start the server"
    ):
        Store.open(tmp_path, role="tool")
    with closing(Store.open(tmp_path, role="tool", accepts_older=True)) as tool:
        assert tool.is_older and tool.read(lambda tx: schema.read_schema(tx.connection())).version == "0017"
    with closing(Store.open(tmp_path, role="engine")) as engine:
        assert engine.read(lambda tx: schema.read_schema(tx.connection())) == schema.Schema(
            schema.HEAD, schema.COMPATIBLE_FROM
        )


@pytest.mark.parametrize("role", ["api", "engine"])
def test_a_server_does_not_migrate_while_another_one_runs(tmp_path: Path, role: Role, monkeypatch) -> None:
    monkeypatch.setattr(schema, "_SERVERS_END_S", 0.0)
    write_old_database(tmp_path / "skyrl_tx.db", "0017")
    with lock_role(tmp_path, PEER[role]), pytest.raises(StoreInUse, match=rf"its {PEER[role]} runs as .*stop all"):
        Store.open(tmp_path, role=role)
    with pytest.raises(SchemaOutdated):
        Store.open(tmp_path, role="tool")
    Store.open(tmp_path, role=role).close()


def test_a_command_creates_no_tables_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "skyrl_tx.db").touch()
    with pytest.raises(StoreError, match="is empty: no server has stored anything there"):
        Store.open(tmp_path, role="tool", creates=False)
    Store.open(tmp_path, role="tool").close()
    Store.open(tmp_path, role="tool", creates=False).close()


def test_a_failed_migration_rolls_back(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'skyrl_tx.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE VIEW sampling_sessions AS SELECT 1"))  # the last table in the schema
    with pytest.raises(StoreError, match="sampling_sessions already exists"):
        Store.open(tmp_path, role="api")
    assert inspect(engine).get_table_names() == []
    assert inspect(engine).get_view_names() == ["sampling_sessions"]
    engine.dispose()


@pytest.mark.parametrize("statement", ["CREATE TABLE songs (id INTEGER)", "CREATE TABLE alembic_version (version_num)"])
def test_a_database_of_another_program_is_refused_unchanged(tmp_path: Path, statement: str) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'skyrl_tx.db'}")
    with engine.begin() as connection:
        connection.execute(text(statement))
    tables = inspect(engine).get_table_names()
    with pytest.raises(StoreError, match=rf"skyrl_tx\.db belongs to another program: .* {tables[0]}; choose another"):
        Store.open(tmp_path, role="api")
    assert inspect(engine).get_table_names() == tables
    engine.dispose()


OLD_ROWS = (
    """INSERT INTO sessions (session_id, owner, tags, user_metadata, created_at, last_heartbeat_at)
       VALUES ('session-1', 'ann', '[]', '{}', 1.0, 1.0)""",
    """INSERT INTO models (model_id, session_id, base_model, spec, status, created_at, last_request_at, effect_order)
       VALUES ('session-1:train:0', 'session-1', 'base', x'00', 'ready', 1.0, 1.0, 7)""",
    "INSERT INTO snapshots VALUES ('session-1:train:0', 'art', 6, 1.0)",
    """INSERT INTO requests (request_id, kind, owner, session_id, model_id, seq_id, body, digest, status, effect_order,
                             attempts, result, created_at, completed_at)
       VALUES ('req-1', 'optim_step', 'ann', 'session-1', 'session-1:train:0', 1, x'01', x'02', 'done', 7, 0, x'03',
               1.0, 2.0),
              ('req-2', 'optim_step', 'ann', 'session-1', 'session-1:train:0', 2, x'04', x'05', 'open', NULL, 1, NULL,
               3.0, NULL)""",
)


def write_old_database(path: Path, revision: str) -> None:
    """Write a data directory with an earlier schema, one completed request and one open request."""
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        old_schemas.create(connection, revision)
        for statement in OLD_ROWS:
            connection.execute(text(statement))
    engine.dispose()


def revisions() -> list[str]:
    return [f"{number:04}" for number in range(1, int(schema.HEAD) + 1)]


@pytest.mark.parametrize("revision", revisions())
def test_a_database_of_any_earlier_release_opens_with_its_data(tmp_path: Path, revision: str) -> None:
    write_old_database(tmp_path / "skyrl_tx.db", revision)
    store = Store.open(tmp_path, role="engine")
    model_id = ModelId("session-1:train:0")
    assert store.read(lambda tx: futures.get_state(tx, RequestId("req-1"), "ann")).result == b"\x03"

    (waiting,) = store.read(lambda tx: futures.list_pending(tx, 0, 10))
    assert (waiting.request_id, waiting.body, waiting.attempts) == ("req-2", b"\x04", 1)
    assert [effect.request_id for effect in store.read(lambda tx: futures.read_log(tx, model_id, 6))] == ["req-1"]

    snapshot = store.read(lambda tx: models.get_snapshot(tx, model_id))
    assert snapshot is not None and (snapshot.artifact_id, snapshot.effect_order) == ("art", 6)

    effect = store.write(
        lambda tx: futures.complete(tx, RequestId("req-2"), b"answer", failed=False, effect_order=8, now=4.0)
    )
    assert effect

    store.close()
    engine = create_engine(f"sqlite:///{tmp_path / 'skyrl_tx.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), old_schemas.ALL_TABLES) == []
    engine.dispose()


def test_a_database_of_the_first_release_is_upgraded(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'skyrl_tx.db'}")
    with engine.begin() as connection:
        old_schemas.create(connection, "0001")
        connection.execute(text("INSERT INTO snapshots VALUES ('run', 'art', 7, 1.0)"))
    Store.open(tmp_path, role="api").close()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT effect_order FROM snapshots")).scalar_one() == 7
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == schema.HEAD
        assert compare_metadata(MigrationContext.configure(connection), old_schemas.ALL_TABLES) == []
    engine.dispose()
