"""The key/value cache of the decoder: preallocated slots, written at one position per slot.

Legend: L layers, S decode slots, B batch rows, K kv heads, T tokens, C cache positions, H head dim, M rows to insert.

Heads lie before positions, so that attention reads one contiguous stretch per head; on CPU this layout alone was
measured 1.26 times as fast as positions before heads.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Sharding

from skyrl_tx.layers.parameter import Axis

AXES: tuple[Axis | None, ...] = ("layers", "batch", "kv_heads", None, "head_dim")
"""The logical axes of both forms of `KeyValues`."""


@struct.dataclass
class KeyValues:
    """Keys (rotated) and values of every layer: of prompts [L, B, K, C, H], or the cache [L, S, K, C, H]."""

    k: jax.Array
    v: jax.Array


def allocate(
    num_layers: int,
    num_slots: int,
    num_kv_heads: int,
    length: int,
    head_dim: int,
    dtype: jnp.dtype,
    sharding: Sharding | None = None,
) -> KeyValues:
    """Return an empty cache of `length` positions in each of `num_slots` slots."""
    shape = (num_layers, num_slots, num_kv_heads, length, head_dim)
    return KeyValues(k=jnp.zeros(shape, dtype, device=sharding), v=jnp.zeros(shape, dtype, device=sharding))


def insert(cache: KeyValues, prompts: KeyValues, size: jax.Array, row_M: jax.Array, slot_M: jax.Array) -> KeyValues:
    """Copy the first `size` positions of rows of `prompts` into slots, from position 0 on.

    One row may go to many slots (samples of one prompt). A slot number >= S writes nothing, so M can be padded.
    The rest of the slot is cleared: attention weighs positions not yet written with 0, and 0 * NaN of a former tenant
    would be NaN.
    """
    length = cache.k.shape[3]

    def write(into: jax.Array, rows: jax.Array) -> jax.Array:
        rows = rows[:, row_M, :, :length].astype(into.dtype)
        rows = jnp.where((jnp.arange(rows.shape[3]) < size)[:, None], rows, 0)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, length - rows.shape[3]), (0, 0)))
        return into.at[:, slot_M].set(rows, mode="drop")

    return KeyValues(k=write(cache.k, prompts.k), v=write(cache.v, prompts.v))


def extend(cache: KeyValues, new: KeyValues, start: jax.Array) -> KeyValues:
    """Write keys and values [L, B, K, T, H] of the positions from `start` on, all of which the cache must have."""

    def write(into: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(into, rows.astype(into.dtype), start, axis=3)

    return KeyValues(k=write(cache.k, new.k), v=write(cache.v, new.v))


def append(cache: KeyValues, k_LSKH: jax.Array, v_LSKH: jax.Array, position_S: jax.Array) -> KeyValues:
    """Write one position of every slot, in all layers at once. A position >= C writes nothing."""
    slot_S = jnp.arange(cache.k.shape[1])

    def write(into: jax.Array, new_LSKH: jax.Array) -> jax.Array:
        # Two index arrays with a slice between put their dim first: [S, L, K, H].
        new_SLKH = jnp.swapaxes(new_LSKH, 0, 1).astype(into.dtype)
        return into.at[:, slot_S, :, position_S].set(new_SLKH, mode="drop")

    return KeyValues(k=write(cache.k, k_LSKH), v=write(cache.v, v_LSKH))


def read_layer(cache: KeyValues, layer: jax.Array, length: int) -> KeyValues:
    """Return one layer's first `length` positions, [S, K, length, H]."""
    _, num_slots, num_kv_heads, _, head_dim = cache.k.shape

    def read(source: jax.Array) -> jax.Array:
        size = (1, num_slots, num_kv_heads, length, head_dim)
        return jax.lax.dynamic_slice(source, (layer, 0, 0, 0, 0), size)[0]

    return KeyValues(k=read(cache.k), v=read(cache.v))
