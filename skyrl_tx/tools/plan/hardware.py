"""Figures of the supported devices: memory, FLOPs per second, bandwidths, and devices per host.

Sources, as published in 2025:

- NVIDIA: the data sheets "H200 Tensor Core GPU", "H100 Tensor Core GPU", "A100 Tensor Core GPU", "L40S GPU", "L4
  Tensor Core GPU" and "DGX B200". All except A100 give FLOPs with sparsity, so this table has half of the figure.
- GeForce: the appendices of the white papers "NVIDIA Ada GPU Architecture" and "NVIDIA RTX Blackwell GPU
  Architecture", for bfloat16 products with float32 accumulation.
- Google: the pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e" of the Cloud TPU documentation.

The figures of v5e, v5p and v6e were compared with these pages. The FLOPs of the other devices were compared only with
tables that third parties derived from these sources.
"""

import argparse
import math
import re
from dataclasses import dataclass
from typing import Literal

from skyrl_tx.backends.jax.gpu_memory import GPU_SHARE

GB = 10**9
GIB = 2**30
MEASURED = {"h200": {"training": 0.50, "sampling": 0.54}}
"""The fraction of the roofline bound that one device reached in measurements, by device and kind of work.

For example, one H200 trained half as many tokens per second as the bound. Measured with `make gpu` and Qwen3-8B:
training in micro-batches of 16,384 tokens, and decoding 256 samples of 1,000 tokens.
"""
_TPU_RESERVED_BYTES = GIB // 4
"""Memory that the TPU runtime reserves. On v5e the compiler reports 15.75 of 16 GiB as usable."""


class DeviceError(argparse.ArgumentTypeError):
    """A device name or topology is invalid. The message names the valid values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device, for example an H200."""

    name: str
    family: Literal["gpu", "tpu"]
    memory_bytes: int
    flops: float
    """FLOPs per second of dense bfloat16 products."""
    bytes_per_s: float
    """Memory bandwidth."""
    link_bytes_per_s: float
    """Bandwidth to the other devices of the host, in one direction, over all links of the device."""
    per_host: int
    """The number of devices in the largest common host."""
    dims: int = 1
    """The number of dimensions of a topology. It is 1 for GPUs, whose topology is a number of devices."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of one kind, for example h200:8."""

    kind: DeviceKind
    topology: tuple[int, ...]
    gpu_share: float = GPU_SHARE
    """The share of a GPU's memory that JAX takes."""

    @property
    def number(self) -> int:
        """The number of devices."""
        return math.prod(self.topology)

    @property
    def limit_bytes(self) -> int:
        """The memory that JAX may take on each device, in bytes."""
        if self.kind.family == "gpu":
            return int(self.gpu_share * self.kind.memory_bytes)
        return self.kind.memory_bytes - _TPU_RESERVED_BYTES

    def __str__(self) -> str:
        return f"{self.kind.name}:{'x'.join(map(str, self.topology))}"


def _make_kind(
    name: str,
    memory_bytes: int,
    tflops: float,
    gb_per_s: float,
    link_gb_per_s: float,
    *,
    per_host: int = 8,
    dims: int = 1,
) -> DeviceKind:
    return DeviceKind(
        name=name,
        family="gpu" if dims == 1 else "tpu",
        memory_bytes=memory_bytes,
        flops=tflops * 1e12,
        bytes_per_s=gb_per_s * 1e9,
        link_bytes_per_s=link_gb_per_s * 1e9,
        per_host=per_host,
        dims=dims,
    )


# Link bandwidths: for GPUs with NVLink, one direction, which is half of the figure in data sheets. For other GPUs,
# PCIe x16. For TPUs, all links together.
KINDS = {
    kind.name: kind
    for kind in (
        _make_kind("b200", 180 * GB, 2250, 8000, 900),
        _make_kind("h200", 141 * GB, 989.5, 4800, 450),
        _make_kind("h100", 80 * GB, 989.5, 3350, 450),  # SXM
        _make_kind("h100-nvl", 94 * GB, 835.5, 3900, 300),
        _make_kind("h100-pcie", 80 * GB, 756.5, 2000, 64),
        _make_kind("a100-80", 80 * GB, 312, 2039, 300),  # SXM
        _make_kind("a100-40", 40 * GB, 312, 1555, 300),
        _make_kind("l40s", 48 * GB, 362, 864, 32),
        _make_kind("l4", 24 * GB, 121, 300, 32),
        _make_kind("rtx5090", 32 * GB, 209.5, 1792, 64),
        _make_kind("rtx4090", 24 * GB, 165.2, 1008, 32),
        _make_kind("v4", 32 * GIB, 275, 1200, 300, per_host=4, dims=3),
        _make_kind("v5e", 16 * GIB, 197, 800, 200, per_host=8, dims=2),
        _make_kind("v5p", 95 * GIB, 459, 2765, 600, per_host=4, dims=3),
        _make_kind("v6e", 32 * GIB, 918, 1600, 400, per_host=8, dims=2),
    )
}


HOW_TO_PLAN_THIS_MACHINE = (
    "for this machine, for example a laptop without an accelerator, use `skyrl-tx doctor --base-model MODEL`"
)


def parse_devices(text: str) -> Devices:
    """Parse the name of devices, such as h200, h200:8, v5e:2x4 or v5p:2x2x1. Raises DeviceError."""
    name, colon, topology = text.lower().partition(":")
    kind = KINDS.get(name)
    if kind is None:
        problem = f"unknown device {name!r}; the known devices are {', '.join(KINDS)}"
        raise DeviceError(f"{problem}; {HOW_TO_PLAN_THIS_MACHINE}")
    if not colon:
        return Devices(kind, (1,) * kind.dims)
    form, example = ("a number of devices", "8") if kind.dims == 1 else _FORMS[kind.dims]
    if re.fullmatch(r"x".join([r"[1-9]\d{0,3}"] * kind.dims), topology) is None:
        raise DeviceError(f"{topology!r} must be {form}, for example {name}:{example}")
    return Devices(kind, tuple(map(int, topology.split("x"))))


_FORMS = {2: ("a topology of two sizes", "2x4"), 3: ("a topology of three sizes", "2x2x1")}
"""The form of a topology and an example of it, by the number of dimensions."""
