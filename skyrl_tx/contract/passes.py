"""A pass whose gradients wait in scratch memory, for backends to subclass: the half that needs no device."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.results import PassResult

Gradient = TypeVar("Gradient", bound=Any)
"""Any type with `+`, such as a tree of arrays of a backend."""


class ScratchPass(Pass, Generic[Gradient]):
    """Computes the micro-batches of each request in order, and adds up their gradients by request.

    So the numbers of a request follow from its own examples, and `abort` has only scratch memory to discard.
    """

    def __init__(self, batch: PreparedModelPassBatch, *, micro_batch_tokens: int) -> None:
        self._todo = list(micro_batches(batch.examples, micro_batch_tokens))[::-1]
        self._results: list[PassResult] = []
        self._gradients: dict[tuple[ModelId, RequestId], Gradient] = {}

    @abstractmethod
    def compute(self, examples: Sequence[PassExample]) -> tuple[list[PassResult], Gradient | None]:
        """Return one result for each of some examples of one request, and the sum of their gradients.

        The gradient is None in a forward pass. Changes no model.
        """

    @abstractmethod
    def commit(self, model_id: ModelId, gradient: Gradient) -> None:
        """Add the gradient of one request to that of its model. Called for requests in batch order; must not fail."""

    def step(self) -> bool:
        """See Pass."""
        if self._todo:
            examples = self._todo[-1]
            results, gradient = self.compute(examples)
            self._todo.pop()
            self._results += results
            if gradient is not None:
                key = (examples[0].model_id, examples[0].request_id)
                self._gradients[key] = self._gradients[key] + gradient if key in self._gradients else gradient
        return not self._todo

    def results(self) -> list[PassResult]:
        """See Pass."""
        while not self.step():
            pass
        for (model_id, _), gradient in self._gradients.items():
            self.commit(model_id, gradient)
        self._gradients = {}
        return self._results

    def abort(self) -> None:
        """See Pass."""
        self._todo, self._gradients = [], {}


def micro_batches(examples: Sequence[PassExample], num_tokens: int) -> Iterator[Sequence[PassExample]]:
    """Yield examples of one request up to a number of tokens, at least one, in order.

    What is computed together depends on the request alone, which batch invariance needs.
    """
    own: list[PassExample] = []
    for example in examples:
        size = sum(each.tokens.size for each in own) + example.tokens.size
        if own and (example.request_id != own[0].request_id or size > num_tokens):
            yield own
            own = []
        own.append(example)
    if own:
        yield own
