"""`skyrl-tx status` on data directories of servers that never ran, are running, or have died."""

import json
import re
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlmodel import Session

from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.results import Failure
from skyrl_tx.store import engine_state, futures, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.tables import EngineStateRow
from skyrl_tx.tools.cli import main

METERS = {
    "totals": {},
    "queues": {"training": {"waiting": 1, "running": 0, "backlog_bytes": 2048, "backlog_limit_bytes": 2**31}},
    "places": {"models_resident": 2, "models_places": 8, "samplers_resident": 0, "samplers_places": 4},
    "backend": {
        "decode_slots": 64,
        "decode_slots_used": 7,
        "progress": "compiled 2 of 3 programs in the background, 9 s",
        "outage": "vLLM has not responded for 12 s (ConnectError); samples wait",
        **{"compared_tokens": 2000, "trainer_gap_nats": 0.5, "trainer_gap_max_nats": 0.01},
        "device_memory": [{"used_bytes": 2**30, "limit_bytes": 2**33}],
    },
}


def fill(data_dir: Path, *, age_s: float) -> None:
    """Store an engine status that is a few seconds old, two open requests, a failed one and gauges."""
    now = time.time()

    def work(tx: Session) -> None:
        state = EngineStateRow(
            boot_id="a",
            pid=1,
            status="ready",
            capabilities={"devices": ["H100"]},
            base_models=[],
            updated_at=now - age_s,
        )
        state.activity, state.activity_since, state.meters = "forward_backward", now - age_s - 5, METERS
        engine_state.publish(tx, state)
        session = sessions.create(tx, owner="ann", now=now)

        for number in range(3):
            new = NewRequest(key=f"k{number}", kind="model_pass", owner="ann", session_id=session, body=b"x")
            submitted = futures.submit(tx, new, now - 100)
            if number == 1:
                futures.count_delivery_attempt(tx, [submitted.request_id])
            if number == 2:
                failure = codec.encode(Failure(message="lr is [red]NaN", category=ErrorCategory.USER))
                futures.complete(tx, submitted.request_id, failure, failed=True, effect_order=None, now=now - 30)

        at = int(now) // 10 * 10
        for step in range(3):
            engine_state.add_gauges(tx, at - 10 * step, {"training_tokens_per_s": 100.0 * step})

    store = Store.open(data_dir, role="api")

    try:
        store.write(work)
    finally:
        store.close()


def test_status_of_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, age_s=1)
    assert main(["status", "--data-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "compiled 2 of 3 programs in the background, 9 s" in shown
    assert re.search(r"engine ready: forward_backward for \d+ s · 1 × H100", shown)
    assert "100 tokens/s" in shown and "▁" in shown and "█" in shown
    assert "models 2/8" in shown and "slots 7/64" in shown and "memory 1.0 GiB/8.0 GiB" in shown
    assert "\nvLLM has not responded for 12 s (ConnectError); samples wait\n" in shown
    assert "gap to the trainer 2.5e-04 nats (max 1.0e-02) over 2,000 tokens" in " ".join(shown.split())
    assert re.search(r"open requests 2, oldest 1\d\d s", shown)
    assert "lr is [red]NaN" in shown, "texts of users are no markup"


def test_status_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, age_s=1)
    assert main(["status", "--json", "--data-dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    (work,) = found["work"]
    assert (work["owner"], work["kind"], work["waiting"], work["running"]) == ("ann", "model_pass", 1, 1)
    assert found["failures"][0]["message"] == "lr is [red]NaN"
    assert found["rates"]["training_tokens_per_s"] == 100.0
    assert found["history"]["training_tokens_per_s"] == [200.0, 100.0, 0.0]


def test_a_dead_server_is_described_with_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, age_s=3600)
    assert main(["status", "--data-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "engine not running, last status 60 min ago" in shown and "ann" in shown


def test_a_directory_without_an_engine_is_described_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store.open(tmp_path, role="api").close()
    assert main(["status", "--data-dir", str(tmp_path)]) == 1
    assert "engine never started" in capsys.readouterr().out


def test_here_says_whether_an_engine_of_this_machine_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This is the health check of an engine in a container, which has a separate host name."""

    def publish(number: int, host: str, status: str) -> None:
        row = EngineStateRow(
            number=number, boot_id=host, host=host, pid=1, status=status, capabilities={}, base_models=[]
        )
        row.updated_at = time.time()
        with closing(Store.open(tmp_path, role="api")) as store:
            store.write(lambda tx: engine_state.publish(tx, row))

    here = ["status", "--here", "--data-dir", str(tmp_path)]
    publish(1, "another-machine", "ready")
    assert main(here[:1] + here[2:]) == 0 and main(here) == 1
    assert "engine never started" in capsys.readouterr().out
    publish(2, socket.gethostname(), "starting")
    assert main(here) == 1 and "engine starting" in capsys.readouterr().out
    publish(2, socket.gethostname(), "ready")
    assert main(here) == 0


def test_without_a_database_the_command_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--data-dir", str(tmp_path)]) == 1
    assert "no server has stored anything there" in capsys.readouterr().err


def test_watch_shows_the_screen_repeatedly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, age_s=1)
    assert main(["status", "--watch", "--times", "2", "--data-dir", str(tmp_path)]) == 0
    assert "engine ready" in capsys.readouterr().out


def test_times_are_refused_without_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--times", "2", "--data-dir", str(tmp_path)]) == 2
    assert "--times requires --watch" in capsys.readouterr().err
