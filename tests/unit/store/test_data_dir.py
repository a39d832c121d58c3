"""A data directory belongs to one database, because other databases do not know its weights."""

from pathlib import Path

import pytest

from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError


def other_url(tmp_path: Path, name: str) -> str:
    return f"sqlite:///{tmp_path / name}"


def open_and_close(data_dir: Path, url: str | None) -> None:
    Store.open(data_dir, role="api", url=url).close()


def test_a_directory_with_its_own_database_refuses_another(tmp_path: Path) -> None:
    open_and_close(tmp_path / "data", None)
    with pytest.raises(StoreError, match=r"belongs to the database skyrl_tx\.db in it"):
        open_and_close(tmp_path / "data", other_url(tmp_path, "other.db"))
    open_and_close(tmp_path / "data", None)


def test_a_directory_of_an_external_database_requires_its_url(tmp_path: Path) -> None:
    url = other_url(tmp_path, "other.db")
    open_and_close(tmp_path / "data", url)
    open_and_close(tmp_path / "data", url)
    with pytest.raises(StoreError, match=r"belongs to the database sqlite:///.*other\.db: name it with --database-url"):
        open_and_close(tmp_path / "data", None)
    assert not (tmp_path / "data" / "skyrl_tx.db").exists()


def test_a_directory_refuses_a_second_external_database(tmp_path: Path) -> None:
    open_and_close(tmp_path / "data", other_url(tmp_path, "one.db"))
    with pytest.raises(StoreError, match=r"one\.db, not sqlite:.*two\.db.*remove .*/data/database"):
        open_and_close(tmp_path / "data", other_url(tmp_path, "two.db"))
    assert not (tmp_path / "two.db").exists()
    (tmp_path / "data" / "database").unlink()
    open_and_close(tmp_path / "data", other_url(tmp_path, "two.db"))


def test_the_recorded_database_name_holds_no_secret(tmp_path: Path, postgresql_url: str) -> None:
    open_and_close(tmp_path, postgresql_url)
    assert "@" not in (tmp_path / "database").read_text()


def test_a_tool_that_reads_records_no_database(tmp_path: Path) -> None:
    """The tool may have the URL of another database, for example from its environment."""
    url = other_url(tmp_path, "other.db")
    open_and_close(tmp_path / "data", url)
    (tmp_path / "data" / "database").unlink()
    Store.open(tmp_path / "data", role="tool", url=url, creates=False).close()
    assert not (tmp_path / "data" / "database").exists()
