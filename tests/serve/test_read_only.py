"""A server on a read-only file system writes only to its data directory, its cache and the temporary directory."""

import os
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.repo.test_dockerfile import get_arguments
from tests.support.live_server import LiveServer

UNSHARE = ("unshare", "--mount", "--propagation", "private", *(() if os.geteuid() == 0 else ("--user", "-r")))
"""Runs a command with private mounts."""
MAKE_READ_ONLY = """
for directory in "$SKYRL_TX_DATA_DIR" "$XDG_CACHE_HOME" "$TMPDIR"; do mount --bind "$directory" "$directory"; done
mount -o remount,bind,ro /
cd "$HOME"
if touch file 2> /dev/null; then echo "$HOME can be written" >&2; exit 1; fi
exec "$@"
"""


@pytest.mark.slow
def test_a_server_needs_the_volumes_of_the_image_and_tmp_only(tmp_path: Path) -> None:
    short = {"SKYRL_TX_DATA_DIR": "data", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}  # sockets have short paths
    writable = {name: tmp_path / directory for name, directory in short.items()}
    home = tmp_path / "home"
    for directory in (*writable.values(), home):
        directory.mkdir()

    variables = {name: str(path) for name, path in writable.items()}
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    launcher = (*UNSHARE, "bash", "-euc", MAKE_READ_ONLY, "-")
    allowed = subprocess.run([*launcher, "true"], env=environment, capture_output=True, text=True, check=False)
    if allowed.returncode:
        pytest.skip(f"this machine does not allow it: {allowed.stderr}")

    with LiveServer(
        writable["SKYRL_TX_DATA_DIR"],
        flags=("--base-model", "tiny", "--no-auth"),
        environment=environment,
        launcher=launcher,
        ready_within_s=120.0,
    ) as server:
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2}, timeout=120.0
        )
        assert answer.status_code == 200, answer.text

    assert list(home.iterdir()) == []
    assert any((writable["XDG_CACHE_HOME"] / "skyrl_tx" / "xla").iterdir())


def test_the_image_has_a_volume_for_each() -> None:
    variables = dict(variable.split("=", 1) for variable in get_arguments("ENV"))
    assert variables == {"SKYRL_TX_DATA_DIR": "/data", "XDG_CACHE_HOME": "/cache"}
    assert get_arguments("VOLUME") == ["/data /cache"]
