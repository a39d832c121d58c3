"""Frozen adapters on the device: copies in slots of their own, so that training never changes them.

Slot 0 stays zero: it is the base model.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax.slots import BASE
from skyrl_tx.contract.errors import CapacityError
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.models import ModelConfig


class SamplerPool:
    """Which sampler lies in which slot, and the slots: an `Adapter` whose leaves have a leading slot axis."""

    def __init__(self, model_config: ModelConfig, max_samplers: int, max_rank: int) -> None:
        shapes = models.adapter_shapes(model_config, max_rank)
        self._slots: Adapter = jax.tree.map(lambda leaf: jnp.zeros((1 + max_samplers, *leaf.shape), leaf.dtype), shapes)
        self._free = list(range(max_samplers, BASE, -1))  # the lowest is taken first
        self._slot_of: dict[SamplerId, int] = {}

    def load(self, sampler: SamplerId, adapter: Adapter) -> None:
        """Copy an adapter, padded to the largest rank; of no effect when it is there already."""
        if sampler in self._slot_of:
            return
        if not self._free:
            raise CapacityError(f"all {len(self._slot_of)} sampler slots are taken")
        slot = self._free.pop()
        self._slots = _put(self._slots, np.int32(slot), adapter)
        self._slot_of[sampler] = slot

    def drop(self, sampler: SamplerId) -> None:
        """Free a sampler's slot. Idempotent."""
        if sampler in self._slot_of:
            self._free.append(self._slot_of.pop(sampler))

    def slot_of(self, sampler: SamplerId | None) -> int:
        """Return the slot of a loaded sampler; None is the base model."""
        return BASE if sampler is None else self._slot_of[sampler]

    def adapters(self, *, any_used: bool) -> Adapter | None:
        """Return all slots, or None when only the base model is used: programs without adapters are faster."""
        return self._slots if any_used else None


@partial(jax.jit, donate_argnames="pool")
def _put(pool: Adapter, slot: jax.Array, adapter: Adapter) -> Adapter:
    return jax.tree.map(lambda into, leaf: into.at[slot].set(leaf.astype(into.dtype)), pool, adapter)
