"""A slice of decoding reads the cache, and adds to it when it ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers import kv_cache
from skyrl_tx.layers.attention import cached_attention
from skyrl_tx.layers.kv_cache import KeyValues

L, S, K, C, H = 2, 3, 2, 8, 4


def some(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("by_layer", [False, True])
def test_what_a_slice_added_is_in_the_cache(by_layer):
    cache = KeyValues(k=some(L, S, K, C, H), v=some(L, S, K, C, H, seed=1))
    start_S = jnp.array([0, 4, 7])
    opened = kv_cache.open_slice(cache, start_S, stretch=7, max_tokens=3, by_layer=by_layer)
    past, _ = opened.layer(1)
    np.testing.assert_array_equal(past.k, jnp.swapaxes(cache.k[1, :, :, :7], 2, 3))
    np.testing.assert_array_equal(past.v, cache.v[1, :, :, :7])

    new = [KeyValues(k=some(L, S, K, H, seed=2 + n), v=some(L, S, K, H, seed=9 + n)) for n in range(3)]
    recent = opened.recent
    for n, each in enumerate(new):
        layers = [
            kv_cache.append(opened.layer(layer)[1], jax.tree.map(lambda leaf, at=layer: leaf[at], each), jnp.int32(n))
            for layer in range(L)
        ]
        recent = tuple(layers) if by_layer else jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        opened = opened.replace(recent=recent)
    closed = kv_cache.close_slice(cache, opened.replace(num_recent=jnp.int32(2)))  # the third was not meant to be

    for name in ("k", "v"):
        expected = np.array(getattr(cache, name))
        for n in range(2):
            for slot, start in enumerate(start_S.tolist()):
                if start + n < C:  # beyond, nothing is written
                    expected[:, slot, :, start + n] = getattr(new[n], name)[:, slot]
        np.testing.assert_array_equal(getattr(closed, name), expected)


def test_how_much_of_the_cache_is_read_changes_no_bit():
    """A row reads a longer stretch when there is a longer row beside it."""
    q_SNH, recent = some(S, 2 * K, 64), KeyValues(k=some(S, K, 16, 64, seed=1), v=some(S, K, 16, 64, seed=2))
    keys, values = some(S, K, 64, 60, seed=3), some(S, K, 60, 64, seed=4)
    attend = jax.jit(cached_attention)

    def read(length: int) -> np.ndarray:
        past = KeyValues(
            k=jnp.pad(keys, ((0, 0), (0, 0), (0, 0), (0, length - 60))),
            v=jnp.pad(values, ((0, 0), (0, 0), (0, length - 60), (0, 0))),
        )
        return np.asarray(attend(q_SNH, past, recent, jnp.array([60, 1, 33]), jnp.int32(5)))

    for longer in (192, 256, 512):
        np.testing.assert_array_equal(read(128), read(longer))
