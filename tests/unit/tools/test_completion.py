"""Shell completion of commands, flags, choices and paths, in the installed shells."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyrl_tx.tools.cli import COMMANDS, main

SHELLS = ("bash", "zsh", "fish")
needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
needs_fish = pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")

CASES = [
    ("st", {"status"}),
    ("keys create --sc", {"--scope"}),
    ("keys create --scope ", {"admin", "user", "sample", "read", "metrics"}),
    ("serve --backend-config.mesh.t", {"--backend-config.mesh.tp"}),
    ("serve --backend fake --backend-config.vo", {"--backend-config.vocab-size"}),
    ("plan --dev", {"--device"}),
    ("completion ", {*SHELLS, "-h", "--help"}),
    ("backup dir", {"directory"}),
]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a directory with the completion scripts, a `skyrl-tx` command of this tree, and a subdirectory."""
    program = tmp_path / "bin" / "skyrl-tx"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m skyrl_tx "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in SHELLS:
        assert main(["completion", name]) == 0
        (tmp_path / f"script.{name}").write_text(capsys.readouterr().out)
    (tmp_path / "directory").mkdir()
    return tmp_path


def complete_in_bash(directory: Path, line: str) -> set[str]:
    """Return the completions that bash offers at the end of a line."""
    program = (
        "source script.bash; COMP_LINE=$1; COMP_POINT=${#1}; COMP_TYPE=9; "
        '_python_argcomplete skyrl-tx; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", f"skyrl-tx {line}"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return {word.rstrip("/") for word in done.stdout.split()}


@pytest.mark.parametrize(("line", "offered"), [*CASES, ("", {*COMMANDS, "-h", "--help"})])
def test_bash_completes(shell: Path, line: str, offered: set[str]) -> None:
    assert complete_in_bash(shell, line) == offered


@needs_fish
@pytest.mark.parametrize(
    ("line", "offered"),
    [pytest.param(*case, marks=pytest.mark.slow if place else ()) for place, case in enumerate(CASES[:4])],
)
def test_fish_completes(shell: Path, line: str, offered: set[str]) -> None:
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source script.fish; complete -C 'skyrl-tx {line}'"],
        cwd=shell,
        capture_output=True,
        text=True,
        check=True,
    )
    found = {offer.partition("\t")[0].rstrip("/") for offer in done.stdout.splitlines()}
    assert found - {"-h", "--help"} == offered - {"-h", "--help"}, done.stderr


@needs_zsh
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("keys create --scope met", "metrics"),
        pytest.param("keys cre", "create", marks=pytest.mark.slow),
        pytest.param("serve --backend-config.mesh.t", "--backend-config.mesh.tp", marks=pytest.mark.slow),
    ],
)
def test_zsh_completes(shell: Path, typed: str, completed: str) -> None:
    """Type a line and the tab key at a terminal."""
    (shell / ".zshrc").write_text(
        f"PS1='> '; unsetopt beep; autoload -Uz compinit; compinit -u -d {shell}/dump; source {shell / 'script.zsh'}\n"
        "print loaded\n"
    )
    variables = {**os.environ, "ZDOTDIR": str(shell), "TERM": "dumb"}
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        ["zsh", "-i"], stdin=end, stdout=end, stderr=end, env=variables, start_new_session=True, close_fds=True
    )
    os.close(end)

    try:
        assert "loaded" in read_until(terminal, "loaded")
        os.write(terminal, f"skyrl-tx {typed}\t".encode())
        assert completed in read_until(terminal, completed)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def read_until(terminal: int, text: str, within_s: float = 30.0) -> str:
    """Return the terminal output up to a text, without control sequences.

    If the text does not appear, return all output.
    """
    end, read = time.monotonic() + within_s, ""
    while text not in read and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            read += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\x07\r\x08]", "", os.read(terminal, 4096).decode(errors="replace"))
    return read


def test_shell_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "cmd"])
    assert "bash" in capsys.readouterr().err
