"""A decode slice reads the cache and adds to it when it ends. States move with the positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers import cache_state
from skyrl_tx.layers.cache_state import BlockTable, Cache, LayerCache
from skyrl_tx.layers.kv_cache import KeyValues, Pages, Segments, append_token, attend_segments
from tests.support.fast_jit import fast_jit
from tests.support.paged_arrays import get_positions, join_pages, make_table, split_into_pages

L, S, K, C, P, H = 2, 3, 2, 8, 4, 4
"""Layers, rows, kv heads, positions of a row, positions of a page, dims."""
TABLE = make_table(S, C // P)


def some(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def keys_and_values(*shape: int, seed: int = 0) -> KeyValues:
    return KeyValues(k=some(*shape, seed=seed), v=some(*shape, seed=seed + 1))


def hybrid(seed: int = 0) -> Cache:
    """Return the cache of a stack with attention and a stack that only has a state."""
    state = {"state": some(3, 1 + S, 5, seed=seed + 2)}
    positions = split_into_pages(keys_and_values(L, S, K, C, H, seed=seed), P)
    return LayerCache(positions=positions), LayerCache(fixed=state)


@pytest.mark.parametrize("by_layer", [False, True])
def test_what_a_slice_changes_is_written_to_the_cache(by_layer):
    """The second row has no page for the positions that it writes, which begin at 4."""
    cache, table = hybrid(), TABLE.replace(page_BM=TABLE.page_BM.at[1, 1].set(0))
    start_S = np.array([0, 4, 7])
    new = [keys_and_values(L, S, K, H, seed=20 + n) for n in range(3)]

    @fast_jit
    def slice_of_three(cache: Cache, start_S: jax.Array, new: list[KeyValues]) -> tuple[KeyValues, Cache]:
        """Return the past of layer 1 and the cache after a slice that keeps two of three tokens."""
        if by_layer:
            opened = cache_state.open_decode_slice_by_layer(cache, table, start_S, read_length=C, max_tokens=3)
        else:
            opened = cache_state.open_decode_slice(cache, table, start_S, max_tokens=3)

        past = opened.get_layer(0, 1, ()).past
        read = past.read_block(0, 2) if isinstance(past, Pages) else past[0]
        assert opened.get_layer(1, 1, "state").fixed == "state"

        for n, token in enumerate(new):
            layers = [
                LayerCache(
                    append_token(opened.get_layer(0, i, ()).recent, jax.tree.map(lambda leaf, at=i: leaf[at], token), n)
                )
                for i in range(L)
            ]
            first = tuple(layers) if by_layer else jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
            opened = opened.replace(live=(first, jax.tree.map(lambda leaf: 2 * leaf, opened.live[1])))

        return read, cache_state.close_decode_slice(cache, opened.replace(num_recent=jnp.int32(2)), table)

    past, after = slice_of_three(cache, start_S, new)
    before = join_pages(cache[0].positions, table)
    np.testing.assert_array_equal(past.k, np.swapaxes(before.k[1], 2, 3) if by_layer else before.k[1])
    np.testing.assert_array_equal(past.v, before.v[1])

    for name in ("k", "v"):
        expected = np.array(getattr(before, name))
        for n in range(2):
            for row, start in ((0, 0), (2, 7)):
                if start + n < C:  # nothing is written after the last position
                    expected[:, row, :, start + n] = getattr(new[n], name)[:, row]

        np.testing.assert_array_equal(getattr(get_positions(after, table)[0], name), expected)
        assert not np.asarray(getattr(after[0].positions, name))[:, 0].any(), "the empty page"
        np.testing.assert_array_equal(getattr(after[0].positions, name)[:, 5], getattr(cache[0].positions, name)[:, 5])

    states = np.array(cache[1].fixed["state"])
    states[:, 1:] *= 8
    np.testing.assert_array_equal(after[1].fixed["state"], states)


def test_rows_read_and_write_their_pages_and_states_and_no_other():
    """The rows are the third sample, the first sample, and a row without a sample."""
    cache = hybrid()
    table = BlockTable(TABLE.page_BM[jnp.array([2, 0, 0])].at[2].set(0), jnp.array([3, 1, 0]))

    @fast_jit
    def slice_of_one(cache: Cache) -> tuple[Segments, Cache]:
        opened = cache_state.open_decode_slice_by_layer(cache, table, jnp.array([3, 5, 0]), read_length=C, max_tokens=2)
        live = jax.tree.map(lambda leaf: leaf + 1, opened.live)
        return opened.past[0][1], cache_state.close_decode_slice(
            cache, opened.replace(live=live, num_recent=jnp.int32(1)), table
        )

    (past,), after = slice_of_one(cache)
    before = join_pages(cache[0].positions, TABLE)
    np.testing.assert_array_equal(past.v[:2], before.v[1, [2, 0]])
    np.testing.assert_array_equal(past.k[:2], np.swapaxes(before.k[1, [2, 0]], 2, 3))
    assert not np.asarray(past.v[2]).any()
    expected = np.array(before.v)
    expected[:, 2, :, 3] = expected[:, 0, :, 5] = 1
    np.testing.assert_array_equal(get_positions(after, TABLE)[0].v, expected)
    states = np.array(cache[1].fixed["state"])
    states[:, [3, 1]] += 1
    np.testing.assert_array_equal(after[1].fixed["state"], states)


def test_pages_and_states_are_copied_and_cleared():
    cache = hybrid()
    cache = jax.tree.map(lambda leaf: np.concatenate([leaf, np.full_like(leaf[:, :2], np.nan)], axis=1), cache)
    num_pages, num_states = (leaf.shape[1] for leaf in (cache[0].positions.k, cache[1].fixed["state"]))
    cache[1].fixed["state"][:, 0] = 0
    pages, states = (np.zeros((4, 2), np.int32) for _ in range(2))
    pages[:2], states[:2] = [(3, num_pages - 2), (0, num_pages - 1)], [(2, num_states - 1), (0, 2)]
    pages[2:] = states[2:] = -1  # entries after the count are ignored
    copied = fast_jit(cache_state.copy_pages)(cache, pages[None], np.array([2]), states[None], np.array([2]))

    for got, given in zip(jax.tree.leaves(copied[0]), jax.tree.leaves(cache[0]), strict=True):
        np.testing.assert_array_equal(got[:, :-2], given[:, :-2])
        np.testing.assert_array_equal(got[:, -2], given[:, 3])
        assert not np.asarray(got[:, -1]).any()

    got, given = copied[1].fixed["state"], cache[1].fixed["state"]
    np.testing.assert_array_equal(got[:, -1], given[:, 2])
    assert not np.asarray(got[:, 2]).any() and np.isnan(got[:, -2]).all()
    np.testing.assert_array_equal(got[:, [1, 3]], given[:, [1, 3]])


def test_segments_double():
    given = keys_and_values(1, 1, 1, 704, 2)
    cache, table = (LayerCache(positions=split_into_pages(given, 64)),), make_table(1, 11)

    @fast_jit
    def segments(cache: Cache) -> Segments:
        return (
            cache_state.open_decode_slice_by_layer(cache, table, jnp.array([600]), read_length=704, max_tokens=3)
            .get_layer(0, 0, ())
            .past
        )

    past = segments(cache)
    assert [segment.v.shape[2] for segment in past] == [128, 128, 256, 192]
    np.testing.assert_array_equal(np.concatenate([segment.v for segment in past], 2), given.v[0])
    np.testing.assert_array_equal(np.concatenate([segment.k for segment in past], 3), np.swapaxes(given.k[0], 2, 3))


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 16), pytest.param(2, 64, marks=pytest.mark.slow), (8, 128)])
def test_kv_read_length_changes_no_bit(kv_heads, head_dim):
    """The KV read length follows the longest row."""
    shape = (1, 4, kv_heads, 1024, head_dim)
    written = (np.arange(1024) < 120)[:, None].astype(np.float32)
    rows = KeyValues(k=written * some(*shape), v=written * some(*shape, seed=1))
    cache, table = (LayerCache(positions=split_into_pages(rows, 64)),), make_table(4, 16)
    q_SNH, start_S = some(4, 2 * kv_heads, head_dim, seed=2), np.array([60, 1, 33, 120])

    recent = KeyValues(k=some(4, kv_heads, 16, head_dim, seed=3), v=some(4, kv_heads, 16, head_dim, seed=4))

    @partial(jax.jit, static_argnames="read_length")
    def read(cache: Cache, q_SNH: jax.Array, recent: KeyValues, *, read_length: int) -> jax.Array:
        opened = cache_state.open_decode_slice_by_layer(cache, table, start_S, read_length=read_length, max_tokens=16)
        return attend_segments(q_SNH, opened.get_layer(0, 0, ()).past, recent, start_S, jnp.int32(5))

    short, *longer = (read(cache, q_SNH, recent, read_length=length) for length in (128, 256, 1024))
    for result in longer:
        np.testing.assert_array_equal(result, short)


def test_longer_rows_change_no_bit_of_attention_over_pages():
    """The loop over pages ends with the longest row."""
    rows = keys_and_values(1, 4, 2, 1024, 16)
    cache, table = (LayerCache(positions=split_into_pages(rows, 64)),), make_table(4, 16)
    new = some(4, 4, 16, seed=2), some(4, 2, 16, seed=3), some(4, 2, 16, seed=4)

    @fast_jit
    def attend(cache: Cache, start_S: jax.Array, new: tuple[jax.Array, ...]) -> jax.Array:
        opened = cache_state.open_decode_slice(cache, table, start_S, max_tokens=4)
        return opened.get_layer(0, 0, ()).attend(*new)[0]

    short = attend(cache, np.array([0, 60, 200, 256], np.int32), new)
    long = attend(cache, np.array([0, 60, 200, 1000], np.int32), new)
    np.testing.assert_array_equal(short[:3], long[:3])
    assert np.abs(np.asarray(short[3] - long[3])).max() > 1e-3


@pytest.mark.parametrize(("num_tokens", "page_size", "num_rows"), [(4, 8, 5), (16, 8, 3), (17, 8, 3), (1, 8, 4)])
def test_pages_are_written_as_positions_are(num_tokens, page_size, num_rows):
    """On TPU, whole pages are written.

    Rows lack pages or end within one, and may begin anywhere.
    """
    g, pages_of_row = np.random.default_rng(num_tokens), 4
    into = jnp.asarray(g.standard_normal((2, 21, 3, page_size, 4)), jnp.float32)
    new = jnp.asarray(g.standard_normal((2, num_rows, 3, num_tokens, 4)), jnp.float32)
    by_position, by_page = jax.jit(cache_state.write_by_position), jax.jit(cache_state.write_by_page)
    for _ in range(20):
        pages = g.permutation(np.arange(1, 21))[: num_rows * pages_of_row].reshape(num_rows, pages_of_row)
        for row in pages:
            row[g.integers(0, pages_of_row + 1) :] = 0
        start = g.integers(0, pages_of_row * page_size, num_rows).astype(np.int32)
        size = g.integers(0, num_tokens + 1, num_rows).astype(np.int32)
        given = into, new, pages.astype(np.int32), start, size
        np.testing.assert_array_equal(by_page(*given), by_position(*given))
