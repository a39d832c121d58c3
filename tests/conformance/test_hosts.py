"""Two processes with two devices each, joined by gloo, give the bits of one process with four devices."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx.testing.tiny_models import write_model
from tests.conformance.test_mesh import PROGRAM, SIZES, Numbers, assert_equal
from tests.support.fast_jit import FAST_COMPILE_FLAGS
from tests.support.free_ports import free_ports


def run(
    directory: Path, last: str, mesh: str, *, flags: str, num_devices: int, host: tuple[int, int] | None = None
) -> subprocess.Popen[str]:
    """Start the program with `num_devices` devices.

    `host` is the rank of the process and the coordinator's port.
    """
    output = directory / ("alone" if host is None else f"host-{host[0]}")
    output.mkdir()
    xla_flags = f"--xla_force_host_platform_device_count={num_devices} {flags}"
    environment = os.environ | {"XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM), str(directory), str(output), last, "shared", mesh]
    if host is not None:
        command += ["--host", str(host[0]), f"127.0.0.1:{host[1]}"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_on_one_and_two_hosts(directory: Path, last: str, mesh: str, flags: str) -> tuple[Numbers, Numbers, Numbers]:
    """Return the results of one process, of host 0 and of host 1."""
    port = free_ports()
    running = [
        run(directory, last, mesh, flags=flags, num_devices=4),
        *(run(directory, last, mesh, flags=flags, num_devices=2, host=(rank, port)) for rank in (0, 1)),
    ]
    outputs = [process.communicate()[0] for process in running]
    assert not any(process.returncode for process in running), "\n\n".join(text[-3000:] for text in outputs)
    alone, first, second = (dict(np.load(directory / name / f"{mesh}.npz")) for name in ("alone", "host-0", "host-1"))
    assert alone.pop("bytes").size == 4
    assert first.pop("bytes").size == second.pop("bytes").size == 2, "each host has only the weights of its devices"
    return alone, first, second


def find_differences(found: Numbers, wanted: Numbers) -> list[str]:
    """Return the names of the arrays whose bits differ."""
    assert found.keys() == wanted.keys()
    return sorted(name for name in wanted if found[name].tobytes() != wanted[name].tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.exhaustive)])
def test_two_hosts_give_the_bits_of_one(tmp_path: Path, mesh: str) -> None:
    """Every sum over devices has two terms, so their order does not matter."""
    directory = write_model(tmp_path, "Qwen3ForCausalLM", tied_embeddings=False, num_layers=1, **SIZES)
    alone, first, second = run_on_one_and_two_hosts(directory, "sample", mesh, FAST_COMPILE_FLAGS)
    assert len(alone) > 100 and find_differences(first, second) == []
    assert find_differences(first, alone) == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("architecture", "mesh"),
    [
        ("Qwen3ForCausalLM", "fsdp=4"),
        ("Qwen3ForCausalLM", "tp=4"),
        ("Qwen3MoeForCausalLM", "tp=2,ep=2"),
        ("Qwen3MoeForCausalLM", "ep=4"),
    ],
)
def test_sums_over_four_devices_differ_by_rounding(tmp_path: Path, architecture: str, mesh: str) -> None:
    """The sums are added in a different order than in one process, but in the same order on each host."""
    directory = write_model(tmp_path, architecture, tied_embeddings=False, num_layers=1, **SIZES)
    alone, first, second = run_on_one_and_two_hosts(directory, "train", mesh, FAST_COMPILE_FLAGS)
    assert find_differences(first, second) == []
    assert_equal(first, alone)
