"""Weights are collected by what a database knows of them, so a data directory is served with its own database only."""

from pathlib import Path

import pytest

from skyrl_tx.store.database import Store, StoreError


def elsewhere(tmp_path: Path, name: str) -> str:
    return f"sqlite:///{tmp_path / name}"


def open_and_close(data_dir: Path, url: str | None) -> None:
    Store.open(data_dir, role="api", url=url).close()


def test_a_directory_with_a_database_of_its_own_takes_no_other(tmp_path: Path) -> None:
    open_and_close(tmp_path / "data", None)
    with pytest.raises(StoreError, match=r"has a database of its own, skyrl_tx\.db"):
        open_and_close(tmp_path / "data", elsewhere(tmp_path, "other.db"))
    open_and_close(tmp_path / "data", None)


def test_a_directory_of_another_database_is_not_opened_without_its_name(tmp_path: Path) -> None:
    url = elsewhere(tmp_path, "other.db")
    open_and_close(tmp_path / "data", url)
    open_and_close(tmp_path / "data", url)
    with pytest.raises(StoreError, match=r"belongs to the database sqlite:///.*other\.db: name it by --database-url"):
        open_and_close(tmp_path / "data", None)
    assert not (tmp_path / "data" / "skyrl_tx.db").exists()


def test_one_directory_is_not_served_with_two_databases(tmp_path: Path) -> None:
    open_and_close(tmp_path / "data", elsewhere(tmp_path, "one.db"))
    with pytest.raises(StoreError, match=r"one\.db, not sqlite:.*two\.db.*remove .*/data/database"):
        open_and_close(tmp_path / "data", elsewhere(tmp_path, "two.db"))
    assert not (tmp_path / "two.db").exists()
    (tmp_path / "data" / "database").unlink()
    open_and_close(tmp_path / "data", elsewhere(tmp_path, "two.db"))


def test_what_is_noted_of_a_database_holds_no_secret(tmp_path: Path, postgresql_url: str) -> None:
    open_and_close(tmp_path, postgresql_url)
    assert "@" not in (tmp_path / "database").read_text()
