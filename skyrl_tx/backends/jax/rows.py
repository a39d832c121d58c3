"""The decode slots and the keys and values behind them, in one of a few shapes of the same memory.

A row is as long as what runs has come to need, not as what it may come to: most samples end early. When one comes to
the end of its row all rows are laid out anew, half as many and twice as long. What runs is taken along bit by bit, by
way of the host, so that the cache never exists twice on the device.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import jax
import numpy as np

from skyrl_tx.backends.jax import decode
from skyrl_tx.backends.jax.prefill import empty_keys
from skyrl_tx.backends.jax.slots import CacheShape, RunningSample, Slots
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.layers.kv_cache import KeyValues
from skyrl_tx.models import DecoderParams, ModelConfig


class Rows:
    """Running samples, and the cache that they are decoded from. `room_of` a size: what prompts of it are padded to."""

    def __init__(
        self,
        params: DecoderParams,
        model: ModelConfig,
        shape_for: Callable[[int], CacheShape],
        room_of: Callable[[int], int],
    ) -> None:
        self._params = params
        self._model = model
        self._room_of = room_of
        self.shape_for = shape_for
        """The shape with the most rows that hold so many positions."""
        self.shape = shape_for(1)
        self.cache = self._empty_cache()
        self.slots = Slots(self.shape.num_slots)

    def insert(self, keys: KeyValues, samples: deque[RunningSample]) -> None:
        """Take as many samples from the deque as there is room for, each with a copy of these keys [L, 1, K, C, H]."""
        taken = self.slots.free_for(samples[0].adapter)[: len(samples)]
        if not taken:
            return
        num_slots = len(self.slots)
        slot_S = np.full(num_slots, num_slots, np.int32)
        slot_S[: len(taken)] = taken
        size = np.int32(samples[0].position)
        with self.at_risk():
            self.cache = decode.insert(self.cache, keys, size, slot_S, np.int32(len(taken)))
        for slot in taken:
            self.slots.place(samples.popleft(), slot)

    def reshape(self, shape: CacheShape, keep: Collection[int] = ()) -> None:
        """Lay the rows out anew; the samples of the slots in `keep`, which must fit, go on in others."""
        kept = [(self.slots.live[slot], self._lift(slot)) for slot in keep]
        try:
            del self.cache  # before there is another
            self.shape, self.slots = shape, Slots(shape.num_slots)
            self.cache = self._empty_cache()
            for sample, keys in kept:
                self.insert(self._lowered(keys), deque([sample]))
        except Exception as error:
            raise BackendLost(f"the key/value cache could not be given another shape: {error}") from error

    def _lift(self, slot: int) -> KeyValues:
        """Return one row on the host, in as much room as a prompt of its size has."""
        size = self.slots.live[slot].position

        def fit(leaf: np.ndarray) -> np.ndarray:
            kept = leaf[:, :, :, :size]
            return np.pad(kept, ((0, 0), (0, 0), (0, 0), (0, self._room_of(size) - size), (0, 0)))

        return jax.tree.map(fit, jax.device_get(decode.take_row(self.cache, np.int32(slot))))

    def _lowered(self, keys: KeyValues) -> KeyValues:
        """Return a row of the host where prompts are, which is part of a program's key."""
        like = empty_keys(self._params, self._model, 1, keys.k.shape[3])
        return jax.tree.map(lambda leaf, other: jax.device_put(leaf, other.sharding), keys, like)

    def _empty_cache(self) -> KeyValues:
        return empty_keys(self._params, self._model, self.shape.num_slots, self.shape.length)

    @contextmanager
    def at_risk(self) -> Iterator[None]:
        """Tell a failure that took the cache, which is updated in place, from one that left it whole."""
        try:
            yield
        except Exception as error:
            if self.cache.k.is_deleted():
                raise BackendLost(f"decoding failed and took the key/value cache along: {error}") from error
            raise
