"""The one door between the engine and whatever computes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel

from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta


class StatePart(StrEnum):
    """What a model consists of beside the base weights."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    GRADIENT = "gradient"


ALL_PARTS = frozenset(StatePart)


class Snapshot(ABC):
    """A model's state at one moment; later training never changes it."""

    @abstractmethod
    def write(self, directory: Path) -> None:
        """Write into an existing empty directory: PEFT layout, safetensors and JSON only.

        Callable from any thread; touches no device.
        """


class Pass(ABC):
    """One batch on its way. Atomic: all of it is kept, or nothing.

    Several may be under way, on different models, with steps and other calls in between.
    """

    @abstractmethod
    def step(self) -> bool:
        """Dispatch one micro-batch, without waiting for more than a few before it; True once all are dispatched."""

    @abstractmethod
    def results(self) -> list[PassResult]:
        """Wait, commit the gradients, and return one result per example in the batch's order."""

    @abstractmethod
    def abort(self) -> None:
        """Forget the pass: no gradient is kept. Idempotent; of no effect after `results`."""


class AbstractBackend(ABC):
    """Owns devices, base weights, adapters, gradients and optimizer state; knows no HTTP, SQL or sessions.

    Called by one thread. Raise UserError for the caller's mistake, CapacityError when full, BackendLost when state is
    gone. Any other exception: this call failed and left no trace.
    """

    _begun_requests: list[SampleRequest] | None = None

    @abstractmethod
    def __init__(self, base_model: str, config: BaseModel) -> None:
        """Remember; touch no device."""

    @abstractmethod
    def start(self) -> Capabilities:
        """Load the base model, warm up."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""

    @abstractmethod
    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        """Make a fresh adapter: A from the seed, B zero, no gradient, fresh optimizer."""

    @abstractmethod
    def delete_model(self, model_id: ModelId) -> None:
        """Free a model's slot. Idempotent."""

    @abstractmethod
    def forward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """Result i belongs to example i; no gradient changes."""

    @abstractmethod
    def forward_backward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """As `forward`, and the gradient of the summed loss is added to each model's, request by request."""

    @abstractmethod
    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        """Apply the summed gradient and clear it.

        Reports at least "unclipped_grad_l2:mean", "learning_rate:mean" and "step:max", the optimizer's count of steps.
        No name without a colon: clients write these beside columns of their own ("step" is one).
        """

    @abstractmethod
    def clear_gradient(self, model_id: ModelId) -> None:
        """Drop the summed gradient: a pass of its accumulation failed."""

    @abstractmethod
    def sample(self, batch: PreparedSampleBatch) -> list[SampleDelta]:
        """Sample to completion; the deltas of one sample are in order."""

    @abstractmethod
    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        """Take the state as it is now; quick, and immutable from then on."""

    @abstractmethod
    def open_snapshot(self, directory: Path) -> Snapshot:
        """Read back what `Snapshot.write` wrote. Raises UserError for files that do not fit the base model."""

    @abstractmethod
    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        """Make the model, or overwrite it, from `parts` of a snapshot; parts not named start fresh."""

    @abstractmethod
    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        """Make frozen weights ready to sample from. Of no effect when they already are."""

    @abstractmethod
    def drop_sampler(self, sampler: SamplerId) -> None:
        """Free frozen weights. Idempotent; the engine never drops one with running samples."""

    # Working defaults, built on the methods above.

    def text_of(self, tokens: list[int]) -> str:
        """Decode tokens for stop strings. Raises UserError where there is no tokenizer."""
        raise UserError("stop: this backend has no tokenizer, so stop strings cannot be found; pass token ids")

    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        """Start a pass whose micro-batches the engine may interleave with decoding."""
        return _WholePass(self.forward_backward if backward else self.forward, batch)

    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        """Queue prompts for `step_sample`."""
        self._begun().extend(batch.requests)

    def step_sample(self) -> list[SampleDelta]:
        """Decode one slice of all that runs; empty when nothing does."""
        begun = self._begun()
        if not begun:
            return []
        requests, begun[:] = tuple(begun), []
        return self.sample(PreparedSampleBatch(requests=requests))

    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        """Forget prompts; no delta of theirs comes after this. Unknown ids are of no effect."""
        begun = self._begun()
        begun[:] = [request for request in begun if request.request_id not in request_ids]

    def end_sample(self, request_id: RequestId, index: int) -> None:
        """End one sample of a request that goes on: it had its stop string. No delta of it comes after this.

        Called between slices; what has ended or is unknown is of no effect. By default nothing: `step_sample` has come
        to the end of each.
        """
        assert index >= 0

    def _begun(self) -> list[SampleRequest]:
        if self._begun_requests is None:
            self._begun_requests = []
        return self._begun_requests


class _WholePass(Pass):
    """A backend's whole pass as one step."""

    def __init__(
        self, run: Callable[[PreparedModelPassBatch], list[PassResult]], batch: PreparedModelPassBatch
    ) -> None:
        self._run = run
        self._batch = batch

    def step(self) -> bool:
        """See Pass; the work itself is left to `results`, so that `abort` leaves no trace."""
        return True

    def results(self) -> list[PassResult]:
        """See Pass."""
        return self._run(self._batch)

    def abort(self) -> None:
        """See Pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """What an entry point of the group `skyrl_tx.backends` names: importing it must be cheap."""

    config: type[BaseModel]
    """Its fields become flags; each has a description and a default."""
    load: Callable[[], type[AbstractBackend]]
    """Import the backend itself."""
