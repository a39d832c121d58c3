"""A server that samples from a vLLM stub, which stops in the middle of a sample and comes back."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.live_server import LiveServer
from tests.support.vllm_stub import StubOptions, VllmStub, running_stub
from tests.support.with_constants import constants

FAKE = FakeConfig(vocab_size=32, max_context_length=64, max_samplers=16)
FLAGS = ("--base-model", "fake", "--backend", "fake", "--sampler", "vllm", *constants("api", retrieve_hold_s=1))
ROOT = Path(__file__).resolve().parents[2]
STARTED = re.compile(r"stub of vLLM (\d+) serves")
LOST = "vLLM has not responded for"
PROMPT = types.ModelInput.from_ints([3, 1, 2])
PARAMS = types.SamplingParams(max_tokens=16, seed=7, stop=[])


@pytest.fixture
def stub() -> Iterator[VllmStub]:
    served = FakeBackend("fake", FAKE)
    with running_stub(served, served.start(), StubOptions(num_known=FAKE.vocab_size)) as stub:
        yield stub


def wait_until(is_met: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not is_met():
        assert time.monotonic() < end, "the condition was not met in 30 s"
        time.sleep(0.02)


class Clients:
    """A server that uses the stub, and the SDK clients of the server."""

    def __init__(self, directory: Path, stub: VllmStub, stack: ExitStack, *flags: str) -> None:
        config = ["--backend-config.vocab-size", "32", "--backend-config.max-context-length", "64"]
        config += ["--vllm-url", stub.url, *constants("sampler", lost_after_s=0.2)]
        server = stack.enter_context(LiveServer(directory / "data", flags=[*FLAGS, *config, *flags]))
        self.server = server
        service = stack.enter_context(tinker.ServiceClient(base_url=server.url))
        self.training = service.create_lora_training_client(base_model="fake", rank=8).result()
        self.sampling = self.training.save_weights_and_get_sampling_client().result()

    def train(self) -> None:
        inputs = {"target_tokens": [1, 2, 3], "weights": [1.0] * 3}
        datum = types.Datum(model_input=PROMPT, loss_fn_inputs=inputs)
        self.training.forward_backward([datum], "cross_entropy").result()
        self.training.optim_step(types.AdamParams(learning_rate=0.01)).result()

    def health(self) -> dict[str, str]:
        answer = httpx.get(f"{self.server.url}/api/v1/healthz", timeout=10)
        assert answer.status_code == 200
        return answer.json()


@pytest.mark.slow
def test_a_lost_sampler_is_reported_and_its_samples_wait_while_training_goes_on(tmp_path: Path, stub: VllmStub) -> None:
    with ExitStack() as stack:
        clients = Clients(tmp_path, stub, stack)
        assert clients.health() == {"status": "ok"}
        [expected] = clients.sampling.sample(PROMPT, 1, PARAMS).result().sequences
        stub.options.is_paused, num_bodies = True, len(stub.bodies)
        running = clients.sampling.sample(PROMPT, 1, PARAMS)
        wait_until(lambda: len(stub.bodies) > num_bodies)
        stub.stop()
        wait_until(lambda: clients.health().get("detail", "").startswith(LOST))
        assert clients.health()["detail"].endswith("; samples wait")

        clients.train()
        stub.options.is_paused = False
        stub.start()
        [found] = running.result().sequences
        assert found.tokens == expected.tokens
        wait_until(lambda: clients.health() == {"status": "ok"})


@pytest.mark.slow
def test_an_own_vllm_ends_with_its_engine_and_starts_with_the_next(tmp_path: Path) -> None:
    """A killed engine leaves no vLLM process behind."""
    command = f"env PYTHONPATH={ROOT} {sys.executable} -m tests.support.vllm_command"
    flags = [*FLAGS, "--vllm-command", command, "--sampler-config.adapter-dir", str(tmp_path)]

    with LiveServer(tmp_path / "data", flags=flags) as server:
        with tinker.ServiceClient(base_url=server.url) as service:
            training = service.create_lora_training_client(base_model="fake", rank=8).result()
            sampling = training.save_weights_and_get_sampling_client().result()
            [before] = sampling.sample(PROMPT, 1, PARAMS).result().sequences
            first = int(server.wait_for(STARTED))
            os.kill(server.engine_pid, signal.SIGKILL)
            second = int(server.wait_for(STARTED, times=2))
            assert second != first
            wait_until(lambda: not Path(f"/proc/{first}").exists())
            [after] = sampling.sample(PROMPT, 1, PARAMS).result().sequences
            assert after.tokens == before.tokens
        assert server.stop() == 0

    wait_until(lambda: not Path(f"/proc/{second}").exists())


@pytest.mark.slow
def test_samples_fail_when_the_sampler_stays_away(tmp_path: Path, stub: VllmStub) -> None:
    with ExitStack() as stack:
        clients = Clients(tmp_path, stub, stack, *constants("sampler", outage_timeout_s=0.5))
        stub.stop()
        with pytest.raises(tinker.RequestFailedError, match="send the request again later") as failed:
            clients.sampling.sample(PROMPT, 1, PARAMS).result()
        assert failed.value.category == types.RequestErrorCategory.Server
        clients.train()
        stub.start()
        assert clients.sampling.sample(PROMPT, 1, PARAMS).result().sequences
