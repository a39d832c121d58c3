"""Whole rows, slots of adapters and token-by-token decoding give the same numbers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.kernel_choice import pad_cached_dims
from skyrl_tx.layers import cache_state
from skyrl_tx.layers.attention import DENSE_LENGTH
from skyrl_tx.layers.kernels.registry import MOSAIC_PAGES, NO_KERNELS, TRITON_PAGES, Kernels
from skyrl_tx.layers.lora import RowSlots
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.layers.sharding import UNSHARDED
from skyrl_tx.models.config import Group, Stack, group_blocks, split_stacks
from tests.support.fast_jit import fast_jit
from tests.support.paged_arrays import get_positions, make_table
from tests.unit.models.conftest import LATENTS, read_back

# Tests share the shapes of these programs: three rows of 40 tokens, three adapters, and two pages
# per row.
LENGTH, ROWS, PAGES = 40, 3, 2
PROMPTS = make_table(ROWS, PAGES)
SAMPLES = jax.tree.map(lambda leaf: leaf + leaf.max(), PROMPTS)
"""The rows of the cache: three prompts, followed by three samples."""
forward = fast_jit(models.forward, static_argnames=("config", "remat"))
extend = fast_jit(models.prefill, static_argnames="config")
target_logprobs = fast_jit(models.target_logprobs)
copy = fast_jit(cache_state.copy_pages)


@partial(fast_jit, static_argnames=("config", "by_layer", "is_separate"))
def decode_step(
    params,
    config,
    token,
    position,
    cache,
    adapter=None,
    rows=None,
    *,
    by_layer: bool = False,
    is_separate: bool = False,
):
    """Decode one step of the samples from stacks, copies by layer, or separate layers."""
    if by_layer:
        params = models.unstack_params(params, config)
        opened = cache_state.open_decode_slice_by_layer(cache, SAMPLES, position, read_length=128, max_tokens=4)
    else:
        params = split_stacks(params, cache_state.unstack_layers) if is_separate else params
        opened = cache_state.open_decode_slice(cache, SAMPLES, position, max_tokens=4, has_separate_layers=is_separate)
    hidden, ended = models.decode_step(params, config, token, opened, adapter, rows)
    return hidden, cache_state.close_decode_slice(cache, ended, SAMPLES)


def tokens(rows: int = 3, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, length), dtype=np.int32)


def make_unwritten_cache(params, config) -> cache_state.Cache:
    """Return a cache of NaN, with zeros in the empty page and in the states of prompts."""

    def nothing(leaf, num_empty: int):
        return np.concatenate([np.zeros_like(leaf[:, :num_empty]), np.full_like(leaf[:, num_empty:], np.nan)], axis=1)

    cache = models.make_empty_cache(jax.tree.map(jnp.asarray, params), config, 1 + 2 * ROWS * PAGES, 1 + 2 * ROWS)
    return tuple(
        cache_state.LayerCache(
            jax.tree.map(partial(nothing, num_empty=1), layer.positions),
            jax.tree.map(partial(nothing, num_empty=1 + ROWS), layer.fixed),
        )
        for layer in cache
    )


def prefill(params, config, x, adapter=None, rows=None):
    """Run whole prompts in one chunk of 32, into pages that are cleared as in the backend."""
    chunk, size = np.pad(x, ((0, 0), (0, 32 - x.shape[1]))), np.int32(x.shape[1])
    pages = np.asarray(PROMPTS.page_BM).reshape(-1)
    cache = copy_rows(make_unwritten_cache(params, config), [(0, page) for page in pages], [])
    return extend(params, config, chunk, np.int32(0), cache, PROMPTS, adapter, rows, size=size)


def copy_rows(cache: cache_state.Cache, *pairs) -> cache_state.Cache:
    """Return the cache after copying pages and states."""
    page_N2, state_N2 = (
        np.pad(np.array(copies, np.int32).reshape(-1, 2), ((0, 8 - len(copies)), (0, 0))) for copies in pairs
    )
    return copy(cache, page_N2[None], np.array([len(pairs[0])]), state_N2[None], np.array([len(pairs[1])]))


def start_samples(cache: cache_state.Cache, prompts: Sequence[int]) -> cache_state.Cache:
    """Return the cache with a sample after each of these prompts, which are shorter than a page."""
    first = [(PROMPTS.page_BM[prompt, 0], SAMPLES.page_BM[row, 0]) for row, prompt in enumerate(prompts)]
    empty = [(0, page) for page in SAMPLES.page_BM[:, 1]]
    states = [(PROMPTS.state_B[prompt], SAMPLES.state_B[row]) for row, prompt in enumerate(prompts)]
    return copy_rows(cache, [*first, *empty], states)


def stack(*adapters):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *adapters)


def make_slots(model):
    """Return three adapters, where the first changes nothing, and the slots of three rows."""
    first, second = model.adapter(1), model.adapter(2)
    return stack(jax.tree.map(np.zeros_like, first), first, second), RowSlots(np.array([2, 0, 1]))


def evaluate(*arguments, **named) -> np.ndarray:
    return np.asarray(forward(*arguments, **named))


def test_slots_equal_one_adapter_for_all_rows(loaded):
    x = tokens()
    mixed = evaluate(loaded.params, loaded.config, x, *make_slots(loaded))
    base = evaluate(loaded.params, loaded.config, x)
    np.testing.assert_allclose(mixed[0], evaluate(loaded.params, loaded.config, x, loaded.adapter(2))[0], atol=1e-5)
    np.testing.assert_allclose(mixed[1], base[1], atol=1e-5)
    np.testing.assert_allclose(mixed[2], evaluate(loaded.params, loaded.config, x, loaded.adapter(1))[2], atol=1e-5)
    assert np.abs(mixed[0] - base[0]).max() > 1e-2  # the adapters act


def test_nan_in_one_slot_does_not_spread(loaded):
    good = loaded.adapter(1)
    bad = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), good)
    slots, rows = stack(good, bad, bad), RowSlots(np.array([0, 1, 2]))
    x = tokens()
    hidden = forward(loaded.params, loaded.config, x, slots, rows)
    logprobs = np.asarray(target_logprobs(loaded.params, hidden, x, slots, rows))
    hidden = np.asarray(hidden)
    assert np.isfinite(hidden[0]).all() and np.isfinite(logprobs[0]).all()
    assert np.isnan(hidden[1:]).all()


def test_padding_at_the_right_changes_nothing(loaded):
    x = tokens(length=9)
    padded = np.pad(x, ((0, 0), (0, LENGTH - 9)))
    np.testing.assert_allclose(
        evaluate(loaded.params, loaded.config, padded)[:, :9], evaluate(loaded.params, loaded.config, x), atol=1e-5
    )


def test_packed_sequences_equal_separate_rows(each_family):
    x, adapter = tokens(), each_family.adapter(1)
    slots, _ = make_slots(each_family)
    alone = evaluate(each_family.params, each_family.config, x, slots, RowSlots(np.array([1, 1, 1])))
    lengths = [40, 7, 25]
    row = np.concatenate([sequence[:length] for sequence, length in zip(x, lengths, strict=True)])[None]
    starts = np.cumsum([0, *lengths[:-1]])
    start_BT = np.repeat(starts, lengths).astype(np.int32)[None]
    together = evaluate(each_family.params, each_family.config, row, adapter, start_BT=start_BT)[0]
    for sequence, start, length in zip(alone, starts, lengths, strict=True):
        np.testing.assert_allclose(together[start : start + length], sequence[:length], atol=2e-5)


@pytest.mark.slow
def test_long_packed_sequences_equal_separate_rows(unlike):
    """Sequences are longer and shorter than attention blocks and delta-rule chunks.

    One has a single token.
    """
    lengths = [70, 5, 130, 64, 1, 27]
    x, adapter = tokens(len(lengths), max(lengths)), unlike.adapter(1)
    alone = evaluate(unlike.params, unlike.config, x, adapter)
    row = np.concatenate([sequence[:length] for sequence, length in zip(x, lengths, strict=True)])[None]
    starts = np.cumsum([0, *lengths[:-1]])
    start_BT = np.repeat(starts, lengths).astype(np.int32)[None]
    together = evaluate(unlike.params, unlike.config, row, adapter, start_BT=start_BT)[0]
    for sequence, start, length in zip(alone, starts, lengths, strict=True):
        np.testing.assert_allclose(together[start : start + length], sequence[:length], atol=1e-5)


@pytest.mark.parametrize(
    ("by_layer", "is_separate", "in_groups"), [(False, False, True), (False, True, True), (True, False, False)]
)
def test_decoding_equals_the_full_forward(each_family, by_layer, is_separate, in_groups):
    """With `in_groups`, all rows are multiplied with all adapters in use."""
    config = each_family.config
    slots, rows = make_slots(each_family)
    x = tokens()
    whole = evaluate(each_family.params, config, x, slots, rows)

    _, prefilled = prefill(each_family.params, config, x[:, :6], slots, rows)
    prompts = np.array([1, 0, 0])
    cache = start_samples(prefilled, prompts)
    in_use = np.array([2, 0, 1, 0])
    group_M = np.array([in_use.tolist().index(slot) for slot in rows.slot_G[prompts]])
    sample_slots = RowSlots(in_use, group_M) if in_groups else RowSlots(rows.slot_G[prompts])

    for position in range(6, 14):
        hidden, cache = decode_step(
            each_family.params,
            config,
            x[prompts, position],
            np.full(3, position),
            cache,
            slots,
            sample_slots,
            by_layer=by_layer,
            is_separate=is_separate,
        )

        np.testing.assert_allclose(hidden, whole[prompts, position], atol=1e-5)


@pytest.mark.parametrize("chunks", [(20, 20), (16, 3, 21), (1, 32, 7)])
def test_chunked_prefill_equals_the_full_forward(each_family, chunks):
    config = each_family.config
    slots, rows = make_slots(each_family)
    x = tokens()
    assert sum(chunks) == LENGTH
    whole = evaluate(each_family.params, config, x, slots, rows)
    past = make_unwritten_cache(each_family.params, config)
    start = 0
    for size in chunks:
        chunk = np.pad(x[:, start : start + size], ((0, 0), (0, 32 - size)))
        at = np.int32(start)
        hidden, past = extend(each_family.params, config, chunk, at, past, PROMPTS, slots, rows, size=np.int32(size))
        np.testing.assert_allclose(np.asarray(hidden)[:, :size], whole[:, start : start + size], atol=1e-5)
        start += size


@pytest.mark.parametrize("kernels", [NO_KERNELS, Kernels(pages=TRITON_PAGES, interpret=True)], ids=["loop", "kernel"])
def test_samples_decode_at_separate_positions(loaded, kernels):
    config = loaded.config
    x = tokens()
    whole = evaluate(loaded.params, config, x)
    heads = [mixer.heads for mixer in config.mixers]
    assert all((kernels.get_past_kernel(spec, UNSHARDED) is None) == (kernels is NO_KERNELS) for spec in heads)
    _, prefilled = prefill(loaded.params, config, x[:, :10])  # positions after a sample's position must not be read
    cache = start_samples(prefilled, range(3))
    rows, positions = np.arange(3), np.array([3, 7, 9])
    params = replace(loaded.params, kernels=kernels)
    hidden, cache = decode_step(params, config, x[rows, positions], positions, cache)
    np.testing.assert_allclose(hidden, whole[rows, positions], atol=1e-5)


@pytest.mark.parametrize("kernels", [NO_KERNELS, Kernels(pages=MOSAIC_PAGES, interpret=True)], ids=["loop", "kernel"])
def test_heads_of_few_dims_have_more_in_the_cache_of_a_tpu(loaded, kernels):
    """The added dims are zeros. They change nothing, and the kernel can read them."""
    config, x = pad_cached_dims(loaded.config, "tpu"), tokens()
    assert pad_cached_dims(loaded.config, "gpu") is loaded.config
    assert all(mixer.heads.key_dim < 128 and mixer.cache_heads.key_dim == 128 for mixer in config.mixers)
    whole = evaluate(loaded.params, loaded.config, x)
    _, prefilled = prefill(loaded.params, config, x[:, :10])
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(prefilled)} == {128}
    cache = start_samples(prefilled, range(3))
    rows, positions = np.arange(3), np.array([3, 7, 9])
    params = replace(loaded.params, kernels=kernels)
    hidden, cache = decode_step(params, config, x[rows, positions], positions, cache)
    np.testing.assert_allclose(hidden, whole[rows, positions], atol=1e-5)


def test_latents_have_zeros_after_them_in_the_cache_of_a_tpu(tmp_path):
    loaded = read_back(tmp_path, LATENTS)
    config, x = pad_cached_dims(loaded.config, "tpu"), tokens()
    whole = evaluate(loaded.params, loaded.config, x)
    _, prefilled = prefill(loaded.params, config, x[:, :10])
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(prefilled)} == {128}
    rows, positions = np.arange(3), np.array([3, 7, 9])
    hidden, _ = decode_step(loaded.params, config, x[rows, positions], positions, start_samples(prefilled, range(3)))
    np.testing.assert_allclose(hidden, whole[rows, positions], atol=1e-5)


LONG = DENSE_LENGTH + 6  # long enough for blocked attention, which marks its saved results in its own derivative rule


@partial(fast_jit, static_argnames=("config", "policy"))
def adapter_gradient(params, config, adapter, x, rows=None, *, policy=RematPolicy.NONE):
    """Return the gradient of the sum of all log-probabilities by the adapter's weights."""

    def total(weights):
        mine = adapter.replace(weights=weights)
        hidden = models.forward(params, config, x, mine, rows, remat=policy)
        return models.target_logprobs(params, hidden, x, mine, rows).sum()

    return jax.grad(total)(adapter.weights)


@pytest.mark.parametrize(
    ("slotted", "length", "policies"),
    [
        (True, LONG, [RematPolicy.SAVE_MATMULS]),
        pytest.param(True, LONG, [RematPolicy.FULL], marks=pytest.mark.slow),
        pytest.param(True, 8, [RematPolicy.SAVE_MATMULS, RematPolicy.FULL], marks=pytest.mark.slow),
        pytest.param(False, 8, [RematPolicy.SAVE_MATMULS, RematPolicy.FULL], marks=pytest.mark.slow),
    ],
)
def test_remat_policy_does_not_change_the_gradient(loaded, slotted, length, policies):
    adapter, rows = loaded.adapter(1), RowSlots(np.array([0, 0])) if slotted else None
    if slotted:
        adapter = stack(adapter)
    x = tokens(2, length)
    plain = adapter_gradient(loaded.params, loaded.config, adapter, x, rows)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(plain))
    for policy in policies:
        again = adapter_gradient(loaded.params, loaded.config, adapter, x, rows, policy=policy)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, again)


def test_offloaded_inputs_of_layers_give_the_same_bits(loaded):
    adapter, x = loaded.adapter(1), tokens(2, 8)
    kept, offloaded = (
        adapter_gradient(loaded.params, loaded.config, adapter, x, policy=policy)
        for policy in (RematPolicy.FULL, RematPolicy.OFFLOAD)
    )
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(kept))
    jax.tree.map(np.testing.assert_array_equal, offloaded, kept)


def test_padded_rank_is_a_fixpoint(loaded):
    adapter = loaded.adapter(1, rank=2, max_rank=4)
    gradient = adapter_gradient(
        loaded.params, loaded.config, stack(adapter), tokens(2, LONG), RowSlots(np.array([0, 0]))
    )
    for name, pair in jax.tree.map(np.asarray, gradient).items():
        assert not np.any(pair.a[..., 2:]) and not np.any(pair.b[..., 2:, :]), name
        assert np.any(pair.a[..., :2]) and np.any(pair.b[..., :2, :]), name


def test_compiled_size_does_not_grow_with_layers(loaded):
    def lines(num_layers: int) -> int:
        config = replace(loaded.config, groups=group_blocks(loaded.config.blocks[:1] * num_layers))
        shapes = jax.tree.map(
            lambda parameter: jax.ShapeDtypeStruct(parameter.shape, jnp.float32), models.describe_params(config)
        )
        lowered = forward.lower(shapes, config, jax.ShapeDtypeStruct((1, 8), jnp.int32))
        return len(lowered.as_text().splitlines())

    assert lines(2) == lines(24)


def test_separate_layers_are_lowered_once(loaded):
    """36 layers of Qwen3-4B took ten times as long to trace and lower when each layer was lowered."""

    def count_products(num_layers: int) -> int:
        config = replace(loaded.config, groups=group_blocks(loaded.config.blocks[:1] * num_layers))
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        params = jax.tree.map(
            lambda parameter: jax.ShapeDtypeStruct(parameter.shape, jnp.float32, sharding=sharding),
            models.describe_params(config),
        )
        cache = models.describe_cache(params, config, 1 + 2 * ROWS * PAGES, 1 + 2 * ROWS)
        token, position = (jax.ShapeDtypeStruct((ROWS,), jnp.int32) for _ in range(2))
        lowered = decode_step.lower(params, config, token, position, cache, is_separate=True)
        return lowered.as_text().count("stablehlo.dot_general")

    assert count_products(2) == count_products(6) > 0


def test_bfloat16_weights_keep_float32_results(loaded):
    low = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), loaded.params)
    rounded = jax.tree.map(lambda leaf: leaf.astype(np.float32), low)
    adapter, x = loaded.adapter(1), tokens()
    hidden, prefilled = prefill(low, loaded.config, x[:, :10], adapter)
    assert hidden.dtype == jnp.float32 and {leaf.dtype for leaf in jax.tree.leaves(prefilled)} == {
        jnp.dtype(jnp.bfloat16)
    }
    expected = evaluate(rounded, loaded.config, x, adapter)[:, :10]
    error = np.abs(hidden[:, :10] - expected).max() / np.abs(expected).max()
    assert 0 < error < 0.03  # activations are rounded to 8 bits of mantissa at each product, sums are not

    cache = start_samples(prefilled, range(3))
    decoded, cache = decode_step(low, loaded.config, x[:, 9], np.full(3, 9), cache, adapter)
    assert decoded.dtype == jnp.float32 and cache[0].positions.k.dtype == jnp.bfloat16
    assert np.abs(decoded - expected[:, 9]).max() / np.abs(expected).max() < 0.03


def test_embeddings_and_positions_may_be_given(loaded):
    params, config, x = loaded.params, loaded.config, tokens()
    embed = fast_jit(models.embed, static_argnames="config")
    embedded, start = np.asarray(embed(params, config, x)), np.zeros(x.shape, np.int32)
    start[:, 15:] = 15
    whole = evaluate(params, config, x, start_BT=start)
    np.testing.assert_array_equal(evaluate(params, config, embedded, start_BT=start), whole)
    later = np.arange(LENGTH) - start + 7  # rotations are relative, so that a constant changes nothing
    np.testing.assert_allclose(evaluate(params, config, x, start_BT=start, position_BT=later), whole, atol=1e-5)
    assert np.abs(evaluate(params, config, x, start_BT=start, position_BT=2 * later) - whole).max() > 1e-2

    hidden, past = extend(params, config, embedded[:, :32], np.int32(0), make_unwritten_cache(params, config), PROMPTS)
    expected, same = extend(params, config, x[:, :32], np.int32(0), make_unwritten_cache(params, config), PROMPTS)
    np.testing.assert_array_equal(hidden, expected)
    jax.tree.map(np.testing.assert_array_equal, past, same)


@pytest.mark.parametrize(("hidden_size", "factor"), [(32, 5.65625), (3072, 55.5)])
def test_scaled_embeddings_have_a_factor_in_the_type_of_the_weights(loaded, hidden_size, factor):
    config = replace(loaded.config, hidden_size=hidden_size, scales_embeddings=True)
    plain, x = loaded.params.embed, tokens()
    for dtype, expected in ((jnp.float32, np.float32(hidden_size) ** np.float32(0.5)), (jnp.bfloat16, factor)):
        table = plain.astype(dtype)
        found = models.embed(loaded.params.replace(embed=table), config, x)
        np.testing.assert_array_equal(found, table[x].astype(jnp.float32) * expected)


def split_groups(params, config):
    """Return the same model with each layer in its own group."""
    found = {
        layer: (stack.block, {name: leaf[place : place + 1] for name, leaf in own.items()})
        for stack, own in zip(config.stacks, params.layers, strict=True)
        for place, layer in enumerate(stack.layers)
    }
    layers = [found[layer] for layer in range(config.num_layers)]
    groups = tuple(Group((Stack(block, (layer,)),)) for layer, (block, _) in enumerate(layers))
    return replace(params, layers=tuple(own for _, own in layers)), replace(config, groups=groups)


def sort_by_layer(cache, config) -> list:
    """Return the positions of each layer of the prompts."""
    found = {
        layer: jax.tree.map(lambda leaf, place=place: leaf[place], positions)
        for stack, positions in zip(config.stacks, get_positions(cache, PROMPTS), strict=True)
        for place, layer in enumerate(stack.layers)
    }
    return [found[layer] for layer in range(config.num_layers)]


def test_a_cycle_of_unlike_layers_equals_its_layers_one_by_one(alternating):
    params, config = alternating.params, alternating.config
    (group,) = config.groups
    assert len(group.stacks) == 2 and group.num_repeats == 2

    apart = split_groups(params, config)
    adapter, x = alternating.adapter(1), tokens()
    slots, rows = make_slots(alternating)
    close = partial(np.testing.assert_allclose, atol=1e-5)

    close(evaluate(params, config, x, adapter), evaluate(*apart, x, adapter))
    close(evaluate(params, config, x, slots, rows), evaluate(*apart, x, slots, rows))

    gradients = [adapter_gradient(*model, adapter, tokens(2, 8)) for model in ((params, config), apart)]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *gradients)

    (hidden, past), (expected, other) = (prefill(*model, x[:, :20], slots, rows) for model in ((params, config), apart))
    close(hidden, expected)

    jax.tree.map(
        lambda ours, theirs: close(ours[..., :20, :], theirs[..., :20, :]),
        sort_by_layer(past, config),
        sort_by_layer(other, apart[1]),
    )
