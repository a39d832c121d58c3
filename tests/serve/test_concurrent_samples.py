"""Two thousand concurrent samples of one client all get results, and both processes use bounded memory."""

import logging
import re
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.support.live_server import LiveServer
from tests.support.with_constants import constants

NUM_SAMPLES = 2000
MAX_GROWTH_BYTES = 256 * 2**20
pytestmark = pytest.mark.slow


def read_resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture(
    params=[
        pytest.param(2**30, id="room for all", marks=pytest.mark.exhaustive),
        pytest.param(2**21, id="room for a quarter"),
    ]
)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveServer]:
    flags = ["--base-model", "fake", "--backend", "fake"]
    flags += constants("engine", max_queued_sample_bytes=request.param)
    flags += ["--backend-config.step-delay-s", "0.01", "--backend-config.max-sample-tokens", "8192"]
    with LiveServer(tmp_path / "data", flags=flags) as server:
        yield server


def test_two_thousand_concurrent_samples_have_results(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "httpx")  # the SDK's HTTP client logs each answer
    pids = (server.pid, server.engine_pid)

    with tinker.ServiceClient(base_url=server.url) as service:
        client = service.create_sampling_client(base_model="fake").result()
        params = types.SamplingParams(max_tokens=64, stop=[])
        client.sample(types.ModelInput.from_ints([1]), 1, params).result()
        before = [read_resident_bytes(pid) for pid in pids]
        started = time.monotonic()
        prompts = [types.ModelInput.from_ints([1 + index % 200] * 50) for index in range(NUM_SAMPLES)]
        pending = [client.sample(prompt, 1, params) for prompt in prompts]
        assert all(len(future.result().sequences[0].tokens) == 64 for future in pending)
        elapsed = time.monotonic() - started

    growth = [after - was for after, was in zip(map(read_resident_bytes, pids), before, strict=True)]
    print(f"{NUM_SAMPLES} samples in {elapsed:.1f} s; API and engine grew by {[num // 2**20 for num in growth]} MiB")
    assert max(growth) < MAX_GROWTH_BYTES
    statuses = {record.args[-2] for record in caplog.records if record.name == "httpx" and record.args}
    assert HTTPStatus.OK in statuses
    assert statuses <= {HTTPStatus.OK, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
    assert server.engine_pid == pids[1]
