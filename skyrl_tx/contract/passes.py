"""A base class for passes that keep their gradients in scratch memory until the end.

It uses no device.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from typing_extensions import override

from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.results import PassResult

Gradient = TypeVar("Gradient", bound=Any)
"""Any type that supports `+`, for example a backend's tree of arrays."""


class ScratchPass(Pass, Generic[Gradient]):
    """Computes the micro-batches of each request in order and sums their gradients per request.

    The numbers of a request therefore depend only on its own examples, and `abort` only discards
    scratch memory.
    """

    def __init__(self, batch: PreparedModelPassBatch, *, micro_batch_tokens: int) -> None:
        """Split the batch into micro-batches of at most `micro_batch_tokens` tokens."""
        self._todo = list(micro_batches(batch.examples, micro_batch_tokens))[::-1]
        self._results: list[PassResult] = []
        self._gradients: dict[tuple[ModelId, RequestId], Gradient] = {}

    @abstractmethod
    def compute(self, examples: Sequence[PassExample]) -> tuple[list[PassResult], Gradient | None]:
        """Compute a micro-batch: return one result per example and the sum of their gradients.

        All examples belong to one request. The gradient is None in a forward pass. The call changes
        no model.
        """

    @abstractmethod
    def commit(self, model_id: ModelId, gradient: Gradient) -> None:
        """Add the gradient of one request to the gradient of its model.

        Called in batch order; must not fail.
        """

    @override
    def step(self) -> bool:
        if self._todo:
            examples = self._todo[-1]
            results, gradient = self.compute(examples)
            self._todo.pop()
            self._results += results
            if gradient is not None:
                key = (examples[0].model_id, examples[0].request_id)
                self._gradients[key] = self._gradients[key] + gradient if key in self._gradients else gradient
        return not self._todo

    @override
    def results(self) -> list[PassResult]:
        while not self.step():
            pass
        for (model_id, _), gradient in self._gradients.items():
            self.commit(model_id, gradient)
        self._gradients = {}
        return self._results

    @override
    def abort(self) -> None:
        self._todo, self._gradients = [], {}


def micro_batches(examples: Sequence[PassExample], num_tokens: int) -> Iterator[Sequence[PassExample]]:
    """Split examples into micro-batches of at most `num_tokens` tokens, in order.

    A micro-batch has examples of one request only, and at least one example. So the examples that
    are computed together depend on the request alone, as batch invariance requires.
    """
    micro_batch: list[PassExample] = []
    for example in examples:
        size = sum(member.tokens.size for member in micro_batch) + example.tokens.size
        if micro_batch and (example.request_id != micro_batch[0].request_id or size > num_tokens):
            yield micro_batch
            micro_batch = []
        micro_batch.append(example)
    if micro_batch:
        yield micro_batch
