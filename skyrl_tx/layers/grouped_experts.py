"""The experts of a mixture for all tiles at once, where a kernel multiplies each tile with the matrix of its expert.

See `layers.moe`, whose other way computes some tiles at a time, with copies of their matrices. The numbers are the same
up to rounding: here products are rounded to the type of the weights before biases and activations.

Legend: W tiles, P places of a tile, D embed, F mlp, R rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from skyrl_tx.layers.kernels.registry import MultiplyTiles
from skyrl_tx.layers.lora import LoraPair
from skyrl_tx.layers.tiles import AddedProducts


@dataclass(frozen=True, slots=True)
class TiledMap:
    """One linear map of all experts with its adapters: x -> x W + scale (x A) B, for each tile those of its expert.

    As in `layers.lora.ExpertMap`, x A is given without A, and scale (x A) is returned without B.
    """

    multiply: MultiplyTiles
    num_used: jax.Array
    matrix_XIO: jax.Array
    """The matrices of the map, of all experts and possibly of all layers."""
    matrix_W: jax.Array
    """Which of these a tile has."""
    a: jax.Array | None
    b: jax.Array | None
    """Both factors have rank 0 if there is no adapter."""
    adapter_W: jax.Array
    scale_W: jax.Array

    def apply(self, x_WPI: jax.Array, inner_WPR: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Return the map of `x` in the weights' type."""
        h_WPR = self._compute_inner(x_WPI, inner_WPR)
        added = None if self.b is None else self._make_added(h_WPR, self.b)
        y_WPO = self._multiply_tiles(x_WPI, self.matrix_XIO, self.matrix_W, added, result=self.matrix_XIO.dtype)
        return y_WPO, h_WPR if self.b is None else None

    def compute_gradient(
        self, x_WPI: jax.Array, inner_WPR: jax.Array | None, d_y_WPO: jax.Array, d_outer_WPR: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, LoraPair]:
        """Return the gradient of `x` in the weights' type, and those of `inner` and of each tile's factors, float32."""
        dtype, a, b = self.matrix_XIO.dtype, self.a, self.b
        if b is not None:
            d_outer_WPR = self._multiply_factor(d_y_WPO, b, transposed=True)
        assert d_outer_WPR is not None, "the gradient of scale (x A) must be given without B"
        d_h_WPR = d_outer_WPR * self.scale_W[:, None, None]
        added = None if a is None else self._make_added(d_h_WPR, a)
        d_x_WPI = self._multiply_tiles(d_y_WPO, self.matrix_XIO, self.matrix_W, added, transposed=True, result=dtype)
        d_b = None if b is None else _sum_outer_products(self._compute_inner(x_WPI, inner_WPR), d_y_WPO, dtype)
        if a is None:
            return d_x_WPI, d_h_WPR, LoraPair(a=None, b=d_b)  # type: ignore[arg-type]
        return d_x_WPI, None, LoraPair(a=_sum_outer_products(x_WPI, d_h_WPR, dtype), b=d_b)  # type: ignore[arg-type]

    def _compute_inner(self, x_WPI: jax.Array, inner_WPR: jax.Array | None) -> jax.Array:
        if self.a is not None:
            inner_WPR = self._multiply_factor(x_WPI, self.a)
        assert inner_WPR is not None, "x A must be given without A"
        return inner_WPR * self.scale_W[:, None, None]

    def _make_added(self, narrow_WPR: jax.Array, factor: jax.Array) -> AddedProducts | None:
        return AddedProducts(narrow_WPR, factor, self.adapter_W) if narrow_WPR.shape[-1] else None

    def _multiply_factor(self, x_WPI: jax.Array, factor: jax.Array, *, transposed: bool = False) -> jax.Array:
        """Return the product with a factor of the adapter, float32 [W, P, R]."""
        rank = factor.shape[1 if transposed else 2]
        if rank == 0:
            return jnp.zeros((*x_WPI.shape[:2], 0), jnp.float32)
        x_WPI = x_WPI.astype(self.matrix_XIO.dtype)
        return self._multiply_tiles(x_WPI, factor, self.adapter_W, None, transposed=transposed, result=jnp.float32)

    def _multiply_tiles(
        self, x_WPI: jax.Array, matrices: jax.Array, index_W: jax.Array, added: AddedProducts | None, **settings: Any
    ):
        return self.multiply(x_WPI, matrices, index_W, self.num_used, added, **settings)


def _sum_outer_products(x_WPI: jax.Array, y_WPO: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the sums over the rows of each tile of outer products, multiplied in `dtype`: float32 [W, I, O]."""
    return jnp.einsum("wpi,wpo->wio", x_WPI.astype(dtype), y_WPO.astype(dtype), preferred_element_type=jnp.float32)


Activate = Callable[..., jax.Array]
"""A function of what the maps before the last return, float32."""


def forward(
    maps: Mapping[str, TiledMap],
    add_bias: Callable[[str, jax.Array], jax.Array],
    activate: Activate,
    x_WPD: jax.Array,
    inner: Mapping[str, jax.Array],
) -> tuple[tuple[jax.Array, jax.Array | None], tuple[jax.Array, ...]]:
    """Return the outputs of all tiles [W, P, D], with scale (x A) [W, P, R] where experts share B of down.

    Also what the maps before the last return [W, P, F], which the backward pass reads. `maps` end with down. `add_bias`
    adds that of a map, by its name.
    """
    *others, (last, down) = maps.items()
    mapped = tuple(add_bias(name, each.apply(x_WPD, inner.get(name))[0]) for name, each in others)
    y_WPD, outer_WPR = down.apply(activate(*_to_float32(mapped)).astype(x_WPD.dtype), None)
    return (add_bias(last, y_WPD), outer_WPR), mapped


def backward(
    maps: Mapping[str, TiledMap],
    activate: Activate,
    x_WPD: jax.Array,
    inner: Mapping[str, jax.Array],
    mapped: tuple[jax.Array, ...],
    share_WP: jax.Array,
    d_y_WPD: jax.Array,
    d_outer_WPR: jax.Array | None,
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], jax.Array, dict[str, LoraPair]]:
    """Return the gradients of the tokens of all tiles and of `inner`, of the shares, and of each tile's factors by map.

    `d_y` and `d_outer` are those of the weighted sums of a token's experts. With z, which down reads, and g, the
    gradient of z for a share of 1, the gradient of the share is the sum of z g over F, but for biases.
    """
    *others, (last, down) = maps.items()
    z_WPF, pull = jax.vjp(activate, *_to_float32(mapped))
    weighted_WPF = (share_WP[..., None] * z_WPF).astype(x_WPD.dtype)
    g_WPF, _, d_down = down.compute_gradient(weighted_WPF, None, d_y_WPD, d_outer_WPR)
    g_WPF = g_WPF.astype(jnp.float32)
    d_share_WP = (z_WPF * g_WPF).sum(axis=-1)
    d_x, d_inner, d_pairs = list[jax.Array](), dict[str, jax.Array](), dict[str, LoraPair]()
    for (name, each), d_WPF in zip(others, pull(share_WP[..., None] * g_WPF), strict=True):
        by_map_WPD, d_WPR, d_pairs[name] = each.compute_gradient(
            x_WPD, inner.get(name), d_WPF.astype(x_WPD.dtype), None
        )
        d_x.append(by_map_WPD.astype(jnp.float32))
        if d_WPR is not None:
            d_inner[name] = d_WPR
    return (reduce(jnp.add, d_x).astype(x_WPD.dtype), d_inner), d_share_WP, {**d_pairs, last: d_down}


def _to_float32(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(each.astype(jnp.float32) for each in arrays)
