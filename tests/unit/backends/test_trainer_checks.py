"""Samples are compared with the trainer. The stub's log-probabilities differ by a known amount."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx.backends.composed import ComposedBackend, ComposedConfig
from skyrl_tx.contract.backend import BackendSpec, Snapshot
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import BackendLost, CapacityError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.results import SampleDelta, TrainerGap
from skyrl_tx.integrations.vllm import SAMPLER
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.vllm_stub import VllmStub
from tests.support.vllm_world import FAKE, World, request

TRAINED = SamplerId("trained")


class _Trainer(FakeBackend):
    """A trainer that can fail to load or to score."""

    last: "_Trainer"
    num_scored = 0
    load_failure: Exception | None = None
    failure: Exception | None = None

    def __init__(self, base_model: str, config: FakeConfig) -> None:
        super().__init__(base_model, config)
        _Trainer.last = self

    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        if self.load_failure is not None:
            raise self.load_failure
        super().load_sampler(sampler, source)

    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        self.num_scored += 1
        super().begin_sample(batch)

    def step_sample(self) -> list[SampleDelta]:
        if self.failure is not None:
            raise self.failure
        return super().step_sample()


class BackendOnStub:
    """A composed backend that samples on a stub, with the weights of a trained model."""

    def __init__(self, world: World, stack: ExitStack) -> None:
        self.stub: VllmStub = world.stub()
        self._world, self._stack = world, stack
        self._weights = world.adapter()

    def start(self, share: float = 1.0) -> ComposedBackend:
        spec = BackendSpec(config=FakeConfig, load=lambda: _Trainer)
        parts = {"trainer": spec, "trainer_config": FAKE, "sampler": SAMPLER, "sampler_config": self._world.config()}
        backend = ComposedBackend("tiny", ComposedConfig(**parts, check_share=share))
        self._stack.callback(backend.close)
        backend.start()
        self.load(backend)
        return backend

    def load(self, backend: ComposedBackend) -> None:
        backend.load_sampler(TRAINED, self._weights)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[BackendOnStub]:
    with ExitStack() as stack:
        yield BackendOnStub(World(tmp_path, stack), stack)


def draw(backend: ComposedBackend, *requests: SampleRequest) -> dict[str, list[SampleDelta]]:
    """Draw samples to their ends and return the deltas of each request."""
    deltas: dict[str, list[SampleDelta]] = {asked.request_id: [] for asked in requests}
    for delta in backend.sample(PreparedSampleBatch(requests=requests)):
        deltas[delta.request_id].append(delta)
    assert all(parts[-1].stop_reason is not None for parts in deltas.values())
    assert all(delta.stop_reason is None for parts in deltas.values() for delta in parts[:-1])
    return deltas


def gaps(backend: ComposedBackend, *requests: SampleRequest) -> list[TrainerGap | None]:
    return [deltas[-1].trainer_gap for deltas in draw(backend, *requests).values()]


@pytest.mark.parametrize("sampler", [None, TRAINED])
def test_the_gap_of_a_right_sampler_is_rounding(bench: BackendOnStub, sampler: SamplerId | None) -> None:
    backend = bench.start()
    (gap,) = gaps(backend, request(sampler=sampler))
    assert gap is not None and gap.num_tokens == 12 and 0 <= gap.mean <= gap.largest < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_gap_is_the_difference_that_the_server_has(bench: BackendOnStub, temperature: float) -> None:
    backend = bench.start()
    bench.stub.options.logprob_error = -0.125
    requests = [request(f"r{n}", sampler=TRAINED, seed=n, temperature=temperature) for n in range(3)]
    found = gaps(backend, *requests)
    assert [gap and gap.num_tokens for gap in found] == [12, 12, 12]
    assert [gap and gap.mean for gap in found] == pytest.approx([0.125] * 3, abs=1e-5)
    meters = backend.meters()
    assert (meters.compared_samples, meters.compared_tokens) == (3, 36)
    assert meters.trainer_gap_nats == pytest.approx(36 * 0.125, abs=1e-3)
    assert meters.trainer_gap_max_nats == pytest.approx(0.125, abs=1e-5)


def test_each_comparison_is_logged_and_a_large_gap_warns_once(
    bench: BackendOnStub, caplog: pytest.LogCaptureFixture
) -> None:
    backend = bench.start()
    bench.stub.options.logprob_error = 0.5
    with caplog.at_level(logging.INFO, "skyrl_tx.backends.trainer_checks"):
        gaps(backend, *(request(f"r{n}", sampler=TRAINED, max_tokens=20) for n in range(3)))
    assert "sample 0 of r1: log-probabilities differ from the trainer's by 0.5 nats on average" in caplog.text
    check_records = [record for record in caplog.records if record.name == "skyrl_tx.backends.trainer_checks"]
    (warning,) = [record for record in check_records if record.levelno == logging.WARNING]
    assert "do not sample from the trained weights" in warning.getMessage()


def test_the_tokens_of_a_compared_sample_are_those_of_one_that_is_not(bench: BackendOnStub) -> None:
    requests = [request(f"r{n}", sampler=TRAINED, seed=n) for n in range(4)]
    plain, compared = (draw(bench.start(share), *requests) for share in (0.0, 1.0))
    for name, deltas in plain.items():
        for what in ("tokens", "logprobs"):
            both = (np.concatenate([getattr(delta, what) for delta in parts]) for parts in (deltas, compared[name]))
            np.testing.assert_array_equal(*both)
        assert deltas[-1].stop_reason == compared[name][-1].stop_reason


def test_what_cannot_be_compared_is_not(bench: BackendOnStub, caplog: pytest.LogCaptureFixture) -> None:
    """Samples at other temperatures are not compared.

    Nor are samples whose weights the trainer cannot load.
    """
    backend = bench.start()
    assert gaps(backend, request(sampler=TRAINED, temperature=0.7)) == [None]
    for failure in (CapacityError("no memory for another sampler"), RuntimeError("a bug")):
        backend.drop_sampler(TRAINED)
        _Trainer.last.load_failure = failure
        bench.load(backend)
        assert gaps(backend, request(sampler=TRAINED)) == [None]
        assert f"so it neither scores nor draws samples of it: {failure}" in caplog.text
    assert backend.meters().compared_samples == 0


def test_with_a_share_of_0_the_trainer_has_no_part_in_sampling(bench: BackendOnStub) -> None:
    backend = bench.start(share=0.0)
    assert gaps(backend, request(sampler=TRAINED)) == [None]
    assert _Trainer.last.num_scored == 0 and backend.meters().compared_samples is None


def test_a_share_is_chosen_by_request_and_index(bench: BackendOnStub) -> None:
    requests = [replace(request(f"r{n}", max_tokens=1), num_samples=2) for n in range(40)]

    def list_compared(share: float) -> set[tuple[RequestId, int]]:
        deltas = bench.start(share).sample(PreparedSampleBatch(requests=tuple(requests)))
        return {(delta.request_id, delta.index) for delta in deltas if delta.trainer_gap is not None}

    quarter = list_compared(0.25)
    assert 10 <= len(quarter) <= 30 and quarter == list_compared(0.25)
    assert quarter < list_compared(0.5)


def test_a_sample_that_the_engine_ends_itself_is_in_the_meters_only(bench: BackendOnStub) -> None:
    """For example, at a stop string."""
    backend = bench.start()
    backend.begin_sample(PreparedSampleBatch(requests=(request("first", sampler=TRAINED, max_tokens=40),)))
    while not any(delta.tokens.size for delta in backend.step_sample()):
        pass
    backend.end_sample(RequestId("first"), 0)
    backend.cancel_sample([RequestId("first")])
    draw(backend, request("next"))
    assert backend.meters().compared_samples == 2


def test_a_cancelled_sample_is_not_compared(bench: BackendOnStub) -> None:
    backend = bench.start()
    backend.begin_sample(PreparedSampleBatch(requests=(request("gone", sampler=TRAINED),)))
    while not any(delta.request_id == "gone" and delta.tokens.size for delta in backend.step_sample()):
        pass
    backend.cancel_sample([RequestId("gone")])
    backend.drop_sampler(TRAINED)
    assert backend.step_sample() == [] and backend.meters().compared_samples == 0


def test_a_trainer_that_fails_to_score_ends_no_sample_wrongly(
    bench: BackendOnStub, caplog: pytest.LogCaptureFixture
) -> None:
    backend = bench.start()
    _Trainer.last.failure = RuntimeError("a bug")
    assert gaps(backend, request(sampler=TRAINED)) == [None]
    assert "the trainer could not score samples" in caplog.text
    _Trainer.last.failure = None
    (gap,) = gaps(backend, request("again", sampler=TRAINED))
    assert gap is not None


def test_a_lost_device_of_the_trainer_is_lost(bench: BackendOnStub) -> None:
    backend = bench.start()
    _Trainer.last.failure, _Trainer.last.is_lost = RuntimeError("INTERNAL"), True
    with pytest.raises(BackendLost):
        gaps(backend, request(sampler=TRAINED))
