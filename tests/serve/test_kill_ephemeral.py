"""An ephemeral sampler survives a kill right after the result of its save."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.live_server import LiveServer

TOKENS = [5, 9, 2, 7, 30, 31]
ENGINE_STARTED = re.compile(r"engine process (\d+)")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path / "data") as server:
        yield server


def datum() -> types.Datum:
    targets = np.array([*TOKENS[1:], 0], np.int64)
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs={"target_tokens": targets})


def train(training: tinker.TrainingClient) -> None:
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.05)).result()


@pytest.mark.slow
def test_ephemeral_sampler_survives_an_engine_kill(server: LiveServer) -> None:
    with tinker.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client("fake", rank=4, seed=1).result()
        train(training)
        expected = training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data[:-1]
        samplers: list[tinker.SamplingClient] = []
        for kill in range(2):
            samplers.append(training.save_weights_and_get_sampling_client().result())
            os.kill(server.engine_pid, signal.SIGKILL)
            server.wait_for(ENGINE_STARTED, times=kill + 2)
        train(training)
        for sampler in samplers:
            scored = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
            np.testing.assert_allclose(scored[1:], expected, atol=1e-5)
