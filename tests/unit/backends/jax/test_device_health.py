"""Detection of lost devices and of running compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from skyrl_tx.backends.jax import devices
from skyrl_tx.backends.jax.devices import check_devices, get_compilation_monitor
from skyrl_tx.contract.errors import BackendLost


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("fsdp", "tp", "ep"))


def test_devices_that_compute_pass(mesh: Mesh) -> None:
    check_devices(mesh)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"), "do not compute any more: INTERNAL"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), None),
        (27.0, "compute wrong numbers: the sum of 8 numbers is 27.0"),
    ],
)
def test_lost_device_is_not_confused_with_exhausted_memory(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, outcome: Exception | float, expected: str | None
) -> None:
    def add(_: jax.Array) -> float:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(devices, "_sum", add)
    if expected is None:
        check_devices(mesh)
    else:
        with pytest.raises(BackendLost, match=expected):
            check_devices(mesh)


def test_exhausted_memory_ends_several_hosts_which_wait_for_the_sum(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(_: jax.Array) -> float:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(devices, "_sum", add)
    monkeypatch.setattr(devices, "is_distributed", lambda: True)
    with pytest.raises(BackendLost, match="RESOURCE_EXHAUSTED"):
        check_devices(mesh)


def test_compilation_is_seen_while_it_runs_and_after_it_failed() -> None:
    monitor, seen = get_compilation_monitor(), []

    @jax.jit
    def multiply(x: jax.Array) -> jax.Array:
        seen.append(monitor.is_compiling)
        return x @ jnp.ones((3, 3))

    assert not monitor.is_compiling
    for rows in ((2, 3), (2, 3), (2, 4)):
        try:
            multiply(jnp.ones(rows))
        except TypeError:  # 4 columns do not fit 3 rows
            assert rows == (2, 4)
        assert not monitor.is_compiling
    assert seen == [True, True], "the second call compiles nothing"
