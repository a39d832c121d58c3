"""Upper bounds for the tokens per second of training and decoding on a mesh, and the choice of a mesh by them.

The roofline model computes three times for a micro-batch or decode step:

- arithmetic: its FLOPs at the peak rate of the devices;
- memory: reading the weights and the KV cache at memory bandwidth;
- links: sending data between devices at link bandwidth.

All three may overlap, so the longest of them is a lower bound for the time of the step. Latencies,
padding and all other work are left out. `hardware.MEASURED` lists which fraction of the bound real
devices reached.

Meshes are ranked by the time to sample one token and to train on it. If the fastest mesh cannot
train rows of the requested length, `find_fitting_candidate` looks for another mesh that can.

Roofline: Williams et al. 2009, doi:10.1145/1498765.1498785.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.memory import DEFAULT_SLOTS, SAMPLE_SHARE, SATURATING_TOKENS, CacheBytes
from skyrl_tx.backends.jax.mesh import MeshError, check_divisible
from skyrl_tx.backends.jax.start_plan import count_bytes_per_device, make_abstract_layout
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, count_adapter_bytes
from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models import ModelConfig, describe_params
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
WEIGHT_SHARE = 0.8
"""The share of a device's memory that weights should take at most. Meshes with larger weights are ranked last."""
_SEQUENCE_TOKENS = 4096
"""Length of training sequences and samples when meshes are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The sizes of the micro-batch and the decode step whose bounds are computed, and of the weights."""

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
    num_parameters: int
    itemsize: int
    """Bytes of each number in the base weights."""
    adapter_bytes: int
    """The size of one adapter on each device. Its gradient has the same size."""
    cache_bytes: int
    """The part of the KV cache that a decode step reads on each device."""


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
    def from_model(cls, model: ModelConfig, work: Workload, mesh: MeshConfig) -> "_Weights":
        experts = count_expert_parameters(model)
        # Leave out the embedding, because a look-up reads only a few of its rows. With tied weights it is also the
        # unembedding, which is read whole.
        common = work.num_parameters - experts - (0 if model.tied_embeddings else model.vocab_size * model.hidden_size)
        return cls(work.itemsize * common / mesh.tp, work.itemsize * experts / (mesh.tp * mesh.ep))


def compute_training_bound(model: ModelConfig, devices: Devices, mesh: MeshConfig, work: Workload) -> RooflineBound:
    """Return the bound of a forward and backward pass of one micro-batch."""
    # FLOPs, two per multiply-accumulate: a forward pass, a second one with rematerialization, and a backward pass. In
    # the backward pass frozen weights need one product, for the gradient of their input. Adapters and sequence mixing
    # (attention, linear attention) need two, because the gradient flows into both factors.
    kind, tokens, length = devices.kind, work.micro_batch_tokens, work.sequence_tokens
    frozen, lora = count_frozen_macs(model), count_adapter_macs(model, work.rank)
    mixing = count_mixing_macs(model, length) / length
    forwards = 2 if work.is_remat else 1
    macs = (forwards + 1) * frozen + (forwards + 2) * (lora + mixing)

    # Each pass over the layers reads all weights. With `fsdp` or `cp`, devices first gather them from each other.
    weights = _Weights.from_model(model, work, mesh)
    read_bytes = (weights.common + weights.experts) * (forwards + 1)
    sent = _compute_remote_share(mesh.fsdp * mesh.cp) * read_bytes

    # The gradient is all-reduced over all shards of the batch. Each pass over a layer also all-reduces two outputs
    # over `tp`, and with `cp` it has an all-to-all before and after the mixer.
    shards = mesh.dp * mesh.fsdp * mesh.cp * mesh.ep
    tokens_per_device = tokens / shards
    sent += 2 * _compute_remote_share(shards) * work.adapter_bytes
    sent += (forwards + 1) * (
        _count_reduced_bytes(model, mesh, tokens_per_device)
        + _count_exchanged_bytes(model, mesh, tokens_per_device, work.itemsize)
    )
    return RooflineBound(
        tokens,
        arithmetic_s=2 * macs * tokens / devices.number / kind.flops,
        memory_s=read_bytes / kind.bytes_per_s,
        links_s=sent / kind.link_bytes_per_s,
    )


def compute_decoding_bound(model: ModelConfig, devices: Devices, mesh: MeshConfig, work: Workload) -> RooflineBound:
    """Return the bound of one decode step of all slots with the base model."""
    kind, slots = devices.kind, work.num_slots
    # The last position of a sample mixes with all positions before it.
    mixing = count_mixing_macs(model, work.sample_tokens) - count_mixing_macs(model, work.sample_tokens - 1)
    weights = _Weights.from_model(model, work, mesh)
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
        memory_s=(read_bytes + work.cache_bytes) / kind.bytes_per_s,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A mesh with upper bounds for its speed in training and decoding.

    Training is for micro-batches that keep a device busy, decoding for as many samples as fit into its memory.
    """

    mesh: MeshConfig
    weight_bytes: int
    """Bytes of weights on each device."""
    has_fitting_weights: bool
    """Whether the weights take at most `WEIGHT_SHARE` of the memory."""
    training: RooflineBound
    decoding: RooflineBound

    @property
    def seconds_per_token(self) -> float:
        """Time to sample a token and train on it, if devices do not compute while they send.

        In practice, sending seldom overlaps with computing. So sending counts in full here, and meshes that send little
        get a better rank.
        """
        return self.training.s_per_token + self.decoding.s_per_token


def rank_meshes(
    model: ModelConfig,
    config: JaxConfig,
    devices: Devices,
    dtype: np.dtype,
    meshes: Iterable[MeshConfig],
) -> list[Candidate]:
    """Return the meshes that can shard the model, best first.

    Meshes whose sizes do not divide the sizes of the model are left out.
    """
    described = describe_params(model)
    num_parameters = sum(int(np.prod(parameter.shape)) for parameter in flatten(described).values())
    length = min(_SEQUENCE_TOKENS, config.max_context_length or model.max_context_length, model.max_context_length)

    candidates: list[Candidate] = []
    for mesh_config in meshes:
        layout = make_abstract_layout(mesh_config)
        try:
            check_divisible(layout, model)
        except MeshError:
            continue

        # Decode as many samples as fit in addition to the weights.
        shards = layout.num_shards("batch")
        per_sample = CacheBytes.from_model(model, layout, dtype.itemsize)
        sample_bytes = per_sample.position * length + per_sample.state
        weight_bytes = count_bytes_per_device(described, layout, dtype)
        num_fitting = int(SAMPLE_SHARE * (devices.limit_bytes - weight_bytes)) // sample_bytes * shards
        num_slots = max(min(num_fitting, config.sample_slots or DEFAULT_SLOTS[0] * mesh_config.dp), 1)
        work = Workload(
            micro_batch_tokens=SATURATING_TOKENS * shards,
            sequence_tokens=length,
            is_remat=True,
            rank=DEFAULT_RANK,
            num_slots=num_slots,
            sample_tokens=length,
            # The weights and the cache
            num_parameters=num_parameters,
            itemsize=dtype.itemsize,
            adapter_bytes=count_adapter_bytes(model, DEFAULT_RANK, layout),
            cache_bytes=sample_bytes * -(-num_slots // shards),
        )
        candidates.append(
            Candidate(
                mesh=mesh_config,
                weight_bytes=weight_bytes,
                has_fitting_weights=weight_bytes <= WEIGHT_SHARE * devices.limit_bytes,
                training=compute_training_bound(model, devices, mesh_config, work),
                decoding=compute_decoding_bound(model, devices, mesh_config, work),
            )
        )
    return sorted(candidates, key=_get_rank)


def _get_rank(candidate: Candidate) -> tuple[bool, float, int, int]:
    return (
        not candidate.has_fitting_weights,
        candidate.seconds_per_token,
        candidate.weight_bytes,
        candidate.mesh.cp,
    )


def list_meshes(num_devices: int, *, with_cp: bool) -> Iterator[MeshConfig]:
    """Yield all meshes of `num_devices` devices. `with_cp` adds meshes that split the tokens of each training row."""
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for cp, dp, fsdp, tp in itertools.product(sizes if with_cp else (1,), sizes, sizes, sizes):
        ep, rest = divmod(num_devices, cp * dp * fsdp * tp)
        if not rest:
            yield MeshConfig(dp=dp, fsdp=fsdp, tp=tp, ep=ep, cp=cp)


@dataclass(frozen=True, slots=True)
class LengthShortfall:
    """The memory of a mesh is too small for training rows of the requested length. Names a mesh with enough memory."""

    tokens: int
    """The row length of `--context`, or the model's context length if that is smaller."""
    mesh: MeshConfig
    """The mesh that the user named, or else the fastest mesh."""
    longest: int
    """The longest row that fits with this mesh, in tokens."""
    fitting: MeshConfig | None
    """A mesh of the same devices that fits rows of `tokens` tokens, or None if no mesh does."""


def find_fitting_candidate(
    candidates: Sequence[Candidate], longest_row: Callable[[MeshConfig], int], tokens: int
) -> Candidate | None:
    """Return a mesh that fits training rows of `tokens` tokens, or None if no mesh does.

    `candidates` must be in the order of `rank_meshes`. They are put into groups with equal `tp` and `ep`, and the group
    with the fastest mesh is tried first. In the first group that has a fitting mesh, the smallest `cp` that fits is
    chosen, and of the fitting meshes with this `cp` the fastest is returned.

    `longest_row` returns the length of the longest row that fits with a mesh. One call takes seconds, so most meshes
    are not tried. In a group, the mesh with the largest `cp` has memory for the longest rows, and among meshes of
    equal `cp` the one with the largest `fsdp`. So one call for this mesh tells whether the whole group can be skipped.
    """
    groups: dict[tuple[int, int], list[Candidate]] = {}
    for candidate in candidates:
        if candidate.has_fitting_weights:
            groups.setdefault((candidate.mesh.tp, candidate.mesh.ep), []).append(candidate)

    for group in groups.values():
        if longest_row(max(group, key=_get_length_key).mesh) < tokens:
            continue
        for cp in sorted({candidate.mesh.cp for candidate in group}):
            same_cp = [candidate for candidate in group if candidate.mesh.cp == cp]
            if longest_row(max(same_cp, key=_get_length_key).mesh) >= tokens:
                return next(candidate for candidate in same_cp if longest_row(candidate.mesh) >= tokens)
    return None


def _get_length_key(candidate: Candidate) -> tuple[int, int]:
    return candidate.mesh.cp, candidate.mesh.fsdp
