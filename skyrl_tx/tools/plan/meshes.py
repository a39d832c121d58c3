"""Choose a mesh for a model and a number of devices.

Meshes are ranked by the time to sample one token and to train on it, according to the roofline. If the fastest mesh
cannot train rows of the requested length, `find_fitting_candidate` looks for another mesh that can.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.memory import DEFAULT_SLOTS, SAMPLE_SHARE, SATURATING_TOKENS, CacheBytes
from skyrl_tx.backends.jax.start_plan import count_bytes_per_device, make_abstract_layout
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, count_adapter_bytes
from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models import ModelConfig, describe_params
from skyrl_tx.tools.plan.hardware import Devices
from skyrl_tx.tools.plan.roofline import RooflineBound, Workload, compute_decoding_bound, compute_training_bound

WEIGHT_SHARE = 0.8
"""The share of a device's memory that weights should take at most. Meshes with larger weights are ranked last."""
_SEQUENCE_TOKENS = 4096
"""Length of training sequences and samples when meshes are compared."""


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
            mesh.check_divisible(layout, model)
        except mesh.MeshError:
            continue

        # Decode as many samples as fit in addition to the weights.
        shards = layout.num_shards("batch")
        per_sample = CacheBytes.from_model(model, layout, dtype.itemsize)
        sample_bytes = per_sample.position * length + per_sample.state
        weight_bytes = count_bytes_per_device(described, layout, dtype)
        num_fitting = int(SAMPLE_SHARE * (devices.limit_bytes - weight_bytes)) // sample_bytes * shards
        work = Workload(
            micro_batch_tokens=SATURATING_TOKENS * shards,
            sequence_tokens=length,
            is_remat=True,
            rank=DEFAULT_RANK,
            num_slots=max(min(num_fitting, config.sample_slots or DEFAULT_SLOTS[0] * mesh_config.dp), 1),
            sample_tokens=length,
        )
        cache_bytes = sample_bytes * -(-work.num_slots // shards)
        adapter_bytes = count_adapter_bytes(model, DEFAULT_RANK, layout)

        size = {"num_parameters": num_parameters, "itemsize": dtype.itemsize}
        candidates.append(
            Candidate(
                mesh=mesh_config,
                weight_bytes=weight_bytes,
                has_fitting_weights=weight_bytes <= WEIGHT_SHARE * devices.limit_bytes,
                training=compute_training_bound(model, devices, mesh_config, work, **size, adapter_bytes=adapter_bytes),
                decoding=compute_decoding_bound(model, devices, mesh_config, work, **size, cache_bytes=cache_bytes),
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
    for cp in range(1, num_devices + 1) if with_cp else (1,):
        if num_devices % cp == 0:
            yield from _list_meshes_with_cp(num_devices, cp)


def _list_meshes_with_cp(num_devices: int, cp: int) -> Iterator[MeshConfig]:
    remaining = num_devices // cp
    for dp, fsdp, tp in itertools.product(_list_divisors(remaining), repeat=3):
        if remaining % (dp * fsdp * tp) == 0:
            yield MeshConfig(dp=dp, fsdp=fsdp, tp=tp, ep=remaining // (dp * fsdp * tp), cp=cp)


def _list_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


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
