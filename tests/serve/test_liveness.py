"""A call that does not return, stack traces of a running server, and threads that die, on real processes."""

import ctypes
import multiprocessing
import re
import sys
import time
from pathlib import Path

import httpx
import pytest

from skyrl_tx.launch import engine_process
from skyrl_tx.tools.cli import main
from tests.support.live_server import LiveServer
from tests.support.with_constants import constants

HANGS = ("--base-model", "fake", "--backend", "fake", "--backend-config.step-delay-s", "300")
DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0] * 3, "dtype": "float32", "shape": [3]},
    },
}
STACKS = re.compile(r"(Current thread 0x\w+|Thread 0x\w+) \(most recent call first\)")


def post(url: str, endpoint: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/api/v1/{endpoint}", json=body, timeout=60.0)


def wait_for_result(url: str, answer: httpx.Response) -> dict[str, object]:
    while (got := post(url, "retrieve_future", request_id=answer.json()["request_id"])).status_code == 408:
        pass
    return got.json()


@pytest.mark.slow
def test_hung_call_restarts_the_engine_and_fails_its_request_at_last(tmp_path: Path) -> None:
    limits = ("--step-timeout-s", "0.5", *constants("engine", max_attempts=1))
    limits += constants("api", engine_silence_s=0.2, retrieve_hold_s=1)

    with LiveServer(tmp_path, flags=(*HANGS, *limits)) as server:
        url = server.url
        session_id = post(url, "create_session", tags=[], sdk_version="0.38.0").json()["session_id"]
        made = post(
            url, "create_model", session_id=session_id, model_seq_id=0, base_model="fake", lora_config={"rank": 8}
        )
        model_id = wait_for_result(url, made)["model_id"]

        passed = post(
            url,
            "forward_backward",
            model_id=model_id,
            seq_id=1,
            forward_backward_input={"data": [DATUM], "loss_fn": "cross_entropy"},
        )

        server.wait_for(re.compile(r"(engine exited: forward_backward .* has taken longer than --step-timeout-s)"))
        failure = wait_for_result(url, passed)
        assert failure["category"] == "server" and "crashed or hung 1 times while it ran this request alone" in str(
            failure["error"]
        )
        assert STACKS.search(server.log) and "time.sleep" not in server.log
        assert "in _compute" in server.log, "the stack names the function that does not return"


def test_stacks_of_both_processes_are_written_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--stacks", "--data-dir", str(tmp_path)]) == 1
    assert "no server is running there" in capsys.readouterr().err
    with LiveServer(tmp_path) as server:
        assert httpx.get(f"{server.url}/api/v1/livez").json() == {"status": "ok"}
        assert main(["status", "--stacks", "--data-dir", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert f"process {server.pid} (api)" in shown and f"process {server.engine_pid} (engine)" in shown
        server.wait_for(re.compile(r"(in _run_once)"))  # the API's event loop
        server.wait_for(re.compile(r"(engine_process\.py\", line \d+, in run_engine)"))
        assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}

    assert main(["status", "--stacks", "--data-dir", str(tmp_path)]) == 1, (
        "the lock files of the last server are still there"
    )


def keep_the_lock(log: Path) -> None:
    sys.__stderr__ = log.open("w")
    engine_process.MIN_INTERPRETER_TIMEOUT_S = 0.2
    with engine_process._interpreter_watchdog(0.2):
        time.sleep(0.5)  # Python code runs meanwhile, so the timer starts again
        ctypes.PyDLL(None).sleep(60)


def test_call_that_keeps_the_interpreters_lock_ends_the_process(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=keep_the_lock, args=(tmp_path / "log",))
    process.start()
    process.join(50)
    assert process.exitcode == 1
    assert "in keep_the_lock" in (tmp_path / "log").read_text()
