"""The pool of frozen LoRA adapters on the device. Training never changes these copies.

Adapter slot 0 stays zero and stands for the base model.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax.mesh import make_adapter_placement
from skyrl_tx.backends.jax.sample.running_sample import BASE_SLOT
from skyrl_tx.backends.jax.shapes import next_power_of_two
from skyrl_tx.contract.errors import CapacityError
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.layers.lora import Adapter, GatheredAdapter, RowsByLayer, gather_rows
from skyrl_tx.layers.sharding import UNSHARDED, Layout
from skyrl_tx.models import ModelConfig

LOWEST_RANK = 8
"""The rank of an empty pool, unless the rank of its adapters is known."""


class SamplerPool:
    """The adapter slot of each sampler, and the weights of all slots.

    The weights are one `Adapter` whose arrays have a leading axis of slots.

    The pool starts with `num_slots` slots, including the slot of the base model, and with `rank`. It
    grows when a sampler needs another slot or has a higher rank. Growing changes shapes, so
    programs are compiled again.

    With `separates_ranks`, there is one `Adapter` for each padded rank in use, because on a CPU the
    bits of a product depend on the padded rank. All of them have the same slots.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        max_samplers: int,
        layout: Layout = UNSHARDED,
        *,
        num_slots: int,
        rank: int = LOWEST_RANK,
        separates_ranks: bool = False,
    ) -> None:
        self._model = model_config
        self._max_samplers = max_samplers
        self._put = (
            make_adapter_placement(layout, model_config, is_pool=True) if layout.is_sharded else lambda tree: tree
        )
        self._num_slots = num_slots
        self._separates_ranks = separates_ranks
        self._adapters: dict[int, Adapter] = {} if separates_ranks else {rank: self._make_empty(rank)}  # by rank
        self._slots: dict[SamplerId, int] = {}
        self._ranks: dict[int, int] = {}  # the rank of the adapter in each slot
        self._last_gathered: tuple[tuple[int, ...], RowsByLayer] | None = None  # by rank and slots

    def load(self, sampler: SamplerId, adapter: Adapter) -> None:
        """Copy an adapter of any padded rank into a free slot, unless it is loaded.

        Raises CapacityError.
        """
        if sampler in self._slots:
            return
        if len(self._slots) == self._max_samplers:
            raise CapacityError(f"all {self._max_samplers} adapter slots for sampling are in use")

        slot = min(set(range(BASE_SLOT + 1, 2 + self._max_samplers)) - set(self._slots.values()))
        if slot >= self._num_slots:
            self._num_slots = min(next_power_of_two(slot + 1), 1 + self._max_samplers)
        rank = adapter.weights["unembed"].a.shape[-1]
        if self._separates_ranks:
            # Arrays of a restored state are committed to the device. The pool and its programs would be too.
            adapter = jax.device_get(adapter)
            pool, others = self._adapters.get(rank) or self._make_empty(rank), self._adapters
        else:
            pool, others = next(iter(self._adapters.values())), dict[int, Adapter]()
            rank = max(rank, *self._adapters)

        self._last_gathered = None
        larger = self._put(jax.tree.map(_pad, pool, self._make_shapes(self._num_slots, rank)))
        # Pad on the host to the rank of the pool, so that one program writes adapters of all ranks.
        padded = jax.tree.map(partial(_pad, pad=np.pad), adapter, models.describe_adapter(self._model, rank))
        self._adapters = {**others, rank: self._put(_write_slot(larger, np.int32(slot), padded))}
        self._slots[sampler], self._ranks[slot] = slot, rank

    def drop(self, sampler: SamplerId) -> None:
        """Free the adapter slot of a sampler. Idempotent."""
        self._slots.pop(sampler, None)

    def get_slot(self, sampler: SamplerId | None) -> int:
        """Return the adapter slot of a loaded sampler; None is the base model."""
        return BASE_SLOT if sampler is None else self._slots[sampler]

    def get_rank(self, slots: Iterable[int]) -> int:
        """Return the highest padded rank of the adapters in these slots, or 0 for the base model alone.

        Unless ranks are separate, this is the rank of the pool, for any slot but the one of the base model.
        """
        used = [slot for slot in slots if slot != BASE_SLOT]
        if self._separates_ranks:
            return max((self._ranks.get(slot, 0) for slot in used), default=0)
        return next(iter(self._adapters)) if used else 0

    def get_adapters(self, rank: int) -> Adapter | None:
        """Return the adapters of a rank of `get_rank`, or None for rank 0.

        Programs without adapters are faster.
        """
        return self._adapters[rank] if rank else None

    def gather(self, slots: Sequence[int], rank: int) -> GatheredAdapter:
        """Return the adapters of a rank, plus a copy of the adapter in each of `slots`.

        The copies are valid until the next call.
        """
        key, adapters = (rank, *slots), self._adapters[rank]
        if self._last_gathered is None or self._last_gathered[0] != key:
            slot_G, former = np.asarray(slots, np.int32), self._last_gathered
            self._last_gathered = None  # the next copy reuses its memory
            if former is None or (len(former[0]), former[0][0]) != (len(key), rank):
                shapes = jax.eval_shape(gather_rows, adapters, slot_G)
                former = (), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            self._last_gathered = key, _gather(adapters, slot_G, former[1])
        return GatheredAdapter(weights=adapters.weights, scale=adapters.scale, rows=self._last_gathered[1])

    def describe(self, slots: Sequence[int], rank: int) -> GatheredAdapter:
        """Return the shapes of the result of `gather` once an adapter of `rank` is in the pool."""
        adapters = self._make_shapes(self._num_slots, rank if self._separates_ranks else max(rank, *self._adapters))
        rows = jax.eval_shape(gather_rows, adapters, np.asarray(slots, np.int32))
        return GatheredAdapter(weights=adapters.weights, scale=adapters.scale, rows=rows)

    def _make_empty(self, rank: int) -> Adapter:
        shapes = self._make_shapes(self._num_slots, rank)
        return self._put(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))

    def _make_shapes(self, num_slots: int, rank: int) -> Adapter:
        shapes = models.describe_adapter(self._model, rank)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_slots, *leaf.shape), leaf.dtype), shapes)


@partial(jax.jit, donate_argnames="former", keep_unused=True)
def _gather(adapters: Adapter, slot_G: jax.Array, former: RowsByLayer) -> RowsByLayer:
    """Gather adapters by row into the memory of `former`.

    On CPU, touching new memory costs more than the copy.
    """
    return gather_rows(adapters, slot_G)


def _pad(leaf: Any, padded: jax.ShapeDtypeStruct, pad: Callable[..., Any] = jnp.pad) -> Any:
    if leaf.shape == padded.shape:
        return leaf
    return pad(leaf, [(0, target - size) for size, target in zip(leaf.shape, padded.shape, strict=True)])


@partial(jax.jit, donate_argnames="adapters")
def _write_slot(adapters: Adapter, slot: jax.Array, adapter: Adapter) -> Adapter:
    """Overwrite one adapter slot.

    If a weight is not finite in bfloat16, all weights of the adapter become zero and its scale
    becomes NaN. The samples of this adapter then have NaN log-probabilities, while rows that
    multiply its weights by zero are unaffected.
    """
    is_finite = jnp.all(jnp.stack([jnp.isfinite(leaf.astype(jnp.bfloat16)).all() for leaf in jax.tree.leaves(adapter)]))
    weights = jax.tree.map(lambda leaf: jnp.where(is_finite, leaf, 0), adapter.weights)
    checked = Adapter(weights=weights, scale=jnp.where(is_finite, adapter.scale, jnp.nan))
    return jax.tree.map(lambda into, leaf: into.at[slot].set(leaf.astype(into.dtype)), adapters, checked)
