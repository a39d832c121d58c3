"""The interface between the engine and a backend: the only way in which the engine uses devices.

A backend subclasses `AbstractBackend`, or `BlockingBackend` if it computes whole batches in one call. Its verbs of
sampling are those of `SamplingBackend`, which a sampler next to a trainer has too (`skyrl_tx.contract.sampler`).
`skyrl_tx.testing.backend_suite` tests the guarantees stated here, see docs/internals/adding_a_backend.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel

from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta


class StatePart(StrEnum):
    """The parts of a model's state; base weights are shared and not part of it."""

    WEIGHTS = "weights"
    """The adapter."""
    OPTIMIZER = "optimizer"
    """The optimizer's moments and its number of steps."""
    GRADIENT = "gradient"
    """The gradient accumulated since the last `optim_step`."""


ALL_PARTS = frozenset(StatePart)


class Snapshot(ABC):
    """The captured parts of one model's state. It is immutable: later training does not change it."""

    @abstractmethod
    def write(self, directory: Path) -> None:
        """Write the snapshot into an existing empty directory.

        The files are those of `skyrl_tx.contract.state_files`, at least of the captured parts. The engine calls this
        from any thread, while its own thread uses the backend, so it must not start a computation on a device.
        """


class Pass(ABC):
    """One batch of forward or forward-backward computation, in micro-batches.

    A pass is atomic: it adds either its whole gradient, in `results`, or nothing. Several passes over different models
    may be running at once, and the engine may call any other method of the backend between the steps of a pass,
    except methods that change one of its models.
    """

    @property
    def is_waiting(self) -> bool:
        """Whether the next step waits for the compiler. The engine prefers passes that do not wait, then samples.

        The step of a pass that waits may return False after a short time without dispatching. The default is False.
        """
        return False

    @abstractmethod
    def step(self) -> bool:
        """Dispatch one micro-batch, and return True if it was the last one. A further call does nothing.

        Wait for earlier micro-batches only to bound the work that is queued on the device.
        """

    @abstractmethod
    def results(self) -> list[PassResult]:
        """Run the remaining steps, add the gradients, and return one result per example in batch order."""

    @abstractmethod
    def abort(self) -> None:
        """Discard the pass and its gradients. Idempotent; does nothing after `results`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRank:
    """This host among several that compute one backend together, each a process."""

    rank: int
    """From 0 to size - 1; the engine runs on the host of rank 0."""
    size: int
    coordinator: str
    """Host and port of rank 0 at which backends may find each other, for their own use."""


class SamplingBackend(ABC):
    """Draws samples from the base model and from frozen weights: the half of a backend that trains nothing.

    All methods are called from one thread. See `AbstractBackend` for errors, batch invariance and isolation.
    """

    @abstractmethod
    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        """Load the weights of a snapshot for sampling. Does nothing if the sampler is loaded."""

    @abstractmethod
    def drop_sampler(self, sampler: SamplerId) -> None:
        """Free a sampler. Idempotent; the engine never drops a sampler with running samples."""

    @abstractmethod
    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        """Queue requests. `step_sample` computes them, as soon as there is memory for each."""

    @abstractmethod
    def step_sample(self) -> list[SampleDelta]:
        """Run one decode slice of all running samples and return the new tokens; an empty list if nothing is queued.

        While samples are queued and nothing is new, return a delta without tokens, after a short wait.
        """

    @abstractmethod
    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        """Discard all samples of requests; no delta of them follows. Unknown ids are ignored."""

    @abstractmethod
    def end_sample(self, request_id: RequestId, index: int) -> None:
        """End one sample of a request, which has produced a stop string; no delta of it follows.

        Called between decode slices. A sample that has ended or is unknown is ignored.
        """

    def sample(self, batch: PreparedSampleBatch) -> list[SampleDelta]:
        """Sample to the end and return all deltas, those of each sample in order. Nothing else may be queued."""
        self.begin_sample(batch)
        deltas: list[SampleDelta] = []
        while new := self.step_sample():
            deltas.extend(new)
        return deltas


class AbstractBackend(SamplingBackend):
    """Owns the devices, the base weights, and every model's adapter, accumulated gradient and optimizer state.

    The engine calls all methods from one thread. It validates arguments against `Capabilities` and `LossSpec` first, so
    a backend may assert what they state.

    **Errors.** Raise UserError for a mistake of the caller, CapacityError if memory or slots are exhausted, and
    BackendLost if the state on the device is lost. After BackendLost the engine process exits, and a new one rebuilds
    every model by replay. After any other exception the engine calls `check_devices`, and fails the request if that
    returns. A call that raises must leave the state unchanged.

    **Batch invariance.** The numbers of a request must not depend on other requests in the batch or on the device:
    results, gradients and samples are equal to the last bit. Replay after a crash depends on it.

    **Isolation.** A call for one model must not change another model's state, whatever numbers it holds (NaN as well).
    """

    @abstractmethod
    def __init__(self, base_model: str, config: BaseModel) -> None:
        """Store the arguments; do not touch a device. `config` is an instance of `BackendSpec.config`."""

    # Life cycle

    @abstractmethod
    def start(self) -> Capabilities:
        """Load the base model, compile what is needed often, and return what this backend can do. Called once."""

    def join_hosts(self, rank: HostRank) -> None:
        """Become one of several hosts that make the same calls in the same order. Called once, before `start`.

        A backend that overrides this returns the same results on every host, and raises the same error on all or
        BackendLost: memory, clocks and the order of sets may differ between hosts and must decide nothing. A pass that
        could go on with less memory does not decide that either: its `step` and `results` raise MemoryExhausted, when
        nothing that it dispatched is running, and go on when they are called again. The default refuses.
        """
        raise UserError(f"--hosts.size {rank.size}: this backend computes on one host")

    @abstractmethod
    def close(self) -> None:
        """Free all resources. Idempotent; also called before `start`."""

    # Training

    @abstractmethod
    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        """Create a model with a fresh adapter: A from `spec.lora.seed`, B zero, no gradient, no optimizer step."""

    @abstractmethod
    def delete_model(self, model_id: ModelId) -> None:
        """Free a model's state. Idempotent; does nothing for an unknown model."""

    @abstractmethod
    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        """Start a pass.

        With `backward`, the gradient of the summed loss is added to the accumulated gradient of each model. To be
        batch-invariant, sum the gradient of each request by itself, then add the requests in batch order.
        """

    @abstractmethod
    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        """Apply the accumulated gradient, clear it, and return metrics. Without a gradient, apply zeros.

        The metrics include at least "unclipped_grad_l2:mean", "learning_rate:mean" and "step:max" (the number of
        steps). Every name has a reduction after a colon, because clients log names without one themselves.
        """

    def gradient_norm(self, model_id: ModelId) -> float | None:
        """Return the global L2 norm of the accumulated gradient, 0 without one; None if the backend does not tell.

        The engine refuses an optimizer step whose gradient norm is not finite. Changes nothing.
        """
        return None

    @abstractmethod
    def clear_gradient(self, model_id: ModelId) -> None:
        """Discard the accumulated gradient, which is incomplete (a pass has failed) or not finite."""

    # State

    @abstractmethod
    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        """Return the current state of a model. This is fast: copies to the host finish in `Snapshot.write`."""

    @abstractmethod
    def open_snapshot(self, directory: Path) -> Snapshot:
        """Read the files that `Snapshot.write` wrote. Raises UserError if they do not fit the base model."""

    @abstractmethod
    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        """Create or overwrite a model from `parts` of a snapshot; other parts are those of a fresh model.

        Raises UserError if the snapshot lacks a part or does not fit `spec`.
        """

    # Methods with an implementation

    def check_devices(self) -> None:
        """Run a small operation on every device. Raises BackendLost if one does not compute any more.

        The engine calls this after a call that raised an unexpected error, and after a sample that failed. If it
        returns, that request fails; if it raises, no request fails and the engine starts again. The default does
        nothing: without this method every request fails until the backend itself raises BackendLost.
        """
        return

    def is_compiling(self) -> bool:
        """Return whether the running call waits for a compiler. Called from any thread.

        Compilation may take much longer than a computation and has a time limit of its own. The default is False.
        """
        return False

    def meters(self) -> Meters:
        """Return what this backend holds and did, for people.

        The engine calls this about once a second between other calls, so it must be fast and must not wait for a
        device. The default tells nothing.
        """
        return Meters()

    def forward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """Compute one result per example, in batch order, and no gradient."""
        return self.begin_pass(batch, backward=False).results()

    def forward_backward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """As `forward`, and accumulate gradients, see `begin_pass`."""
        return self.begin_pass(batch, backward=True).results()

    def fingerprint_changes(self) -> Mapping[str, str]:
        """Return entries of `Capabilities.fingerprint` as they are now, if they may have changed since `start`.

        The engine stores them with weights, so that a later start reports that results are not bit-equal. Called from
        any thread. The default returns none.
        """
        return {}

    def text_of(self, tokens: list[int]) -> str:
        """Decode tokens, to find stop strings. Raises UserError if there is no tokenizer."""
        raise UserError("stop: this backend has no tokenizer, so stop strings cannot be found; pass token ids")


class BlockingBackend(AbstractBackend):
    """Base class of backends that compute whole batches in one call.

    Training and sampling do not take turns on the device then, and a sample occupies it until it ends.
    """

    def __init__(self, base_model: str, config: BaseModel) -> None:
        """See AbstractBackend. Subclasses call this constructor."""
        self._queued_requests: list[SampleRequest] = []

    @abstractmethod
    def forward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """See AbstractBackend."""

    @abstractmethod
    def forward_backward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """See AbstractBackend."""

    @abstractmethod
    def sample(self, batch: PreparedSampleBatch) -> list[SampleDelta]:
        """See AbstractBackend."""

    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        """See AbstractBackend."""
        return _BlockingPass(self.forward_backward if backward else self.forward, batch)

    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        """See AbstractBackend."""
        self._queued_requests.extend(batch.requests)

    def step_sample(self) -> list[SampleDelta]:
        """See AbstractBackend."""
        if not self._queued_requests:
            return []
        requests, self._queued_requests = tuple(self._queued_requests), []
        return self.sample(PreparedSampleBatch(requests=requests))

    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        """See AbstractBackend."""
        self._queued_requests = [each for each in self._queued_requests if each.request_id not in request_ids]

    def end_sample(self, request_id: RequestId, index: int) -> None:
        """See AbstractBackend. Between slices no sample is running, so there is nothing to end."""


class _BlockingPass(Pass):
    """A whole pass as one step. It runs in `results`, so that `abort` has nothing to undo."""

    def __init__(
        self, run: Callable[[PreparedModelPassBatch], list[PassResult]], batch: PreparedModelPassBatch
    ) -> None:
        self._run = run
        self._batch = batch

    def step(self) -> bool:
        return True

    def results(self) -> list[PassResult]:
        return self._run(self._batch)

    def abort(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """The object that an entry point of the group `skyrl_tx.backends` refers to; importing it must be fast."""

    config: type[BaseModel]
    """Its fields become flags, each with a description and a default."""
    load: Callable[[], type[AbstractBackend]]
    """Imports and returns the backend's class."""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Short names of fields of `config`. For example {"load_format": "load_format"} makes `--load-format` set it."""
