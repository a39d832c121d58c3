"""Keys and values of one stack of layers, and how attention reads them.

Legend: n layers of a stack, S decode slots, B batch rows, K kv heads, T tokens, C cache positions, H head dim.

Heads lie before positions, so that attention reads one contiguous block per head; on CPU this layout alone was
measured 1.26 times as fast as positions before heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

SEGMENT = 128
"""The least number of positions that are read together."""


@struct.dataclass
class KeyValues:
    """Keys (rotated) and values of a stack: of prompts [n, B, K, C, H], or of slots [n, S, K, C, H]."""

    k: jax.Array
    v: jax.Array | None  # None: the keys are the values too, as with latents

    @property
    def values(self) -> jax.Array:
        """The values, in whichever array they are."""
        return self.k if self.v is None else self.v


Segments = tuple[KeyValues, ...]
"""One layer's positions, in consecutive segments: values [S, K, C, H] and keys [S, K, H, C], or both [S, K, C, H]."""


def append(recent: KeyValues, new: KeyValues, index: jax.Array) -> KeyValues:
    """Write one token's keys and values [S, K, H] into one layer's recent ones."""

    def write(into: jax.Array, leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(into, leaf[:, :, None].astype(into.dtype), index, axis=2)

    return jax.tree.map(write, recent, new)


def read_segments(stack: KeyValues, layer: Any, length: int, slot_S: jax.Array | None = None) -> Segments:
    """Return one layer's first `length` positions: of the slots `slot_S`, or of all.

    The first segment has `SEGMENT` positions, and each other segment as many as all before it. So the segment of a
    position does not depend on the KV read length, and its products round alike, which makes decoding batch-invariant.
    A dot of few queries with keys [H, C] was measured 1.5 times as fast on CPU as with [C, H]. Keys that are values too
    are read once, as [C, H].
    """
    _, num_slots, num_kv_heads, _, head_dim = stack.k.shape

    def read(source: jax.Array, first: int, last: int) -> jax.Array:
        if slot_S is not None:
            one = (1, 1, num_kv_heads, last - first, head_dim)
            return jax.vmap(lambda slot: jax.lax.dynamic_slice(source, (layer, slot, 0, first, 0), one)[0, 0])(slot_S)
        size = (1, num_slots, num_kv_heads, last - first, head_dim)
        return jax.lax.dynamic_slice(source, (layer, 0, 0, first, 0), size)[0]

    found: list[KeyValues] = []
    first, last = 0, min(SEGMENT, length)
    while first < length:
        keys = read(stack.k, first, last)
        if stack.v is None:
            found.append(KeyValues(k=keys, v=None))
        else:
            found.append(KeyValues(k=jnp.swapaxes(keys, 2, 3), v=read(stack.v, first, last)))
        first, last = last, min(2 * last, length)
    return tuple(found)
