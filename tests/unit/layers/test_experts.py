"""Experts by a kernel that multiplies tiles, compared with products of XLA.

The kernel runs in interpret mode on CPU. On an accelerator it is compiled (`make gpu`).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.experts import (
    AddedProducts,
    Clamp,
    ExpertAdapters,
    ExpertWeights,
    Routing,
    choose_tile_size,
    get_pooled_expert_adapters,
    get_tile_shape,
)
from skyrl_tx.layers.kernels.registry import KERNELS, MOSAIC_EXPERTS, TRITON_EXPERTS, ExpertsKernel, Kernels
from skyrl_tx.layers.lora import LoraPair, RowSlots
from skyrl_tx.layers.moe import apply_mixture
from tests.support.fast_jit import fast_jit
from tests.unit.layers.test_moe import D, E, make_pool, one_adapter

ROUTING = Routing(num_experts=E, num_chosen=2, renormalizes=True)
BOTH = pytest.mark.parametrize("kernel", [TRITON_EXPERTS, MOSAIC_EXPERTS], ids=["triton", "mosaic"])


def make_kernels(kernel: ExpertsKernel) -> Kernels:
    platform = jax.default_backend()
    if platform != "cpu" and (platform, kernel) not in [(name, known.experts) for (name, _), known in KERNELS.items()]:
        pytest.skip(f"{kernel.name} is not for {platform}")
    return Kernels(experts=kernel, interpret=platform == "cpu")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@BOTH
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "rank"),
    [
        *((32, 176, 40, 4), (16, 12, 8, 3)),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((16, 64, 128, 8), (128, 80, 200, 16))),
    ],
)
def test_each_tile_is_multiplied_with_its_matrices(
    rows: int, inputs: int, outputs: int, rank: int, transposed: bool, kernel: ExpertsKernel
):
    """Dims need not fill blocks.

    Rows after the last used tile are zero, even if their input is NaN.
    """
    x, narrow = normal(0, 5, rows, inputs), normal(1, 5, rows, rank)
    matrices, others = normal(2, 3, inputs, outputs), normal(3, 7, rank, outputs)
    index, own = np.array([2, 2, 0, 1, 1], np.int32), np.array([6, 0, 0, 3, 5], np.int32)
    wanted = np.einsum("wpi,wio->wpo", x, matrices[index]) + np.einsum("wpr,wro->wpo", narrow, others[own])
    if transposed:
        matrices, others = (np.swapaxes(array, 1, 2) for array in (matrices, others))
    x[4:] = np.nan
    multiply = make_kernels(kernel).get_tile_kernel()
    assert multiply is not None

    with jax.default_matmul_precision("highest"):
        added = AddedProducts(*map(jnp.asarray, (narrow, others, own)))
        found = multiply(x, jnp.asarray(matrices), jnp.asarray(index), jnp.int32(4), added, transposed=transposed)
        alone = multiply(x, jnp.asarray(matrices), jnp.asarray(index), jnp.int32(4), transposed=transposed)

    np.testing.assert_allclose(found[:4], wanted[:4], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(found[4:], 0)
    assert found.dtype == jnp.float32 and np.abs(found[:4] - alone[:4]).max() > 0.1


def experts(*, is_gated: bool = True, has_bias: bool = False) -> ExpertWeights:
    gate, up, down = (normal(i, E, *size) for i, size in enumerate(((D, 12), (D, 12), (12, D))))
    if not has_bias:
        return ExpertWeights(gate if is_gated else None, up, down)
    biases = normal(30, E, 12), normal(31, E, 12), normal(32, E, D)
    return ExpertWeights(gate, up, down, *biases, clamp=Clamp(limit=1.5, slope=1.702))


@partial(fast_jit, static_argnames="kernels")
def value_and_gradient(x, router, weights, adapters, slope, kernels):
    """Return the mixture and, with adapters, its gradient by tokens, router and factors."""
    if adapters is None:
        return apply_mixture(x, router, weights, None, ROUTING, kernels=kernels)[0]

    def compute(x: jax.Array, router: jax.Array, pairs: dict[str, LoraPair]) -> jax.Array:
        return apply_mixture(x, router, weights, adapters.replace(pairs=pairs), ROUTING, kernels=kernels)[0]

    y, pull = jax.vjp(compute, x, router, dict(adapters.pairs))
    return y, pull(slope)


@BOTH
@pytest.mark.parametrize(
    ("weights", "form", "num_tokens"),
    [
        (experts(), None, 300),
        (experts(), "own", 300),
        (experts(), "shared", 300),
        (experts(), "shared", 1),
        (experts(is_gated=False), "shared", 300),
        (experts(has_bias=True), "shared", 300),
    ],
    ids=["base", "own", "shared", "one-token", "squared", "biased"],
)
def test_values_and_gradients_are_those_of_xla(
    weights: ExpertWeights, form: str | None, num_tokens: int, kernel: ExpertsKernel
):
    x, router, slope = normal(3, num_tokens, D), normal(9, E, D), normal(4, num_tokens, D)
    adapters: ExpertAdapters | None = None
    if form is not None:
        adapters = one_adapter(20, shares=form == "shared")
        adapters = adapters.replace(pairs={name: adapters.pairs[name] for name in weights.maps})
    with jax.default_matmul_precision("highest"):
        wanted, found = (
            value_and_gradient(x, router, weights, adapters, slope, kernels)
            for kernels in (Kernels(), make_kernels(kernel))
        )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@BOTH
@pytest.mark.parametrize("shares", [False, True])
def test_rows_use_the_adapters_of_their_slots(shares: bool, kernel: ExpertsKernel):
    """No bit of a row depends on the adapters in other slots."""
    x, router, weights = normal(3, 8, D), normal(9, E, D), experts()
    slots, layer = RowSlots(slot_G=np.array([0, 1], np.int32)), jnp.int32(1)
    pools = [make_pool([one_adapter(20, shares=shares), one_adapter(seed, shares=shares)], 1) for seed in (40, 60)]

    @partial(fast_jit, static_argnames="kernels")
    def run(pool, kernels):
        own = get_pooled_expert_adapters(pool, "expert_", slots, layer)
        return apply_mixture(x, router, weights, own, ROUTING, kernels=kernels)[0]

    with jax.default_matmul_precision("highest"):
        found, other = (run(pool, make_kernels(kernel)) for pool in pools)
        wanted = run(pools[0], Kernels())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_array_equal(found[:4], other[:4])
    assert np.abs(found[4:] - other[4:]).max() > 0.1


@BOTH
def test_no_token_changes_a_bit_of_another(kernel: ExpertsKernel):
    """Other tokens move a token to another tile, or to another position in its tile."""
    x, others, router, weights = normal(3, 300, D), normal(5, 300, D), normal(9, E, D), experts()
    others[::7] = x[::7]
    run = fast_jit(
        lambda x: apply_mixture(x, router, weights, one_adapter(20), ROUTING, kernels=make_kernels(kernel))[0]
    )
    one, two = run(x), run(others)
    np.testing.assert_array_equal(one[::7], two[::7])
    assert np.all(np.any(np.asarray(one)[1:7] != np.asarray(two)[1:7], axis=1))


@BOTH
def test_products_of_bfloat16_are_as_near_to_float32_as_those_of_xla(kernel: ExpertsKernel):
    x, router, slope, adapters = normal(3, 300, D), normal(9, E, D), normal(4, 300, D), one_adapter(20, shares=True)
    exact = value_and_gradient(x, router, experts(), adapters, slope, Kernels())
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), experts())

    def distances(kernels: Kernels) -> list[float]:
        found = value_and_gradient(x, router, rounded, adapters, slope, kernels)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        return [float(np.linalg.norm(np.float32(a) - b) / np.linalg.norm(b)) for a, b in pairs]

    for ours, theirs in zip(distances(make_kernels(kernel)), distances(Kernels()), strict=True):
        assert ours < 1.5 * theirs + 1e-3 and theirs < 0.02


def test_most_experts_of_few_visits_have_one_tile():
    """The matrices of 128 experts are read once for 256 tokens with eight experts each."""
    assert (
        choose_tile_size(256 * 8, 128, 16) == 32
        and choose_tile_size(16, 128, 16) == 16
        and choose_tile_size(65536, 128, 16) == 128
    )
    num_tiles, places = get_tile_shape(256 * 8, 128, 16)
    assert places == 32 and num_tiles == (256 * 8 + 128 * 31) // 32


def test_there_is_no_kernel_for_cpu():
    assert {platform for (platform, _), kernels in KERNELS.items() if kernels.experts} == {"gpu", "tpu"}
