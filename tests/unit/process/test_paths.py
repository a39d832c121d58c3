import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_tx.process import paths
from skyrl_tx.process.paths import explain_os_error, get_home
from tests.support.denied import deny_directory


def test_a_deny_directory_is_named_with_owner_and_mode() -> None:
    with deny_directory("config.json") as (directory, reason):
        file = directory / "config.json"
        with pytest.raises(PermissionError) as raised:
            file.read_text()
        assert explain_os_error(raised.value) == f"{file}: {directory} {reason}"
        assert explain_os_error(raised.value, directory) == f"{directory}: {reason}"
        with pytest.raises(PermissionError) as raised:
            (directory / "new").mkdir()
        assert explain_os_error(raised.value) == f"{directory / 'new'}: {directory} {reason}"


def test_a_file_in_place_of_a_directory_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below" / "it"):
        with pytest.raises(OSError) as raised:
            path.mkdir(parents=True)
        assert explain_os_error(raised.value).endswith(f": {file} is a file, not a directory")


def test_other_errors_keep_their_text() -> None:
    assert explain_os_error(OSError(errno.ENOSPC, "No space left on device", "/data/x")) == (
        "/data/x: No space left on device"
    )
    assert explain_os_error(OSError("the hub\nfailed")) == "the hub failed"


def test_an_unknown_user_lives_at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(fail))
    assert get_home() == Path("/")
    monkeypatch.setattr(paths.pwd, "getpwuid", {}.__getitem__)
    assert "belongs to user" in paths.describe_owner(Path("/")) or os.geteuid() == 0


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_has_access", lambda path, needed: not needed & os.W_OK)
    monkeypatch.setattr(paths.os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    error = OSError(errno.EROFS, "Read-only file system", str(tmp_path / "new"))
    assert explain_os_error(error) == (
        f"{tmp_path / 'new'}: {tmp_path} is on a file system that is mounted read-only: use a directory that can be "
        "written"
    )
