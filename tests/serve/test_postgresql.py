"""Test `skyrl-tx serve` on PostgreSQL: two API processes share an engine, the engine is killed, the database stops."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.live_server import LiveServer, ServerFailed
from tests.support.postgresql_server import PASSWORD, PostgresqlServer

FAKE = ("--base-model", "fake", "--backend", "fake")
ENGINE_STARTED = re.compile(r"engine process (\d+)")
WAITS_FOR_DATABASE = re.compile(r"the engine restarts when the database is available")
NUM_STEPS = 8


def datum(seed: int) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(1, 200, size=12)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(11, dtype=np.float32)},
    )


def train(url: str, seed: int, on_step_submitted: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train and return the losses and the logprobs of a sample."""
    training = tinker.ServiceClient(base_url=url).create_lora_training_client("fake", rank=8, seed=seed).result()
    seen: list[float] = []
    for step in range(NUM_STEPS):
        pass_future = training.forward_backward([datum(seed), datum(seed + step)], "cross_entropy")
        step_future = training.optim_step(types.AdamParams(learning_rate=0.05))
        on_step_submitted(step)
        step_future.result()
        seen.append(pass_future.result().metrics["loss:sum"])

    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
    (sequence,) = sampler.sample(types.ModelInput.from_ints([7, 8]), 1, params).result().sequences
    return [*seen, *(sequence.logprobs or [])]


def in_background(work: Callable[[], list[float]]) -> Future[list[float]]:
    """Run a client on a daemon thread."""
    outcome: Future[list[float]] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


@pytest.fixture(scope="module")
def reference_results(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The numbers of two undisturbed runs on SQLite."""
    with LiveServer(tmp_path_factory.mktemp("reference"), flags=FAKE) as server:
        return [train(server.url, seed) for seed in (1, 2)]


def check_shared_data(first: LiveServer, second: LiveServer) -> None:
    """Check that both API processes serve the same data, and that a request sent to both is executed once."""

    def call(url: str, endpoint: str, **body: object) -> dict[str, str]:
        return httpx.post(f"{url}/api/v1/{endpoint}", json=body, timeout=40).json()

    new = {"session_id": call(first.url, "create_session", tags=[], sdk_version="0.38.0")["session_id"]}
    new |= {"model_seq_id": 1, "base_model": "fake", "lora_config": {"rank": 4, "seed": 1}}
    sent = [call(url, "create_model", **new) for url in (first.url, second.url)]
    assert sent[0] == sent[1]
    answers = [call(url, "retrieve_future", request_id=sent[0]["request_id"]) for url in (second.url, first.url)]
    assert answers[0] == answers[1] and answers[0]["model_id"] == sent[0]["model_id"]

    # PostgreSQL cannot store the NUL character in a text, so the API must refuse it.
    with_nul = httpx.post(f"{first.url}/api/v1/create_session", json={"tags": [], "sdk_version": "\0"})
    assert with_nul.status_code == 400 and "U+0000" in with_nul.json()["detail"]

    listed = [httpx.get(f"{url}/api/v1/training_runs").json() for url in (first.url, second.url)]
    assert listed[0] == listed[1] and len(listed[0]["training_runs"]) == 3


@pytest.mark.slow
def test_runs_through_two_api_processes_survive_a_kill_of_the_engine(
    tmp_path: Path, postgresql_url: str, reference_results: list[list[float]]
) -> None:
    flags = (*FAKE, "--database-url", postgresql_url)
    with (
        LiveServer(tmp_path, flags=flags) as server,
        LiveServer(tmp_path, command="api", flags=flags) as second,
    ):

        def kill_once(step: int) -> None:
            if step == 3:
                os.kill(server.engine_pid, signal.SIGKILL)

        runs = [in_background(lambda: train(server.url, 1, kill_once)), in_background(lambda: train(second.url, 2))]
        assert [run.result(300) for run in runs] == reference_results
        server.wait_for(ENGINE_STARTED, times=2)
        check_shared_data(server, second)
        with pytest.raises(ServerFailed, match="an engine is already running on this database"):
            LiveServer(tmp_path, flags=(*flags, "--fresh"))  # not even to delete its data
        assert second.stop() == server.stop() == 0
        for log in (server.log, second.log):
            assert PASSWORD not in log
            assert "Traceback" not in log


@pytest.mark.slow
@pytest.mark.postgres
def test_database_outage_pauses_the_server(tmp_path: Path, reference_results: list[list[float]]) -> None:
    with PostgresqlServer() as database:
        flags = (*FAKE, "--database-url", database.new_database())
        with LiveServer(tmp_path, flags=flags) as server:
            api = httpx.Client(base_url=f"{server.url}/api/v1", timeout=40, headers={"X-API-Key": "tml-local"})
            reached: list[int] = []
            run = in_background(lambda: train(server.url, 1, reached.append))
            while len(reached) < 3:
                time.sleep(0.01)
            database.stop()
            unhealthy = api.get("healthz")
            assert unhealthy.status_code == 503, server.log
            outage = "the database is not available; see the server's log"
            assert outage in unhealthy.json()["detail"]

            waiting = api.post("retrieve_future", json={"request_id": "any"})
            assert waiting.status_code == 408
            assert waiting.json()["queue_state_reason"] == outage
            assert "it cannot be reached" in server.log
            assert api.post("create_session", json={"tags": [], "sdk_version": "0.38.0"}).status_code == 503

            server.wait_for(WAITS_FOR_DATABASE)
            assert not run.done()
            database.start()
            assert run.result(300) == reference_results[0]
            server.wait_for(ENGINE_STARTED, times=2)
            assert api.get("healthz").json() == {"status": "ok"}
            api.close()
            assert server.stop() == 0

        assert PASSWORD not in server.log
