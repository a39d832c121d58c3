"""Training with a custom loss on the server is bit-equal when the engine is killed, on both databases."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.client_environments import SDKS, ClientEnvironment, PreparedEnvironment
from tests.support.live_server import LiveServer

CLIENT = Path(__file__).parents[1] / "api" / "custom_loss_upload.py"
NUM_STEPS = 6
KILL_AT = (2, 5)  # passes
STARTED_PASS = re.compile(r"(model_pass): \d+ requests")
ENGINE_STARTED = re.compile(r"engine process (\d+)")
FLAGS = ("--base-model", "tiny", "--served-model-name", "Qwen/Qwen3-8B", "--log-level", "debug")
pytestmark = pytest.mark.slow

GetEnvironment = Callable[[ClientEnvironment], PreparedEnvironment]


def train(server: LiveServer, client_environment: GetEnvironment) -> list[float]:
    done = client_environment(SDKS["0.38.0"]).run(CLIENT, server.url, "clipped_ratio", str(NUM_STEPS))
    return json.loads(done.stdout.splitlines()[-1])


def kill_engines(server: LiveServer) -> None:
    for number, passes in enumerate(KILL_AT, 1):
        server.wait_for(STARTED_PASS, times=passes, within_s=120.0)
        os.kill(server.engine_pid, signal.SIGKILL)
        server.wait_for(ENGINE_STARTED, times=number + 1)


def train_with_kills(data_dir: Path, client_environment: GetEnvironment, *flags: str) -> list[float]:
    with LiveServer(data_dir, flags=(*FLAGS, *flags)) as server:
        killer = threading.Thread(target=kill_engines, args=(server,))
        killer.start()
        found = train(server, client_environment)
        killer.join()
        assert len(ENGINE_STARTED.findall(server.log)) == len(KILL_AT) + 1
    return found


@pytest.mark.parametrize("kind", [pytest.param("sqlite", marks=pytest.mark.exhaustive), "postgresql"])
def test_kills_change_no_bit(
    tmp_path: Path, client_environment: GetEnvironment, kind: str, request: pytest.FixtureRequest
) -> None:
    """The results equal an undisturbed run on SQLite."""
    with LiveServer(tmp_path / "calm", flags=FLAGS) as server:
        calm = train(server, client_environment)
    assert len(set(calm[:NUM_STEPS])) == NUM_STEPS
    flags = ()
    if kind == "postgresql":
        flags = ("--database-url", request.getfixturevalue("postgresql").new_database())
    assert train_with_kills(tmp_path / kind, client_environment, *flags) == calm
