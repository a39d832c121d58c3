"""Multi-host functions on a single host, and with `is_distributed` patched.

`tests/conformance/test_hosts.py` runs two processes.
"""

import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from skyrl_tx.backends.jax import devices, mesh
from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.backends.jax.devices import convert_memory_errors
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.contract.errors import BackendLost, CapacityError


def test_on_one_host_arrays_and_numbers_are_its_own():
    whole = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec())
    tree = {"a": devices.put(np.arange(3), whole), "b": np.float32(2)}
    assert devices.fetch(tree)["a"].tolist() == devices.fetch_one_by_one(tree)["a"].tolist() == [0, 1, 2]
    assert devices.agree_on_minimum(3 * 2**20 + 1) == 3 * 2**20 + 1
    assert not devices.is_distributed() and devices.make_fingerprint() == {}


def test_devices_are_in_order_of_their_ids_and_those_of_this_host(monkeypatch):
    unordered = [SimpleNamespace(id=number, process_index=number % 2) for number in (3, 0, 2, 1)]
    assert [device.id for device in devices.list_local_devices(unordered)] == [0, 1, 2, 3]
    monkeypatch.setattr(devices, "is_distributed", lambda: True)
    assert [device.id for device in devices.list_local_devices(unordered)] == [0, 2]


def test_with_several_hosts_an_exhausted_device_loses_the_backend(monkeypatch, caplog):
    """The other hosts may still have memory and would wait for this one."""
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    with caplog.at_level(logging.CRITICAL):
        with pytest.raises(CapacityError), convert_memory_errors("a model"):
            raise error
        monkeypatch.setattr(devices, "is_distributed", lambda: True)
        expected = pytest.raises(BackendLost, match=r"RESOURCE_EXHAUSTED.*--backend-config.micro-batch-tokens")
        with expected, convert_memory_errors("a model"):
            raise error
        with (
            pytest.raises(BackendLost, match="RESOURCE_EXHAUSTED"),
            programs.detect_loss(()),
        ):
            raise error


def test_several_hosts_use_all_devices(monkeypatch):
    monkeypatch.setattr(mesh, "is_distributed", lambda: True)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace()] * 4)
    with pytest.raises(mesh.MeshError, match=r"fsdp=1,tp=1,ep=1 needs 1 devices, but there are 4 on all hosts"):
        mesh.make_layout(MeshConfig())
