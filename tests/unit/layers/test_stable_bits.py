"""A sum and its norm have the same bits, whether or not XLA must keep the sum."""

import jax
import numpy as np
import pytest

from skyrl_tx.layers.parameter import rms_norm
from skyrl_tx.layers.stable_bits import add_unfused


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.standard_normal(shape, np.float32) for shape in shapes]


def residual(x_BTD: jax.Array, routed: jax.Array, update: jax.Array, shared: jax.Array) -> jax.Array:
    return x_BTD + add_unfused(routed + update, shared).reshape(x_BTD.shape)


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return rms_norm(x, weight, 1e-6)


@pytest.mark.parametrize("num_tokens", [32, 48, 64])
def test_a_norm_of_a_sum_of_four_has_the_bits_of_a_norm_of_an_array(num_tokens):
    """Norms of plain sums were seen to differ at these sizes."""
    size = 32
    *terms, weight = arrays((1, num_tokens, size), *[(num_tokens, size)] * 3, (size,))
    x, routed, update, shared = terms
    summed = jax.jit(residual)(*terms)
    np.testing.assert_array_equal(summed, x + ((routed + update) + shared))
    fused = jax.jit(lambda weight, *terms: norm(residual(*terms), weight))(weight, *terms)
    np.testing.assert_array_equal(fused, jax.jit(norm)(summed, weight))


@pytest.mark.parametrize("num_tokens", [16, 64])
def test_a_sum_with_a_norm_has_the_same_bits_with_and_without_a_gradient(num_tokens):
    """Norms of plain sums were seen to differ at these sizes."""
    x, y, update = arrays(*[(1, num_tokens, 32)] * 3)
    output_weight, sum_weight = arrays(*[(32,)] * 2)

    def compute_norm(*terms: jax.Array) -> jax.Array:
        x, y, update = terms
        return norm(add_unfused(x, norm(y + update, output_weight)), sum_weight)

    def with_gradient(*terms: jax.Array):
        found, backward = jax.vjp(compute_norm, *terms)
        return found, backward(found)

    expected, _ = jax.jit(with_gradient)(x, y, update)
    np.testing.assert_array_equal(jax.jit(compute_norm)(x, y, update), expected)


def test_the_gradient_is_that_of_a_sum():
    x, y, factor = arrays(*[(3, 5)] * 3)
    found = jax.grad(lambda x, y: (add_unfused(x, y) * factor).sum(), argnums=(0, 1))(x, y)
    for gradient in found:
        np.testing.assert_array_equal(gradient, factor)
