"""A slice of decoding reads the cache, and adds to it when it ends."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers import kv_cache
from skyrl_tx.layers.attention import cached_attention
from skyrl_tx.layers.kv_cache import KeyValues
from tests.support.fast_jit import fast_jit

L, S, K, C, H = 2, 3, 2, 8, 4


def some(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("by_layer", [False, True])
def test_keys_and_values_of_a_slice_are_written_to_the_cache(by_layer):
    cache = KeyValues(k=some(L, S, K, C, H), v=some(L, S, K, C, H, seed=1))
    start_S = np.array([0, 4, 7])
    new = [KeyValues(k=some(L, S, K, H, seed=2 + n), v=some(L, S, K, H, seed=9 + n)) for n in range(3)]

    @fast_jit
    def slice_of_three(cache: KeyValues, start_S: jax.Array, new: list[KeyValues]) -> tuple[KeyValues, KeyValues]:
        """Return the past of layer 1, and the cache after a slice whose third token is not kept."""
        opened = kv_cache.open_slice(cache, start_S, read_length=7, max_tokens=3, by_layer=by_layer)
        (past,), _ = opened.layer(1)
        for n, each in enumerate(new):
            layers = [
                kv_cache.append(opened.layer(i)[1], jax.tree.map(lambda leaf, at=i: leaf[at], each), jnp.int32(n))
                for i in range(L)
            ]
            recent = tuple(layers) if by_layer else jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
            opened = opened.replace(recent=recent)
        return past, kv_cache.close_slice(cache, opened.replace(num_recent=jnp.int32(2)))

    past, closed = slice_of_three(cache, start_S, new)
    np.testing.assert_array_equal(past.k, np.swapaxes(cache.k[1, :, :, :7], 2, 3))
    np.testing.assert_array_equal(past.v, cache.v[1, :, :, :7])
    for name in ("k", "v"):
        expected = np.array(getattr(cache, name))
        for n in range(2):
            for slot, start in enumerate(start_S.tolist()):
                if start + n < C:  # beyond, nothing is written
                    expected[:, slot, :, start + n] = getattr(new[n], name)[:, slot]
        np.testing.assert_array_equal(getattr(closed, name), expected)


def test_segments_double():
    cache = KeyValues(k=some(1, 1, 1, 700, 2), v=some(1, 1, 1, 700, 2, seed=1))

    @fast_jit
    def segments(cache: KeyValues) -> kv_cache.Segments:
        return kv_cache.open_slice(cache, jnp.array([600]), read_length=700, max_tokens=3).layer(0)[0]

    past = segments(cache)
    assert [each.v.shape[2] for each in past] == [128, 128, 256, 188]
    np.testing.assert_array_equal(np.concatenate([each.v for each in past], 2), cache.v[0])
    np.testing.assert_array_equal(np.concatenate([each.k for each in past], 3), np.swapaxes(cache.k[0], 2, 3))


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 16), pytest.param(2, 64, marks=pytest.mark.slow), (8, 128)])
def test_kv_read_length_changes_no_bit(kv_heads, head_dim):
    """The KV read length follows the longest row."""
    shape = (1, 4, kv_heads, 1024, head_dim)
    written = (np.arange(1024) < 120)[:, None].astype(np.float32)
    cache = KeyValues(k=written * some(*shape), v=written * some(*shape, seed=1))
    q_SNH, start_S = some(4, 2 * kv_heads, head_dim, seed=2), np.array([60, 1, 33, 120])

    recent = KeyValues(k=some(4, kv_heads, 16, head_dim, seed=3), v=some(4, kv_heads, 16, head_dim, seed=4))

    @partial(jax.jit, static_argnames="read_length")
    def read(cache: KeyValues, q_SNH: jax.Array, recent: KeyValues, *, read_length: int) -> jax.Array:
        opened = kv_cache.open_slice(cache, start_S, read_length=read_length, max_tokens=16, by_layer=True)
        past, _ = opened.layer(0)
        return cached_attention(q_SNH, past, recent, start_S, jnp.int32(5))

    short, *longer = (read(cache, q_SNH, recent, read_length=length) for length in (128, 256, 1024))
    for each in longer:
        np.testing.assert_array_equal(each, short)
