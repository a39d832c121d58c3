"""How the backend suite compares the results of two passes."""

import numpy as np

from skyrl_tx.contract.results import PassResult
from skyrl_tx.testing.backend_driver import nearly_equal


def result(*logprobs: float, loss: float = 3.0) -> PassResult:
    return PassResult(logprobs=np.array(logprobs, np.float32), sums={"loss": loss})


def test_without_tolerance_bits_are_compared():
    assert nearly_equal(result(-1.0, -2.0), result(-1.0, -2.0), 0.0)
    assert not nearly_equal(result(-1.0, -2.0), result(-1.0, np.nextafter(np.float32(-2), np.float32(0))), 0.0)


def test_a_tolerance_bounds_logprobs_and_sums():
    assert nearly_equal(result(-1.0, -2.0), result(-1.0, -2.000005, loss=3.0001), 1e-5)
    assert not nearly_equal(result(-1.0, -2.0), result(-1.0, -2.00005), 1e-5)
    assert not nearly_equal(result(-1.0, -2.0), result(-1.0, -2.0, loss=3.001), 1e-5)
    assert not nearly_equal(result(-1.0, -2.0), result(-1.0, -2.0, -3.0), 1e-5)
