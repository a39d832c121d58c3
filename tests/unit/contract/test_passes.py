"""Micro-batches of a pass, and when its gradients are applied."""

import numpy as np
import pytest

from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.passes import ScratchPass, micro_batches
from skyrl_tx.contract.results import PassResult
from skyrl_tx.testing.backend_driver import drawn_examples

A, B = ModelId("a"), ModelId("b")
BATCH = PreparedModelPassBatch(
    examples=(
        *drawn_examples(A, (3,), (4,), (5,), request="a1"),
        *drawn_examples(A, (2,), request="a2"),
        *drawn_examples(B, (9,), (1,), request="b1"),
    )
)


class CountingPass(ScratchPass[int]):
    """The gradient of an example is its length."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(BATCH, micro_batch_tokens=8)
        self.committed: list[tuple[str, int]] = []
        self._fails_at = fails_at

    def compute(self, examples: list[PassExample]) -> tuple[list[PassResult], int]:
        if self._fails_at == examples[0].tokens.size:
            raise MemoryError
        results = [
            PassResult(logprobs=np.zeros(example.tokens.size, np.float32), sums={"loss": 0}) for example in examples
        ]
        return results, sum(example.tokens.size for example in examples)

    def commit(self, model_id: ModelId, gradient: int) -> None:
        self.committed.append((model_id, gradient))


def test_micro_batches_hold_one_request_and_few_tokens():
    sizes = [[example.tokens.size for example in batch] for batch in micro_batches(BATCH.examples, 8)]
    assert sizes == [[3, 4], [5], [2], [9], [1]]
    for request in ("a1", "a2", "b1"):
        own = [example for example in BATCH.examples if example.request_id == RequestId(request)]
        alone = [[example.tokens.size for example in batch] for batch in micro_batches(own, 8)]
        assert [size for size in sizes if size in alone] == alone, "neighbours change no micro-batch"


def test_gradients_are_added_by_request_in_batch_order():
    running = CountingPass()
    assert [running.step() for _ in range(5)] == [False] * 4 + [True]
    assert running.step() and running.committed == []
    assert [result.logprobs.size for result in running.results()] == [3, 4, 5, 2, 9, 1]
    assert running.committed == [("a", 12), ("a", 2), ("b", 10)]
    running.results()
    assert len(running.committed) == 3, "only once"


def test_a_pass_that_fails_or_is_aborted_adds_nothing():
    failing = CountingPass(fails_at=9)
    with pytest.raises(MemoryError):
        failing.results()
    aborted = CountingPass()
    aborted.step()
    aborted.abort()
    aborted.results()
    assert failing.committed == aborted.committed == []
