"""The most tokens per second of training and decoding on a mesh, by a roofline.

A step takes at least the time of its products at the peak rate of the devices, of reading weights and cache at the
bandwidth of their memory, and of what devices send each other. All three may overlap, so the longest is the bound.
Nothing else counts: no latency, no padding, no other work. `skyrl_tx.tools.plan.hardware` has the measured figures.

Roofline: Williams et al. 2009, doi:10.1145/1498765.1498785.
"""

from dataclasses import dataclass

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
from skyrl_tx.tools.plan.hardware import Devices

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
