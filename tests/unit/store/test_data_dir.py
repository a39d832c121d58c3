"""A data directory belongs to one database and to one user."""

import logging
import os
import stat
from pathlib import Path

import pytest

from skyrl_tx.store import StoreError
from skyrl_tx.store.database import Store


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


def get_mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_files(directory: Path) -> dict[str, int]:
    """Return the modes of entries that other users can access.

    Sockets are skipped, because connecting needs write access, which other users do not have.
    """
    return {
        path.name: get_mode(path) for path in directory.iterdir() if get_mode(path) & 0o077 and not path.is_socket()
    }


@pytest.fixture
def _usual_umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_usual_umask")
def test_files_of_a_new_data_directory_are_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store.open(tmp_path / "data", role="api")
    assert get_mode(tmp_path / "data") == 0o700 and open_files(tmp_path / "data") == {}
    assert (tmp_path / "data" / "skyrl_tx.db-wal").exists()
    store.close()
    assert caplog.text == ""


@pytest.mark.usefixtures("_usual_umask")
def test_files_of_a_new_directory_of_a_database_on_a_server_are_private(
    tmp_path: Path, postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # the second store would warn about the files of the first
        Store.open(tmp_path / "data", role="api", url=postgresql_url).close()
        assert open_files(tmp_path / "data") == {}
    assert caplog.text == ""


@pytest.mark.usefixtures("_usual_umask")
def test_existing_data_directory_is_made_private_with_its_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o755)
    with_log = Store.open(data_dir, role="engine")  # an open connection keeps the write-ahead log
    for name in ("skyrl_tx.db", "skyrl_tx.db-wal", "skyrl_tx.db-shm", "schema.lock"):
        (data_dir / name).chmod(0o644)
    data_dir.chmod(0o755)
    caplog.clear()
    Store.open(data_dir, role="api").close()
    with_log.close()
    assert get_mode(data_dir) == 0o700 and open_files(data_dir) == {}
    (warning,) = caplog.messages
    assert f"{data_dir} (mode 0755)" in warning and "skyrl_tx.db-wal (mode 0644)" in warning


@pytest.mark.usefixtures("_usual_umask")
def test_database_elsewhere_is_private_and_its_directory_unchanged(tmp_path: Path) -> None:
    elsewhere = tmp_path / "shared"
    elsewhere.mkdir(mode=0o755)
    Store.open(tmp_path / "data", role="api", url=f"sqlite:///{elsewhere / 'tx.db'}").close()
    assert get_mode(elsewhere) == 0o755 and get_mode(elsewhere / "tx.db") == 0o600


@pytest.mark.usefixtures("_usual_umask")
@pytest.mark.parametrize("is_sticky", [True, False])
def test_shared_directory_keeps_its_mode_and_a_warning_names_it(
    tmp_path: Path, is_sticky: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The mode of a directory with another owner cannot be changed, but the files in it are private."""
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    data_dir.chmod(0o1777 if is_sticky else 0o777)
    if not is_sticky:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with caplog.at_level(logging.WARNING):
        Store.open(data_dir, role="api").close()
    assert get_mode(data_dir) & 0o777 == 0o777 and open_files(data_dir) == {}
    assert f"other users have access to {data_dir}" in caplog.text
