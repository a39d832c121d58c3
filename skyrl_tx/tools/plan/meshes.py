"""The choice of a mesh: the one that samples a token and trains on it in the least time, by the roofline.

If rows in training are too long for it, the fastest mesh that fits them is chosen.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.memory import DEFAULT_SLOTS, SAMPLE_SHARE, SUFFICIENT_TOKENS, CacheBytes
from skyrl_tx.backends.jax.start_plan import count_bytes_per_device, make_abstract_layout
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, count_adapter_bytes
from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models import ModelConfig, describe_params
from skyrl_tx.tools.plan.hardware import Devices
from skyrl_tx.tools.plan.roofline import RooflineBound, Workload, bound_decoding, bound_training

WEIGHT_SHARE = 0.8
"""Share of a device's memory that weights may take; a mesh with more is chosen only where no other is left."""
_SEQUENCE_TOKENS = 4096
"""Length of sequences and samples by which meshes are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A mesh with its bounds: of micro-batches that keep a device busy, and of as many samples as fit."""

    mesh: MeshConfig
    weight_bytes: int
    """On each device."""
    has_fitting_weights: bool
    training: RooflineBound
    decoding: RooflineBound

    @property
    def seconds_per_token(self) -> float:
        """Time to sample a token and train on it. Meshes that send little are better, as sending seldom overlaps."""
        return self.training.s_per_token + self.decoding.s_per_token


def rank_meshes(
    model: ModelConfig,
    config: JaxConfig,
    devices: Devices,
    dtype: np.dtype,
    meshes: Iterable[MeshConfig],
) -> list[Candidate]:
    """Return those of the meshes that divide the model, the best first."""
    described = describe_params(model)
    num_parameters = sum(int(np.prod(each.shape)) for each in flatten(described).values())
    length = min(_SEQUENCE_TOKENS, config.max_context_length or model.max_context_length, model.max_context_length)
    found: list[Candidate] = []
    for each in meshes:
        layout = make_abstract_layout(each)
        try:
            mesh.check_divisible(layout, model)
        except mesh.MeshError:
            continue
        shards = layout.num_shards("batch")
        room = CacheBytes.from_model(model, layout, dtype.itemsize)
        sample_bytes = room.position * length + room.state
        weight_bytes = count_bytes_per_device(described, layout, dtype)
        fitting = int(SAMPLE_SHARE * (devices.limit_bytes - weight_bytes)) // sample_bytes * shards
        work = Workload(
            micro_batch_tokens=SUFFICIENT_TOKENS * shards,
            sequence_tokens=length,
            is_remat=True,
            rank=DEFAULT_RANK,
            num_slots=max(min(fitting, config.sample_slots or DEFAULT_SLOTS[0] * each.dp), 1),
            sample_tokens=length,
        )
        cache_bytes = sample_bytes * -(-work.num_slots // shards)
        size = {"num_parameters": num_parameters, "itemsize": dtype.itemsize}
        found.append(
            Candidate(
                mesh=each,
                weight_bytes=weight_bytes,
                has_fitting_weights=weight_bytes <= WEIGHT_SHARE * devices.limit_bytes,
                training=bound_training(
                    model, devices, each, work, **size, adapter_bytes=count_adapter_bytes(model, DEFAULT_RANK, layout)
                ),
                decoding=bound_decoding(model, devices, each, work, **size, cache_bytes=cache_bytes),
            )
        )
    return sorted(
        found, key=lambda each: (not each.has_fitting_weights, each.seconds_per_token, each.weight_bytes, each.mesh.cp)
    )


def list_meshes(number: int, *, with_cp: bool) -> Iterator[MeshConfig]:
    """Yield the meshes of a number of devices; those with `cp` are for rows that are too long for all others."""
    for cp in range(1, number + 1) if with_cp else (1,):
        if number % cp == 0:
            yield from _list_meshes_with_cp(number // cp, cp)


def _list_meshes_with_cp(number: int, cp: int) -> Iterator[MeshConfig]:
    for dp, fsdp, tp in itertools.product(_list_divisors(number), repeat=3):
        if number % (dp * fsdp * tp) == 0:
            yield MeshConfig(dp=dp, fsdp=fsdp, tp=tp, ep=number // (dp * fsdp * tp), cp=cp)


def _list_divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True, slots=True)
class LongRows:
    """Rows in training that are too long for a mesh."""

    tokens: int
    """Tokens that a row should have."""
    mesh: MeshConfig
    """The mesh that was given, or the fastest one."""
    longest: int
    """The most tokens of a row with that mesh."""
    fitting: MeshConfig | None
    """A mesh of the same devices that fits such rows; None if there is none."""


def find_fitting_candidate(
    by_time: Sequence[Candidate], longest_row: Callable[[MeshConfig], int], tokens: int
) -> Candidate | None:
    """Return the fastest mesh that fits rows of `tokens`, with the least `cp`; None if there is none.

    `longest_row` takes seconds. Of meshes with the same `tp` and `ep`, that with the largest `cp` has the longest rows,
    and of those with the same `cp`, too, that with the largest `fsdp`. The others are asked for only if that one fits.
    """
    groups: dict[tuple[int, int], list[Candidate]] = {}
    for each in by_time:
        if each.has_fitting_weights:
            groups.setdefault((each.mesh.tp, each.mesh.ep), []).append(each)
    for group in groups.values():
        if longest_row(max(group, key=_get_length_key).mesh) < tokens:
            continue
        for cp in sorted({each.mesh.cp for each in group}):
            of_cp = [each for each in group if each.mesh.cp == cp]
            if longest_row(max(of_cp, key=_get_length_key).mesh) >= tokens:
                return next(each for each in of_cp if longest_row(each.mesh) >= tokens)
    return None


def _get_length_key(candidate: Candidate) -> tuple[int, int]:
    return candidate.mesh.cp, candidate.mesh.fsdp
