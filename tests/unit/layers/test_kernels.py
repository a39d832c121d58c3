"""Attention kernels against the loops: packed rows, windows, sinks, and unsupported heads.

The kernels run in interpret mode on CPU. On an accelerator they are compiled (`make gpu`).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.attention import DENSE_LENGTH, causal_attention
from skyrl_tx.layers.kernels.registry import KERNELS as BY_PLATFORM
from skyrl_tx.layers.kernels.registry import SPLASH, TRITON, AttentionKernel, Heads, Kernels
from tests.support.fast_jit import fast_jit

KERNELS = [(platform, kernels.attention) for (platform, _), kernels in BY_PLATFORM.items()]
LENGTHS = 70, 5, 130, 64, 1, 27
NUM_TOKENS = sum(LENGTHS) + 13
"""Includes padding, which is one more sequence."""


def make_starts(*lengths: int) -> np.ndarray:
    """Return the start of the sequence for each position of a row of NUM_TOKENS."""
    starts = np.repeat(np.cumsum((0, *lengths[:-1])), lengths)
    return np.concatenate([starts, np.full(NUM_TOKENS - starts.size, starts.size)]).astype(np.int32)


START_BT = np.stack([make_starts(*LENGTHS), make_starts(100)])


def draw_inputs(key_dim: int, value_dim: int, seed: int = 0) -> list[np.ndarray]:
    """Return queries of four heads, and keys and values of two."""
    g = np.random.default_rng(seed)
    sizes = (4, key_dim), (2, key_dim), (2, value_dim)
    return [g.standard_normal((2, NUM_TOKENS, *size)).astype(np.float32) for size in sizes]


SINKS = np.array([0.3, -1.0, 2.0, 0.0], np.float32)


def attention(heads: Heads, kernel: AttentionKernel | None):
    """Return a function that computes attention over arrays."""
    platform = jax.default_backend()
    if kernel is not None and platform != "cpu" and (platform, kernel) not in KERNELS:
        pytest.skip(f"{kernel.name} is not for {platform}")
    attend = Kernels(kernel, interpret=platform == "cpu").get_attention_kernel(heads)
    assert (attend is None) == (kernel is None)
    sinks = SINKS if heads.has_sinks else None
    return lambda q, k, v, start: causal_attention(q, k, v, start, sinks, window=heads.window, kernel=attend)


@partial(fast_jit, static_argnames=("heads", "kernel"))
def values_and_gradients(x, start_BT, target, heads, kernel):
    """Return the output and the gradients of its product with a target."""
    out, backward = jax.vjp(lambda *x: attention(heads, kernel)(*x, start_BT), *x)
    return out, *backward(target)


@pytest.mark.parametrize(
    ("kernel", "heads"),
    [
        (SPLASH, Heads(64, 64)),
        (SPLASH, Heads(64, 64, window=40, has_sinks=True)),
        pytest.param(SPLASH, Heads(192, 128), marks=pytest.mark.slow),
        (TRITON, Heads(64, 64)),
        (TRITON, Heads(64, 64, window=40, has_sinks=True)),
        pytest.param(TRITON, Heads(96, 96), marks=pytest.mark.slow),
        pytest.param(TRITON, Heads(256, 256), marks=pytest.mark.slow),
        (TRITON, Heads(48, 32, window=40, has_sinks=True)),
        pytest.param(TRITON, Heads(192, 128), marks=pytest.mark.slow),
        pytest.param(TRITON, Heads(32, 80), marks=pytest.mark.slow),
    ],
)
def test_a_kernel_computes_packed_rows_as_the_loops_do(kernel, heads):
    x = draw_inputs(heads.key_dim, heads.value_dim)
    target = np.random.default_rng(1).standard_normal((2, NUM_TOKENS, 4, heads.value_dim)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        wanted = values_and_gradients(x, START_BT, target, heads, None)
        found = values_and_gradients(x, START_BT, target, heads, kernel)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 300])
def test_blocks_that_all_see_need_no_mask_and_blocks_that_none_sees_are_not_computed(window):
    """The row has multiple blocks on each side of a boundary.

    Keys before a start are set to NaN.
    """
    g, start_BT = np.random.default_rng(0), np.repeat([0, 150, 850], [150, 700, 150]).astype(np.int32)[None]
    q, k, v, target = (g.standard_normal((1, 1000, heads, 64)).astype(np.float32) for heads in (4, 2, 2, 4))
    heads = Heads(64, 64, window=window)
    wanted = values_and_gradients((q, k, v), start_BT, target, heads, None)
    found = values_and_gradients((q, k, v), start_BT, target, heads, TRITON)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    k[:, :128], v[:, :128] = np.nan, np.nan  # the first block of keys; queries from 256 on do not see it
    found = values_and_gradients((q, k, v), start_BT, target, heads, TRITON)
    np.testing.assert_allclose(found[0][:, 256:], wanted[0][:, 256:], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1][:, 256:], wanted[1][:, 256:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [SPLASH, TRITON])
def test_neither_rows_nor_sequences_change_a_bit_of_each_other(kernel):
    """A sequence has the same values and gradients next to any neighbours, in any arrangement."""
    heads, own = Heads(64, 64), slice(75, 205)  # the sequence of 130
    first, second = draw_inputs(64, 64), draw_inputs(64, 64, seed=1)
    target = np.random.default_rng(2).standard_normal((2, NUM_TOKENS, 4, 64)).astype(np.float32)
    others = [np.array(y) for y in second]
    for mine, theirs in zip(first, others, strict=True):
        theirs[0, own] = mine[0, own]
    other_target = np.array(target[::-1])
    other_target[0, own] = target[0, own]
    other_start = np.stack([make_starts(10, 65, 130, 2, 80), make_starts(*LENGTHS)])
    one = values_and_gradients(first, START_BT, target, heads, kernel)
    two = values_and_gradients(others, other_start, other_target, heads, kernel)

    for x, y in zip(one, two, strict=True):
        np.testing.assert_array_equal(x[0, own], y[0, own])
        assert np.any(x[0] != y[0])


@pytest.mark.parametrize("kernel", [SPLASH, TRITON])
def test_products_of_bfloat16_are_as_near_to_float32_as_those_of_the_loops(kernel):
    """The limit is twice the error of the loops.

    A kernel also rounds its output, and splash rounds its scaled queries.
    """
    heads = Heads(128, 128)
    x = [y.astype(jnp.bfloat16) for y in draw_inputs(128, 128)]
    target = np.random.default_rng(1).standard_normal((2, NUM_TOKENS, 4, 128)).astype(np.float32)
    exact = values_and_gradients([np.float32(y) for y in x], START_BT, target, heads, None)

    def distances(kernel: AttentionKernel | None) -> list[float]:
        found = values_and_gradients(x, START_BT, target, heads, kernel)
        return [float(np.linalg.norm(np.float32(a) - b) / np.linalg.norm(b)) for a, b in zip(found, exact, strict=True)]

    for ours, theirs in zip(distances(kernel), distances(None), strict=True):
        assert ours < max(2 * theirs, 2.5e-3) and theirs < 4e-3


def test_short_rows_are_computed_without_kernel():
    x = [y[:, :DENSE_LENGTH] for y in draw_inputs(8, 8)]
    found = attention(Heads(8, 8), SPLASH)(*x, START_BT[:, :DENSE_LENGTH])
    np.testing.assert_array_equal(found, attention(Heads(8, 8), None)(*x, START_BT[:, :DENSE_LENGTH]))


@pytest.mark.parametrize("kernel", [SPLASH, TRITON])
def test_a_row_may_be_one_block_and_one_sequence(kernel):
    x = [y[:, :100] for y in draw_inputs(16, 16)]
    for start_BT in (None, START_BT[:, :100]):
        found, wanted = (fast_jit(attention(Heads(16, 16), chosen))(*x, start_BT) for chosen in (kernel, None))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "reason"),
    [
        (Heads(128, 128), None),
        (Heads(256, 256), None),
        (Heads(512, 512), "heads of 512 dims"),
        (Heads(128, 128, window=128), None),
        (Heads(64, 64, has_sinks=True), None),
        (Heads(192, 128), None),
    ],
)
def test_what_the_kernel_of_gpus_lacks_is_computed_by_the_loops(heads, reason):
    assert TRITON.find_refusal(heads) == reason
    assert (Kernels(TRITON).get_attention_kernel(heads) is None) == (reason is not None)
    assert SPLASH.find_refusal(heads) is None


def test_there_is_no_kernel_for_cpu():
    assert {platform for platform, kernel in KERNELS if kernel} == {"gpu", "tpu"}
