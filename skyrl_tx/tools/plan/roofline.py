"""The most tokens per second of training and decoding on a mesh, by a roofline.

A step takes at least the time of its products at the peak rate of the devices, of reading weights and cache at the
bandwidth of their memory, and of what devices send each other. All three may overlap, so the longest is the bound.
Nothing else counts: no latency, no padding, no other work. `skyrl_tx.tools.plan.roofline` has the measured figures.

Roofline: Williams et al. 2009, doi:10.1145/1498765.1498785.
"""

import math
import os
import re
from dataclasses import dataclass
from typing import Literal

from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.models import ModelConfig
from skyrl_tx.models.flops import (
    count_adapter_macs,
    count_exchanged_numbers,
    count_expert_parameters,
    count_frozen_macs,
    count_mixing_macs,
    estimate_experts_read,
)

GIB = 2**30


MEASURED = {"h200": {"training": 0.50, "sampling": 0.54}}
"""The share of the bound of a roofline that one device was measured to reach, by its kind and the work.

By `make gpu` with Qwen3-8B: training in micro-batches of 16,384 tokens, and decoding of 256 samples of 1,000 tokens.
"""


GPU_SHARE = 0.75
"""Share of a GPU's memory that JAX takes (docs.jax.dev, GPU memory allocation)."""


_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


_TPU_RESERVED_BYTES = GIB // 4
"""Memory that the TPU runtime keeps: the compiler reports 15.75 of 16 GiB on v5e."""


class DeviceError(ValueError):
    """A device, a topology or a share of memory that cannot be planned for. The message names what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device."""

    name: str
    family: Literal["gpu", "tpu"]
    memory_bytes: int
    flops: float
    """Dense products in bfloat16, FLOPs per second."""
    bytes_per_s: float
    """Bandwidth of the memory."""
    link_bytes_per_s: float
    """Bandwidth to other devices of the host, in one direction, over all links of a device."""
    per_host: int
    """Devices of the largest usual host."""
    dims: int = 1
    """Dims of a topology: 1 for a number of devices."""


@dataclass(frozen=True, slots=True)
class Devices:
    """A kind of device, and how many are used."""

    kind: DeviceKind
    topology: tuple[int, ...]

    @property
    def number(self) -> int:
        """The number of devices."""
        return math.prod(self.topology)

    @property
    def limit_bytes(self) -> int:
        """The memory of each device that JAX may take."""
        if self.kind.family == "gpu":
            return int(_read_gpu_share() * self.kind.memory_bytes)
        return self.kind.memory_bytes - _TPU_RESERVED_BYTES

    def __str__(self) -> str:
        return f"{self.kind.name}:{'x'.join(map(str, self.topology))}"


def _make_gpu(name: str, gigabytes: float, tflops: float, gb_per_s: float, link_gb_per_s: float) -> DeviceKind:
    return DeviceKind(
        name=name,
        family="gpu",
        memory_bytes=int(gigabytes * 1e9),
        flops=tflops * 1e12,
        bytes_per_s=gb_per_s * 1e9,
        link_bytes_per_s=link_gb_per_s * 1e9,
        per_host=8,
    )


def _make_tpu(
    name: str, gibibytes: int, tflops: float, gb_per_s: float, link_gb_per_s: float, *, per_host: int, dims: int
) -> DeviceKind:
    return DeviceKind(
        name=name,
        family="tpu",
        memory_bytes=gibibytes * GIB,
        flops=tflops * 1e12,
        bytes_per_s=gb_per_s * 1e9,
        link_bytes_per_s=link_gb_per_s * 1e9,
        per_host=per_host,
        dims=dims,
    )


# Links: NVLink in one direction, half of what data sheets give; else PCIe x16. TPU: all links together.
KINDS = {
    each.name: each
    for each in (
        _make_gpu("b200", 180, 2250, 8000, 900),
        _make_gpu("h200", 141, 989.5, 4800, 450),
        _make_gpu("h100", 80, 989.5, 3350, 450),  # SXM
        _make_gpu("h100-nvl", 94, 835.5, 3900, 300),
        _make_gpu("h100-pcie", 80, 756.5, 2000, 64),
        _make_gpu("a100-80", 80, 312, 2039, 300),  # SXM
        _make_gpu("a100-40", 40, 312, 1555, 300),
        _make_gpu("l40s", 48, 362, 864, 32),
        _make_gpu("l4", 24, 121, 300, 32),
        _make_gpu("rtx5090", 32, 209.5, 1792, 64),
        _make_gpu("rtx4090", 24, 165.2, 1008, 32),
        _make_tpu("v4", 32, 275, 1200, 300, per_host=4, dims=3),
        _make_tpu("v5e", 16, 197, 800, 200, per_host=8, dims=2),
        _make_tpu("v5p", 95, 459, 2765, 600, per_host=4, dims=3),
        _make_tpu("v6e", 32, 918, 1600, 400, per_host=8, dims=2),
    )
}


def parse_devices(text: str) -> Devices:
    """Return the devices that `h200`, `h200:8`, `v5e:2x4` or `v5p:2x2x1` name. Raises DeviceError."""
    name, colon, topology = text.lower().partition(":")
    kind = KINDS.get(name)
    if kind is None:
        raise DeviceError(f"{name!r} is not known; known are {', '.join(KINDS)}")
    if kind.family == "gpu":
        _read_gpu_share()
    if not colon:
        return Devices(kind, (1,) * kind.dims)
    form, example = ("a number of devices", "8") if kind.dims == 1 else _FORMS[kind.dims]
    if re.fullmatch(r"x".join([r"[1-9]\d{0,3}"] * kind.dims), topology) is None:
        raise DeviceError(f"{topology!r} must be {form}, such as {name}:{example}")
    return Devices(kind, tuple(map(int, topology.split("x"))))


def _read_gpu_share() -> float:
    """Return the share of a GPU's memory that JAX takes here. Raises DeviceError."""
    text = os.environ.get(_SHARE_VARIABLE) or str(GPU_SHARE)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise DeviceError(f"{_SHARE_VARIABLE} is {text!r}; it must be a number above 0 and at most 1")
    return share


_FORMS = {2: ("a topology of two sizes", "2x4"), 3: ("a topology of three sizes", "2x2x1")}


FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The sizes of the steps that are compared."""

    micro_batch_tokens: int
    """On all devices."""
    sequence_tokens: int
    """Length of a sequence in training."""
    is_remat: bool
    rank: int
    num_slots: int
    """Samples that are decoded at the same time, on all devices."""
    sample_tokens: int
    """Length of each sample: the positions that a decode step reads."""


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """The least seconds of a step on each device, by their cause, and the tokens of the step."""

    tokens: int
    arithmetic_s: float
    memory_s: float
    links_s: float

    @property
    def tokens_per_s(self) -> float:
        """The most tokens per second, on all devices together."""
        return self.tokens / max(self.arithmetic_s, self.memory_s, self.links_s)

    @property
    def s_per_token(self) -> float:
        """The least seconds for a token if nothing is computed while devices send to each other."""
        return (max(self.arithmetic_s, self.memory_s) + self.links_s) / self.tokens

    @property
    def by(self) -> str:
        """The longest of these: `arithmetic`, `memory` or `links`."""
        times = {"arithmetic": self.arithmetic_s, "memory": self.memory_s, "links": self.links_s}
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True, slots=True)
class _Weights:
    """Bytes of base weights that each device computes with, those of `fsdp` gathered."""

    common: float
    experts: float

    @classmethod
    def from_model(cls, model: ModelConfig, num_parameters: int, itemsize: int, mesh: MeshConfig) -> "_Weights":
        experts = count_expert_parameters(model)
        # The look-up of embeddings reads few rows; with tied weights the same array is the unembedding.
        common = num_parameters - experts - (0 if model.tied_embeddings else model.vocab_size * model.hidden_size)
        return cls(itemsize * common / mesh.tp, itemsize * experts / (mesh.tp * mesh.ep))


def bound_training(
    model: ModelConfig,
    devices: Devices,
    mesh: MeshConfig,
    work: Workload,
    *,
    num_parameters: int,
    itemsize: int,
    adapter_bytes: int,
) -> RooflineBound:
    """Return the bound of a forward and backward pass of one micro-batch.

    `adapter_bytes` are those of an adapter on each device, and of its gradient.
    """
    kind, tokens, length = devices.kind, work.micro_batch_tokens, work.sequence_tokens
    frozen, lora = count_frozen_macs(model), count_adapter_macs(model, work.rank)
    mixing = count_mixing_macs(model, length) / length
    # Products of two FLOPs: forward, again with rematerialization, and backward. Frozen weights have one product in the
    # backward pass, for the gradient of their input; others two.
    forwards = 2 if work.is_remat else 1
    macs = (forwards + 1) * frozen + (forwards + 2) * (lora + mixing)
    weights = _Weights.from_model(model, num_parameters, itemsize, mesh)
    gathered = (weights.common + weights.experts) * (forwards + 1)
    sent = _compute_remote_share(mesh.fsdp * mesh.cp) * gathered
    # Each pass over a layer adds up two outputs of its rows over tp, and mixers exchange them over cp.
    shards = mesh.dp * mesh.fsdp * mesh.cp * mesh.ep
    rows = tokens / shards
    sent += 2 * _compute_remote_share(shards) * adapter_bytes  # all shards of rows add up the gradient
    sent += (forwards + 1) * (
        _count_reduced_bytes(model, mesh, rows) + _count_exchanged_bytes(model, mesh, rows, itemsize)
    )
    return RooflineBound(
        tokens,
        arithmetic_s=2 * macs * tokens / devices.number / kind.flops,
        memory_s=gathered / kind.bytes_per_s,
        links_s=sent / kind.link_bytes_per_s,
    )


def bound_decoding(
    model: ModelConfig,
    devices: Devices,
    mesh: MeshConfig,
    work: Workload,
    *,
    num_parameters: int,
    itemsize: int,
    cache_bytes: int,
) -> RooflineBound:
    """Return the bound of one decode step of all slots with the base model; it reads `cache_bytes` on each device."""
    kind, slots = devices.kind, work.num_slots
    position = count_mixing_macs(model, work.sample_tokens) - count_mixing_macs(model, work.sample_tokens - 1)
    weights = _Weights.from_model(model, num_parameters, itemsize, mesh)
    gathered = weights.common + weights.experts * estimate_experts_read(
        model, -(-slots // (mesh.dp * mesh.fsdp * mesh.cp))
    )
    rows = slots / (mesh.dp * mesh.fsdp * mesh.cp * mesh.ep)
    # XLA gathers the whole weights of `fsdp`, read or not.
    sent = _compute_remote_share(mesh.fsdp * mesh.cp) * (weights.common + weights.experts) + _count_reduced_bytes(
        model, mesh, rows
    )
    return RooflineBound(
        slots,
        arithmetic_s=2 * (count_frozen_macs(model) + position) * slots / devices.number / kind.flops,
        memory_s=(gathered + cache_bytes) / kind.bytes_per_s,
        links_s=sent / kind.link_bytes_per_s,
    )


def _compute_remote_share(num_devices: int) -> float:
    """Return the share of an array in equal parts that each device gets from others."""
    return (num_devices - 1) / num_devices


def _count_exchanged_bytes(model: ModelConfig, mesh: MeshConfig, rows: float, itemsize: int) -> float:
    """Return the bytes that each device sends in one pass over all layers so that mixers get whole rows.

    With `cp` the tokens of a row are on the devices of `cp` and `ep`, and so are the heads while mixers compute.
    """
    if mesh.cp == 1:
        return 0.0
    numbers = count_exchanged_numbers(model, mesh.tp * mesh.cp * mesh.ep) / mesh.tp
    return _compute_remote_share(mesh.cp * mesh.ep) * rows * numbers * itemsize


def _count_reduced_bytes(model: ModelConfig, mesh: MeshConfig, rows: float) -> float:
    """Return the bytes that each device sends in one pass over all layers for `rows` tokens, besides weights.

    Over `tp` the outputs of mixer and feed-forward are added up, float32: each part goes out and comes back. Over `ep`
    the tokens of all its devices are gathered, and their outputs added up.
    """
    hidden_bytes = rows * model.hidden_size * FLOAT32_BYTES
    found = 2 * model.num_layers * 2 * _compute_remote_share(mesh.tp) * hidden_bytes
    if mesh.ep > 1:
        found += model.num_layers * 3 * _compute_remote_share(mesh.ep) * mesh.ep * hidden_bytes
    return found
