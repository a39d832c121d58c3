"""A linear map with an adapter: merged or apart, forwards and backwards, it is the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.lora import AdaptedMap, LoraPair, RowAdapter, linear
from tests.support.fast_jit import fast_jit

INPUTS, OUTPUTS, RANK = 24, 40, 3
SCALE = np.float32(0.7)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "is_merged"), [(8, "float32", False), (32, "float32", True), (32, "bfloat16", False)]
)
def test_value_and_gradient_are_those_of_the_plain_formula(num_rows, dtype, is_merged):
    draw = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    x, slope = drawn(2, num_rows // 2, INPUTS), drawn(2, num_rows // 2, OUTPUTS)
    weight, bias = drawn(INPUTS, OUTPUTS).astype(jnp.dtype(dtype)), drawn(OUTPUTS)
    pair = LoraPair(a=drawn(INPUTS, RANK), b=drawn(RANK, OUTPUTS))
    assert AdaptedMap.of(weight, pair, SCALE, num_rows).is_merged == is_merged

    def ours(x: jax.Array, pair: LoraPair) -> jax.Array:
        return linear(x, jnp.asarray(weight), RowAdapter(pair=pair, scale=SCALE), bias)

    def plain(x: jax.Array, pair: LoraPair) -> jax.Array:
        return x @ weight.astype(np.float32) + x @ pair.a @ pair.b * SCALE + bias

    @fast_jit
    def evaluate(x: jax.Array, pair: LoraPair):
        (found, back), (wanted, plain_back) = jax.vjp(ours, x, pair), jax.vjp(plain, x, pair)
        return (found, back(slope)), (wanted, plain_back(slope))

    found, wanted = evaluate(x, pair)
    tolerance = 1e-5 if dtype == "float32" else 0.02  # of the largest: factors have 8 bits, sums have 24
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert own.dtype == jnp.float32
        np.testing.assert_allclose(own, other, rtol=0, atol=tolerance * float(np.abs(other).max()))
