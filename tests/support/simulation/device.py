"""The fake backend on a device that fails, hangs or loses its process."""

from collections.abc import Callable, Collection
from pathlib import Path

from skyrl_tx.contract.backend import Pass, Snapshot, StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.ids import ModelId, SamplerId
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend

CONFIG = FakeConfig(vocab_size=24, slice_tokens=4)
BAD_TOKEN, CRASH_TOKEN = 22, 23
"""A pass with one of these as its first token raises an error, or ends the process, whenever it runs."""

Use = Callable[[str], None]
"""Called with the name of each call, before and after it; raises what the device raises."""


class Device(FakeBackend):
    """Each call takes some virtual time and passes the points where a fault may happen."""

    def __init__(self, config: FakeConfig, use: Use, crash: Callable[[], None]) -> None:
        super().__init__("tiny", config)
        self._use = use
        self._crash = crash

    def start(self) -> Capabilities:
        self._use("start")
        return super().start()

    def check_devices(self) -> None:
        self._use("check_devices")
        super().check_devices()

    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        self._use("create_model")
        super().create_model(model_id, spec)

    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        self._use("begin_pass")
        return _Pass(super().begin_pass(batch, backward=backward), batch, self._use, self._crash)

    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        self._use("optim_step")
        metrics = super().optim_step(model_id, params)
        self._use("optim_step done")
        return metrics

    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        self._use("capture")
        return super().capture(model_id, parts)

    def open_snapshot(self, directory: Path) -> Snapshot:
        self._use("open_snapshot")
        return super().open_snapshot(directory)

    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        self._use("restore")
        super().restore(model_id, spec, source, parts)

    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        self._use("load_sampler")
        super().load_sampler(sampler, source)

    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        self._use("begin_sample")
        super().begin_sample(batch)

    def step_sample(self) -> list[SampleDelta]:
        if not self._open:
            return []
        self._use("step_sample")
        return super().step_sample()


class _Pass(Pass):
    """One pass of the fake backend; its last step computes everything."""

    def __init__(self, inner: Pass, batch: PreparedModelPassBatch, use: Use, crash: Callable[[], None]) -> None:
        self._inner = inner
        self._first_tokens = {int(example.tokens[0]) for example in batch.examples}
        self._use = use
        self._crash = crash

    def step(self) -> bool:
        self._use("step")
        if CRASH_TOKEN in self._first_tokens:
            self._crash()
        if BAD_TOKEN in self._first_tokens:
            raise ValueError("this pass fails whenever it runs")
        return self._inner.step()

    def results(self) -> list[PassResult]:
        self._use("results")
        if CRASH_TOKEN in self._first_tokens:
            self._crash()
        if BAD_TOKEN in self._first_tokens:
            raise ValueError("this pass fails whenever it runs")
        return self._inner.results()

    def abort(self) -> None:
        self._inner.abort()
