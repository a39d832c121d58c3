"""A pass over whole requests: micro-batches are dispatched one by one, and nothing is kept until all have succeeded.

So a pass that meets the end of the device's memory can begin anew, in smaller micro-batches, and nobody notices.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax

from skyrl_tx import models
from skyrl_tx.backends.jax import packing, training
from skyrl_tx.backends.jax.adapters import AdapterPool, TrainingState
from skyrl_tx.backends.jax.memory import Memory, MemoryPlan, is_exhausted, no_memory
from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.results import PassResult
from skyrl_tx.layers.lora import AdapterWeights

log = logging.getLogger(__name__)

MOST_AHEAD = 2  # one runs and the next one is there; with more of them a sample that arrives waits for longer


@dataclass(frozen=True, slots=True)
class _Request:
    """The examples of one request, and where in the batch they begin."""

    model_id: ModelId
    start: int
    examples: tuple[PassExample, ...]


@dataclass(frozen=True, slots=True)
class _Unit:
    """One micro-batch, and its place among those of its request."""

    request: _Request
    slab: packing.Slab
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """A micro-batch whose outputs may still be under way."""

    unit: _Unit
    outputs: training.Outputs


class Ahead:
    """The micro-batches of all passes that the device has not been seen to finish."""

    def __init__(self) -> None:
        self._logprobs: deque[jax.Array] = deque()

    def make_room(self) -> None:
        """Wait until one more may be dispatched."""
        while len(self._logprobs) >= MOST_AHEAD:
            with suppress(jax.errors.JaxRuntimeError):  # the pass that it belongs to meets it as it reads its results
                self._logprobs.popleft().block_until_ready()

    def add(self, outputs: training.Outputs) -> None:
        """Note what was dispatched."""
        self._logprobs.append(outputs.logprobs)


class JaxPass(Pass):
    """See Pass. The gradient of a request is summed by itself, in the order of its plan, then added to its model's."""

    def __init__(
        self,
        batch: PreparedModelPassBatch,
        *,
        backward: bool,
        params: models.DecoderParams,
        config: models.ModelConfig,
        pool: AdapterPool,
        memory: Memory,
        ahead: Ahead,
    ) -> None:
        self._params = params
        self._config = config
        self._pool = pool
        self._backward = backward
        self._memory = memory
        self._ahead = ahead
        self._requests = _group(batch.examples)
        self._before: dict[ModelId, TrainingState] = {r.model_id: pool.take(r.model_id) for r in self._requests}
        self._is_over = self._has_shrunk = False
        self._begin(memory.plan)

    def _begin(self, plan: MemoryPlan) -> None:
        """Start, or start anew, with nothing but what was there before."""
        self._plan = plan
        self._gradients = {model_id: state.gradient for model_id, state in self._before.items()}
        self._of_request: AdapterWeights | None = None
        self._dispatched: list[_Dispatched] = []
        self._waiting = deque(self._cut(plan))

    def _cut(self, plan: MemoryPlan) -> list[_Unit]:
        return list(_cut(self._requests, plan.micro_batch_tokens, self._params.layout.num_shards("batch")))

    def step(self) -> bool:
        """See Pass."""
        assert not self._is_over, "this pass has ended"
        if self._waiting:
            unit = self._waiting.popleft()
            self._ahead.make_room()
            with self._smaller_if_exhausted():
                outputs = self._dispatch(unit)
                self._ahead.add(outputs)
                self._dispatched.append(_Dispatched(unit, outputs))
        return not self._waiting

    def results(self) -> list[PassResult]:
        """See Pass."""
        outputs: list[Any] | None = None  # on the host
        while outputs is None:
            while not self.step():
                pass
            with self._smaller_if_exhausted():  # a device may say so only when what it computed is read
                jax.block_until_ready(self._gradients)
                outputs = jax.device_get([dispatched.outputs for dispatched in self._dispatched])
        results: dict[int, PassResult] = {}
        for dispatched, output in zip(self._dispatched, outputs, strict=True):
            request, slab = dispatched.unit.request, dispatched.unit.slab
            for index, result in packing.read_results(slab, request.examples, output.logprobs, output.loss):
                results[request.start + index] = result
        if self._backward:
            self._commit()
        if self._has_shrunk:
            self._memory.shrink(self._plan)
        self.abort()
        return [results[index] for index in range(len(results))]

    def abort(self) -> None:
        """See Pass."""
        self._is_over = True
        self._waiting.clear()
        self._dispatched, self._gradients, self._of_request = [], {}, None

    def _commit(self) -> None:
        for model_id, before in self._before.items():
            assert self._pool.take(model_id) is before, "a model must not change while a pass over it runs"
        for model_id, before in self._before.items():
            self._pool.put(model_id, before.with_gradient(self._gradients[model_id]))

    @contextmanager
    def _smaller_if_exhausted(self) -> Iterator[None]:
        """When the device has no memory left, begin anew in smaller micro-batches; raise when there are none.

        They are this pass's own until it has succeeded: what helped nobody costs nobody, in other bits or in time.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            self._begin(self._smaller(error))
            self._has_shrunk = True

    def _smaller(self, error: Exception) -> MemoryPlan:
        """Return a plan by which this pass has smaller micro-batches; raises CapacityError when there is none."""
        largest = max(unit.slab.num_tokens for unit in self._cut(self._plan))
        for plan in self._plan.smaller():
            helps = plan.remat and not self._plan.remat and self._backward
            if helps or max(unit.slab.num_tokens for unit in self._cut(plan)) < largest:
                log.warning("the device has no memory for %s: trying %s (%s)", self._plan, plan, error)
                return plan
        raise no_memory("this pass, in the smallest pieces", error) from error

    def _dispatch(self, unit: _Unit) -> training.Outputs:
        request = unit.request
        batch = packing.fill(unit.slab, request.examples)
        adapter = self._before[request.model_id].adapter
        if not self._backward:
            return training.forward(self._params, adapter, batch, config=self._config)
        if unit.is_first:
            self._of_request = training.zeros_like(adapter.weights)
        assert self._of_request is not None
        self._of_request, outputs = training.accumulate(
            self._params, adapter, self._of_request, batch, config=self._config, remat=self._plan.remat
        )
        if unit.is_last:
            summed = self._gradients[request.model_id]
            new = self._of_request
            self._gradients[request.model_id] = new if summed is None else training.sum_gradients(summed, new)
            self._of_request = None
        return outputs


def _group(examples: tuple[PassExample, ...]) -> list[_Request]:
    requests: list[_Request] = []
    start = 0
    for _, group in groupby(examples, key=lambda example: example.request_id):
        members = tuple(group)
        requests.append(_Request(members[0].model_id, start, members))
        start += len(members)
    assert len({request.examples[0].request_id for request in requests}) == len(requests), "a request lies apart"
    return requests


def _cut(requests: list[_Request], micro_batch_tokens: int, shards: int) -> Iterator[_Unit]:
    for request in requests:
        slabs = packing.plan(request.examples, micro_batch_tokens, shards)
        for position, slab in enumerate(slabs):
            yield _Unit(request, slab, is_first=position == 0, is_last=position == len(slabs) - 1)
