"""deploy/skyrl-tx.service and the backup units, checked with systemd's own tools if they are installed."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from skyrl_tx.process.setup import OPEN_FILES
from skyrl_tx.store.database import Store
from skyrl_tx.tools.cli import main
from skyrl_tx.tools.serve import read_settings
from tests.support.deployment_variables import check_variables

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "skyrl-tx.service"
PROGRAM = "/opt/skyrl-tx/bin/skyrl-tx"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def read_values(name: str) -> list[str]:
    """Return all values of a directive."""
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Write the unit with a program that exists on this machine."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace(PROGRAM, "/bin/true"))
    return path


@needs_systemd
def test_systemd_accepts_it(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_an_unknown_directive_would_be_found(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("[Install]", "NoSuchDirective=yes\n[Install]"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert "NoSuchDirective" in done.stdout + done.stderr


@needs_systemd
def test_its_exposure_is_low(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.splitlines()[-1:]


def test_it_runs_the_server_with_its_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = dict(value.split("=", 1) for value in read_values("Environment"))
    check_variables(variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (start,) = read_values("ExecStart")
    program, command, flag, file = shlex.split(start)
    assert (program, command, flag, file) == (PROGRAM, "serve", "--config", "/etc/skyrl-tx.yaml")

    (tmp_path / "config.yaml").write_text("base_model: tiny\n")
    settings = read_settings(command, [flag, str(tmp_path / "config.yaml")])
    assert [str(settings.data_dir)] == [f"/var/lib/{name}" for name in read_values("StateDirectory")]
    assert variables["XDG_CACHE_HOME"] == f"/var/cache/{read_values('CacheDirectory')[0]}"
    assert str(settings.backend_config.compile_cache_dir).startswith("/var/cache/skyrl_tx/")  # type: ignore[attr-defined]


def test_it_stops_in_order_and_has_enough_files() -> None:
    assert read_values("KillMode") == ["mixed"] and read_values("LimitNOFILE") == [str(OPEN_FILES)]
    assert int(read_values("TimeoutStopSec")[0]) >= 40 and read_values("OOMPolicy") == ["continue"]


@pytest.mark.parametrize("name", ["PrivateDevices", "ProtectClock", "DeviceAllow", "MemoryDenyWriteExecute"])
def test_devices_and_compiled_programs_are_allowed(name: str) -> None:
    assert read_values(name) == []


@needs_systemd
def test_systemd_accepts_the_backup_units(tmp_path: Path) -> None:
    for path in DEPLOY.glob("skyrl-tx-backup.*"):
        (tmp_path / path.name).write_text(path.read_text().replace(PROGRAM, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", *tmp_path.iterdir()], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("source", ["timer", "cron"])
def test_scheduled_backups_copy_the_data_of_the_service(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither cron nor systemd reads the operator's environment, so each command must name program and data."""
    monkeypatch.delenv("SKYRL_TX_DATA_DIR", raising=False)
    if source == "timer":
        unit = (DEPLOY / "skyrl-tx-backup.service").read_text()
        (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        command += " --data-dir " + re.findall(r"^Environment=SKYRL_TX_DATA_DIR=(.*)$", unit, re.MULTILINE)[0]
    else:
        guide = (DEPLOY.parent / "docs" / "guides" / "backup.md").read_text()
        (command,) = re.findall(r"^0 3 \* \* \*  skyrl  (.*)$", guide, re.MULTILINE)

    Store.open(tmp_path / "data", role="api").close()
    program, *arguments = shlex.split(command)
    data_dir, target = tmp_path / "data", tmp_path / "backup"
    assert program == PROGRAM
    replaced = {"/var/lib/skyrl_tx": str(data_dir), "/var/backups/skyrl_tx": str(target)}
    assert set(replaced) <= set(arguments)
    assert main([replaced.get(argument, argument) for argument in arguments]) == 0
    assert "database" in (target / "backup.json").read_text()
