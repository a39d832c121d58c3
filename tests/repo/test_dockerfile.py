"""The Dockerfile installs a working command; its steps run in a virtual environment, without Docker."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import keys
from skyrl_tx.store.database import Store
from skyrl_tx.tools.serve import read_settings
from tests.support.live_api import live_api
from tests.support.polling import until

ROOT = Path(__file__).parents[2]


def read_steps() -> list[tuple[str, str]]:
    """Return all instructions with their arguments. Continued lines are joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def get_arguments(instruction: str) -> list[str]:
    return [argument for name, argument in read_steps() if name == instruction]


def test_image_serves_as_an_unprivileged_user_with_data_in_a_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_arguments("USER") == ["skyrl"]
    assert "/data" in get_arguments("VOLUME")[0].split()
    for name, value in (variable.split("=", 1) for variable in get_arguments("ENV")):
        monkeypatch.setenv(name, value)
    (script,) = json.loads(get_arguments("ENTRYPOINT")[-1])
    assert f"deploy/{script} /usr/local/bin/" in get_arguments("COPY")
    program, command, *flags = (ROOT / "deploy" / script).read_text().splitlines()[-1].removeprefix("exec ").split()
    assert flags.pop() == '"$@"'
    settings = read_settings(command, [*flags, *json.loads(get_arguments("CMD")[-1])])
    assert (program, command, settings.host) == ("skyrl-tx", "serve", "0.0.0.0")
    assert settings.data_dir == Path("/data") and not settings.no_auth


def start_container(tmp_path: Path, *arguments: str, **environment: str) -> tuple[str, str]:
    """Run the image's start script. Return the keys that it prints, and the command of the server."""
    command = tmp_path / "skyrl-tx"
    command.write_text(f'#!/bin/sh\n[ "$1" = serve ] && exec echo "$@"\nexec {sys.executable} -m skyrl_tx "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        [ROOT / "deploy" / "container-start.sh", *arguments],
        env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "SKYRL_TX_DATA_DIR": str(tmp_path / "data")}
        | environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    *keys, served = done.stdout.splitlines()
    return "".join(keys), served


def test_first_start_of_a_container_prints_an_admin_key_once(tmp_path: Path) -> None:
    assert start_container(tmp_path, "--base-model", "tiny", "--no-auth")[0] == ""
    assert start_container(tmp_path, SKYRL_TX_NO_AUTH="true")[0] == ""

    key, served = start_container(tmp_path, "--base-model", "a b")
    assert key.startswith("tml-") and served == "serve --host 0.0.0.0 --base-model a b"
    assert start_container(tmp_path)[0] == ""
    with closing(Store.open(tmp_path / "data", role="tool")) as store:
        row = store.read(lambda tx: keys.find(tx, key))
    assert row is not None and (row.owner, row.scope) == ("root", "admin")


def test_health_check_succeeds_while_the_api_answers(tmp_path: Path) -> None:
    """This also holds while the engine starts or is gone, because a restarted container would not be ready sooner."""
    (check,) = get_arguments("HEALTHCHECK")
    program, *arguments = json.loads(check[check.index("CMD ") + 4 :])
    assert program == "python"
    settings = ApiSettings(port=0, data_dir=tmp_path, base_model="fake")
    with live_api(settings) as server:
        own_port = [argument.replace("http://127.0.0.1:8000", server.url) for argument in arguments]
        assert own_port != arguments
        until(lambda: subprocess.run([sys.executable, *own_port], stderr=subprocess.DEVNULL).returncode == 0)
    assert subprocess.run([sys.executable, *own_port], stderr=subprocess.DEVNULL).returncode == 1


def test_values_of_the_build_argument_are_extras() -> None:
    assert 'EXTRA=""' in get_arguments("ARG")
    offered = re.findall(r'"(\w+)"', (ROOT / "Dockerfile").read_text().split('ARG EXTRA=""')[0].splitlines()[-1])
    project = (ROOT / "pyproject.toml").read_text()
    assert "cuda12" in offered
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in offered if extra)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_install_steps_give_a_working_command(tmp_path: Path) -> None:
    source, environment = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    for copied in get_arguments("COPY"):
        *names, _ = shlex.split(copied)
        for name in names:
            if name.startswith("deploy/"):
                continue  # installed outside the package
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source)

    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    path = f"{environment / 'bin'}:/usr/bin:/bin"
    installs = [step for step in get_arguments("RUN") if step.startswith("pip ")]
    assert installs

    for step in installs:
        subprocess.run(["bash", "-euc", step], cwd=source, env=_environment(path), check=True)
    shown = subprocess.run(
        [environment / "bin" / "skyrl-tx", "serve", "--help"],
        env=_environment(path),
        check=True,
        capture_output=True,
        text=True,
    )
    assert "--backend-config.max-lora-rank" in shown.stdout


def _environment(path: str) -> dict[str, str]:
    """Return this process's environment for pip, without PYTHON* variables and with an empty EXTRA."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
        "PATH": path,
        "EXTRA": "",
    }
