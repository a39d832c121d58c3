"""`skyrl-tx status --stacks` finds the processes of a data directory."""

import os
from pathlib import Path

import pytest

from skyrl_tx.tools.commands.status import find_process


def test_the_process_that_has_the_lock_file_open_holds_it(tmp_path: Path) -> None:
    lock = tmp_path / "api.lock"
    assert find_process(lock) is None
    lock.write_text(str(os.getpid()))
    assert find_process(lock) is None, "the number may be that of another process since"
    with lock.open():
        assert find_process(lock) == os.getpid()


def test_a_descriptor_that_is_closed_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server constantly opens and closes connections."""
    lock, closed, readlink = tmp_path / "api.lock", [], Path.readlink

    def readlink_or_closed(path: Path) -> Path:
        if not closed:
            closed.append(path)
            raise FileNotFoundError(path)
        return readlink(path)

    lock.write_text(str(os.getpid()))
    monkeypatch.setattr(Path, "readlink", readlink_or_closed)
    with lock.open():
        assert find_process(lock) == os.getpid()
    assert closed
