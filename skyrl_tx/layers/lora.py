"""Low-rank adapters: Hu et al. 2021, arXiv:2106.09685.

Legend: A adapter slots, L layers, B batch rows, G groups of rows, M rows and tokens of a group, T tokens, I inputs and
O outputs of a linear map, R rank.

An `Adapter` takes one of two forms, told apart by its `scale`:
- *one adapter for all rows*: scale is a scalar, leaves are [L, I, R] and [L, R, O] (no L for the unembedding). Two
  plain matmuls; this is what training differentiates.
- *slots*: scale is [A] and every leaf has a leading A. Each row, or each group of neighbouring rows (of G entries each
  serves B / G rows), reads its own slot by a gather, never by a masked product over all slots: there a NaN of one
  adapter would reach every row as 0 * NaN.

Ranks are padded to one R with zeros. Zero columns of A against zero rows of B get zero gradients, so padding, and
targets that are not trained, stay zero for ever.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class LoraPair:
    """The two factors of one linear map's update: x -> (x @ a) @ b * scale."""

    a: jax.Array  # [..., I, R]
    b: jax.Array  # [..., R, O]


AdapterWeights = dict[str, LoraPair]
"""What an optimizer trains: a pair for each target, by the name of the linear map."""


@struct.dataclass
class Adapter:
    """One adapter, or a stack of slots. `scale` (alpha / rank) lies beside the weights: it is never trained."""

    weights: AdapterWeights
    scale: jax.Array  # float32 scalar, or [A]


@struct.dataclass
class RowAdapter:
    """The adapter of one linear map as its rows see it: shared by all rows, or one for each group of rows."""

    pair: LoraPair  # [I, R] and [R, O], or with a leading G
    scale: jax.Array  # scalar, or [G]

    def delta(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the update for `x` [B, ..., I]: float32 [B, ..., O], factors multiplied in `dtype`."""
        a, b = self.pair.a.astype(dtype), self.pair.b.astype(dtype)
        if self.scale.ndim == 0:
            return multiply(multiply(x, a), b) * self.scale
        x_GMI = x.astype(dtype).reshape(self.scale.shape[0], -1, x.shape[-1])
        inner = jnp.einsum("gmi,gir->gmr", x_GMI, a, preferred_element_type=jnp.float32)
        outer = jnp.einsum("gmr,gro->gmo", inner.astype(dtype), b, preferred_element_type=jnp.float32)
        return (outer * self.scale[:, None, None]).reshape(*x.shape[:-1], b.shape[-1])


RowAdapters = Mapping[str, RowAdapter]


def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `x` [..., I] times `weight` [I, O] in the weight's type, accumulated in float32.

    As one matrix product, whatever the dims before: XLA on CPU was measured to take twice as long for the gradient of
    an MLP with adapters when rows and tokens stay two dims.
    """
    flat = x.astype(weight.dtype).reshape(-1, x.shape[-1])
    y = jnp.dot(flat, weight, preferred_element_type=jnp.float32)
    return y.reshape(*x.shape[:-1], weight.shape[-1])


def linear(x: jax.Array, weight: jax.Array, adapter: RowAdapter | None, bias: jax.Array | None = None) -> jax.Array:
    """Return `x` [B, ..., I] times `weight` [I, O] plus the adapter's update and the bias.

    Multiplies in the weight's type and accumulates in float32, which is also the type of the result.
    """
    y = multiply(x, weight)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if adapter is not None:
        y = y + adapter.delta(x, weight.dtype)
    return y


def select_rows(adapter: Adapter, name: str, adapter_G: jax.Array | None, layer: jax.Array | None) -> RowAdapter:
    """Return what the rows see of one target of a *slots* adapter; `layer` is None for the unembedding."""
    assert adapter_G is not None, "an adapter with slots needs the slot of each row, or group of rows"
    index = adapter_G if layer is None else (adapter_G, layer)
    pair = adapter.weights[name]
    return RowAdapter(pair=LoraPair(a=pair.a[index], b=pair.b[index]), scale=adapter.scale[adapter_G])
