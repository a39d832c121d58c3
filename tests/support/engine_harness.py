"""A data directory with the API's side of its store, and engines that run on it, for tests of the engine."""

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from sqlmodel import Session, select

from skyrl_tx.artifacts import LocalArtifacts
from skyrl_tx.backends.registry import find_backend, start_backend
from skyrl_tx.compose import APPS
from skyrl_tx.contract import codec, requests
from skyrl_tx.contract.backend import AbstractBackend, Pass, Snapshot, StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId, SamplingSessionId, SessionId
from skyrl_tx.contract.requests import Datum, LoraSpec, ModelPass, ModelSpec, OptimizerParams, OptimStep, Sample
from skyrl_tx.contract.results import Metrics, SampleDelta
from skyrl_tx.engine.engine import Engine
from skyrl_tx.engine.extension import EngineExtension
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.launch.command import load_engine_extensions
from skyrl_tx.launch.engine_process import open_store, run_engine
from skyrl_tx.store import futures, models, placement, sampling_sessions, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.tables import ModelRow, RequestRow
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend

SPEC = ModelSpec(lora=LoraSpec(rank=2, seed=5))
OWNER = "local"
WATCHED = 50
"""Requests whose outcome is read at once."""
_EAGER: dict[str, Any] = {"gap_timeout_s": 0.3, "snapshot_max_share": 1.0}
"""Settings for short tests with many snapshots."""


class Perishable(FakeBackend):
    """A fake backend that loses its device in its n-th call, before or after the call has its effect."""

    def __init__(self, config: FakeConfig, calls_left: int) -> None:
        super().__init__("tiny", config)
        self.calls_left = calls_left

    def _count(self) -> None:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise BackendLost("unplugged")

    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        """See AbstractBackend."""
        self._count()
        return super().begin_pass(batch, backward=backward)

    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        """See AbstractBackend."""
        self._count()
        metrics = super().optim_step(model_id, params)
        self._count()
        return metrics

    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        """See AbstractBackend."""
        self._count()
        return super().capture(model_id, parts)

    def step_sample(self) -> list[SampleDelta]:
        """See AbstractBackend."""
        deltas = super().step_sample()
        if deltas:
            self._count()
        return deltas


class EngineHarness:
    """One data directory, on which a client, the API and several engines in turn work."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        self.data_dir = data_dir
        self.config = FakeConfig(vocab_size=128)
        self.settings = EngineSettings(data_dir=data_dir, base_model="tiny", **{**_EAGER, **settings})
        self.api = Store.open(data_dir, role="api", url=self.settings.store_url)
        self.artifacts = LocalArtifacts(data_dir / "artifacts")
        self.extensions: list[EngineExtension] = load_engine_extensions(APPS)
        self.owner = OWNER
        self.session_id = self.new_session()

    def close(self) -> None:
        """Close the API's store."""
        self.api.close()

    def new_session(self) -> SessionId:
        """Create a client session."""
        return self.api.write(lambda tx: sessions.create(tx, owner=self.owner, now=time.time()))

    def become(self, owner: str) -> None:
        """Continue as another owner, in a new session."""
        self.owner = owner
        self.session_id = self.new_session()

    def submit(
        self,
        request: requests.Request,
        *,
        model_id: ModelId | None = None,
        seq_id: int | None = None,
        sampling_session_id: SamplingSessionId | None = None,
        engine: int = 1,
        num_attempts: int = 0,
    ) -> RequestId:
        """Store a request, like the API. `engine` executes it if it names no model.

        The request looks as if engines had crashed `num_attempts` times while they executed it.
        """
        where = {"model_id": model_id, "seq_id": seq_id, "sampling_session_id": sampling_session_id}

        def work(tx: Session) -> RequestId:
            request_id = self._submit(tx, request, engine=engine, **where)
            for _ in range(num_attempts):
                futures.count_delivery_attempt(tx, [request_id])
            return request_id

        return self.api.write(work)

    def _submit(self, tx: Session, request: requests.Request, **where: Any) -> RequestId:
        if (model_id := where.get("model_id")) is not None:
            where["engine"] = models.get_engine_number(tx, model_id) or 1
        new = NewRequest(
            key="",
            kind=request.kind if isinstance(request, requests.Rejected) else codec.get_kind(request),
            owner=self.owner,
            session_id=self.session_id,
            body=codec.encode(request),
            **where,
        )
        return futures.submit(tx, new, time.time()).request_id

    def make(self, request: requests.CreateModel | requests.LoadWeights, name: str = "m") -> tuple[ModelId, RequestId]:
        """Submit a create_model, or a load_weights that creates a model."""
        model_id = ModelId(f"{self.session_id}:train:{name}")

        def work(tx: Session) -> RequestId:
            now = time.time()
            row = ModelRow(
                model_id=model_id,
                session_id=self.session_id,
                base_model="tiny",
                spec=codec.encode(request.spec),
                created_at=now,
                last_request_at=now,
                engine=placement.choose_engine(tx),
            )
            models.create(tx, row)
            return self._submit(tx, request, model_id=model_id)

        return model_id, self.api.write(work)

    def create(self, name: str = "m", spec: ModelSpec = SPEC) -> tuple[ModelId, RequestId]:
        """Submit a create_model."""
        return self.make(requests.CreateModel(base_model="tiny", spec=spec), name)

    def save_samplers(self, count: int) -> list[SamplerId]:
        """Create a model, run an engine that makes `count` ephemeral saves, and return their samplers."""
        model_id, last = self.create()
        names = [SamplingSessionId(f"{self.session_id}:sample:{number}") for number in range(count)]
        for seq_id, name in enumerate(names, start=1):
            save = requests.SaveWeights(kind="sampler_weights", name=None, sampling_session_id=name)
            last = self.submit(save, model_id=model_id, seq_id=seq_id)
        self.run(last)
        rows = [self.api.read(lambda tx, name=name: sampling_sessions.get(tx, name)) for name in names]
        return [row.sampler_id for row in rows if row is not None and row.sampler_id is not None]

    def run(
        self,
        *until: RequestId,
        backend: AbstractBackend | None = None,
        on_stuck: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Run an engine until these requests have results. A lost device is recorded as a crash, as by a supervisor."""
        stop = threading.Event()
        store = open_store(self.settings, stop)

        def watch() -> None:
            left = list(until)
            while left and not stop.is_set():
                done = self.api.read(lambda tx, ids=tuple(left[:WATCHED]): futures.get_outcomes(tx, ids))
                left = [request_id for request_id in left if request_id not in done]
                if not done:
                    self.api.wait(5.0)
            stop.set()
            store.wake()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            engine = Engine(self.settings, backend or self.backend(), store, self.artifacts, extensions=self.extensions)
            engine.run(stop, on_stuck=on_stuck)
        except BackendLost:
            self.api.write(lambda tx: futures.record_engine_end(tx, is_crash=True))
            raise
        finally:
            stop.set()
            self.api.wake()
            watcher.join()
            store.close()

    def backend(self) -> AbstractBackend:
        """Return the backend that `run` uses by default."""
        return FakeBackend("tiny", self.config)

    def result(self, request_id: RequestId) -> Any:
        """Return the result of a request."""
        state = self.api.read(lambda tx: futures.get_state(tx, request_id, None))
        assert state.result is not None, state
        return codec.decode(state.result)

    def attempts(self, request_id: RequestId) -> int:
        """Return the delivery attempts of a request that are counted in the database."""
        wanted = select(RequestRow.attempts).where(RequestRow.request_id == request_id)
        return self.api.read(lambda tx: tx.exec(wanted).one())

    def answer(self, request: requests.Request, **where: Any) -> Any:
        """Submit one request, run an engine for it, and return its result."""
        request_id = self.submit(request, **where)
        self.run(request_id)
        return self.result(request_id)


def datum(seed: int = 0, length: int = 6, **inputs: Any) -> Datum:
    """Return a random sequence whose targets are the next tokens."""
    tokens = np.random.default_rng(seed).integers(1, 128, length, dtype=np.int32)
    targets = np.roll(tokens, -1).astype(np.int64)
    return Datum(tokens=tokens, loss_inputs={"target_tokens": targets, **inputs})


def forward_backward(seed: int = 0, **changes: Any) -> ModelPass:
    """Return a pass of two sequences."""
    data = (datum(seed), datum(seed + 1000, 4))
    return ModelPass(**{"data": data, "loss": "cross_entropy", "loss_config": {}, "backward": True, **changes})


def optim_step(learning_rate: float = 0.05) -> OptimStep:
    """Return an optimizer step with weight decay."""
    return OptimStep(params=OptimizerParams(learning_rate=learning_rate, weight_decay=0.1))


def sample(prompt: tuple[int, ...] = (65, 66), sampler: SamplerId | None = None, **params: Any) -> Sample:
    """Return a request for one greedy sample of eight tokens."""
    settled = requests.SamplingParams(**{"seed": 3, "max_tokens": 8, "temperature": 0.0, **params})
    return Sample(prompt=np.array(prompt, np.int32), num_samples=1, sampler=sampler, params=settled)


def run_fake_engine(settings: EngineSettings, step_delay_s: float = 0.0) -> None:
    """Run an engine process. In this module, so that a spawned child can import it."""
    config = FakeConfig(vocab_size=128, step_delay_s=step_delay_s)
    run_engine(settings, lambda _: start_backend("fake", find_backend("fake"), settings.base_model, config), apps=APPS)
