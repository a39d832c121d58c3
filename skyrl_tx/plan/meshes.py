"""The choice of a mesh: the one that samples a token and trains on it in the least time, by the roofline."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.costs import RANK
from skyrl_tx.backends.jax.memory import SUFFICIENT_TOKENS, RoomBytes
from skyrl_tx.backends.jax.start_plan import bytes_on_each_device, layout_without_devices
from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models import ModelConfig, describe_params
from skyrl_tx.plan.hardware import Devices
from skyrl_tx.plan.roofline import Bound, Work, decoding, training

ROOM = 0.8
"""Share of a device's memory that weights may take; a mesh with more is chosen only where no other is left."""
_SEQUENCE_TOKENS = 4096
"""Length of sequences and samples by which meshes are compared."""
_NUM_SAMPLES = 32
"""Samples at the same time by which meshes are compared, unless slots are configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A mesh with its bounds at equal work: micro-batches that keep a device busy, and samples in all slots."""

    mesh: MeshConfig
    weight_bytes: int
    """On each device."""
    has_room: bool
    training: Bound
    decoding: Bound

    @property
    def seconds_per_token(self) -> float:
        """Time to sample a token and train on it."""
        return 1 / self.training.tokens_per_s + 1 / self.decoding.tokens_per_s


def candidates(
    model: ModelConfig,
    config: JaxConfig,
    devices: Devices,
    dtype: np.dtype,
    meshes: Iterable[MeshConfig],
) -> list[Candidate]:
    """Return those of the meshes that divide the model, the best first. It may be empty."""
    described = describe_params(model)
    num_parameters = sum(int(np.prod(each.shape)) for each in flatten(described).values())
    length = min(_SEQUENCE_TOKENS, config.max_context_length or model.max_context_length, model.max_context_length)
    found: list[Candidate] = []
    for each in meshes:
        layout = layout_without_devices(each)
        try:
            mesh.check_divides(layout, model)
        except mesh.MeshError:
            continue
        shards = layout.num_shards("batch")
        work = Work(
            micro_batch_tokens=SUFFICIENT_TOKENS * shards,
            sequence_tokens=length,
            is_remat=True,
            rank=RANK,
            num_slots=config.sample_slots or _NUM_SAMPLES,
            sample_tokens=length,
        )
        room = RoomBytes.of(model, layout, dtype.itemsize)
        cache_bytes = (room.position * length + room.state) * work.num_slots // shards
        weight_bytes = bytes_on_each_device(described, layout, dtype)
        size = {"num_parameters": num_parameters, "itemsize": dtype.itemsize}
        found.append(
            Candidate(
                mesh=each,
                weight_bytes=weight_bytes,
                has_room=weight_bytes <= ROOM * devices.limit_bytes,
                training=training(model, devices, each, work, **size),
                decoding=decoding(model, devices, each, work, **size, cache_bytes=cache_bytes),
            )
        )
    return sorted(found, key=lambda each: (not each.has_room, each.seconds_per_token, each.weight_bytes, each.mesh.cp))


def meshes_of(number: int, *, with_cp: bool) -> Iterator[MeshConfig]:
    """Yield the meshes of a number of devices; those with `cp` are for rows that are too long for all others."""
    for cp in range(1, number + 1) if with_cp else (1,):
        if number % cp == 0:
            yield from _meshes_by_cp(number // cp, cp)


def _meshes_by_cp(number: int, cp: int) -> Iterator[MeshConfig]:
    for fsdp in range(1, number + 1):
        for tp in range(1, number // fsdp + 1):
            if number % (fsdp * tp) == 0:
                yield MeshConfig(fsdp=fsdp, tp=tp, ep=number // (fsdp * tp), cp=cp)
