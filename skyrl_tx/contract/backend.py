"""The interface between the engine and a backend. The engine uses devices only through a backend.

A backend subclasses `AbstractBackend`, or `BlockingBackend` if it computes whole batches in one
call. The sampling methods are declared in `SamplingBackend`, because a separate sampler has them
too, for example a sampler on vLLM servers (see `skyrl_tx.contract.sampler`).

`skyrl_tx.testing.backend_suite` tests the guarantees that are stated here.
docs/internals/adding_a_backend.md explains how to write a backend.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel
from typing_extensions import override

from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta


class StatePart(StrEnum):
    """The parts of a model's state.

    The base weights are shared by all models and are not part of it.
    """

    WEIGHTS = "weights"
    """The adapter."""
    OPTIMIZER = "optimizer"
    """The optimizer's moments and its number of steps."""
    GRADIENT = "gradient"
    """The gradient accumulated since the last `optim_step`."""


ALL_PARTS = frozenset(StatePart)


class Snapshot(ABC):
    """Captured parts of the state of one model. Later training does not change a snapshot."""

    @abstractmethod
    def write(self, directory: Path) -> None:
        """Write the snapshot into an existing empty directory.

        Write at least the captured parts, as the files described in
        `skyrl_tx.contract.state_files`. The engine calls this method from any thread while its own
        thread uses the backend, so it must not start a computation on a device.
        """


class Pass(ABC):
    """A forward or forward-backward computation of one batch, split into micro-batches.

    A pass is atomic: `results` adds the whole gradient, and until then nothing is added. Multiple
    passes over different models may run at the same time. Between two calls of `step` the engine
    may call any other method of the backend, except methods that change a model of this pass.
    """

    @property
    def is_waiting(self) -> bool:
        """Whether the next micro-batch must wait for the compiler. The default is False.

        The engine first runs passes that do not wait, then samples. While a pass waits, `step` may
        return False after a short time without dispatching a micro-batch.
        """
        return False

    @abstractmethod
    def step(self) -> bool:
        """Dispatch one micro-batch and return True if it was the last one.

        Further calls do nothing.

        Do not wait for earlier micro-batches, except to limit how much work is queued on the
        device.
        """

    @abstractmethod
    def results(self) -> list[PassResult]:
        """Run the remaining micro-batches, add the gradients, and return one result per example.

        Results are in batch order.
        """

    @abstractmethod
    def abort(self) -> None:
        """Discard the pass and its gradients. Idempotent; does nothing after `results`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRank:
    """The place of this host in a group of hosts that compute one backend together.

    Each host runs one process.
    """

    rank: int
    """A number from 0 to size - 1. The engine runs on the host with rank 0."""
    size: int
    coordinator: str
    """Host and port of rank 0, for example "10.0.0.1:9000".

    A backend may use it to connect its hosts.
    """


class SamplingBackend(ABC):
    """The part of a backend that draws samples, from the base model or from frozen weights.

    All methods are called from one thread. `AbstractBackend` states the rules for errors, batch
    invariance and isolation.
    """

    @abstractmethod
    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        """Load the weights of a snapshot for sampling.

        Does nothing if the sampler is already loaded.
        """

    @abstractmethod
    def drop_sampler(self, sampler: SamplerId) -> None:
        """Free a sampler. Idempotent. The engine never drops a sampler that has running samples."""

    @abstractmethod
    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        """Queue requests. `step_sample` starts each request as soon as there is memory for it."""

    @abstractmethod
    def step_sample(self) -> list[SampleDelta]:
        """Run one decode slice of all running samples and return the new tokens.

        Return an empty list only if nothing is queued. If samples are queued and there is no new
        token, wait a short time and return a delta without tokens.
        """

    @abstractmethod
    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        """Discard all samples of these requests and return no more deltas for them.

        Unknown ids are ignored.
        """

    @abstractmethod
    def end_sample(self, request_id: RequestId, index: int) -> None:
        """End one sample because the engine found a stop string in it.

        The engine calls this between decode slices. The backend returns no more deltas for the
        sample. A sample that has already ended, or that is unknown, is ignored.
        """

    def sample(self, batch: PreparedSampleBatch) -> list[SampleDelta]:
        """Draw all samples to their end and return all deltas, in order within each sample.

        No other request may be queued.
        """
        self.begin_sample(batch)
        deltas: list[SampleDelta] = []
        while new := self.step_sample():
            deltas.extend(new)
        return deltas


class AbstractBackend(SamplingBackend):
    """Owns the devices, the base weights, and the adapter, gradient and optimizer of each model.

    The engine calls all methods from one thread. It checks arguments against `Capabilities` and
    `LossSpec` before each call, so a backend may assert these limits. The exceptions are
    `max_models` and `max_samplers`: with all slots in use, `create_model`, `load_sampler`, and
    `restore` with a new id raise CapacityError.

    **Errors.** Raise UserError if the caller made a mistake, CapacityError if memory or slots are
    exhausted, and BackendLost if the state on the device is lost. After BackendLost the engine
    process exits, and a new engine rebuilds every model by replaying its requests. After any other
    exception the engine calls `check_devices`; if that returns, only the request fails. A call that
    raises must leave the state unchanged.

    **Batch invariance.** The numbers of a request must not depend on other requests in the batch or
    on the device. Results, gradients and samples are bit-identical, because crash recovery replays
    requests in other batches.

    **Isolation.** A call for one model must not change the state of another model, even if it
    computes NaN.
    """

    @abstractmethod
    def __init__(self, base_model: str, config: BaseModel) -> None:
        """Store the arguments and do not touch a device.

        `config` is an instance of `BackendSpec.config`.
        """

    # Life cycle

    @abstractmethod
    def start(self) -> Capabilities:
        """Load the base model, compile common programs, and return the capabilities.

        Called once.
        """

    def join_hosts(self, rank: HostRank) -> None:
        """Join a group of hosts that make the same calls in the same order.

        Called once, before `start`.

        The default raises UserError. A backend that overrides this method returns the same results
        on every host. It raises either the same error on all hosts or BackendLost. Free memory,
        clocks and the order of sets may differ between hosts, so they must not influence a
        decision.

        A pass that runs out of memory on one host must not decide alone to use smaller parts.
        Instead, `step` or `results` raises MemoryExhausted as soon as no computation that it
        dispatched is running. The engine calls the method again, and the pass then continues with
        less memory.
        """
        raise UserError(f"--hosts.size {rank.size}: this backend computes on one host")

    @abstractmethod
    def close(self) -> None:
        """Free all resources. Idempotent. May be called before `start`."""

    # Training

    @abstractmethod
    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        """Create a model. A is drawn from `spec.lora.seed`, B is zero, and there is no gradient."""

    @abstractmethod
    def delete_model(self, model_id: ModelId) -> None:
        """Free the state of a model. Idempotent. An unknown model is ignored."""

    @abstractmethod
    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        """Start a pass over a batch.

        With `backward`, the gradient of the summed loss is added to the accumulated gradient of
        each model. For batch invariance, sum the gradient of each request separately, then add the
        requests in batch order.
        """

    @abstractmethod
    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        """Apply the accumulated gradient, clear it, and return metrics.

        Without a gradient, apply zeros.

        The metrics include at least "unclipped_grad_l2:mean", "learning_rate:mean" and "step:max"
        (the number of optimizer steps so far). Every name ends in a colon and a reduction, because
        names without a colon are reserved for metrics that clients log.
        """

    def gradient_norm(self, model_id: ModelId) -> float | None:
        """Return the global L2 norm of the accumulated gradient, or 0 if there is no gradient.

        The engine refuses an optimizer step if the norm is not finite. The default returns None,
        which switches this check off. The call must not change the state.
        """
        return None

    @abstractmethod
    def clear_gradient(self, model_id: ModelId) -> None:
        """Discard the accumulated gradient.

        The engine calls this if a pass failed, so that the gradient is incomplete, or if it is not
        finite.
        """

    # State

    @abstractmethod
    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        """Return the current state of a model.

        Must be fast: `Snapshot.write` finishes the copies to the host.
        """

    @abstractmethod
    def open_snapshot(self, directory: Path) -> Snapshot:
        """Open files that `Snapshot.write` wrote.

        Raises UserError if files are missing or damaged, or do not fit the base model.
        """

    @abstractmethod
    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        """Create or overwrite a model from `parts` of a snapshot.

        The other parts are as in a fresh model.

        Raises UserError if the snapshot lacks a part or does not fit `spec`.
        """

    # Methods with an implementation

    def check_devices(self) -> None:
        """Run a small operation on every device. Raises BackendLost if a device no longer computes.

        The engine calls this after an unexpected exception and after a sample that failed. If the
        method returns, that request fails. If it raises, no request fails and the engine restarts.
        The default does nothing, so a lost device makes every request fail until the backend itself
        raises BackendLost.
        """
        return

    def is_compiling(self) -> bool:
        """Return whether the running call waits for a compiler.

        Called from any thread. The default is False.

        Compilation may take much longer than a computation, so the engine applies a separate time
        limit to it.
        """
        return False

    def meters(self) -> Meters:
        """Return metrics for the status screen and dashboards. The default reports none.

        The engine calls this about once a second between other calls, so it must be fast and must
        not wait for a device.
        """
        return Meters()

    def forward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """Compute one result per example, in batch order, without gradients."""
        return self.begin_pass(batch, backward=False).results()

    def forward_backward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """Compute one result per example and accumulate gradients, see `begin_pass`."""
        return self.begin_pass(batch, backward=True).results()

    def fingerprint_changes(self) -> Mapping[str, str]:
        """Return entries of `Capabilities.fingerprint` that may have changed since `start`.

        The engine stores them with weights. A later start compares them and warns if results may
        not be bit-identical. Called from any thread. The default returns no entries.
        """
        return {}

    def text_of(self, tokens: list[int]) -> str:
        """Decode tokens to text, so that the engine can find stop strings.

        Raises UserError without a tokenizer.
        """
        raise UserError("stop: this backend has no tokenizer, so stop strings cannot be found; pass token ids")

    def make_tokenizer_reader(self) -> Callable[[], str]:
        """Return a function that returns the tokenizer as the text of a `tokenizer.json`.

        The engine calls it on another thread, for samples with a constraint. Both raise UserError
        without a tokenizer.
        """
        raise UserError("response_format: this backend has no tokenizer, so samples cannot be constrained")


class BlockingBackend(AbstractBackend):
    """Base class of backends that compute a whole batch in one call.

    Subclasses implement `forward`, `forward_backward` and `sample` instead of passes and decode
    slices. With such a backend, training and sampling do not alternate on the device: a batch of
    samples occupies it until all samples have ended.
    """

    @override
    def __init__(self, base_model: str, config: BaseModel) -> None:
        """Create the queue of requests. Subclasses must call this constructor."""
        self._queued_requests: list[SampleRequest] = []

    @override
    @abstractmethod
    def forward(self, batch: PreparedModelPassBatch) -> list[PassResult]: ...

    @override
    @abstractmethod
    def forward_backward(self, batch: PreparedModelPassBatch) -> list[PassResult]: ...

    @override
    @abstractmethod
    def sample(self, batch: PreparedSampleBatch) -> list[SampleDelta]: ...

    @override
    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        return _BlockingPass(self.forward_backward if backward else self.forward, batch)

    @override
    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        self._queued_requests.extend(batch.requests)

    @override
    def step_sample(self) -> list[SampleDelta]:
        if not self._queued_requests:
            return []
        requests, self._queued_requests = tuple(self._queued_requests), []
        return self.sample(PreparedSampleBatch(requests=requests))

    @override
    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        self._queued_requests = [request for request in self._queued_requests if request.request_id not in request_ids]

    @override
    def end_sample(self, request_id: RequestId, index: int) -> None:
        """Do nothing, because no sample is running between two calls of `step_sample`."""


class _BlockingPass(Pass):
    """A pass with one micro-batch. It runs in `results`, so `abort` has nothing to undo."""

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
    """The object behind an entry point of the group `skyrl_tx.backends`.

    Importing it must be fast.
    """

    config: type[BaseModel]
    """The settings class.

    Its fields become command-line flags, so each needs a description and a default.
    """
    load: Callable[[], type[AbstractBackend]]
    """Imports the backend's class and returns it."""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Short flags for fields of `config`.

    For example {"load_format": "load_format"} adds `--load-format`.
    """
