"""The fake backend passes the backend suite, and so does a blocking backend built on it."""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from skyrl_tx.contract.backend import AbstractBackend, BlockingBackend, Snapshot, StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta
from skyrl_tx.testing.backend_suite import BackendSuite
from skyrl_tx.testing.fake import BACKEND, FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend

CONFIG = FakeConfig(vocab_size=32, slice_tokens=3)


class BlockingFake(BlockingBackend):
    """Computes whole batches with a fake backend."""

    def __init__(self, base_model: str, config: BaseModel) -> None:
        super().__init__(base_model, config)
        self._fake = FakeBackend(base_model, config)

    def start(self) -> Capabilities:
        return self._fake.start()

    def close(self) -> None:
        self._fake.close()

    def check_devices(self) -> None:
        self._fake.check_devices()

    @contextmanager
    def lost_device(self) -> Generator[None]:
        self._fake.is_lost = True
        yield
        self._fake.is_lost = False

    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        self._fake.create_model(model_id, spec)

    def delete_model(self, model_id: ModelId) -> None:
        self._fake.delete_model(model_id)

    def forward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        return self._fake.forward(batch)

    def forward_backward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        return self._fake.forward_backward(batch)

    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        return self._fake.optim_step(model_id, params)

    def clear_gradient(self, model_id: ModelId) -> None:
        self._fake.clear_gradient(model_id)

    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        return self._fake.capture(model_id, parts)

    def open_snapshot(self, directory: Path) -> Snapshot:
        return self._fake.open_snapshot(directory)

    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        self._fake.restore(model_id, spec, source, parts)

    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        self._fake.load_sampler(sampler, source)

    def drop_sampler(self, sampler: SamplerId) -> None:
        self._fake.drop_sampler(sampler)

    def sample(self, batch: PreparedSampleBatch) -> list[SampleDelta]:
        return self._fake.sample(batch)


class TestFake(BackendSuite):
    spec = BACKEND

    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        return FakeBackend("tiny", CONFIG)

    @contextmanager
    def lost_device(self, backend: AbstractBackend) -> Generator[None]:
        assert isinstance(backend, FakeBackend)
        backend.is_lost = True
        yield
        backend.is_lost = False


class TestBlockingFake(BackendSuite):
    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        return BlockingFake("tiny", CONFIG)

    @contextmanager
    def lost_device(self, backend: AbstractBackend) -> Generator[None]:
        assert isinstance(backend, BlockingFake)
        with backend.lost_device():
            yield


def test_samples_continue_while_the_mask_of_another_is_computed() -> None:
    is_computed = False

    class Constraint:
        def is_ready(self, timeout_s: float = 0.0) -> bool:
            return is_computed

        def fill_mask(self, mask: np.ndarray) -> None:
            assert is_computed, "the backend waits for this mask"
            mask[0] = 1 << 5

        def accept(self, token: int) -> None:
            pass

    params = SamplingParams(seed=1, max_tokens=2, eos_stops=False)
    plain = SampleRequest(
        request_id=RequestId("plain"),
        sampler=None,
        prompt=np.array([1], np.int32),
        num_samples=1,
        params=params,
        options=PromptOptions(),
    )
    backend = FakeBackend("tiny", CONFIG)
    limited = replace(plain, request_id=RequestId("limited"), make_constraint=Constraint)
    backend.begin_sample(PreparedSampleBatch(requests=(limited, plain)))

    deltas = [delta for _ in range(3) for delta in backend.step_sample()]
    assert [delta.request_id for delta in deltas if delta.tokens.size] == ["plain"]
    assert [(delta.request_id, delta.error) for delta in deltas if not delta.tokens.size] == [("limited", None)] * 2
    is_computed = True
    assert [delta.tokens.tolist() for _ in range(2) for delta in backend.step_sample()] == [[5], [5]]
    assert backend.step_sample() == []
