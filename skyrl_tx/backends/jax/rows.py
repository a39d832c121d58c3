"""The decode slots and the keys and values behind them, in one of a few shapes of the same memory.

A row is as long as what runs has come to need, not as what it may come to: most samples end early. When one comes to
the end of its row all rows are laid out anew, half as many and twice as long. What runs is taken along bit by bit, by
way of the host and a few positions at a time, so that the device never holds the cache twice, nor a row.
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

Pieces = list[tuple[int, KeyValues]]
"""Of a row, each with the position that it begins at."""

PIECE = 256  # positions that are on their way between device and host at once


class Rows:
    """Running samples, and the cache that they are decoded from."""

    def __init__(self, params: DecoderParams, model: ModelConfig, shape_for: Callable[[int], CacheShape]) -> None:
        self._params = params
        self._model = model
        self.shape_for = shape_for
        """The shape with the most rows that hold so many positions."""
        self.shape = shape_for(1)
        self._piece = min(PIECE, self.shape.length)
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
        kept = [(sample := self.slots.live[slot], self._lift(slot, sample.position)) for slot in keep]
        try:
            del self.cache  # before there is another
            self.shape, self.slots = shape, Slots(shape.num_slots)
            self.cache = self._empty_cache()
            for sample, pieces in kept:
                slot = self.slots.free_for(sample.adapter)[0]
                self._lower(pieces, slot)
                self.slots.place(sample, slot)
        except Exception as error:
            raise BackendLost(f"the key/value cache could not be given another shape: {error}") from error

    def rehearse(self) -> None:
        """Run once what moves rows of this shape, to where they are."""
        self._lower(self._lift(0, 1), 0)

    def _lift(self, slot: int, num_positions: int) -> Pieces:
        """Return the first positions of a row, on the host."""
        last = max(num_positions - self._piece, 0)  # the last piece ends where they do, so any row for them has room
        return [
            (start, jax.device_get(decode.take_piece(self.cache, np.int32(slot), np.int32(start), size=self._piece)))
            for start in (*range(0, last, self._piece), last)
        ]

    def _lower(self, pieces: Pieces, slot: int) -> None:
        for start, piece in pieces:
            self.cache = decode.put_piece(self.cache, piece, np.int32(slot), np.int32(start))

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
