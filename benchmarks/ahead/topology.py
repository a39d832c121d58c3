"""Layouts over devices that are not here, which their compilers know by description.

JAX describes a topology of TPUs to libtpu by its name, and one of GPUs to the plugin for CUDA by a GpuTargetConfigProto
(jax.experimental.topologies). Neither compiler needs a device. GPUs are described in gpu_targets.toml.
"""

import json
import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import topologies

from skyrl_tx import DISTRIBUTION
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.contract.errors import UserError
from skyrl_tx.layers.sharding import Layout

GPUS_PER_HOST = 8
_DNN = "dnn_version_info {\n  major: 9\n  minor: 10\n}\n"
"""A version of cuDNN, which the compiler asks for. No program of ours calls it."""


def describe_layout(family: Literal["gpu", "tpu"], topology: str, config: MeshConfig) -> Layout:
    """Return a layout over the first devices of a topology, such as `v5e:2x4` or `h200:8`.

    Raises UserError for a GPU without description, and without the compiler of the devices.
    """
    return mesh.layout_from_devices(_describe_gpus(topology) if family == "gpu" else _describe_tpus(topology), config)


def _describe_tpus(topology: str) -> Any:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks a server of the cloud which TPU this is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except _ERRORS as error:
        raise _make_compiler_error(topology, f"'{DISTRIBUTION}[tpu]'", error) from error


def _describe_gpus(topology: str) -> Any:
    name, _, number = topology.partition(":")
    target, wanted = gpu_target(name), int(number or 1)
    hosts = -(-wanted // GPUS_PER_HOST)
    shape = f"1x{hosts}x{wanted if hosts == 1 else GPUS_PER_HOST}"  # slices, hosts, GPUs
    try:
        return topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices
    except _ERRORS as error:
        raise _make_compiler_error(topology, "jax-cuda12-plugin jax-cuda12-pjrt", error) from error


_ERRORS = RuntimeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError


def _make_compiler_error(topology: str, packages: str, error: Exception) -> UserError:
    cause = " ".join(str(error).split())[:300]
    return UserError(f"no compiler for {topology}: pip install {packages} ({cause})")


def gpu_target(name: str) -> str:
    """Return the description of a GPU as text of a GpuTargetConfigProto. Raises UserError if there is none."""
    described = _load_targets()
    if name not in described["gpus"]:
        raise UserError(f"--device: {name} is not described; of the GPUs, {' and '.join(described['gpus'])} are")
    gpu = dict(described["gpus"][name])
    major, minor = (capability := gpu.pop("capability")).split(".")
    fields = {**gpu, **described["capability"][capability]}
    values = (f"{key}: {json.dumps(value)}" for key, value in fields.items())
    return "\n".join(
        (
            "gpu_device_info {",
            *(f"  {value}" for value in values),
            # Kernels of ours use instructions of this very generation.
            f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}",
            '  device_vendor: "NVIDIA Corporation"',
            f'  platform_version: "Compute Capability {capability}a"',
            "  device_address_bits: 64",
            '  runtime_version: "12.8.0"',
            '  driver_version: "12.8.0"',
            '  compile_time_toolkit_version: "12.8.0"',
            "}",
            'platform_name: "CUDA"',
            f'device_description_str: "{gpu["name"]}"',
            _DNN,
        )
    )


@cache
def _load_targets() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("gpu_targets.toml").read_text())
