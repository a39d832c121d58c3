"""Frozen adapters on the device: copies in places of their own, so that training never changes them.

Place 0 stays zero: it is the base model.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax.buckets import next_power
from skyrl_tx.backends.jax.mesh import adapter_place
from skyrl_tx.backends.jax.slots import BASE
from skyrl_tx.contract.errors import CapacityError
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.layers.lora import Adapter, GatheredAdapter, RowsByLayer, gather_rows
from skyrl_tx.layers.sharding import WHOLE, Layout
from skyrl_tx.models import ModelConfig

LOWEST_RANK = 8


class SamplerPool:
    """Which sampler lies in which place, and the places: an `Adapter` whose leaves have a leading axis for them.

    The arrays have `num_places` to begin with, the base model's included, then as many as were needed so far, and as
    high a rank: memory follows what was loaded, at the price of other shapes, so of compiling again, when more is asked
    for than ever before. Work follows the places in use.
    """

    def __init__(
        self, model_config: ModelConfig, max_samplers: int, layout: Layout = WHOLE, *, num_places: int
    ) -> None:
        self._model = model_config
        self._max_samplers = max_samplers
        self._place = adapter_place(layout, model_config, is_pool=True) if layout.is_split else lambda tree: tree
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._shapes(num_places, LOWEST_RANK))
        self._places: Adapter = self._place(empty)
        self._place_of: dict[SamplerId, int] = {}
        self._gathered: tuple[tuple[int, ...], RowsByLayer] | None = None

    def load(self, sampler: SamplerId, adapter: Adapter) -> None:
        """Copy an adapter of any padded rank; of no effect when it is there already. Raises CapacityError."""
        if sampler in self._place_of:
            return
        if len(self._place_of) == self._max_samplers:
            raise CapacityError(f"all {self._max_samplers} places for samplers are taken")
        place = min(set(range(BASE + 1, 2 + self._max_samplers)) - set(self._place_of.values()))
        num_places, rank = self._places.weights["unembed"].a.shape[0], self._places.weights["unembed"].a.shape[-1]
        rank = max(rank, adapter.weights["unembed"].a.shape[-1])
        if place >= num_places:
            num_places = min(next_power(place + 1), 1 + self._max_samplers)
        self._gathered = None
        larger = self._place(jax.tree.map(_pad, self._places, self._shapes(num_places, rank)))
        fitting = jax.tree.map(_pad_on_host, adapter, models.adapter_shapes(self._model, rank))
        self._places = self._place(_put(larger, np.int32(place), fitting))
        self._place_of[sampler] = place

    def drop(self, sampler: SamplerId) -> None:
        """Free a sampler's place. Idempotent."""
        self._place_of.pop(sampler, None)

    def place_of(self, sampler: SamplerId | None) -> int:
        """Return the place of a loaded sampler; None is the base model."""
        return BASE if sampler is None else self._place_of[sampler]

    def adapters(self, *, any_used: bool) -> Adapter | None:
        """Return all places, or None when only the base model is used: programs without adapters are faster."""
        return self._places if any_used else None

    def gathered(self, places: Sequence[int]) -> GatheredAdapter:
        """Return all places, and a copy of what rows see that are in these; valid until others are asked for."""
        key = tuple(places)
        if self._gathered is None or self._gathered[0] != key:
            place_G, former = np.asarray(places, np.int32), self._gathered
            self._gathered = None  # its memory is taken for the next
            if former is None or len(former[0]) != len(key):
                shapes = jax.eval_shape(gather_rows, self._places, place_G)
                former = (), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            self._gathered = key, _gather(self._places, place_G, former[1])
        return GatheredAdapter(weights=self._places.weights, scale=self._places.scale, rows=self._gathered[1])

    def _shapes(self, num_places: int, rank: int) -> Adapter:
        shapes = models.adapter_shapes(self._model, rank)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_places, *leaf.shape), leaf.dtype), shapes)


@partial(jax.jit, donate_argnames="former", keep_unused=True)
def _gather(places: Adapter, place_G: jax.Array, former: RowsByLayer) -> RowsByLayer:
    """Gather rows into the memory of others: on CPU memory that is new to the process costs more than the copy."""
    return gather_rows(places, place_G)


def _pad(leaf: jax.Array, fitting: jax.ShapeDtypeStruct) -> jax.Array:
    if leaf.shape == fitting.shape:
        return leaf
    return jnp.pad(leaf, [(0, wanted - size) for size, wanted in zip(leaf.shape, fitting.shape, strict=True)])


def _pad_on_host(leaf: jax.Array, fitting: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return what an adapter of a lower rank is in the pool: one program writes them all."""
    if leaf.shape == fitting.shape:
        return np.asarray(leaf)
    return np.pad(leaf, [(0, wanted - size) for size, wanted in zip(leaf.shape, fitting.shape, strict=True)])


@partial(jax.jit, donate_argnames="places")
def _put(places: Adapter, place: jax.Array, adapter: Adapter) -> Adapter:
    """Overwrite one place."""
    return jax.tree.map(lambda into, leaf: into.at[place].set(leaf.astype(into.dtype)), places, adapter)
