"""Samplers on stubs of vLLM servers, and a fake trainer whose adapters they sample from."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from skyrl_tx.contract.backend import Snapshot
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.integrations.vllm import VllmConfig
from skyrl_tx.integrations.vllm.sampler import VllmSampler
from skyrl_tx.testing.backend_driver import WEIGHTS_ONLY, BackendDriver
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.vllm_stub import StubOptions, VllmStub, running_stub

FAKE = FakeConfig(vocab_size=32, slice_tokens=2, max_context_length=64, max_samplers=64)


class World:
    """Stubs, a fake trainer, and samplers on them."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self._stack = directory, stack
        self.use(FAKE)
        self.stubs: list[VllmStub] = []

    def use(self, config: FakeConfig) -> None:
        """Start a trainer."""
        self.trainer = FakeBackend("tiny", config)
        self.capabilities: Capabilities = self.trainer.start()

    def stub(self, config: FakeConfig = FAKE, **options: object) -> VllmStub:
        """Start a server."""
        served = FakeBackend("tiny", config)
        wanted = StubOptions(**{"num_known": config.vocab_size} | options)
        self.stubs.append(self._stack.enter_context(running_stub(served, served.start(), wanted)))
        return self.stubs[-1]

    def config(self, **settings: object) -> VllmConfig:
        """Return settings with all stubs, and times that tests can wait for."""
        defaults = {
            "url": ",".join(stub.url for stub in self.stubs),
            "adapter_dir": self.directory,
            "silence_timeout_s": 20.0,
            "outage_timeout_s": 20.0,
        }
        return VllmConfig(**defaults | settings)

    def sampler(self, **settings: object) -> VllmSampler:
        """Start a sampler."""
        sampler = VllmSampler("tiny", self.config(**settings))
        self._stack.callback(sampler.close)
        sampler.start(self.capabilities)
        return sampler

    def adapter(self) -> Snapshot:
        """Return the weights of a model that was trained for two steps."""
        driver = BackendDriver(self.trainer, self.capabilities, self.directory)
        model = ModelId("model")
        self.trainer.create_model(model, driver.spec())
        for step in range(2):
            self.trainer.forward_backward(driver.batch(driver.request(model, seed=step)))
            self.trainer.optim_step(model, OptimizerParams(learning_rate=0.05))
        return self.trainer.capture(model, WEIGHTS_ONLY)

    def list_files(self, directory: str) -> list[Path]:
        """Return the files in a directory, none if it is not there."""
        return list(Path(directory).glob("*"))

    def wait(self, is_met: Callable[[], object]) -> None:
        """Wait for a condition, 20 s at most."""
        end = time.monotonic() + 20
        while not is_met():
            assert time.monotonic() < end, "the condition was not met in 20 s"
            time.sleep(0.005)

    def kill(self, sampler: VllmSampler) -> Path:
        """End a sampler as if its process was killed: it holds no lock any more. Return its directory."""
        sampler._directory._lock.close()
        return sampler._directory.path

    def set_scope(self, sample: SampleRequest, scope: str) -> SampleRequest:
        """Return a request with another cache scope."""
        return replace(sample, cache_scope=scope)


def request(name: str = "r", sampler: str | None = None, **changes: object) -> SampleRequest:
    """Return a request for twelve tokens."""
    params = {"seed": 7, "max_tokens": 12, "eos_stops": False} | changes
    return SampleRequest(
        request_id=RequestId(name),
        sampler=None if sampler is None else SamplerId(sampler),
        prompt=np.array([3, 1, 2, 3], np.int32),
        num_samples=1,
        params=SamplingParams(**params),
        options=PromptOptions(),
    )


def begin(sampler: VllmSampler, *requests: SampleRequest) -> None:
    sampler.begin_sample(PreparedSampleBatch(requests=requests))


def until(sampler: VllmSampler, is_met: Callable[[list[SampleDelta]], object]) -> list[SampleDelta]:
    """Step until the deltas meet a condition or no sample is open, and return all non-empty deltas."""
    deltas: list[SampleDelta] = []
    while not is_met(deltas) and (new := sampler.step_sample()):
        deltas += [delta for delta in new if delta.tokens.size or delta.stop_reason or delta.error]
    return deltas


def get_tokens(deltas: list[SampleDelta], name: str = "r") -> list[int]:
    return [token for delta in deltas if delta.request_id == name for token in delta.tokens.tolist()]


def draw(sampler: VllmSampler, *requests: SampleRequest) -> list[SampleDelta]:
    """Draw samples to their ends."""
    begin(sampler, *requests)
    return until(sampler, lambda _: False)
