"""The kernel for norm and rotation of heads against plain JAX, and where it is used.

The kernel runs in interpret mode on CPU. On a GPU it is compiled (`make gpu`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.kernels.registry import TRITON, Kernels
from skyrl_tx.layers.parameter import rms_norm
from skyrl_tx.layers.rope import Rope, rotate
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.base import Layer, LayerAdapters, LayerContext
from tests.support.fast_jit import fast_jit

EPSILON = 1e-3


def kernel(head_dim: int):
    platform = jax.default_backend()
    if platform not in ("cpu", "gpu"):
        pytest.skip(f"the kernel is not for {platform}")
    found = Kernels(TRITON, interpret=platform == "cpu").get_rotation_kernel(head_dim, head_dim, Layout())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("leading", "num_heads", "head_dim"), [((2, 24), 6, 64), ((7,), 8, 128), ((3, 1), 5, 32), ((2, 128), 1, 256)]
)
def test_the_kernel_has_values_and_gradient_of_plain_jax(
    leading: tuple[int, ...], num_heads: int, head_dim: int
) -> None:
    draw, fused = np.random.default_rng(0), kernel(head_dim)
    x, target = (draw.standard_normal((*leading, num_heads, head_dim)).astype(np.float32) for _ in range(2))
    weight = draw.normal(1, 0.3, head_dim).astype(np.float32)
    angle = draw.uniform(0, 6, (*leading, head_dim // 2)).astype(np.float32)
    angles = np.cos(angle), np.sin(angle)

    def plain(x: jax.Array) -> jax.Array:
        return rotate(rms_norm(x, weight, EPSILON), *angles)

    def results(function, x):
        out, backward = jax.vjp(function, x)
        return out, *backward(target)

    wanted = fast_jit(lambda x: results(plain, x))(x)
    found = fast_jit(lambda x: results(lambda x: fused(x, weight, *angles, epsilon=EPSILON), x))(x)
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-6 * np.abs(other).max())


def test_the_result_has_the_type_of_the_heads() -> None:
    x, angle = jnp.ones((16, 4, 64), jnp.bfloat16), jnp.zeros((16, 32))
    found = kernel(64)(x, jnp.ones(64), jnp.cos(angle), jnp.sin(angle), epsilon=EPSILON)
    assert found.dtype == jnp.bfloat16


@pytest.mark.parametrize("settings", [{}, {"has_bias": True}, {"query_factor": 2.0}, {"norm_epsilon": None}])
def test_a_layer_uses_it_where_it_gives_the_same_numbers(settings: dict[str, Any]) -> None:
    layer = Attention(
        **{"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "norm_epsilon": EPSILON} | settings,
        rope=Rope(theta=1e4),
    )
    draw = np.random.default_rng(0)
    params = {
        name: jnp.asarray(draw.normal(0.5, 0.2, parameter.shape), jnp.float32 if parameter.is_float32 else jnp.bfloat16)
        for name, parameter in layer.describe().items()
    }
    x = jnp.asarray(draw.standard_normal((2, 16, 64)), jnp.float32)
    assert layer.rotation is not None
    angles = {layer.rotation: layer.rope.compute_angles(jnp.arange(16), layer.rotation[1])}

    def project(kernels: Kernels) -> list[jax.Array]:
        return [
            y
            for y in layer._project(x, Layer(params, LayerAdapters(), LayerContext(Layout(), angles, kernels=kernels)))
            if y is not None
        ]

    kernels = Kernels(TRITON, interpret=jax.default_backend() == "cpu")
    assert (layer._get_rotation_kernel(LayerContext(Layout(), angles, kernels=kernels)) is not None) == (not settings)
    for mine, other in zip(project(kernels), project(Kernels()), strict=True):
        assert mine.dtype == other.dtype == jnp.bfloat16
        np.testing.assert_allclose(*(y.astype(jnp.float32) for y in (mine, other)), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("head_dim", "rotated"), [(96, 96), (64, 32), (16, 16)])
def test_other_heads_have_no_kernel(head_dim: int, rotated: int) -> None:
    assert Kernels(TRITON).get_rotation_kernel(head_dim, rotated, Layout()) is None


def test_there_is_none_without_an_attention_kernel() -> None:
    assert Kernels().get_rotation_kernel(64, 64, Layout()) is None
