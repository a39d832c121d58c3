"""Database checks, which do not change the database."""

import hashlib
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from skyrl_tx.store import keys
from skyrl_tx.store.database import Store
from skyrl_tx.store.schema import HEAD
from skyrl_tx.tools.doctor import database
from skyrl_tx.tools.doctor.findings import Finding
from tests.support import old_schemas
from tests.support.postgresql_server import PASSWORD


def problems(subject) -> list[Finding]:
    return [finding for finding in database.check_database(subject) if finding.level != "ok"]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Make a data directory with a database of this release."""
    Store.open(tmp_path / "data", role="tool").close()
    return tmp_path / "data"


def test_none_is_fine_unless_it_was_lost(subject, tmp_path) -> None:
    assert problems(subject()) == [] and not database.is_current(subject().settings)
    assert not (tmp_path / "data").exists()
    (tmp_path / "data" / "artifacts" / "art-0").mkdir(parents=True)
    (found,) = problems(subject())
    assert found.level == "error" and "has weights but no database" in found.message


def test_a_current_one_is_fine(subject, data_dir) -> None:
    assert problems(subject()) == [] and database.is_current(subject().settings)
    shown = [finding.message for finding in database.check_database(subject(pids={"engine": 5}))]
    assert "the engine is running as process 5" in shown and any("SQLite" in text for text in shown)


@pytest.mark.parametrize(("version", "level", "text"), [("0004", "warning", "migrates"), ("9999", "error", "newer")])
def test_other_schemas_are_named_and_not_migrated(subject, tmp_path, version: str, level: str, text: str) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "skyrl_tx.db"
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        old_schemas.create(connection, "0004")
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :version"), {"version": version})
    engine.dispose()
    before = digest(path)
    (found,) = problems(subject())
    assert found.level == level and text in found.message and not database.is_current(subject().settings)
    assert digest(path) == before


def test_what_is_no_database(subject, data_dir) -> None:
    (data_dir / "skyrl_tx.db").write_bytes(b"no database" * 1000)
    (found,) = problems(subject())
    assert found.level == "error" and "not a database" in found.message


def test_a_long_write_ahead_log(subject, data_dir, monkeypatch) -> None:
    monkeypatch.setattr(database, "_LARGE_WAL_BYTES", 0)
    with closing(sqlite3.connect(data_dir / "skyrl_tx.db")) as reader:
        reader.execute("CREATE TABLE t (x)")
        reader.commit()
        (found,) = problems(subject())
    assert "write-ahead log" in found.message


def test_access(subject, data_dir) -> None:
    def check_levels(*flags: str) -> list[str]:
        with closing(Store.open(data_dir, role="tool")) as store:
            return [finding.level for finding in database.check_access(subject(*flags).settings, store)]

    public = ("--host", "0.0.0.0", "--trusted-proxies", "10.0.0.1")
    assert check_levels() == [] and check_levels(*public) == ["error"]
    assert check_levels(*public, "--no-auth") == ["warning"]
    with closing(Store.open(data_dir, role="tool")) as store:
        store.write(lambda tx: keys.create(tx, owner="ann", scope="user", name="", note="", now=time.time()))
    assert check_levels(*public) == ["ok"]
    assert check_levels("--host", "0.0.0.0") == ["ok", "warning"], "without TLS"


def test_keys_of_a_database_that_cannot_be_opened_are_not_known(subject, data_dir) -> None:
    settings = subject("--host", "0.0.0.0", "--trusted-proxies", "10.0.0.1").settings
    (data_dir / "skyrl_tx.db").unlink(missing_ok=True)
    assert "there are no API keys" in next(database.check_access(settings, None)).message
    (data_dir / "skyrl_tx.db").touch()
    (found,) = database.check_access(settings, None)
    assert found.level == "warning" and "its keys are not known" in found.message


def test_postgresql(subject, postgresql_url, monkeypatch, tmp_path) -> None:
    flags = ("--database-url", postgresql_url)
    Store.open(tmp_path / "data", role="tool", url=postgresql_url).close()
    monkeypatch.setattr(database.shutil, "which", lambda _: "/usr/bin/pg_dump")
    findings = list(database.check_database(subject(*flags)))
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert f"schema {HEAD} is current" in findings[-1].message and "PostgreSQL" in findings[0].message
    assert database.is_current(subject(*flags).settings)
    monkeypatch.setattr(database.shutil, "which", lambda _: None)
    monkeypatch.setattr(database, "_SLOW_ROUND_TRIP_S", 0.0)
    monkeypatch.setattr(database.time, "time", lambda: 1e9)
    shown = "\n".join(finding.message for finding in problems(subject(*flags)))
    assert "pg_dump is not installed" in shown and "a query takes" in shown and "its clock differs" in shown
    assert PASSWORD not in shown


def test_unreachable_postgresql(subject, tmp_path) -> None:
    url = f"postgresql://skyrl:{PASSWORD}@/d?host={tmp_path}"
    (found,) = problems(subject("--database-url", url))
    assert found.level == "error" and "cannot be read" in found.message and PASSWORD not in str(found)
    (found,) = problems(subject("--database-url", "no url"))
    assert found.level == "error"
