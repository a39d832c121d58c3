"""Supervised training is bit-equal when the engine is killed, on the JAX backend and on torch."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx.tools.quickstart.model import write_tiny_model
from skyrl_tx.tools.quickstart.training import load_excerpt
from tests.support.live_server import LiveServer
from tests.support.torch_example import torch_environment
from tests.support.with_constants import constants

SNAPSHOTS = constants("engine", snapshot_interval_requests=4)

NUM_STEPS = 10
BATCH_SIZE = 4
KILL_AFTER = (3, 7)  # steps
ENGINE_STARTED = re.compile(r"engine process (\d+)")
pytestmark = pytest.mark.slow


def make_server(data_dir: Path, *flags: str) -> LiveServer:
    return LiveServer(data_dir, flags=("--base-model", "tiny", *flags))


def make_torch_server(root: Path, name: str) -> LiveServer:
    """Return a server of the torch backend with its own model files and snapshots."""
    pytest.importorskip("torch")
    model = write_tiny_model(root / f"model-of-{name}")
    flags = ("--base-model", str(model), "--served-model-name", "tiny", *SNAPSHOTS)
    environment = torch_environment(root / f"installed-for-{name}")
    return LiveServer(root / name, flags=(*flags, "--backend", "torch"), environment=environment)


def train(url: str, after_step: Callable[[int], None]) -> list[float]:
    """Run pipelined supervised training on GSM8K. Returns the losses and a sample's logprobs."""
    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client("tiny", rank=8, seed=1).result()
    tokenizer = training.get_tokenizer()
    data = [datum(tokenizer.encode(f"{row.text} {row.answer}")[:200]) for row in load_excerpt().train]
    losses: list[float] = []
    waiting: list[tuple[tinker.APIFuture[types.ForwardBackwardOutput], tinker.APIFuture[types.OptimStepResponse]]] = []

    for step in range(NUM_STEPS):
        batch = [data[(step * BATCH_SIZE + row) % len(data)] for row in range(BATCH_SIZE)]
        passed = training.forward_backward(batch, "cross_entropy")
        waiting.append((passed, training.optim_step(types.AdamParams(learning_rate=5e-3, weight_decay=0.01))))
        after_step(step)
        if len(waiting) > 1:
            losses.append(wait_for_loss(*waiting.pop(0)))

    losses += [wait_for_loss(*futures) for futures in waiting]
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, stop=[], seed=1)
    (sequence,) = sampler.sample(data[0].model_input, num_samples=1, sampling_params=params).result().sequences
    return [*losses, *(sequence.logprobs or [])]


def wait_for_loss(
    passed: tinker.APIFuture[types.ForwardBackwardOutput], stepped: tinker.APIFuture[types.OptimStepResponse]
) -> float:
    stepped.result()
    return passed.result().metrics["loss:sum"]


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "weights": np.ones(len(tokens) - 1, np.float32),
        },
    )


@pytest.fixture(scope="module")
def calm_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run without kills."""
    with make_server(tmp_path_factory.mktemp("calm")) as server:
        return train(server.url, lambda step: None)


@pytest.mark.parametrize(
    "flags",
    [(), SNAPSHOTS],
    ids=["replayed from the beginning", "replayed from a snapshot"],
)
def test_engine_kill_changes_no_bit(tmp_path: Path, calm_losses: list[float], flags: tuple[str, ...]) -> None:
    with make_server(tmp_path / "data", *flags) as server:
        losses = train_with_kills(server)
    assert losses == calm_losses
    assert losses[NUM_STEPS - 1] < losses[0]


def test_engine_kill_changes_no_bit_on_torch(tmp_path: Path) -> None:
    with make_torch_server(tmp_path, "calm") as server:
        calm_losses = train(server.url, lambda step: None)
    with make_torch_server(tmp_path, "killed") as server:
        losses = train_with_kills(server)
    assert losses == calm_losses
    assert losses[NUM_STEPS - 1] < losses[0]


def train_with_kills(server: LiveServer) -> list[float]:
    """Train and kill the engine after some steps. Returns the result of `train`."""

    def kill_now_and_then(step: int) -> None:
        if step in KILL_AFTER:
            os.kill(server.engine_pid, signal.SIGKILL)
            server.wait_for(ENGINE_STARTED, times=KILL_AFTER.index(step) + 2)

    return train(server.url, kill_now_and_then)
