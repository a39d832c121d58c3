"""A slice of decoding reads the cache, and adds to it when it ends."""

from functools import partial

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
    (past,), _ = opened.layer(1)
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


def test_segments_double():
    cache = KeyValues(k=some(1, 1, 1, 700, 2), v=some(1, 1, 1, 700, 2, seed=1))
    past, _ = kv_cache.open_slice(cache, jnp.array([600]), stretch=700, max_tokens=3).layer(0)
    assert [each.v.shape[2] for each in past] == [128, 128, 256, 188]
    np.testing.assert_array_equal(jnp.concatenate([each.v for each in past], 2), cache.v[0])
    np.testing.assert_array_equal(jnp.concatenate([each.k for each in past], 3), jnp.swapaxes(cache.k[0], 2, 3))


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 16), (2, 64), (8, 128)])
def test_how_much_of_the_cache_is_read_changes_no_bit(kv_heads, head_dim):
    """A row reads a longer stretch when there is a longer row beside it."""
    shape = (1, 4, kv_heads, 1024, head_dim)
    written = (jnp.arange(1024) < 120)[:, None]
    cache = KeyValues(k=jnp.where(written, some(*shape), 0), v=jnp.where(written, some(*shape, seed=1), 0))
    q_SNH, start_S = some(4, 2 * kv_heads, head_dim, seed=2), jnp.array([60, 1, 33, 120])

    @partial(jax.jit, static_argnames="stretch")
    def read(stretch: int) -> jax.Array:
        opened = kv_cache.open_slice(cache, start_S, stretch=stretch, max_tokens=16, by_layer=True)
        past, _ = opened.layer(0)
        recent = KeyValues(k=some(4, kv_heads, 16, head_dim, seed=3), v=some(4, kv_heads, 16, head_dim, seed=4))
        return cached_attention(q_SNH, past, recent, start_S, jnp.int32(5))

    for longer in (256, 512, 1024):
        np.testing.assert_array_equal(read(128), read(longer))
