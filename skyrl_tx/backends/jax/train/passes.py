"""A forward or forward-backward pass over whole requests.

A pass dispatches its micro-batches one by one, and adds its gradients to the models only when all
micro-batches have succeeded. So a pass that runs out of device memory can restart with smaller
micro-batches.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from skyrl_tx import models
from skyrl_tx.backends.jax.devices import drain_devices, fetch, is_distributed, is_out_of_memory, make_capacity_error
from skyrl_tx.backends.jax.memory_plan import ActiveMemoryPlan, MemoryPlan
from skyrl_tx.backends.jax.train import custom_losses, packing
from skyrl_tx.backends.jax.train import forward_backward as training
from skyrl_tx.backends.jax.train.custom_losses import CustomLossPrograms, LossShape
from skyrl_tx.backends.jax.train.training_programs import MicroBatchShape, TrainingPrograms
from skyrl_tx.backends.jax.train.training_state import TrainingState, TrainingStates, make_zero_gradient
from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.errors import MemoryExhausted
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.results import SHARED_TOKENS, Metrics, PassResult
from skyrl_tx.layers.lora import AdapterWeights
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.losses import LOSSES

log = logging.getLogger(__name__)

MAX_DISPATCHED = 2
"""How many micro-batches are queued on the device: the running one, and the next.
With more, new samples wait longer."""

PROGRAM_WAIT_S = 0.2
"""How long `JaxPass.step` waits for the compiler. Short, so that other requests can continue."""


@dataclass(frozen=True, slots=True)
class _Request:
    """The examples of one request."""

    model_id: ModelId
    start: int
    """The index of the first example in the batch."""
    examples: tuple[PassExample, ...]
    custom: tuple[PassExample, ...] = ()
    """The examples of a request with a custom loss, as the client sent them; else empty.
    In `examples`, their loss is then replaced by a cross-entropy with weights of zero."""
    loss_shapes: tuple[LossShape, ...] = ()
    """The shape of the custom loss of each example."""


@dataclass(frozen=True, slots=True)
class _PlannedMicroBatch:
    """One planned micro-batch of a request."""

    request: _Request
    plan: packing.MicroBatchPlan
    is_last: bool

    @property
    def loss_shapes(self) -> list[LossShape]:
        """The shape of the custom loss of each example; empty without a custom loss."""
        return [self.request.loss_shapes[index] for index in self.plan.members] if self.request.custom else []


class DispatchLimit:
    """Limit how many micro-batches of all passes are queued, and count dispatched ones."""

    def __init__(self) -> None:
        self._outputs: deque[training.MicroBatchOutputs] = deque()
        self.num_micro_batches = 0
        self.num_padding_tokens = 0
        self.num_shared_tokens = 0
        self.num_retries = 0
        """How often a pass restarted because a device was out of memory."""

    def wait(self) -> None:
        """Wait until another micro-batch may be dispatched."""
        while len(self._outputs) >= MAX_DISPATCHED:
            with suppress(jax.errors.JaxRuntimeError):  # the micro-batch's pass gets the error in `results`
                self._outputs.popleft().packed.block_until_ready()

    def add(self, outputs: training.MicroBatchOutputs, num_padding_tokens: int = 0, num_shared_tokens: int = 0) -> None:
        """Record a dispatched micro-batch."""
        self._outputs.append(outputs)
        self.num_micro_batches += 1
        self.num_padding_tokens += num_padding_tokens
        self.num_shared_tokens += num_shared_tokens


class JaxPass(Pass):
    """A pass on JAX devices.

    The gradients of a request's micro-batches are summed first, in order. Then the sum is added to
    the gradient of the model. So the gradient of a request does not depend on other requests.
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
        programs: TrainingPrograms | None,
        losses: CustomLossPrograms,
    ) -> None:
        """Plan the micro-batches. Raises UserError if a request needs too many custom programs.

        `shards` has two numbers. The first is the number of shards of the batch; each micro-batch
        has that many rows. The second is the number of devices that share the tokens of a row.
        Without `programs`, programs are compiled on first use.
        """
        self._params = params
        self._shards = shards
        self._config = config
        self._pool = pool
        self._backward = backward
        self._memory = memory
        self._limit = limit
        self._programs = programs
        self._losses = losses

        # Plan the micro-batches, and compile what they need.
        self._requester = object()  # identifies this pass for the compilers
        self._requests = _group_by_request(batch.examples)
        self._states_before: dict[ModelId, TrainingState] = {r.model_id: pool.get(r.model_id) for r in self._requests}
        self._is_finished = self._has_shrunk = False
        self._restart(memory.plan)
        self._loss_shapes = {shape for request in self._requests for shape in request.loss_shapes}
        self._losses.acquire(self._loss_shapes, self._requester)

    def _restart(self, memory_plan: MemoryPlan) -> None:
        """Discard all results, and plan all micro-batches with a memory plan."""
        self._memory_plan = memory_plan
        self._gradients = {model_id: state.gradient for model_id, state in self._states_before.items()}
        self._request_gradient: AdapterWeights | None = None
        self._dispatched: list[tuple[_PlannedMicroBatch, training.MicroBatchOutputs]] = []
        self._custom_results: dict[int, PassResult] = {}
        self._pending = deque(self._plan_micro_batches(memory_plan))
        if self._programs is not None:
            shapes = (shape for planned in self._pending for shape in self._list_shapes(planned))
            for shape in dict.fromkeys(shapes):
                if shape not in self._programs.ready:
                    self._programs.queue_needed(shape, self._requester)

    def _plan_micro_batches(self, memory_plan: MemoryPlan) -> list[_PlannedMicroBatch]:
        planned: list[_PlannedMicroBatch] = []
        for request in self._requests:
            plans = packing.plan_micro_batches(
                request.examples,
                memory_plan.micro_batch_tokens,
                *self._shards,
                shares_prefixes=self._states_before[request.model_id].shares_prefixes,
                keeps_states=any(mixer.heads is None for mixer in self._config.mixers),
            )
            planned += (_PlannedMicroBatch(request, plan, plan is plans[-1]) for plan in plans)
        return planned

    @property
    @override
    def is_waiting(self) -> bool:
        return self._find_missing_program() is not None

    @override
    def step(self) -> bool:
        assert not self._is_finished, "this pass has ended"

        # Wait a short time for the programs.
        while (wait := self._find_missing_program()) is not None:
            if not wait(PROGRAM_WAIT_S):
                return False

        # Dispatch the next micro-batch.
        if self._pending:
            planned = self._pending.popleft()
            self._limit.wait()
            with self._restart_if_out_of_memory():
                outputs = self._dispatch(planned)
                num_tokens = sum(planned.request.examples[index].tokens.size for index in planned.plan.members)
                num_shared = planned.plan.num_shared_tokens
                self._limit.add(outputs, planned.plan.num_tokens - num_tokens + num_shared, num_shared)
                self._dispatched.append((planned, outputs))
        return not self._pending

    def _find_missing_program(self) -> Callable[[float], bool] | None:
        """Return a function that waits for a missing program of the next micro-batch.

        The function takes a timeout in seconds, and returns whether the program is ready. Returns
        None if no program is missing.
        """
        if not self._pending:
            return None
        planned = self._pending[0]
        if (programs := self._programs) is not None:
            for shape in self._list_shapes(planned):
                if shape not in programs.ready:
                    return partial(programs.wait, shape)
        for loss_shape in planned.loss_shapes:
            if loss_shape not in self._losses.ready:
                return partial(self._losses.wait, loss_shape)
        return None

    @override
    def results(self) -> list[PassResult]:
        # Run until the outputs of all micro-batches are on the host. Some devices report errors
        # only here.
        outputs: list[Any] | None = None
        while outputs is None:
            while not self.step():
                pass
            with self._restart_if_out_of_memory():
                jax.block_until_ready(self._gradients)
                outputs = fetch([outputs for _, outputs in self._dispatched])

        # Read the results. A backward pass has the results of custom losses already.
        results = dict(self._custom_results)
        for (planned, _), output in zip(self._dispatched, outputs, strict=True):
            request = planned.request
            if request.custom:
                if not self._backward:
                    results |= self._evaluate_custom_loss(planned, output)[1]
                continue
            for index, result in packing.read_results(planned.plan, request.examples, output.logprobs, output.loss):
                results[request.start + index] = result

        for request in self._requests:
            pairs = zip(self._dispatched, outputs, strict=True)
            own = [(planned.plan, output) for (planned, _), output in pairs if planned.request is request]
            self._add_metrics(results, request, own)

        # Commit.
        if self._backward:
            self._commit()
        if self._has_shrunk:
            self._memory.shrink(self._memory_plan)
        self.abort()
        return [results[index] for index in range(len(results))]

    def _add_metrics(
        self, results: dict[int, PassResult], request: _Request, micro_batches: list[tuple[packing.MicroBatchPlan, Any]]
    ) -> None:
        """Add metrics to the results of a request. `micro_batches` has their plans and outputs.

        These are the metrics of experts. In runs that share prefixes it is also how many tokens of
        an example were not computed.
        """
        metrics = compute_expert_metrics([output.expert_counts for _, output in micro_batches])
        shared: dict[int, int] = {}
        if self._states_before[request.model_id].shares_prefixes:
            shared = dict(chain.from_iterable(plan.count_shared_tokens() for plan, _ in micro_batches))
            total = sum(example.tokens.size for example in request.examples)
            request_id, num_shared = request.examples[0].request_id, sum(shared.values())
            log.debug("%s of %s: %d of %d tokens were shared", request_id, request.model_id, num_shared, total)

        for index in range(len(request.examples)):
            own = {**metrics, **({SHARED_TOKENS: float(shared[index])} if shared else {})}
            result = results[request.start + index]
            results[request.start + index] = replace(result, metrics={**result.metrics, **own})

    @override
    def abort(self) -> None:
        self._is_finished = True
        self._pending.clear()
        self._losses.release(self._loss_shapes)
        self._loss_shapes = set()
        self._dispatched, self._gradients, self._request_gradient = [], {}, None
        self._custom_results = {}

    def _commit(self) -> None:
        for model_id, before in self._states_before.items():
            assert self._pool.get(model_id) is before, "a model must not change while a pass over it runs"
        for model_id, before in self._states_before.items():
            self._pool.put(model_id, before.with_gradient(self._gradients[model_id]))

    @contextmanager
    def _restart_if_out_of_memory(self) -> Generator[None]:
        """Restart with smaller micro-batches if a device runs out of memory in the `with` block.

        Later passes use the smaller plan only if this pass succeeds with it, because other shapes
        change the last bits of results.

        Raises:
            CapacityError: If there is no smaller plan.
            MemoryExhausted: After the restart, on multiple hosts. Rank 0 checks that all hosts have
                restarted.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if is_distributed():
                drain_devices()  # else a program could wait for hosts that have restarted
            self._restart(self._find_smaller_plan(error))
            self._has_shrunk = True
            self._limit.num_retries += 1
            if is_distributed():
                reason = " ".join(str(error).split())
                message = f"out of device memory ({reason}); try a lower --backend-config.micro-batch-tokens"
                raise MemoryExhausted(message, plan=repr(self._memory_plan)) from error

    def _find_smaller_plan(self, error: Exception) -> MemoryPlan:
        """Return a memory plan that makes this pass take less memory.

        Raises CapacityError if there is none. A plan helps if the largest micro-batch becomes
        smaller, or gets another remat policy in a backward pass.
        """

        def find_largest(plan: MemoryPlan) -> int:
            return max(planned.plan.num_tokens for planned in self._plan_micro_batches(plan))

        largest = find_largest(self._memory_plan)
        remat = self._choose_remat(self._memory_plan, largest)
        for plan in self._memory_plan.iter_smaller():
            has_other_remat = self._backward and self._choose_remat(plan, largest) is not remat
            if has_other_remat or find_largest(plan) < largest:
                log.warning("out of device memory with %s: retrying with %s (%s)", self._memory_plan, plan, error)
                return plan
        raise make_capacity_error("this pass, in the smallest micro-batches", error) from error

    def _choose_remat(self, plan: MemoryPlan, num_tokens: int) -> RematPolicy:
        return plan.get_remat_policy(num_tokens // math.prod(self._shards))

    def _list_shapes(self, planned: _PlannedMicroBatch) -> list[MicroBatchShape]:
        """Return the shapes of the programs that `_dispatch` calls."""
        needs_forward = not self._backward or bool(planned.request.custom)
        shapes = [self._get_shape(planned, backward=False)] if needs_forward else []
        return [*shapes, self._get_shape(planned, backward=True)] if self._backward else shapes

    def _get_shape(self, planned: _PlannedMicroBatch, *, backward: bool) -> MicroBatchShape:
        plan, weights = planned.plan, self._states_before[planned.request.model_id].adapter.weights
        rank = next(iter(weights.values())).a.shape[-1]
        remat = self._choose_remat(self._memory_plan, plan.num_tokens) if backward else None
        is_local = LOSSES[planned.request.examples[0].loss].is_local
        return MicroBatchShape(
            plan.num_rows, plan.length, plan.num_targets, rank, remat, is_local, has_prefixes=plan.has_prefixes
        )

    def _call_program(self, planned: _PlannedMicroBatch, *arguments: Any, backward: bool) -> Any:
        shape = self._get_shape(planned, backward=backward)
        if self._programs is not None:
            program = self._programs.ready[shape]
            program.num_calls += 1
            return program.call(*arguments)
        if not backward:
            return training.forward(*arguments, config=self._config)
        return training.accumulate(*arguments, config=self._config, remat=shape.remat)

    def _dispatch(self, planned: _PlannedMicroBatch) -> training.MicroBatchOutputs:
        """Start to compute a micro-batch, and add its gradient to the gradient of its request."""
        request = planned.request
        batch = packing.fill_micro_batch(planned.plan, request.examples)
        adapter = self._states_before[request.model_id].adapter

        # Forward. With a custom loss, a backward pass needs the log-probabilities first: the gradient
        # of the loss becomes the weights of a cross-entropy.
        if not self._backward or request.custom:
            outputs = self._call_program(planned, self._params, adapter, batch, backward=False)
            if not self._backward:
                return outputs
            weighted, custom_results = self._evaluate_custom_loss(planned, fetch(outputs))
            self._custom_results |= custom_results
            batch = packing.fill_micro_batch(planned.plan, weighted)

        # Forward and backward.
        if self._request_gradient is None:
            self._request_gradient = make_zero_gradient(adapter.weights)
        arguments = self._params, adapter, self._request_gradient, batch
        self._request_gradient, outputs = self._call_program(planned, *arguments, backward=True)

        # After the last micro-batch, add the gradient of the request to the gradient of the model.
        if planned.is_last:
            total, new = self._gradients[request.model_id], self._request_gradient
            self._gradients[request.model_id] = new if total is None else training.sum_gradients(total, new)
            self._request_gradient = None
        return outputs

    def _evaluate_custom_loss(
        self, planned: _PlannedMicroBatch, outputs: Any
    ) -> tuple[tuple[PassExample, ...], dict[int, PassResult]]:
        """Evaluate the custom loss of a micro-batch from its outputs on the host.

        Returns two values. The first is all examples of the request, where the examples of this
        micro-batch have a cross-entropy with the gradient of the custom loss. The second has the
        results of the examples of this micro-batch, by their index in the batch.
        """
        request = planned.request
        forward = dict(packing.read_results(planned.plan, request.examples, outputs.logprobs, outputs.loss))
        values = self._losses.evaluate(
            [request.loss_shapes[index] for index in forward],
            [request.custom[index] for index in forward],
            [result.logprobs for result in forward.values()],
        )

        examples, results = list(request.examples), dict[int, PassResult]()
        for index, (result, gradient) in zip(forward, values, strict=True):
            examples[index] = custom_losses.as_cross_entropy(request.custom[index], gradient)
            results[request.start + index] = result
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
            shapes = tuple(custom_losses.list_shapes(members))
            requests.append(_Request(members[0].model_id, start, plain, members, shapes))
        start += len(members)
    assert len({request.examples[0].request_id for request in requests}) == len(requests), "a request is not adjacent"
    return requests


def compute_expert_metrics(micro_batches: Sequence[Sequence[NumberArray]]) -> Metrics:
    """Return the metrics of a request, or none if its model has no experts.

    Each micro-batch has the counts [layers, E] of each stack of layers: how many tokens each expert
    received. They are integers and are summed first, so the metrics do not depend on the number of
    micro-batches or on their order.
    """
    # One row of metrics per layer. With perfect balance, each expert of a layer has the same count.
    rows: list[NumberArray] = []
    for stack in zip(*micro_batches, strict=True):
        count_LE = np.sum(stack, axis=0, dtype=np.int64)
        balance_L1 = count_LE.mean(axis=1, keepdims=True)
        violation_LE = count_LE / balance_L1 - 1
        has_tokens_L, is_over_L = (count_LE > 0).mean(axis=1), (count_LE > balance_L1).mean(axis=1)
        rows.append(np.stack([has_tokens_L, is_over_L, violation_LE.max(axis=1), violation_LE.min(axis=1)], axis=1))
    if not rows:
        return {}

    # Average over the layers of all stacks.
    metrics_L4 = np.concatenate(rows)
    with_tokens, oversubscribed, max_violation, min_violation = map(float, metrics_L4.mean(axis=0))
    return {
        "e_frac_with_tokens:mean": with_tokens,
        "e_frac_oversubscribed:mean": oversubscribed,
        "e_max_violation:mean": max_violation,
        "e_max_violation:max": float(metrics_L4[:, 2].max()),
        "e_min_violation:mean": min_violation,
    }
