"""The trainer draws samples while all servers are lost.

The servers are stubs that the tests stop.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_tx.backends.composed import ComposedBackend, ComposedConfig
from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.integrations.vllm import SAMPLER
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.vllm_stub import VllmStub
from tests.support.vllm_world import FAKE, World, request

TRAINED = SamplerId("trained")


class BackendOnStub:
    """A composed backend that samples on a stub, with the weights of a trained model."""

    def __init__(self, world: World, stack: ExitStack) -> None:
        self.world, self.stub = world, world.stub()
        settings = world.config(lost_after_s=0.05)
        spec = BackendSpec(config=FakeConfig, load=lambda: FakeBackend)
        parts = {"trainer": spec, "trainer_config": FAKE, "sampler": SAMPLER, "sampler_config": settings}
        backend = ComposedBackend("tiny", ComposedConfig(**parts, check_share=1.0, falls_back=True))
        stack.callback(backend.close)
        backend.start()
        backend.load_sampler(TRAINED, world.adapter())
        self.backend = backend

    def begin(self, *requests: SampleRequest) -> None:
        self.backend.begin_sample(PreparedSampleBatch(requests=requests))

    def until(self, is_met: Callable[[list[SampleDelta]], object]) -> list[SampleDelta]:
        deltas: list[SampleDelta] = []
        while not is_met(deltas) and (new := self.backend.step_sample()):
            deltas += new
        return deltas

    def draw(self, *requests: SampleRequest) -> list[SampleDelta]:
        self.begin(*requests)
        return self.until(lambda _: False)

    @property
    def is_away(self) -> bool:
        return self.backend.meters().sampler_servers_lost == 1

    def lose(self) -> None:
        self.stub.stop()
        self.world.wait(lambda: self.is_away)

    def bring_back(self, stub: VllmStub) -> None:
        stub.start()
        self.world.wait(lambda: not self.is_away)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[BackendOnStub]:
    with ExitStack() as stack:
        yield BackendOnStub(World(tmp_path, stack), stack)


def tokens(deltas: list[SampleDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.tokens.tolist()]


def test_the_trainer_draws_while_the_sampler_is_away_and_says_so(bench: BackendOnStub) -> None:
    asked = replace(request(sampler=TRAINED), num_samples=2, options=PromptOptions(logprobs=True))
    before = bench.draw(asked)
    assert bench.backend.meters().fallback_samples == 0

    bench.lose()
    outage = bench.backend.meters().outage
    assert outage is not None and outage.endswith("; the trainer draws samples")

    drawn = bench.draw(asked)
    bench.world.trainer.load_sampler(TRAINED, bench.world.adapter())
    expected = bench.world.trainer.sample(PreparedSampleBatch(requests=(asked,)))

    for index in (0, 1):
        assert tokens(drawn, index) == tokens(expected, index) != tokens(before, index)
    assert {delta.request_id for delta in drawn} == {asked.request_id}
    assert [delta.index for delta in drawn if delta.prompt is not None and delta.prompt.logprobs is not None] == [0]
    assert all(delta.trainer_gap is None for delta in drawn), "the trainer is not compared with itself"
    assert bench.backend.meters().fallback_samples == 2

    bench.bring_back(bench.stub)
    assert tokens(bench.draw(asked)) == tokens(before)
    assert bench.backend.meters().fallback_samples == 2


def test_a_sample_with_tokens_waits_for_its_server(bench: BackendOnStub) -> None:
    """The trainer would draw other tokens than the server for the same seed."""
    asked = request(sampler=TRAINED, max_tokens=40)
    before = bench.draw(asked)
    bench.stub.options.drop_after = [4]
    bench.begin(asked)
    first = bench.until(lambda deltas: tokens(deltas))
    bench.stub.options.fail_next = [(503, "it starts")] * 1000
    bench.lose()
    bench.stub.options.fail_next = []
    first += bench.backend.step_sample()
    bench.bring_back(bench.stub)
    assert tokens(first + bench.until(lambda _: False)) == tokens(before)
    assert bench.backend.meters().fallback_samples == 0


def test_what_the_sampler_refuses_is_refused_while_it_is_away(bench: BackendOnStub) -> None:
    bench.lose()
    with pytest.raises(UserError, match="top_k 3"):
        bench.begin(request(top_k=3))


def test_a_sample_that_the_trainer_cannot_draw_waits(bench: BackendOnStub) -> None:
    asked = request("other", sampler="other")
    bench.backend._on_trainer._are_needed = False  # as if the trainer had no memory for its weights
    bench.backend.load_sampler(SamplerId("other"), bench.world.adapter())
    bench.lose()
    bench.begin(asked)
    assert not tokens(bench.backend.step_sample()) and bench.backend.meters().fallback_samples == 0
    bench.bring_back(bench.stub)
    assert len(tokens(bench.until(lambda _: False))) == 12


@pytest.mark.parametrize("how", ["cancel", "end"])
def test_a_sample_on_the_trainer_can_be_ended(bench: BackendOnStub, how: str) -> None:
    bench.lose()
    bench.begin(request("gone", sampler=TRAINED, max_tokens=40))
    bench.until(lambda deltas: tokens(deltas))
    if how == "cancel":
        bench.backend.cancel_sample([RequestId("gone")])
    else:
        bench.backend.end_sample(RequestId("gone"), 0)
    assert bench.backend.step_sample() == []
    bench.backend.drop_sampler(TRAINED)
