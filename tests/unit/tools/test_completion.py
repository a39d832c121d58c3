"""Completion scripts, in the shells that are installed."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from skyrl_tx.tools.cli import _COMMANDS, main
from skyrl_tx.tools.completion import SHELLS

needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
needs_fish = pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the script for each shell into a directory."""
    directory = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        with (directory / shell).open("w") as file, redirect_stdout(file):
            assert main(["completion", shell]) == 0
    return directory


def in_bash(scripts: Path, *line: str) -> set[str]:
    """Return what bash offers for the last word of a line."""
    words_given = " ".join(f"'{word}'" for word in line)
    program = (
        f"source {scripts / 'bash'}; COMP_WORDS=({words_given}); COMP_CWORD={len(line) - 1}; "
        '_skyrl_tx; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", program], cwd=scripts, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_offers_all_commands(scripts: Path) -> None:
    assert in_bash(scripts, "skyrl-tx", "") == set(_COMMANDS)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("st",), {"status", "stacks"}),
        (("keys", ""), {"create", "list", "rotate", "revoke", "--help", "-h"}),
        (("keys", "create", "--sc"), {"--scope"}),
        (("keys", "create", "--scope", ""), {"admin", "user", "sample", "read", "metrics"}),
        (("keys", "create", "--scope", "=", "re"), {"read"}),
        (("keys", "create", "--name", ""), set()),
        (("keys", "create", "--name", "list", "--sc"), {"--scope"}),
        (("serve", "--log-level", ""), {"debug", "info", "warning", "error"}),
        (("serve", "--backend-config.mesh.t"), {"--backend-config.mesh.tp"}),
        (("doctor", "--no-h"), {"--no-hashes"}),
        (("doctor", "--ssl-c"), {"--ssl-certfile"}),
        (("plan", "--dev"), {"--device"}),
        (("serve", "--data-dir", ""), set(SHELLS)),
        (("backup", "ba"), {"bash"}),
        (("completion", ""), {*SHELLS, "--help", "-h"}),
    ],
)
def test_bash_completes(scripts: Path, words: tuple[str, ...], offered: set[str]) -> None:
    assert in_bash(scripts, "skyrl-tx", *words) == offered


@needs_fish
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("st", {"status", "stacks"}),
        ("keys ", {"create", "list", "rotate", "revoke"}),
        ("keys create --scope ", {"admin", "user", "sample", "read", "metrics"}),
        ("keys create --name list --sc", {"--scope"}),
        ("serve --backend-config.mesh.t", {"--backend-config.mesh.tp"}),
        ("completion ", set(SHELLS)),
    ],
)
def test_fish_completes(scripts: Path, tmp_path: Path, line: str, offered: set[str]) -> None:
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {scripts / 'fish'}; complete -C 'skyrl-tx {line}'"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert {each.partition("\t")[0] for each in done.stdout.splitlines()} == offered, done.stderr


@needs_zsh
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("keys cre", "keys create"),
        ("keys create --sco", "keys create --scope"),
        ("keys create --scope met", "keys create --scope metrics"),
        ("serve --backend-config.mesh.t", "serve --backend-config.mesh.tp"),
        ("completion fi", "completion fish"),
    ],
)
def test_zsh_completes(scripts: Path, tmp_path: Path, typed: str, completed: str) -> None:
    """Type a line and the tab key at a terminal."""
    (tmp_path / ".zshrc").write_text(
        f"PS1='> '; unsetopt beep; autoload -Uz compinit; compinit -u -d {tmp_path}/dump; source {scripts / 'zsh'}\n"
        "print loaded\n"
    )
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "dumb"}
    terminal, end = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-i"], stdin=end, stdout=end, stderr=end, env=variables, start_new_session=True, close_fds=True
    )
    os.close(end)
    try:
        assert "loaded" in read_until(terminal, "loaded")
        os.write(terminal, f"skyrl-tx {typed}\t".encode())
        assert completed.rsplit(" ", 1)[1] in read_until(terminal, completed.rsplit(" ", 1)[1])
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def read_until(terminal: int, text: str, within_s: float = 30.0) -> str:
    """Return the output of a terminal up to a text, without control sequences; all of it if the text does not come."""
    end, read = time.monotonic() + within_s, ""
    while text not in read and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            read += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\x07\r\x08]", "", os.read(terminal, 4096).decode(errors="replace"))
    return read


def test_shell_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "cmd"])
    assert "bash" in capsys.readouterr().err
