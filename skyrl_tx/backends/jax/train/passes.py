"""A pass over whole requests: dispatches micro-batches one by one, and commits gradients when all have succeeded.

So a pass that runs out of device memory can start again with smaller micro-batches.
"""

import logging
import math
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax

from skyrl_tx import models
from skyrl_tx.backends.jax.devices import drain_devices, fetch, is_distributed, is_out_of_memory, make_capacity_error
from skyrl_tx.backends.jax.memory import ActiveMemoryPlan, MemoryPlan
from skyrl_tx.backends.jax.train import custom_losses, packing
from skyrl_tx.backends.jax.train import forward_backward as training
from skyrl_tx.backends.jax.train.training_programs import MicroBatchShape, TrainingPrograms
from skyrl_tx.backends.jax.train.training_state import TrainingState, TrainingStates, make_zero_gradient
from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.errors import MemoryExhausted
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.results import PassResult
from skyrl_tx.layers.lora import AdapterWeights
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.losses import LOSSES

log = logging.getLogger(__name__)

MAX_DISPATCHED = 2
"""The most micro-batches queued on the device: one that runs, and the next. With more, a new sample waits longer."""

PROGRAM_WAIT_S = 0.2
"""How long a step waits for its program, so that requests which need no other program go on."""


@dataclass(frozen=True, slots=True)
class _Request:
    """The examples of one request, and the index in the batch of the first.

    Those with a custom loss are in `custom`; `examples` are then the same with a cross-entropy that is 0.
    """

    model_id: ModelId
    start: int
    examples: tuple[PassExample, ...]
    custom: tuple[PassExample, ...] = ()


@dataclass(frozen=True, slots=True)
class _PlannedMicroBatch:
    """One planned micro-batch of a request."""

    request: _Request
    plan: packing.MicroBatchPlan
    is_last: bool


class DispatchLimit:
    """Bounds the micro-batches of all passes that are queued on the device, and counts what was dispatched."""

    def __init__(self) -> None:
        self._outputs: deque[training.MicroBatchOutputs] = deque()
        self.num_micro_batches = 0
        self.num_padding_tokens = 0
        self.num_retries = 0
        """Passes that started again because a device was out of memory."""

    def wait(self) -> None:
        """Wait until another micro-batch may be dispatched."""
        while len(self._outputs) >= MAX_DISPATCHED:
            with suppress(jax.errors.JaxRuntimeError):  # the pass that it belongs to gets the error in `results`
                self._outputs.popleft().packed.block_until_ready()

    def add(self, outputs: training.MicroBatchOutputs, num_padding_tokens: int = 0) -> None:
        """Count a dispatched micro-batch."""
        self._outputs.append(outputs)
        self.num_micro_batches += 1
        self.num_padding_tokens += num_padding_tokens


class JaxPass(Pass):
    """See Pass.

    The gradient of each request is summed by itself, in the order of its micro-batches, then added to its model's.
    """

    def __init__(
        self,
        batch: PreparedModelPassBatch,
        *,
        backward: bool,
        params: models.DecoderParams,
        config: models.ModelConfig,
        pool: TrainingStates,
        memory: ActiveMemoryPlan,
        limit: DispatchLimit,
        shards: tuple[int, int],
        programs: TrainingPrograms | None = None,
    ) -> None:
        """Plan the micro-batches. `shards` are those of the batch, each with a row, and those of a row's tokens.

        Without `programs`, each is compiled when it is first called.
        """
        self._params = params
        self._shards = shards
        self._config = config
        self._pool = pool
        self._backward = backward
        self._memory = memory
        self._limit = limit
        self._programs = programs if backward else None
        self._requests = _group_by_request(batch.examples)
        self._before: dict[ModelId, TrainingState] = {r.model_id: pool.get(r.model_id) for r in self._requests}
        self._is_finished = self._has_shrunk = False
        self._restart(memory.plan)

    def _restart(self, memory_plan: MemoryPlan) -> None:
        """Discard what was computed, and plan all micro-batches."""
        self._memory_plan = memory_plan
        self._gradients = {model_id: state.gradient for model_id, state in self._before.items()}
        self._request_gradient: AdapterWeights | None = None
        self._dispatched: list[tuple[_PlannedMicroBatch, training.MicroBatchOutputs]] = []
        self._custom_results: dict[int, PassResult] = {}
        self._pending = deque(self._plan_micro_batches(memory_plan))
        if self._programs is not None:
            for shape in dict.fromkeys(map(self._get_shape, self._pending)):
                if shape not in self._programs.ready:
                    self._programs.queue_needed(shape)

    def _plan_micro_batches(self, memory_plan: MemoryPlan) -> list[_PlannedMicroBatch]:
        steps: list[_PlannedMicroBatch] = []
        for request in self._requests:
            plans = packing.plan_micro_batches(request.examples, memory_plan.micro_batch_tokens, *self._shards)
            steps += (_PlannedMicroBatch(request, plan, plan is plans[-1]) for plan in plans)
        return steps

    @property
    def is_waiting(self) -> bool:
        """See Pass."""
        programs, pending = self._programs, self._pending
        return programs is not None and bool(pending) and self._get_shape(pending[0]) not in programs.ready

    def step(self) -> bool:
        """See Pass."""
        assert not self._is_finished, "this pass has ended"
        if (programs := self._programs) is not None and self.is_waiting:
            is_ready = programs.wait(self._get_shape(self._pending[0]), PROGRAM_WAIT_S)
            if not is_ready:
                return False
        if self._pending:
            step = self._pending.popleft()
            self._limit.wait()
            with self._restart_if_out_of_memory():
                outputs = self._dispatch(step)
                num_tokens = sum(step.request.examples[index].tokens.size for index in step.plan.members)
                self._limit.add(outputs, step.plan.num_tokens - num_tokens)
                self._dispatched.append((step, outputs))
        return not self._pending

    def results(self) -> list[PassResult]:
        """See Pass."""
        outputs: list[Any] | None = None  # on the host
        while outputs is None:
            while not self.step():
                pass
            with self._restart_if_out_of_memory():  # some devices report an error only when results are read
                jax.block_until_ready(self._gradients)
                outputs = fetch([outputs for _, outputs in self._dispatched])
        results = dict(self._custom_results)  # of a backward pass, which needed them for its weights
        for (step, _), output in zip(self._dispatched, outputs, strict=True):
            request = step.request
            if request.custom:
                if not self._backward:
                    results |= _evaluate_custom_loss(step, output)[1]
                continue
            for index, result in packing.read_results(step.plan, request.examples, output.logprobs, output.loss):
                results[request.start + index] = result
        if self._backward:
            self._commit()
        if self._has_shrunk:
            self._memory.shrink(self._memory_plan)
        self.abort()
        return [results[index] for index in range(len(results))]

    def abort(self) -> None:
        """See Pass."""
        self._is_finished = True
        self._pending.clear()
        self._dispatched, self._gradients, self._request_gradient = [], {}, None
        self._custom_results = {}

    def _commit(self) -> None:
        for model_id, before in self._before.items():
            assert self._pool.get(model_id) is before, "a model must not change while a pass over it runs"
        for model_id, before in self._before.items():
            self._pool.put(model_id, before.with_gradient(self._gradients[model_id]))

    @contextmanager
    def _restart_if_out_of_memory(self) -> Generator[None]:
        """If the device is out of memory, restart with smaller micro-batches. Raises CapacityError if there are none.

        The smaller plan becomes that of later passes only when this pass has succeeded with it, because other shapes
        give other bits. With several hosts raises MemoryExhausted then: only rank 0 knows whether all have restarted.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if is_distributed():
                drain_devices()  # or a program would be left that waits for hosts which have restarted
            self._restart(self._find_smaller_plan(error))
            self._has_shrunk = True
            self._limit.num_retries += 1
            if is_distributed():
                reason = " ".join(str(error).split())
                message = f"out of device memory ({reason}); --backend-config.micro-batch-tokens may be too high"
                raise MemoryExhausted(message, plan=repr(self._memory_plan)) from error

    def _find_smaller_plan(self, error: Exception) -> MemoryPlan:
        """Return a memory plan with smaller micro-batches for this pass. Raises CapacityError if there is none."""
        largest = max(step.plan.num_tokens for step in self._plan_micro_batches(self._memory_plan))
        for plan in self._memory_plan.iter_smaller():
            helps = self._backward and self._choose_remat(plan, largest) is not self._choose_remat(
                self._memory_plan, largest
            )
            if helps or max(step.plan.num_tokens for step in self._plan_micro_batches(plan)) < largest:
                log.warning("out of device memory with %s: retrying with %s (%s)", self._memory_plan, plan, error)
                return plan
        raise make_capacity_error("this pass, in the smallest micro-batches", error) from error

    def _choose_remat(self, plan: MemoryPlan, num_tokens: int) -> RematPolicy:
        return plan.get_remat_policy(num_tokens // math.prod(self._shards))

    def _get_shape(self, step: _PlannedMicroBatch) -> MicroBatchShape:
        plan, weights = step.plan, self._before[step.request.model_id].adapter.weights
        rank = next(iter(weights.values())).a.shape[-1]
        remat = self._choose_remat(self._memory_plan, plan.num_tokens)
        is_local = LOSSES[step.request.examples[0].loss].is_local
        return MicroBatchShape(plan.num_rows, plan.length, plan.num_targets, rank, remat, is_local)

    def _dispatch(self, step: _PlannedMicroBatch) -> training.MicroBatchOutputs:
        request = step.request
        batch = packing.fill_micro_batch(step.plan, request.examples)
        adapter = self._before[request.model_id].adapter
        if not self._backward or request.custom:
            outputs = training.forward(self._params, adapter, batch, config=self._config)
            if not self._backward:
                return outputs
            # Waits for the log-probabilities: from them follow the weights of the backward pass.
            weighted, own = _evaluate_custom_loss(step, fetch(outputs))
            self._custom_results |= own
            batch = packing.fill_micro_batch(step.plan, weighted)
        if self._request_gradient is None:
            self._request_gradient = make_zero_gradient(adapter.weights)
        arguments = self._params, adapter, self._request_gradient, batch
        if self._programs is None:
            remat = self._choose_remat(self._memory_plan, step.plan.num_tokens)
            found = training.accumulate(*arguments, config=self._config, remat=remat)
        else:
            program = self._programs.ready[self._get_shape(step)]
            program.num_calls += 1
            found = program.call(*arguments)
        self._request_gradient, outputs = found
        if step.is_last:
            total = self._gradients[request.model_id]
            new = self._request_gradient
            self._gradients[request.model_id] = new if total is None else training.sum_gradients(total, new)
            self._request_gradient = None
        return outputs


def _evaluate_custom_loss(
    step: _PlannedMicroBatch, outputs: Any
) -> tuple[tuple[PassExample, ...], dict[int, PassResult]]:
    """Evaluate the custom loss of a micro-batch from its outputs on the host.

    Returns the request's examples, those of the micro-batch with a cross-entropy of the loss's gradient, and the result
    of each of those, by index in the batch.
    """
    request = step.request
    forward = dict(packing.read_results(step.plan, request.examples, outputs.logprobs, outputs.loss))
    logprobs = [result.logprobs for result in forward.values()]
    evaluated = custom_losses.evaluate([request.custom[index] for index in forward], logprobs)
    examples, results = list(request.examples), dict[int, PassResult]()
    for index, own, each in zip(forward, logprobs, evaluated, strict=True):
        examples[index] = custom_losses.as_cross_entropy(request.custom[index], each.gradient)
        results[request.start + index] = each.to_result(own)
    return tuple(examples), results


def _group_by_request(examples: tuple[PassExample, ...]) -> list[_Request]:
    requests: list[_Request] = []
    start = 0
    for _, group in groupby(examples, key=lambda example: example.request_id):
        members = tuple(group)
        if members[0].custom is None:
            requests.append(_Request(members[0].model_id, start, members))
        else:
            plain = tuple(map(custom_losses.as_cross_entropy, members))
            requests.append(_Request(members[0].model_id, start, plain, custom=members))
        start += len(members)
    assert len({request.examples[0].request_id for request in requests}) == len(requests), "a request is not adjacent"
    return requests
