"""Share the traces that count the memory of training, which take most of the time of tests of plans.

The result of a trace depends only on shapes, layout, kernels and configuration: see
`skyrl_tx.backends.jax.training_costs`.
"""

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from unittest import mock

import jax
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax import training_costs
from skyrl_tx.layers.remat import RematPolicy

_trace = training_costs.trace_residuals
_traces: dict[Hashable, list[jax.ShapeDtypeStruct]] = {}


def _arrays_kept(
    params: models.DecoderParams, config: models.ModelConfig, length: int, policy: RematPolicy
) -> list[jax.ShapeDtypeStruct]:
    leaves, structure = jax.tree.flatten(params)
    key = (
        structure,
        tuple((leaf.shape, leaf.dtype) for leaf in leaves),
        config,
        length,
        policy,
        training_costs.DEFAULT_RANK,
    )
    if key not in _traces:
        _traces[key] = _trace(params, config, length, policy)
    return _traces[key]


@contextmanager
def shared_traces() -> Generator[None]:
    """Trace each model once while the context is open, and once in a process."""
    with mock.patch.object(training_costs, "trace_residuals", _arrays_kept):
        yield


@pytest.fixture(scope="session", autouse=True)
def share_traces() -> Generator[None]:
    """Trace each model once in a process."""
    with shared_traces():
        yield
