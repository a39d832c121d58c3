"""A fake trainer and vLLM samplers, which are stubs, pass the backend suite together."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_tx.backends.composed import ComposedBackend, ComposedConfig
from skyrl_tx.contract.backend import AbstractBackend, BackendSpec
from skyrl_tx.contract.requests import SamplingParams
from skyrl_tx.integrations.vllm import SAMPLER, VllmConfig
from skyrl_tx.testing.backend_driver import BackendDriver
from skyrl_tx.testing.backend_suite import BackendSuite
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.vllm_stub import StubOptions, VllmStub, running_stub

CONFIG = FakeConfig(vocab_size=32, slice_tokens=3, max_context_length=64)
SAMPLER_CONFIG = FakeConfig(vocab_size=32, slice_tokens=3, max_samplers=16)


class _Trainer(FakeBackend):
    """A fake trainer whose last instance the suite can break."""

    last: "_Trainer"

    def __init__(self, base_model: str, config: FakeConfig) -> None:
        super().__init__(base_model, config)
        _Trainer.last = self


class TestFakeAndVllm(BackendSuite):
    highest_temperature = 2.0
    filters: Mapping[str, float] = {}
    num_servers = 1
    stubs: list[VllmStub]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def servers(cls) -> Iterator[None]:
        """The stub servers, shared by all tests of the class."""
        with ExitStack() as stack:
            cls.stubs = []
            for _ in range(cls.num_servers):
                served = FakeBackend("tiny", SAMPLER_CONFIG)
                options = StubOptions(num_known=CONFIG.vocab_size)
                cls.stubs.append(stack.enter_context(running_stub(served, served.start(), options)))
            yield

    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        config = VllmConfig(
            url=",".join(stub.url for stub in cls.stubs),
            adapter_dir=directory,
            filtered_logprobs="renormalized",
            max_adapters=4,
            silence_timeout_s=30,
        )
        trainer = BackendSpec(config=FakeConfig, load=lambda: _Trainer)
        parts = {"trainer": trainer, "trainer_config": CONFIG, "sampler": SAMPLER, "sampler_config": config}
        return ComposedBackend("tiny", ComposedConfig(**parts, check_share=1.0, falls_back=True))

    @contextmanager
    def lost_device(self, backend: AbstractBackend) -> Generator[None]:
        _Trainer.last.is_lost = True
        for stub in self.stubs:  # otherwise its samples would continue
            stub.options.fail_next = [(400, "the test wants it")] * 10
        yield
        _Trainer.last.is_lost = False
        for stub in self.stubs:
            stub.options.fail_next = []

    def test_greedy_samples_ignore_filters(self, driver: BackendDriver) -> None:
        """At temperature 0, a filter never removes the sampled token, so filters do not change the logprobs."""
        plain = SamplingParams(seed=1, max_tokens=6, eos_stops=False, temperature=0.0)
        drawn = [
            driver.draw(driver.sample_request(None, params=params))
            for params in (plain, replace(plain, top_k=1, top_p=0.5))
        ]
        assert drawn[0] == drawn[1]


@pytest.mark.slow
@pytest.mark.exhaustive
class TestFakeAndTwoServers(TestFakeAndVllm):
    num_servers = 2
