"""A linear map with an adapter equals the plain formula, merged or separate, with its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.lora import AdaptedMap, ConcatenatedMap, LoraPair, RowAdapter, linear, multiply_groups
from tests.support.fast_jit import fast_jit

INPUTS, OUTPUTS, RANK = 24, 40, 3
SCALE = np.float32(0.7)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "is_merged", "platform"),
    [
        (8, "float32", False, "cpu"),
        (32, "float32", True, "cpu"),
        (32, "bfloat16", False, "cpu"),
        (32, "bfloat16", False, "cuda"),
    ],
)
def test_value_and_gradient_are_those_of_the_plain_formula(monkeypatch, num_rows, dtype, is_merged, platform):
    def choose_platform(*arguments, default, **others):
        return others.get(platform, default)(*arguments)

    monkeypatch.setattr(jax.lax, "platform_dependent", choose_platform)
    draw = np.random.default_rng(0)

    def draw_array(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    x, slope = draw_array(2, num_rows // 2, INPUTS), draw_array(2, num_rows // 2, OUTPUTS)
    weight, bias = draw_array(INPUTS, OUTPUTS).astype(jnp.dtype(dtype)), draw_array(OUTPUTS)
    pair = LoraPair(a=draw_array(INPUTS, RANK), b=draw_array(RANK, OUTPUTS))
    assert AdaptedMap.from_weight(weight, pair, SCALE, num_rows).is_merged == is_merged

    def ours(x: jax.Array, pair: LoraPair) -> jax.Array:
        return linear(x, jnp.asarray(weight), RowAdapter(pair=pair, scale=SCALE, may_concatenate=True), bias)

    def plain(x: jax.Array, pair: LoraPair) -> jax.Array:
        return x @ weight.astype(np.float32) + x @ pair.a @ pair.b * SCALE + bias

    @fast_jit
    def evaluate(x: jax.Array, pair: LoraPair):
        (found, back), (wanted, plain_back) = jax.vjp(ours, x, pair), jax.vjp(plain, x, pair)
        return (found, back(slope)), (wanted, plain_back(slope))

    assert ConcatenatedMap.is_faster(num_rows, weight) == (dtype == "bfloat16")
    found, wanted = evaluate(x, pair)
    tolerance = 1e-5 if dtype == "float32" else 0.02  # relative to the largest value; bfloat16 factors have 8 bits
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert own.dtype == jnp.float32
        np.testing.assert_allclose(own, other, rtol=0, atol=tolerance * float(np.abs(other).max()))


@pytest.mark.parametrize("num_rows", [2, 64])
def test_a_weight_that_is_stored_transposed_is_the_same_map(num_rows: int) -> None:
    draw = np.random.default_rng(0)
    weight, x, slope, a, b = (
        jnp.asarray(draw.normal(size=shape), jnp.float32)
        for shape in ((OUTPUTS, INPUTS), (num_rows, INPUTS), (num_rows, OUTPUTS), (INPUTS, RANK), (RANK, OUTPUTS))
    )

    @fast_jit
    def both() -> list[tuple[jax.Array, tuple[jax.Array, LoraPair]]]:
        pair = LoraPair(a=a, b=b)
        maps = [
            AdaptedMap.from_weight(weight.T, pair, SCALE, num_rows),
            AdaptedMap.from_weight(weight, pair, SCALE, num_rows, is_transposed=True),
        ]
        return [(adapted.apply(x), adapted.compute_gradient(x, slope)) for adapted in maps]

    wanted, found = both()
    jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5), found, wanted)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_what_leaves_a_product_is_rounded_to_the_type_of_its_weight(dtype) -> None:
    draw = np.random.default_rng(0)
    x_BTI, weight_IO = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((2, 3, 8), (8, 16)))
    a, b = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((8, 4), (4, 16)))

    def evaluate(scale: float) -> tuple[jax.Array, jax.Array]:
        adapter = RowAdapter(pair=LoraPair(a=a, b=b), scale=jnp.float32(scale))
        y, backward = jax.vjp(lambda x: linear(x, weight_IO.astype(dtype), adapter), x_BTI)
        return y, *backward(jnp.ones_like(y))

    (y, d_x), (_, d_x_of_map) = evaluate(0.5), evaluate(0.0)
    for array in (y, d_x_of_map, d_x - d_x_of_map):  # the gradients of two products are added up in float32
        assert array.dtype == jnp.float32
        is_rounded = bool((array == array.astype(jnp.bfloat16).astype(jnp.float32)).all())
        assert is_rounded == (dtype == jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("inputs", "outputs"), [(INPUTS, RANK), (RANK, OUTPUTS)])
def test_one_product_with_all_factors_is_that_of_each_row_with_its_own(dtype, inputs, outputs) -> None:
    draw = np.random.default_rng(0)
    x_MI = jnp.asarray(draw.normal(size=(5, inputs)), jnp.float32)
    factor_GIO = jnp.asarray(draw.normal(size=(3, inputs, outputs)), dtype)
    group_M = np.array([2, 0, 0, 2, 1])
    found = multiply_groups(x_MI, factor_GIO, group_M)
    by_row = multiply_groups(x_MI, factor_GIO[group_M])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, by_row, atol=1e-5)
    others = np.array([False, True, True, False, True])  # factors that only other rows read change nothing
    changed = multiply_groups(x_MI * np.where(others, 7, 1)[:, None], factor_GIO.at[:2].multiply(3), group_M)
    np.testing.assert_array_equal(changed[~others], found[~others])


def test_a_scale_of_nan_is_that_of_its_own_rows() -> None:
    draw = np.random.default_rng(0)
    a, b = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((2, 8, 4), (2, 4, 16)))
    x_MI, scale = jnp.asarray(draw.normal(size=(4, 8)), jnp.float32), jnp.array([0.5, jnp.nan])
    delta = RowAdapter(LoraPair(a=a, b=b), scale, np.array([0, 1, 1, 0])).compute_delta(x_MI, jnp.dtype(jnp.bfloat16))
    assert np.isnan(np.asarray(delta)).all(axis=1).tolist() == [False, True, True, False]
    assert np.isfinite(delta[np.array([0, 3])]).all()
