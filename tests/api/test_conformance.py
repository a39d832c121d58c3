"""`skyrl-tx conformance` against this server, and against servers with a fault.

All rows pass here, so the command tests everything that its rows say. Other tests in this directory check what the SDK
does not show, and equality of bits.
"""

import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from msgspec import structs

from skyrl_tx import DISTRIBUTION
from skyrl_tx.contract import loss_reference
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.loss_reference import LossValue
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.launch.command import CommandError
from skyrl_tx.testing.fake import backend as fake_backend
from skyrl_tx.testing.fake.backend import FakeBackend, _FakePass
from skyrl_tx.testing.fake.model import Pair
from skyrl_tx.tools.cli import main
from skyrl_tx.tools.conformance import command
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack

NOT_CALLED = {"POST /forward", "GET /training_runs/{run_id}/checkpoints/{kind}/{name}/archive", "POST /unload_model"}
"""Endpoints that only older releases of the SDK call. `test_parity.py` calls them."""
REVOKE = "DELETE /auth/apikey/me"
NEWER = {
    "checkpoints: Checkpoints can be searched (SDK 0.39)",
    "checkpoints: An upload of weights can be started (SDK 0.39)",
}
IF_SLOW = "futures: An abandoned sample is cancelled"
"""The row that needs a sample that takes longer than a request."""
CUSTOM = "POST /create_custom_loss"
CUSTOM_LOSSES = {"training: A custom loss that the SDK evaluates", "training: A custom loss that is uploaded"}
HAS_TORCH = importlib.util.find_spec("torch") is not None
"""Whether torch is installed, which the SDK needs for custom losses. CI installs it for the slow tests only."""
TEXT = "sampling: A stop string ends a sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The output of the command and the content of its JSON file."""

    status: int
    output: str
    content: dict[str, Any]

    def names(self, status: str) -> set[str]:
        """Return the names of the rows with a status."""
        return {row["name"] for row in self.content["rows"] if row["status"] == status}


def run_command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in its own process, because a row without a result leaves a thread behind."""
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "1"}
    program = [sys.executable, "-m", "skyrl_tx", "conformance", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=600, env=variables)


def check(url: str, directory: Path, *flags: str, precision: str = "float32") -> Report:
    """Run the command on a server and return its report."""
    file = directory / "report.json"
    done = run_command(url, "--yes", "--json", str(file), "--precision", precision, *flags)
    assert file.exists(), done.stdout + done.stderr
    assert done.stderr == "", "no message of the SDK is between the rows"
    return Report(status=done.returncode, output=done.stdout, content=json.loads(file.read_text()))


def list_checkpoints(stack: LiveStack) -> list[str]:
    listed = stack.server.client.get("/api/v1/checkpoints", params={"limit": 500}).json()["checkpoints"]
    return [checkpoint["tinker_path"] for checkpoint in listed]


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A server that other tests do not use."""
    with live_stack("fake", tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def check_all_rows(stack: LiveStack, directory: Path) -> Report:
    """Run the command with all rows and check their results."""
    before = list_checkpoints(stack)
    report = check(stack.url, directory)
    assert report.names("fail") == set(), report.output
    assert report.status == 0
    assert report.names("not offered") == NEWER

    # The fake backend has no tokenizer and no custom losses.
    is_fake = isinstance(stack.backend, FakeBackend)
    absent = {f"endpoint: {name}" for name in (*NOT_CALLED, REVOKE)}
    absent |= {f"endpoint: {CUSTOM}", TEXT} if is_fake else set()
    absent |= set() if HAS_TORCH else {f"endpoint: {CUSTOM}", *CUSTOM_LOSSES}
    assert report.names("not run") - {IF_SLOW} == absent
    details = {row["name"]: row["detail"] for row in report.content["rows"]}
    if HAS_TORCH:
        place = "in the client" if is_fake else "on the server"
        assert details["training: A custom loss that is uploaded"].startswith(f"evaluated {place}")
    assert details["sampling: Log-probabilities at temperature 2 are tempered or raw"] == "tempered"
    refusals = {name: detail for name, detail in details.items() if name.startswith("refusals: ")}
    assert [name for name, detail in refusals.items() if "does not name" in detail] == []

    # It leaves nothing behind, and used fewer tokens than it said.
    assert list_checkpoints(stack) == before
    announced = int(report.output.splitlines()[0].rpartition("at most ")[2].split()[0].replace(",", ""))
    assert report.content["tokens"] < announced <= command.MAX_TOKENS
    return report


def test_every_row_passes_and_all_tokens_that_the_server_bills_are_counted(
    own_stack: LiveStack, tmp_path: Path
) -> None:
    report = check_all_rows(own_stack, tmp_path)
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = {
        "starting_on": (hour - timedelta(hours=1)).isoformat(),
        "ending_before": (hour + timedelta(hours=1)).isoformat(),
    }
    events = own_stack.server.client.get("/api/v1/billing/usage/events", params=window).json()["data"]
    billed = sum(event["event_info"].get("token_count", 0) for event in events)
    assert 0 < billed <= report.content["tokens"], events


@pytest.mark.slow  # `.ci/run` runs it among the tests that compile with little optimization
def test_every_row_passes_with_jax(tmp_path: Path) -> None:
    with live_stack("jax", tmp_path) as stack:
        check_all_rows(stack, tmp_path)


EVALUATE, DECODE, COMMIT = loss_reference.evaluate, fake_backend.decode, _FakePass.commit


def double_gradients(name: str, *arguments: Any) -> LossValue:
    value = EVALUATE(name, *arguments)
    return value if name == "cross_entropy" else replace(value, slope=2 * value.slope)


def ignore_config(name: str, logprobs: Any, inputs: Any, config: Any) -> LossValue:
    return EVALUATE(name, logprobs, inputs, LOSS_SPECS[name].config)


def shift_logprobs(*arguments: Any) -> SampleDelta:
    delta = DECODE(*arguments)
    return structs.replace(delta, logprobs=delta.logprobs - np.float32(0.1))


def forget_gradient(own: _FakePass, model_id: ModelId, gradient: Pair) -> None:
    own.models[model_id] = replace(own.models[model_id], gradient=None)
    COMMIT(own, model_id, gradient)


@pytest.mark.parametrize(
    ("place", "name", "fault", "row"),
    [
        pytest.param(loss_reference, "evaluate", double_gradients, "losses: ppo: gradient", marks=pytest.mark.slow),
        pytest.param(loss_reference, "evaluate", ignore_config, "losses: dro: value", marks=pytest.mark.slow),
        (
            fake_backend,
            "decode",
            shift_logprobs,
            "sampling: Log-probabilities of a sample equal the result of compute_logprobs",
        ),
        pytest.param(
            _FakePass,
            "commit",
            forget_gradient,
            "training: Gradients add up until a step, and a forward pass adds none",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fault_is_found_with_the_tolerances_of_bfloat16(
    own_stack: LiveStack, tmp_path: Path, place: Any, name: str, fault: Callable[..., Any], row: str
) -> None:
    with patch.object(place, name, fault):
        report = check(own_stack.url, tmp_path, "--only", row, precision="bfloat16")
    assert report.status == 1 and report.names("fail") == {row}
    assert f"FAIL        {row}" in report.output


def test_a_server_that_hangs_fails_in_time(own_stack: LiveStack, tmp_path: Path) -> None:
    is_over = threading.Event()

    def hang(*arguments: Any) -> SampleDelta:
        is_over.wait(300)
        return DECODE(*arguments)

    with patch.object(fake_backend, "decode", hang):
        try:
            report = check(own_stack.url, tmp_path, "--only", "prompt data", "--timeout-s", "3")
        finally:
            is_over.set()
    results = [row for row in report.content["rows"] if "Prompt data" in row["name"]]
    assert [row["detail"] for row in results[:3]] == ["no result within 3 s"] * 3
    assert {row["status"] for row in results[3:]} == {"not run"} and report.status == 1


def test_an_address_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = run_command(url, "--yes", "--timeout-s", "1")
    assert done.returncode == 1 and f"{url}: no answer within 1 s" in done.stderr


def serve_once(listener: socket.socket, response: bytes) -> None:
    """Answer the first request, then close the connection and the listener."""
    with listener, listener.accept()[0] as connection:
        connection.recv(65536)
        connection.sendall(response)


def run_here(*arguments: str) -> int:
    """Run the command in this process, and restore the levels of the loggers."""
    loggers = [logging.getLogger(name) for name in command._LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        return main(["conformance", *arguments])
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def test_tokens_are_used_only_after_a_confirmation(
    own_stack: LiveStack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_stack.recorder.recording() as calls:
        assert run_here(own_stack.url) == 2
        assert "add --yes" in capsys.readouterr().err
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        monkeypatch.setattr("builtins.input", lambda _: "n")
        assert run_here(own_stack.url) == 1
    assert re.search(r"at most [\d,]+ tokens", capsys.readouterr().out)
    assert not [call for call in calls if call.path in ("create_session", "create_model")]


def test_wrong_arguments(own_stack: LiveStack, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(own_stack.url, "--only", "no such row") == 2
    assert "--only no such row" in capsys.readouterr().err
    assert run_here(own_stack.url, "--yes", "--base-model", "other") == 1
    assert f"{own_stack.url}: base model other: the server has {PUBLIC_NAME}" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["foo", "localhost:8000", "ftp://localhost", "http://", "http://localhost:port"])
def test_a_text_that_is_no_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(url, "--yes") == 2
    assert f"{url}: must be a URL such as http://localhost:8000" in capsys.readouterr().err


def test_an_address_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    assert run_here(url, "--yes") == 1
    assert f"{url}: cannot connect: Connection refused\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "the SDK is called"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no HTTP response: "),
    ],
)
def test_any_http_response_shows_that_a_server_is_there(
    response: bytes, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise CommandError("the SDK is called")

    monkeypatch.setattr(command, "_connect", refuse)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=serve_once, args=(listener, response))
    thread.start()
    assert run_here(url, "--yes") == 1
    thread.join()
    assert message in capsys.readouterr().err


def test_list_needs_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("http://127.0.0.1:9", "--list", "--only", "ppo") == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.partition(" (")[0] for row in rows] == ["losses: ppo: value", "losses: ppo: gradient"]


def test_missing_sdk(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(importlib.util, "find_spec", lambda name: None):
        assert run_here("http://127.0.0.1:9", "--list") == 1
    assert f"pip install '{DISTRIBUTION}[conformance]'" in capsys.readouterr().err
