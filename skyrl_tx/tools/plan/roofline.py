"""Upper bounds for the tokens per second of training and decoding on a mesh, from a roofline model.

The model computes three times for a micro-batch or decode step:

- arithmetic: its FLOPs at the peak rate of the devices;
- memory: reading the weights and the KV cache at memory bandwidth;
- links: sending data between devices at link bandwidth.

All three may overlap, so the longest of them is a lower bound for the time of the step. Latencies,
padding and all other work are left out. `hardware.MEASURED` lists which fraction of the bound real
devices reached.

Roofline: Williams et al. 2009, doi:10.1145/1498765.1498785.
"""

from dataclasses import dataclass

from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.models import ModelConfig
from skyrl_tx.models.flops import (
    count_adapter_macs,
    count_exchanged_elements,
    count_expert_parameters,
    count_frozen_macs,
    count_mixing_macs,
    estimate_experts_read,
)
from skyrl_tx.tools.plan.hardware import Devices

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The sizes of the micro-batch and the decode step whose bounds are computed."""

    micro_batch_tokens: int
    """Tokens of a micro-batch, on all devices together."""
    sequence_tokens: int
    """Length of each training sequence."""
    is_remat: bool
    """Whether the backward pass recomputes the layers (activation checkpointing)."""
    rank: int
    """LoRA rank."""
    num_slots: int
    """How many samples are decoded at the same time, on all devices together."""
    sample_tokens: int
    """Length of each sample. A decode step reads the KV cache of this many positions per sample."""


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """Three lower bounds for the time of one micro-batch or decode step of `tokens` tokens."""

    tokens: int
    arithmetic_s: float
    memory_s: float
    links_s: float

    @property
    def tokens_per_s(self) -> float:
        """Upper bound for the tokens per second of all devices together, if all three times overlap."""
        return self.tokens / max(self.arithmetic_s, self.memory_s, self.links_s)

    @property
    def s_per_token(self) -> float:
        """Lower bound for the seconds per token if computing and sending do not overlap."""
        return (max(self.arithmetic_s, self.memory_s) + self.links_s) / self.tokens

    @property
    def bottleneck(self) -> str:
        """Which of the three times is the longest: `arithmetic`, `memory` or `links`."""
        times = {"arithmetic": self.arithmetic_s, "memory": self.memory_s, "links": self.links_s}
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True, slots=True)
class _Weights:
    """Bytes of the base weights that each device reads, after `fsdp` shards are gathered."""

    common: float
    experts: float

    @classmethod
    def from_model(cls, model: ModelConfig, num_parameters: int, itemsize: int, mesh: MeshConfig) -> "_Weights":
        experts = count_expert_parameters(model)
        # Leave out the embedding, because a look-up reads only a few of its rows. With tied weights it is also the
        # unembedding, which is read whole.
        common = num_parameters - experts - (0 if model.tied_embeddings else model.vocab_size * model.hidden_size)
        return cls(itemsize * common / mesh.tp, itemsize * experts / (mesh.tp * mesh.ep))


def compute_training_bound(
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

    `adapter_bytes` is the size of one adapter on each device. Its gradient has the same size.
    """
    # FLOPs, two per multiply-accumulate: a forward pass, a second one with rematerialization, and a backward pass. In
    # the backward pass frozen weights need one product, for the gradient of their input. Adapters and sequence mixing
    # (attention, linear attention) need two, because the gradient flows into both factors.
    kind, tokens, length = devices.kind, work.micro_batch_tokens, work.sequence_tokens
    frozen, lora = count_frozen_macs(model), count_adapter_macs(model, work.rank)
    mixing = count_mixing_macs(model, length) / length
    forwards = 2 if work.is_remat else 1
    macs = (forwards + 1) * frozen + (forwards + 2) * (lora + mixing)

    # Each pass over the layers reads all weights. With `fsdp` or `cp`, devices first gather them from each other.
    weights = _Weights.from_model(model, num_parameters, itemsize, mesh)
    read_bytes = (weights.common + weights.experts) * (forwards + 1)
    sent = _compute_remote_share(mesh.fsdp * mesh.cp) * read_bytes

    # The gradient is all-reduced over all shards of the batch. Each pass over a layer also all-reduces two outputs
    # over `tp`, and with `cp` it has an all-to-all before and after the mixer.
    shards = mesh.dp * mesh.fsdp * mesh.cp * mesh.ep
    tokens_per_device = tokens / shards
    sent += 2 * _compute_remote_share(shards) * adapter_bytes
    sent += (forwards + 1) * (
        _count_reduced_bytes(model, mesh, tokens_per_device)
        + _count_exchanged_bytes(model, mesh, tokens_per_device, itemsize)
    )
    return RooflineBound(
        tokens,
        arithmetic_s=2 * macs * tokens / devices.number / kind.flops,
        memory_s=read_bytes / kind.bytes_per_s,
        links_s=sent / kind.link_bytes_per_s,
    )


def compute_decoding_bound(
    model: ModelConfig,
    devices: Devices,
    mesh: MeshConfig,
    work: Workload,
    *,
    num_parameters: int,
    itemsize: int,
    cache_bytes: int,
) -> RooflineBound:
    """Return the bound of one decode step of all slots with the base model.

    `cache_bytes` is the part of the KV cache that the step reads on each device.
    """
    kind, slots = devices.kind, work.num_slots
    # The last position of a sample mixes with all positions before it.
    mixing = count_mixing_macs(model, work.sample_tokens) - count_mixing_macs(model, work.sample_tokens - 1)
    weights = _Weights.from_model(model, num_parameters, itemsize, mesh)
    read_bytes = weights.common + weights.experts * estimate_experts_read(
        model, -(-slots // (mesh.dp * mesh.fsdp * mesh.cp))
    )
    tokens_per_device = slots / (mesh.dp * mesh.fsdp * mesh.cp * mesh.ep)

    # With `fsdp`, XLA gathers the weights of all experts, also of experts that no token uses.
    sent = _compute_remote_share(mesh.fsdp * mesh.cp) * (weights.common + weights.experts) + _count_reduced_bytes(
        model, mesh, tokens_per_device
    )
    return RooflineBound(
        slots,
        arithmetic_s=2 * (count_frozen_macs(model) + mixing) * slots / devices.number / kind.flops,
        memory_s=(read_bytes + cache_bytes) / kind.bytes_per_s,
        links_s=sent / kind.link_bytes_per_s,
    )


def _compute_remote_share(num_devices: int) -> float:
    """Return the share of an array that a device receives from other devices if each device holds an equal part."""
    return (num_devices - 1) / num_devices


def _count_exchanged_bytes(model: ModelConfig, mesh: MeshConfig, num_tokens: float, itemsize: int) -> float:
    """Return the bytes that each device sends before and after the mixers of all layers.

    `num_tokens` is the number of tokens on each device. With `cp`, the tokens of a batch row are
    sharded over `cp` and `ep`. A mixer, for example attention, needs all tokens of a row. So an
    all-to-all before it gives each device all tokens of some heads, and another one after it shards
    by tokens again.
    """
    if mesh.cp == 1:
        return 0.0
    elements = count_exchanged_elements(model, mesh.tp * mesh.cp * mesh.ep) / mesh.tp
    return _compute_remote_share(mesh.cp * mesh.ep) * num_tokens * elements * itemsize


def _count_reduced_bytes(model: ModelConfig, mesh: MeshConfig, num_tokens: float) -> float:
    """Return the bytes of activations that each device sends in one pass over all layers.

    `num_tokens` is the number of tokens on each device. Over `tp`, each layer all-reduces two
    float32 outputs, of attention and of the feed-forward network. An all-reduce sends each element
    twice: a reduce-scatter, then an all-gather. Over `ep`, each layer all-gathers the tokens, which
    sends each element once, and all-reduces the outputs.
    """
    hidden_bytes = num_tokens * model.hidden_size * FLOAT32_BYTES
    num_bytes = 2 * model.num_layers * 2 * _compute_remote_share(mesh.tp) * hidden_bytes
    if mesh.ep > 1:
        num_bytes += model.num_layers * 3 * _compute_remote_share(mesh.ep) * mesh.ep * hidden_bytes
    return num_bytes
