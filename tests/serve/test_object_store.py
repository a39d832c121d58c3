"""A server with weights in an S3 store: killed while it saves, and moved to an empty disk."""

import os
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx.process import failpoints
from tests.support.client_environments import OBJECT_STORE, ClientEnvironment, PreparedEnvironment
from tests.support.live_server import LiveServer
from tests.support.s3_server import SECRET_KEY, S3Server, s3_server, variables
from tests.support.with_constants import constants

pytestmark = pytest.mark.slow
SNAPSHOTS = constants("engine", snapshot_interval_requests=2, snapshot_max_share=1)
MODEL = ("--base-model", "fake", "--backend", "fake")
FAKE = (*MODEL, *SNAPSHOTS)
NUM_STEPS = 5
TOKENS = [5, 9, 2, 7, 30, 31]


@pytest.fixture(scope="module")
def store(client_environment: Callable[[ClientEnvironment], PreparedEnvironment]) -> Iterator[S3Server]:
    with s3_server(client_environment(OBJECT_STORE)) as server:
        server.create_bucket("weights")
        yield server


def datum(step: int) -> types.Datum:
    tokens = np.roll(TOKENS, step).tolist()
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": np.array([*tokens[1:], 0], np.int64)},
    )


def train(url: str, after_step: Callable[[int], None] = lambda step: None) -> list[object]:
    """Train with saves, sample and download. Returns the losses, the tokens and the bytes."""
    seen: list[object] = []

    with tinker.ServiceClient(base_url=url) as service:
        training = service.create_lora_training_client("fake", rank=8, seed=1).result()
        for step in range(NUM_STEPS):
            passed = training.forward_backward([datum(step)], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.05)).result()
            seen.append(passed.result().metrics["loss:sum"])
            saving = training.save_state(f"step-{step}")
            after_step(step)
            saved = saving.result().path

        copy = service.create_training_client_from_state_with_optimizer(saved).result()
        seen.append(copy.forward([datum(0)], "cross_entropy").result().metrics["loss:sum"])
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, seed=1)
        (sequence,) = sampler.sample(datum(0).model_input, num_samples=1, sampling_params=params).result().sequences
        seen.append(sequence.tokens)
        external = training.save_weights_external("out").result().path
        urls = tinker.RestClient(base_url=url).get_external_weights_urls(external).result().urls
        for name in sorted(urls):
            with urllib.request.urlopen(urls[name], timeout=60) as answer:
                seen.append((name, answer.read()))
        archive = external.replace("tinker://", f"{url}/api/v1/training_runs/", 1)
        archive = archive.replace("/external_weights/", "/checkpoints/external_weights/") + "/archive"
        seen.append(len(httpx.get(archive, follow_redirects=True).raise_for_status().content))

    return seen


@pytest.fixture(scope="module")
def calm_results(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The results of a run with weights in the data directory."""
    with LiveServer(tmp_path_factory.mktemp("calm"), flags=FAKE) as server:
        return train(server.url)


@pytest.mark.parametrize("point", ["artifact.uploading:5", "artifact.uploaded:3", "artifact.committed:3"])
def test_kills_during_saves_and_an_empty_disk_change_no_bit(
    tmp_path: Path, store: S3Server, calm_results: list[object], point: str
) -> None:
    """Every engine is killed at one of its uploads.

    Halfway, all processes are killed and the cached weights are deleted.
    """
    data_dir = tmp_path / "data"
    environment = {**os.environ, **variables(store.url)}
    flags = (*FAKE, "--artifacts", f"s3://weights/{tmp_path.name}", "--redirect-downloads")
    killed = LiveServer(data_dir, flags=flags, environment={**environment, failpoints.VARIABLE: point})
    servers = [killed]

    def move(step: int) -> None:
        if step != NUM_STEPS // 2:
            return
        killed.kill()
        assert killed.log.count("engine exited: killed by SIGKILL") >= 1
        shutil.rmtree(data_dir / "artifact-cache")
        port = int(killed.url.rsplit(":", 1)[1])
        servers.append(LiveServer(data_dir, port=port, flags=flags, environment=environment))

    try:
        assert train(killed.url, move) == calm_results
        assert servers[-1].stop() == 0
        assert not list((data_dir / "artifacts").glob("art-*"))
        assert not [server for server in servers if SECRET_KEY in server.log or "Signature" in server.log]
    finally:
        for server in servers:
            server.kill()


def test_doctor_checks_that_the_object_store_can_be_written(
    tmp_path: Path, store: S3Server, capfd, monkeypatch
) -> None:
    from skyrl_tx.tools.cli import main

    for name, value in variables(store.url).items():
        monkeypatch.setenv(name, value)
    flags = ["doctor", *MODEL, "--data-dir", str(tmp_path), "--port", "0"]
    main([*flags, "--artifacts", f"s3://weights/{tmp_path.name}"])
    assert f"s3://weights/{tmp_path.name} can be written" in capfd.readouterr().out
    (tmp_path / "other").mkdir()
    flags[flags.index(str(tmp_path))] = str(tmp_path / "other")
    main([*flags, "--artifacts", "s3://missing-bucket"])
    output = capfd.readouterr().out
    assert "s3://missing-bucket: the object store cannot create" in output and "NoSuchBucket" in output
    assert SECRET_KEY not in output
