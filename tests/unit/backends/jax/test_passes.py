"""The number of micro-batches that are queued on the device."""

from types import SimpleNamespace

import jax
import numpy as np

from skyrl_tx.backends.jax.train.passes import MAX_DISPATCHED, DispatchLimit


class Output:
    """An array that the device has computed once a test has waited for it."""

    def __init__(self, error=None):
        self.is_done, self.error = False, error

    def block_until_ready(self):
        self.is_done = True
        if self.error:
            raise self.error


def dispatch(limit, output):
    limit.wait()
    limit.add(SimpleNamespace(packed=output))


def test_at_most_max_dispatched_micro_batches_are_queued_on_the_device():
    limit, outputs = DispatchLimit(), [Output() for _ in range(7)]
    for num_dispatched, output in enumerate(outputs, start=1):
        dispatch(limit, output)
        assert np.sum([not queued.is_done for queued in outputs[:num_dispatched]]) <= MAX_DISPATCHED
    assert [output.is_done for output in outputs] == [True] * 5 + [False] * 2


def test_waiting_for_another_pass_does_not_raise_its_error():
    limit = DispatchLimit()
    for output in [Output(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")), Output(), Output()]:
        dispatch(limit, output)
