"""A slice of decoding reads the cache, and adds to it when it ends; state of fixed size moves with the positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers import held
from skyrl_tx.layers.attention import cached_attention
from skyrl_tx.layers.held import Cache, Held
from skyrl_tx.layers.kv_cache import KeyValues, Segments, append
from tests.support.fast_jit import fast_jit

L, S, K, C, H = 2, 3, 2, 8, 4


def some(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def keys_and_values(*shape: int, seed: int = 0) -> KeyValues:
    return KeyValues(k=some(*shape, seed=seed), v=some(*shape, seed=seed + 1))


def hybrid(rows: int, length: int = C, seed: int = 0) -> Cache:
    """Return the cache of two stacks: one of attention, and one that only has a state."""
    state = {"state": some(3, rows, 5, seed=seed + 2)}
    return Held(positions=keys_and_values(L, rows, K, length, H, seed=seed)), Held(fixed=state)


@pytest.mark.parametrize("by_layer", [False, True])
def test_what_a_slice_changes_is_written_to_the_cache(by_layer):
    cache = hybrid(S)
    start_S = np.array([0, 4, 7])
    new = [keys_and_values(L, S, K, H, seed=20 + n) for n in range(3)]

    @fast_jit
    def slice_of_three(cache: Cache, start_S: jax.Array, new: list[KeyValues]) -> tuple[KeyValues, Cache]:
        """Return the past of layer 1, and the cache after a slice whose third token is not kept."""
        if by_layer:
            opened = held.open_rows(cache, jnp.arange(S), start_S, read_length=7, max_tokens=3)
        else:
            opened = held.open_slice(cache, start_S, read_length=7, max_tokens=3)
        (past,) = opened.layer(0, 1, ()).past
        assert opened.layer(1, 1, "state").fixed == "state"
        for n, each in enumerate(new):
            layers = [
                Held(append(opened.layer(0, i, ()).recent, jax.tree.map(lambda leaf, at=i: leaf[at], each), n))
                for i in range(L)
            ]
            first = tuple(layers) if by_layer else jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
            opened = opened.replace(live=(first, jax.tree.map(lambda leaf: 2 * leaf, opened.live[1])))
        ended = opened.replace(num_recent=jnp.int32(2))
        return past, held.close_slice(cache, ended, jnp.arange(S) if by_layer else None)

    past, (attention, linear) = slice_of_three(cache, start_S, new)
    before = cache[0].positions
    np.testing.assert_array_equal(past.k, np.swapaxes(before.k[1, :, :, :7], 2, 3))
    np.testing.assert_array_equal(past.v, before.v[1, :, :, :7])
    for name in ("k", "v"):
        expected = np.array(getattr(before, name))
        for n in range(2):
            for slot, start in enumerate(start_S.tolist()):
                if start + n < C:  # beyond, nothing is written
                    expected[:, slot, :, start + n] = getattr(new[n], name)[:, slot]
        np.testing.assert_array_equal(getattr(attention.positions, name), expected)
    np.testing.assert_array_equal(linear.fixed["state"], 8 * cache[1].fixed["state"])


def test_rows_read_and_write_their_slots_and_no_other():
    """Rows of slots 2 and 0, and one without a sample."""
    cache, slot_S = hybrid(S), jnp.array([2, 0, S])

    @fast_jit
    def slice_of_one(cache: Cache) -> tuple[Segments, Cache]:
        opened = held.open_rows(cache, slot_S, jnp.array([3, 5, 0]), read_length=7, max_tokens=2)
        live = jax.tree.map(lambda leaf: leaf + 1, opened.live)
        return opened.past[0][1], held.close_slice(cache, opened.replace(live=live, num_recent=jnp.int32(1)), slot_S)

    (past,), (attention, linear) = slice_of_one(cache)
    np.testing.assert_array_equal(past.v[:2], cache[0].positions.v[1, [2, 0], :, :7])
    np.testing.assert_array_equal(past.k[:2], np.swapaxes(cache[0].positions.k[1, [2, 0], :, :7], 2, 3))
    expected = np.array(cache[0].positions.v)
    expected[:, 2, :, 3] = expected[:, 0, :, 5] = 1
    np.testing.assert_array_equal(attention.positions.v, expected)
    states = np.array(cache[1].fixed["state"])
    states[:, [2, 0]] += 1
    np.testing.assert_array_equal(linear.fixed["state"], states)


def test_a_slot_gets_a_prompt_with_its_state_and_nothing_of_its_former_tenant():
    cache = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), hybrid(S))
    prompt = hybrid(1, length=4)
    inserted = jax.tree.map(np.asarray, fast_jit(held.insert)(cache, prompt, np.int32(3), np.int32(1)))
    for got, given in zip(jax.tree.leaves(inserted[0]), jax.tree.leaves(prompt[0]), strict=True):
        np.testing.assert_array_equal(got[:, 1, :, :3], given[:, 0, :, :3])
        assert not got[:, 1, :, 3:].any()
        assert np.isnan(got[:, [0, 2]]).all()
    state = inserted[1].fixed["state"]
    np.testing.assert_array_equal(state[:, 1], prompt[1].fixed["state"][:, 0])
    assert np.isnan(state[:, [0, 2]]).all()


def test_a_slot_moves_to_another_cache_in_pieces():
    cache, other = hybrid(S), hybrid(2, length=6, seed=5)
    moved = other
    for start in (0, 2):
        piece = held.read_piece(cache, jnp.int32(2), jnp.int32(start), 2)
        moved = held.write_piece(moved, piece, jnp.int32(0), jnp.int32(start))
    for got, source, before in zip(*(jax.tree.leaves(each[0]) for each in (moved, cache, other)), strict=True):
        np.testing.assert_array_equal(got[:, 0, :, :4], source[:, 2, :, :4])
        np.testing.assert_array_equal(got[:, 0, :, 4:], before[:, 0, :, 4:])
        np.testing.assert_array_equal(got[:, 1], before[:, 1])
    np.testing.assert_array_equal(moved[1].fixed["state"][:, 0], cache[1].fixed["state"][:, 2])
    np.testing.assert_array_equal(moved[1].fixed["state"][:, 1], other[1].fixed["state"][:, 1])


@pytest.mark.parametrize("length", [5, 11])
def test_a_copy_of_a_prompt_is_cut_or_padded(length):
    prompt = hybrid(1)
    attention, linear = held.resize(prompt, length)
    for got, given in zip(jax.tree.leaves(attention), jax.tree.leaves(prompt[0]), strict=True):
        kept = min(length, C)
        np.testing.assert_array_equal(got[:, :, :, :kept], given[:, :, :, :kept])
        assert got.shape[3] == length and not np.asarray(got)[:, :, :, kept:].any()
    np.testing.assert_array_equal(linear.fixed["state"], prompt[1].fixed["state"])


def test_segments_double():
    cache = (Held(positions=keys_and_values(1, 1, 1, 700, 2)),)

    @fast_jit
    def segments(cache: Cache) -> Segments:
        return held.open_slice(cache, jnp.array([600]), read_length=700, max_tokens=3).layer(0, 0, ()).past

    past, given = segments(cache), cache[0].positions
    assert [each.v.shape[2] for each in past] == [128, 128, 256, 188]
    np.testing.assert_array_equal(np.concatenate([each.v for each in past], 2), given.v[0])
    np.testing.assert_array_equal(np.concatenate([each.k for each in past], 3), np.swapaxes(given.k[0], 2, 3))


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 16), pytest.param(2, 64, marks=pytest.mark.slow), (8, 128)])
def test_kv_read_length_changes_no_bit(kv_heads, head_dim):
    """The KV read length follows the longest row."""
    shape = (1, 4, kv_heads, 1024, head_dim)
    written = (np.arange(1024) < 120)[:, None].astype(np.float32)
    cache = (Held(positions=KeyValues(k=written * some(*shape), v=written * some(*shape, seed=1))),)
    q_SNH, start_S = some(4, 2 * kv_heads, head_dim, seed=2), np.array([60, 1, 33, 120])

    recent = KeyValues(k=some(4, kv_heads, 16, head_dim, seed=3), v=some(4, kv_heads, 16, head_dim, seed=4))

    @partial(jax.jit, static_argnames="read_length")
    def read(cache: Cache, q_SNH: jax.Array, recent: KeyValues, *, read_length: int) -> jax.Array:
        opened = held.open_rows(cache, jnp.arange(4), start_S, read_length=read_length, max_tokens=16)
        return cached_attention(q_SNH, opened.layer(0, 0, ()).past, recent, start_S, jnp.int32(5))

    short, *longer = (read(cache, q_SNH, recent, read_length=length) for length in (128, 256, 1024))
    for each in longer:
        np.testing.assert_array_equal(each, short)
