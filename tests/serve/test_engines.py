"""`skyrl-tx serve --engines`: engines die and restart one after another while clients train and sample."""

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tinker

from tests.serve.test_postgresql import train
from tests.support.live_server import LiveServer, ServerFailed
from tests.support.polling import until

FAKE = ("--base-model", "fake", "--backend", "fake")
NUM_ENGINES = 3
NUM_TENANTS = 6
STARTED = re.compile(r"engine process (\d+) started")
READY = re.compile(rf"(\d+) of {NUM_ENGINES} engines are ready")
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.slow
def test_a_rolling_restart_and_a_kill_change_no_result_and_fail_no_request(tmp_path: Path, postgresql_url: str) -> None:
    """Stops each engine in turn, one of them with SIGKILL, while tenants train."""
    with LiveServer(tmp_path / "calm", flags=FAKE) as server:
        calm = [train(server.url, seed) for seed in range(NUM_TENANTS)]
    flags = (*FAKE, "--backend-config.step-delay-s", "0.05", "--database-url", postgresql_url)
    with LiveServer(tmp_path / "data", flags=(*flags, "--engines", str(NUM_ENGINES))) as server:
        server.wait_for(READY, times=NUM_ENGINES, within_s=120)
        first = [int(pid) for pid in STARTED.findall(server.log)]
        assert len(first) == NUM_ENGINES
        halfway = threading.Event()

        with ThreadPoolExecutor(NUM_TENANTS) as clients:
            runs = [
                clients.submit(train, server.url, seed, lambda step: halfway.set() if step == 2 else None)
                for seed in range(NUM_TENANTS)
            ]
            assert halfway.wait(120)
            for number, pid in enumerate(first):
                os.kill(pid, signal.SIGKILL if number == 1 else signal.SIGTERM)
                server.wait_for(STARTED, times=NUM_ENGINES + number + 1, within_s=120)
            results = [run.result(240) for run in runs]

        assert results == calm, server.log
        holders = re.findall(r"engine \d+ has ended: other engines take over its (\d+) models", server.log)
        assert holders, server.log
        service = tinker.ServiceClient(base_url=server.url)
        assert service.create_lora_training_client("fake", rank=4).result().model_id
        assert httpx.get(f"{server.url}/api/v1/healthz", headers={"X-API-Key": "tml-local"}).json() == {"status": "ok"}
        until(lambda: 'engine="2"' in httpx.get(f"{server.url}/metrics", timeout=20).text)
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


def test_several_engines_are_refused_on_sqlite(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="multiple engines need a PostgreSQL database; name one with --database-url"):
        LiveServer(tmp_path, flags=(*FAKE, "--engines", "2"))
