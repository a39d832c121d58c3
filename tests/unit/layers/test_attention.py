"""Attention and rotary embeddings, compared with their definitions in numpy.

Attention is computed for whole rows (dense) or in blocks of keys (flash attention), in training, in
prefill chunks and in decode steps.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.attention import DENSE_LENGTH, KeyRange, causal_attention, dense_attention, flash_attention
from skyrl_tx.layers.cache_state import DecodeLayerCache, PrefillLayerCache
from skyrl_tx.layers.kv_cache import KeyValues, Pages, read_segments
from skyrl_tx.layers.rope import Rope, rotate, rotate_pairs
from tests.support.fast_jit import fast_jit
from tests.support.paged_arrays import make_table, split_into_pages


def draw_heads(T, N=4, K=2, H=8, B=2, seed=0):
    """Draw queries [B, T, N, H], keys and values [B, T, K, H]."""
    g = np.random.default_rng(seed)
    return [g.standard_normal((B, T, n, H)).astype(np.float32) for n in (N, K, K)]


attend = fast_jit(causal_attention, static_argnames="window")

SINKS = np.array([0.3, -1.0, 2.0, 0.0], np.float32)
"""The scores of the attention sinks of four heads. A sink acts like one more key."""


@partial(fast_jit, static_argnames=("kernel", "query_block", "key_block"))
def compute_losses_and_gradients(x, target, start_BT, kernel, **blocks):
    """Return a loss and its gradient for rows of one sequence, for packed rows, and for packed rows with sinks."""

    def loss(x, *starts_and_sinks):
        return (kernel(*x, *starts_and_sinks, **blocks) * target).sum()

    cases = (), (start_BT,), (start_BT, SINKS.reshape(2, 2))
    return [jax.value_and_grad(loss)(x, *starts_and_sinks) for starts_and_sinks in cases]


def attend_by_definition(q_BTNH, k_BTKH, v_BTKH, window=None, sinks=None):
    """Compute attention with loops over rows, heads and positions, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q_BTNH, k_BTKH, v_BTKH))
    out = np.zeros_like(q)
    groups = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(*q.shape[:3]):
        first = 0 if window is None else max(t + 1 - window, 0)
        scores = k[b, first : t + 1, n // groups] @ q[b, t, n] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        sink = 0.0 if sinks is None else np.exp(sinks[n] - scores.max())
        out[b, t, n] = (weights / (weights.sum() + sink)) @ v[b, first : t + 1, n // groups]
    return out


def group_heads(q, k, v):
    """Reshape queries to [B, K, G, T, H], and keys and values to [B, K, T, H], as kernels expect them."""
    B, T, N, H = q.shape
    K = k.shape[2]
    return q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4), k.swapaxes(1, 2), v.swapaxes(1, 2)


@pytest.mark.parametrize("length", [21, DENSE_LENGTH + 3])
def test_attention_equals_the_definition(length):
    q, k, v = draw_heads(T=length, B=1)
    np.testing.assert_allclose(attend(q, k, v), attend_by_definition(q, k, v), atol=1e-5)


@pytest.mark.parametrize(
    ("query_block", "key_block", "window"),
    [(4, 8, None), (3, 2, None), (32, 32, None), (4, 4, 6), pytest.param(8, 4, 3, marks=pytest.mark.slow)],
)
def test_blocks_change_neither_value_nor_gradient(query_block, key_block, window):
    """The window is part of the starts here: a start is the first key that a position attends to."""
    x = group_heads(*draw_heads(T=21))
    target = np.random.default_rng(1).standard_normal(x[0].shape).astype(np.float32)
    start_BT = np.array([[0] * 9 + [9] * 2 + [11] * 10, [0] * 3 + [3] * 18])
    if window is not None:
        start_BT = np.maximum(start_BT, np.arange(21) - window + 1)
    dense = compute_losses_and_gradients(x, target, start_BT, dense_attention)
    blocked = compute_losses_and_gradients(
        x, target, start_BT, flash_attention, query_block=query_block, key_block=key_block
    )
    for expected, found in zip(jax.tree.leaves(dense), jax.tree.leaves(blocked), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [21, DENSE_LENGTH + 40])
def test_packed_sequences_do_not_attend_to_each_other(length):
    q, k, v = draw_heads(T=length, B=2)
    starts_of_rows = ([0, 1, length // 3, length // 2], [0, length - 2])
    start_BT = np.zeros((2, length), np.int32)
    for row, starts in zip(start_BT, starts_of_rows, strict=True):
        for start in starts:
            row[start:] = start
    got = np.asarray(attend(q, k, v, start_BT))
    for b, starts in enumerate(starts_of_rows):
        for start, end in pairwise([*starts, length]):
            alone = attend_by_definition(*(x[b : b + 1, start:end] for x in (q, k, v)))
            np.testing.assert_allclose(got[b : b + 1, start:end], alone, atol=1e-5)


def pack_shared_prefix(prefix_length, suffix_lengths):
    """Pack a row: a sequence of 5 tokens, a prefix, the suffixes that share it, and 3 tokens of padding.

    Returns the starts [1, T], the prefix of each position, and for each sequence the positions of
    its tokens. The sequence of a suffix begins with the prefix.
    """
    bounds = np.cumsum([0, 5, prefix_length, *suffix_lengths, 3])
    start_T = np.repeat(bounds[:-1], np.diff(bounds)).astype(np.int32)
    T, prefix_end = len(start_T), bounds[2]
    is_suffix_T = (start_T >= prefix_end) & (start_T < bounds[-2])
    prefix_start_T, prefix_end_T = np.where(is_suffix_T, 5, T), np.where(is_suffix_T, prefix_end, 0)
    prefix = KeyRange(prefix_start_T[None].astype(np.int32), prefix_end_T[None].astype(np.int32))
    sequences = [np.r_[5:prefix_end, first:end] for first, end in pairwise(bounds[2:-1])]
    return start_T[None], prefix, [np.r_[0:5], *sequences]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 80])
@pytest.mark.parametrize(("prefix_length", "suffix_lengths"), [(11, (9, 4)), (100, (70, 1, 130)), (64, (64,))])
def test_a_suffix_attends_to_its_prefix_and_itself(prefix_length, suffix_lengths, window, has_sinks):
    start_BT, prefix, sequences = pack_shared_prefix(prefix_length, suffix_lengths)
    q, k, v = draw_heads(T=start_BT.shape[1], B=1)
    sinks = SINKS if has_sinks else None
    got = np.asarray(attend(q, k, v, start_BT, sinks, prefix=prefix, window=window))
    for sequence in sequences:
        alone = attend_by_definition(*(x[:, sequence] for x in (q, k, v)), window, sinks)
        np.testing.assert_allclose(got[:, sequence], alone, atol=1e-5)


@pytest.mark.parametrize("window", [None, 80])
def test_the_gradient_of_a_prefix_is_the_sum_over_its_suffixes(window):
    start_BT, prefix, sequences = pack_shared_prefix(100, (70, 1, 130))
    x = draw_heads(T=start_BT.shape[1], B=1)
    target = draw_heads(T=start_BT.shape[1], B=1, seed=1)[0]
    target[:, 5:105] = 0  # the loss of the prefix itself, which separate sequences would count once per suffix

    def loss_of_row(x):
        return (causal_attention(*x, start_BT, prefix=prefix, window=window) * target)[:, :-3].sum()

    def loss_of_sequences(x):
        rows = [causal_attention(*(z[:, s] for z in x), window=window) * target[:, s] for s in sequences]
        return sum(row.sum() for row in rows)

    found, expected = (fast_jit(jax.grad(loss))(x) for loss in (loss_of_row, loss_of_sequences))
    for found_leaf, expected_leaf in zip(found, expected, strict=True):
        np.testing.assert_allclose(found_leaf, expected_leaf, atol=1e-5 * np.abs(expected_leaf).max())


WINDOWS = (1, 5, DENSE_LENGTH, 70, 500)


@pytest.mark.parametrize("shift", [0, 200, -200])
def test_a_sink_is_one_more_key_of_value_zero(shift):
    """With a sink far above all scores, the result is 0. A sink far below all scores changes nothing."""
    sinks = SINKS + shift
    for length in (21, DENSE_LENGTH + 40):
        q, k, v = draw_heads(T=length, B=1)
        for window in (None, 7):
            got = attend(q, k, v, sinks_N=sinks, window=window)
            np.testing.assert_allclose(got, attend_by_definition(q, k, v, window, sinks), atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_hides_earlier_positions(window):
    """Short rows use dense attention, and long rows use blocks. Both are tested with packed sequences, too."""
    for length in (21, 3 * DENSE_LENGTH + 5):
        q, k, v = draw_heads(T=length, B=1)
        np.testing.assert_allclose(attend(q, k, v, window=window), attend_by_definition(q, k, v, window), atol=1e-5)
        bounds = [0, 3, length // 2, length]
        start_BT = np.repeat(bounds[:-1], np.diff(bounds))[None].astype(np.int32)
        got = np.asarray(attend(q, k, v, start_BT, window=window))
        for start, end in pairwise(bounds):
            alone = attend_by_definition(*(x[:, start:end] for x in (q, k, v)), window)
            np.testing.assert_allclose(got[:, start:end], alone, atol=1e-5)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    "window", [*(5, 70, None), *(pytest.param(size, marks=pytest.mark.slow) for size in (1, DENSE_LENGTH, 500))]
)
def test_chunks_and_steps_have_the_same_windows_and_sinks(window, has_sinks):
    """Prefill chunks and decode steps give the same results as attention over whole rows.

    Positions of the cache that were not written hold NaN, so they must not be read. In the decode
    steps, the past of one row ends at the end of a chunk, and the past of the other within a chunk.
    """
    length, chunk, num_cached = 230, 64, 192  # positions, tokens of a chunk, positions in the cache
    q, k, v = draw_heads(T=length, B=2)
    sinks = SINKS if has_sinks else None

    # Prefill, chunk by chunk
    whole = attend_by_definition(q, k, v, window, sinks)
    for start in range(0, num_cached, chunk):
        here = slice(start, start + chunk)
        new = (x[:, here] for x in (q, k, v))
        got = attend_chunk(*new, make_past(k, v, start), np.int32(start), sinks, window=window)
        np.testing.assert_allclose(got, whole[:, here], atol=1e-5)

    # Decode a token. The newest tokens of each row are stored separately.
    start_S, recent = np.array([num_cached, num_cached - 20], np.int32), 7
    row_S1, token_ST = np.arange(2)[:, None], start_S[:, None] + np.arange(recent)
    newest = KeyValues(k=k[row_S1, token_ST].swapaxes(1, 2), v=v[row_S1, token_ST].swapaxes(1, 2))
    position_S = start_S + recent - 1
    new = [x[np.arange(2), position_S] for x in (q, k, v)]
    for in_segments in (False, True):
        past = make_past(k, v, num_cached, unwritten=0.0 if in_segments else np.nan)
        got = attend_step(*new, past, newest, start_S, sinks, window=window, in_segments=in_segments)
        np.testing.assert_allclose(got, whole[np.arange(2), position_S], atol=1e-5)


def make_past(k: np.ndarray, v: np.ndarray | None, size: int, *, unwritten: float = np.nan) -> KeyValues:
    """Return the first `size` positions of keys and values [B, T, K, H], in pages of 64 positions.

    Each row has 256 positions. Those from `size` on hold `unwritten`.
    """

    def put(x: np.ndarray) -> np.ndarray:
        rows = np.full((1, x.shape[0], x.shape[2], 256, x.shape[3]), unwritten, np.float32)
        rows[0, :, :, :size] = x[:, :size].swapaxes(1, 2)
        return split_into_pages(rows, 64)

    return KeyValues(k=put(k), v=None if v is None else put(v))


@partial(fast_jit, static_argnames="window")
def attend_chunk(q, k, v, past, start, sinks=None, *, window=None):
    """Return the attention of a prefill chunk whose first token is at position `start`."""
    pages = Pages(past, np.int32(0), make_table(2, 4).page_BM)
    return PrefillLayerCache(pages, (), start).attend(q, k, v, sinks, window=window)[0]


@partial(fast_jit, static_argnames=("window", "in_segments"))
def attend_step(q, k, v, past, newest, start_S, sinks=None, *, window=None, in_segments):
    """Decode the last of the new tokens [S, ...]. The tokens before it are in `newest`."""
    pages, num_before = Pages(past, 0, make_table(2, 4).page_BM), jnp.int32(newest.k.shape[2] - 1)
    before = jax.tree.map(lambda leaf: leaf.at[:, :, -1].set(jnp.nan), jax.tree.map(jnp.asarray, newest))
    layer_cache = DecodeLayerCache(read_segments(pages, 256) if in_segments else pages, before, (), start_S, num_before)
    return layer_cache.attend(q, k, v, sinks, window=window)[0]


@pytest.mark.parametrize("length", [50, 150])
def test_values_may_be_narrower_than_keys(length):
    """The result and gradients are the same as with values that are padded with zeros to the size of keys.

    The lengths are for dense attention and for attention in blocks.
    """
    q, k, v = draw_heads(length)
    wide = v * (np.arange(8) < 5)
    target = np.random.default_rng(1).standard_normal((2, length, 4, 8)).astype(np.float32)

    @fast_jit
    def value_and_gradient(x, target):
        return jax.value_and_grad(lambda x: (causal_attention(*x) * target).sum())(x)

    value, gradient = value_and_gradient((q, k, v[..., :5]), target[..., :5])
    expected, by_wide = value_and_gradient((q, k, wide), target)
    assert causal_attention(q, k, v[..., :5]).shape == (2, length, 4, 5)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for found, wanted in zip(gradient, (*by_wide[:2], by_wide[2][..., :5]), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_keys_may_also_be_the_values():
    """In latent attention, the cache has one array that is read as keys and as values.

    Positions of the cache that were not written hold NaN, so they must not be read.
    """
    length, chunk, num_cached, recent = 150, 64, 128, 7
    q, k, _ = draw_heads(T=length, B=2, K=1)
    whole = attend_by_definition(q, k, k)
    for start in range(0, num_cached, chunk):
        here = slice(start, start + chunk)
        got = attend_chunk(q[:, here], k[:, here], None, make_past(k, None, start), np.int32(start))
        np.testing.assert_allclose(got, whole[:, here], atol=1e-5)

    start_S = np.array([num_cached, num_cached - 20], np.int32)
    row_S1, token_ST = np.arange(2)[:, None], start_S[:, None] + np.arange(recent)
    newest = KeyValues(k=k[row_S1, token_ST].swapaxes(1, 2), v=None)
    position_S = start_S + recent - 1
    new = [x[np.arange(2), position_S] for x in (q, k)]
    for in_segments in (False, True):
        past = make_past(k, None, num_cached, unwritten=0.0 if in_segments else np.nan)
        got = attend_step(*new, None, past, newest, start_S, in_segments=in_segments)
        np.testing.assert_allclose(got, whole[np.arange(2), position_S], atol=1e-5)


def test_long_rows_stay_within_memory():
    """The scores of all pairs of 16,384 tokens would take 4 GiB for four heads."""
    shapes = [jax.ShapeDtypeStruct((1, 16384, n, 8), jnp.float32) for n in (4, 1, 1)]
    gradient = jax.jit(jax.grad(lambda q, k, v: causal_attention(q, k, v).sum(), argnums=(0, 1, 2)))
    assert gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes < 100e6


def test_rope_rotates_pairs_by_position_times_frequency():
    """A pair of dims is a complex number. Dim i is paired with dim i + H / 2."""
    rope, T, H = Rope(theta=100.0), 6, 8
    x = np.random.default_rng(0).standard_normal((T, 3, H)).astype(np.float32)
    rotated = fast_jit(lambda x, position: rotate(x, *rope.compute_angles(position, H)))(x, np.arange(T))
    pairs = x[..., : H // 2] + 1j * x[..., H // 2 :]
    expected = pairs * np.exp(1j * np.arange(T)[:, None, None] * 100.0 ** -(np.arange(0, H, 2) / H))
    np.testing.assert_allclose(rotated, np.concatenate([expected.real, expected.imag], -1), atol=1e-5)


def test_paired_rope_rotates_adjacent_dims():
    """Dim 2 i is paired with dim 2 i + 1. The result has the order of `rotate`."""
    rope, T, H = Rope(theta=100.0), 6, 8
    x = np.random.default_rng(0).standard_normal((T, 3, H)).astype(np.float32)
    rotated = fast_jit(lambda x, position: rotate_pairs(x, *rope.compute_angles(position, H)))(x, np.arange(T))
    pairs = x[..., ::2] + 1j * x[..., 1::2]
    expected = pairs * np.exp(1j * np.arange(T)[:, None, None] * 100.0 ** -(np.arange(0, H, 2) / H))
    np.testing.assert_allclose(rotated, np.concatenate([expected.real, expected.imag], -1), atol=1e-5)


def test_linear_scaling_divides_positions():
    plain, scaled = Rope(theta=100.0), Rope(theta=100.0, kind="linear", factor=4.0)
    np.testing.assert_allclose(scaled.compute_frequencies(8) * 4, plain.compute_frequencies(8), rtol=1e-6)


def test_llama3_scaling_keeps_high_frequencies_and_divides_low_ones():
    plain = Rope(theta=5e5)
    scaled = Rope(
        5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    ratio = plain.compute_frequencies(128) / scaled.compute_frequencies(128)
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(8, rel=1e-5)
    assert np.all(np.diff(ratio) >= -1e-5)


GPT_OSS_ROPE = Rope(150000.0, "yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False)


def test_yarn_keeps_high_frequencies_and_divides_low_ones():
    """Frequencies with more than 32 turns in 4,096 positions are kept. Below one turn, they are divided by 32.

    Frequencies between these are divided by a number between 1 and 32.
    """
    plain = Rope(theta=150000.0).compute_frequencies(64)
    ratio = plain / GPT_OSS_ROPE.compute_frequencies(64)
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 32], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 1], 32, rtol=1e-6)
    between = ratio[(turns < 32) & (turns > 1)]
    assert len(between) > 5 and np.all(np.diff(between) > 0) and between.min() > 1 and between.max() < 32
    rounded = replace(GPT_OSS_ROPE, truncate=True).compute_frequencies(64)
    assert np.abs(rounded / GPT_OSS_ROPE.compute_frequencies(64) - 1).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "amplitude"),
    [
        ({}, 1.3465735902799727),  # 0.1 ln 32 + 1
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.6931471805599454 / 1.3465735902799727),
        ({"mscale": 2.0}, 1.3465735902799727),
        ({"kind": "default"}, 1.0),
    ],
)
def test_yarn_multiplies_cosine_and_sine(changes, amplitude):
    rope = replace(GPT_OSS_ROPE, **changes)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)
    cosine, sine = rope.compute_angles(jnp.arange(5), 8)
    np.testing.assert_allclose(cosine**2 + sine**2, np.full((5, 4), amplitude**2), rtol=1e-5)
