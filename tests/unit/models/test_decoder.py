"""The three roads through a model - whole rows, slots of adapters, one token at a time - give the same numbers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.layers import kv_cache
from skyrl_tx.layers.attention import DENSE_LENGTH
from skyrl_tx.layers.kept import Kept

forward = jax.jit(models.forward, static_argnames=("config", "kept"))
extend = jax.jit(models.extend, static_argnames="config")


@partial(jax.jit, static_argnames=("config", "bucket", "by_layer"))
def decode_step(
    params, config, token, position, cache, adapter=None, rows=None, *, bucket: int = 12, by_layer: bool = False
):
    """Decode a slice of one step."""
    if by_layer:
        params = models.by_layer(params, config)
    opened = kv_cache.open_slice(cache, position, stretch=bucket, max_tokens=4, by_layer=by_layer)
    hidden, ended = models.decode_step(params, config, token, opened, adapter, rows)
    return hidden, kv_cache.close_slice(cache, ended)


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, length), dtype=np.int32)


def prefill(params, config, x, adapter=None, rows=None, *, length: int = 16):
    """Run whole rows into empty prompts."""
    shape = (config.num_layers, x.shape[0], config.num_kv_heads, length, config.head_dim)
    return extend(params, config, x, np.int32(0), kv_cache.allocate(*shape, params.embed.dtype), adapter, rows)


def stack(*adapters):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *adapters)


def test_slots_equal_one_adapter_for_all_rows(loaded):
    first, second = loaded.adapter(1), loaded.adapter(2)
    zeros = jax.tree.map(np.zeros_like, first)
    x = tokens(3, 12)
    mixed = forward(loaded.params, loaded.config, x, stack(zeros, first, second), jnp.array([2, 0, 1]))
    np.testing.assert_allclose(mixed[0], forward(loaded.params, loaded.config, x, second)[0], atol=1e-5)
    np.testing.assert_allclose(mixed[1], forward(loaded.params, loaded.config, x)[1], atol=1e-5)
    np.testing.assert_allclose(mixed[2], forward(loaded.params, loaded.config, x, first)[2], atol=1e-5)
    assert float(jnp.abs(mixed[0] - forward(loaded.params, loaded.config, x)[0]).max()) > 1e-2  # they do act


def test_nan_in_one_slot_stays_there(loaded):
    good = loaded.adapter(1)
    bad = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), good)
    slots = stack(good, bad)
    x, rows = tokens(2, 10), jnp.array([0, 1])
    hidden = forward(loaded.params, loaded.config, x, slots, rows)
    logprobs = models.target_logprobs(loaded.params, hidden, x, slots, rows)
    assert np.isfinite(hidden[0]).all() and np.isfinite(logprobs[0]).all()
    assert np.isnan(hidden[1]).all()


def test_padding_at_the_right_changes_nothing(loaded):
    x = tokens(2, 9)
    padded = np.pad(x, ((0, 0), (0, 7)))
    np.testing.assert_allclose(
        forward(loaded.params, loaded.config, padded)[:, :9], forward(loaded.params, loaded.config, x), atol=1e-5
    )


def test_sequences_in_a_row_equal_rows_of_their_own(each_family):
    x, adapter = tokens(3, 40), each_family.adapter(1)
    alone = forward(each_family.params, each_family.config, x, adapter)
    lengths = [40, 7, 25]
    row = np.concatenate([each[:length] for each, length in zip(x, lengths, strict=True)])[None]
    starts = np.cumsum([0, *lengths[:-1]])
    start_BT = np.repeat(starts, lengths).astype(np.int32)[None]
    together = forward(each_family.params, each_family.config, row, adapter, start_BT=start_BT)[0]
    for each, start, length in zip(alone, starts, lengths, strict=True):
        np.testing.assert_allclose(together[start : start + length], each[:length], atol=2e-5)


@pytest.mark.parametrize("by_layer", [False, True])
def test_decoding_equals_the_whole_row(each_family, by_layer):
    config = each_family.config
    first = each_family.adapter(1)
    slots = stack(jax.tree.map(np.zeros_like, first), first)
    x = tokens(2, 14)
    whole = forward(each_family.params, config, x, slots, jnp.array([1, 0]))

    _, prefilled = prefill(each_family.params, config, x[:, :6], slots, jnp.array([1, 0]))
    shape = (config.num_layers, 3, config.num_kv_heads, 20, config.head_dim)
    cache = kv_cache.KeyValues(k=jnp.full(shape, jnp.nan), v=jnp.full(shape, jnp.nan))
    for row, slot in ((0, 2), (1, 0), (0, 1)):
        cache = kv_cache.insert(cache, prefilled, jnp.int32(6), jnp.int32(row), jnp.int32(slot))
    rows, slot_adapters = np.array([1, 0, 0]), jnp.array([0, 1, 1])
    for position in range(6, 14):
        positions = jnp.full(3, position)
        hidden, cache = decode_step(
            each_family.params,
            config,
            x[rows, position],
            positions,
            cache,
            slots,
            slot_adapters,
            bucket=16,
            by_layer=by_layer,
        )
        np.testing.assert_allclose(hidden, whole[rows, position], atol=1e-5)


@pytest.mark.parametrize("chunks", [(20, 20), (16, 3, 21), (1, 32, 7)])
def test_chunk_by_chunk_equals_the_whole_row(each_family, chunks):
    config, first = each_family.config, each_family.adapter(1)
    slots, rows = stack(jax.tree.map(np.zeros_like, first), first), jnp.array([1, 0])
    x = tokens(2, sum(chunks))
    whole = forward(each_family.params, config, x, slots, rows)
    shape = (config.num_layers, 2, config.num_kv_heads, 64, config.head_dim)
    past = kv_cache.KeyValues(k=jnp.full(shape, jnp.nan), v=jnp.full(shape, jnp.nan))  # what is not written is not seen
    start = 0
    for size in chunks:
        chunk = np.pad(x[:, start : start + size], ((0, 0), (0, 32 - size)))
        hidden, past = extend(each_family.params, config, chunk, np.int32(start), past, slots, rows)
        np.testing.assert_allclose(hidden[:, :size], whole[:, start : start + size], atol=1e-5)
        start += size


def test_slots_decode_at_positions_of_their_own(loaded):
    config = loaded.config
    x = tokens(2, 10)
    whole = forward(loaded.params, config, x)
    _, prefilled = prefill(loaded.params, config, x)  # all ten: what lies past a slot's position must not be seen
    cache = kv_cache.allocate(config.num_layers, 2, config.num_kv_heads, 12, config.head_dim, jnp.float32)
    for row in range(2):
        cache = kv_cache.insert(cache, prefilled, jnp.int32(10), jnp.int32(row), jnp.int32(row))
    positions = jnp.array([3, 7])
    hidden, cache = decode_step(loaded.params, config, x[[0, 1], [3, 7]], positions, cache)
    np.testing.assert_allclose(hidden, whole[np.array([0, 1]), np.array([3, 7])], atol=1e-5)


@pytest.mark.parametrize(("slotted", "length"), [(False, 8), (True, 8), (False, DENSE_LENGTH + 6)])
def test_what_is_kept_changes_no_gradient(loaded, slotted, length):
    """Nor where attention goes by blocks, which marks what to keep in a rule of its own."""
    adapter = loaded.adapter(1)
    x = tokens(2, length)
    rows = jnp.array([0, 0]) if slotted else None
    if slotted:
        adapter = stack(adapter)

    @partial(jax.jit, static_argnames="kept")
    def gradient(weights, kept):
        def loss(weights):
            mine = adapter.replace(weights=weights)
            hidden = models.forward(loaded.params, loaded.config, x, mine, rows, kept=kept)
            return models.target_logprobs(loaded.params, hidden, x, mine, rows).sum()

        return jax.grad(loss)(weights)

    plain = gradient(adapter.weights, Kept.ALL)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(plain))
    for kept in (Kept.PRODUCTS, Kept.INPUTS):
        again = gradient(adapter.weights, kept)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, again)


def test_padded_rank_is_a_fixpoint(loaded):
    adapter = loaded.adapter(1, rank=2, max_rank=5)
    x = tokens(1, 8)

    @jax.jit
    def loss(weights):
        mine = adapter.replace(weights=weights)
        return models.target_logprobs(
            loaded.params, models.forward(loaded.params, loaded.config, x, mine), x, mine
        ).sum()

    for name, pair in jax.grad(loss)(adapter.weights).items():
        assert not np.any(pair.a[..., 2:]) and not np.any(pair.b[..., 2:, :]), name
        assert np.any(pair.a[..., :2]) and np.any(pair.b[..., :2, :]), name


def test_compiled_size_does_not_grow_with_layers(loaded):
    def lines(num_layers: int) -> int:
        config = replace(loaded.config, num_layers=num_layers)
        shapes = jax.tree.map(
            lambda parameter: jax.ShapeDtypeStruct(parameter.shape, jnp.float32), models.describe_params(config)
        )
        lowered = forward.lower(shapes, config, jax.ShapeDtypeStruct((1, 8), jnp.int32))
        return len(lowered.as_text().splitlines())

    assert lines(2) == lines(24)


def test_bfloat16_weights_keep_float32_results(loaded):
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), loaded.params)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
    adapter, x = loaded.adapter(1), tokens(2, 10)
    hidden, prefilled = prefill(low, loaded.config, x, adapter)
    assert hidden.dtype == jnp.float32 and prefilled.k.dtype == jnp.bfloat16
    expected = forward(rounded, loaded.config, x, adapter)
    error = jnp.abs(hidden - expected).max() / jnp.abs(expected).max()
    assert 0 < float(error) < 0.03  # activations are rounded to 8 bits of mantissa at each product, sums are not

    cache = kv_cache.allocate(2, 2, loaded.config.num_kv_heads, 12, loaded.config.head_dim, jnp.bfloat16)
    for row in range(2):
        cache = kv_cache.insert(cache, prefilled, jnp.int32(10), jnp.int32(row), jnp.int32(row))
    decoded, cache = decode_step(low, loaded.config, x[:, 9], jnp.array([9, 9]), cache, adapter)
    assert decoded.dtype == jnp.float32 and cache.k.dtype == jnp.bfloat16
    assert float(jnp.abs(decoded - expected[:, 9]).max() / jnp.abs(expected).max()) < 0.03
