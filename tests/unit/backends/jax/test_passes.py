"""How far ahead of the device passes go."""

from types import SimpleNamespace

import jax
import numpy as np

from skyrl_tx.backends.jax.passes import MOST_AHEAD, Ahead


class Output:
    """An array that is done once somebody waited for it."""

    def __init__(self, error=None):
        self.is_done, self.error = False, error

    def block_until_ready(self):
        self.is_done = True
        if self.error:
            raise self.error


def dispatch(ahead, output):
    ahead.make_room()
    ahead.add(SimpleNamespace(logprobs=output))


def test_few_micro_batches_are_ahead_of_what_the_device_has_done():
    ahead, outputs = Ahead(), [Output() for _ in range(7)]
    for num_dispatched, output in enumerate(outputs, start=1):
        dispatch(ahead, output)
        assert np.sum([not each.is_done for each in outputs[:num_dispatched]]) <= MOST_AHEAD
    assert [each.is_done for each in outputs] == [True] * 5 + [False] * 2


def test_who_waits_for_another_pass_is_spared_its_failure():
    ahead = Ahead()
    for output in [Output(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")), Output(), Output()]:
        dispatch(ahead, output)
