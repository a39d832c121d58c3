"""LoRA adapters: Hu et al. 2021, arXiv:2106.09685.

Legend: A adapter slots, L layers, B batch rows, G groups of rows, M rows and tokens (of a group), T
tokens, I inputs and O outputs of a linear map, R rank.

An `Adapter` has one of two forms, which differ in the shape of `scale`:

- *One adapter for all rows*: `scale` is a scalar, and leaves are [L, I, R] and [L, R, O] (without L
  for the unembedding). A map takes two more plain products. Training differentiates this form.
- *Slots*: multiple adapters, one in each slot. `scale` is [A], and every leaf has a leading A.
  `RowSlots` says which rows use which slot. A row may multiply the weights of another slot by zero,
  so all weights must be finite. An adapter with NaN weights is therefore stored with weights of
  zero and a NaN scale.

Ranks are padded with zeros to a common R. Zero columns of A and zero rows of B get zero gradients,
so padding stays zero. Linear maps that are not trained have zeros too, which stay zero likewise.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.remat import mark_matmul


@struct.dataclass
class LoraPair:
    """The two factors of one linear map's update: x -> (x @ a) @ b * scale."""

    a: jax.Array  # [..., I, R]
    b: jax.Array  # [..., R, O]


AdapterWeights = dict[str, LoraPair]
"""The trained parameters: a pair for each target, by the name of the linear map."""


@struct.dataclass
class Adapter:
    """One adapter, or a stack of slots. `scale` (alpha / rank) is not trained, so it is no weight."""

    weights: AdapterWeights
    scale: jax.Array  # float32 scalar, or [A]


@struct.dataclass
class RowSlots:
    """The adapter slots that a batch of rows uses, and which rows use which.

    Without `group_M`, the rows are G groups of equally many consecutive rows. With `group_M`, rows
    are in any order, and row m uses slot `slot_G[group_M[m]]`.
    """

    slot_G: jax.Array  # int32
    group_M: jax.Array | None = None  # int32

    def expand_to_rows(self, num_rows: int) -> jax.Array:
        """Return the slot of each of `num_rows` rows."""
        if self.group_M is None:
            return jnp.repeat(self.slot_G, num_rows // self.slot_G.shape[0])
        return self.slot_G[self.group_M]


@struct.dataclass
class RowAdapter:
    """The adapter of one linear map: shared by all rows, or one per group of rows (see `RowSlots`)."""

    pair: LoraPair  # [I, R] and [R, O], or with a leading G
    scale: jax.Array  # scalar, or [G]
    group_M: jax.Array | None = None
    may_concatenate: bool = struct.field(pytree_node=False, default=False)
    """Whether a `ConcatenatedMap` may be used: only on a single device.

    On a mesh, the dim that the concatenation makes longer may be sharded.
    """

    def compute_delta(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the update for `x` [B, ..., I]: float32 [B, ..., O], multiplied in `dtype`."""
        a, b = self.pair.a.astype(dtype), self.pair.b.astype(dtype)
        if self.scale.ndim == 0:
            return multiply(multiply(x, a), b) * self.scale
        inner = multiply_groups(x.reshape(-1, x.shape[-1]), a, self.group_M)
        outer = multiply_groups(inner, b, self.group_M)
        if self.group_M is not None:
            return (outer * self.scale[self.group_M][:, None]).reshape(*x.shape[:-1], b.shape[-1])
        outer = outer.reshape(self.scale.shape[0], -1, b.shape[-1])
        return (outer * self.scale[:, None, None]).reshape(*x.shape[:-1], b.shape[-1])


RowsByLayer = dict[str, tuple[RowAdapter, ...]]
"""The adapters of the rows for each linear map, in each layer that has the map."""


@struct.dataclass
class GatheredAdapter(Adapter):
    """A stack of slots, with the adapters of the rows gathered once before a loop."""

    rows: RowsByLayer


def multiply(x: jax.Array, weight: jax.Array, out_dtype: Any = jnp.float32) -> jax.Array:
    """Return `x` [..., I] times `weight` [I, O] in the weight's type, accumulated in float32.

    The result has the type `out_dtype`. All leading dims are merged into one: XLA on CPU took twice
    as long for the gradient of an MLP with adapters when rows and tokens were two dims.
    """
    flat = x.astype(weight.dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 would fail for rank 0
    y = jnp.dot(flat, weight, preferred_element_type=out_dtype)
    return y.reshape(*x.shape[:-1], weight.shape[-1])


def multiply_groups(x_MI: jax.Array, factor_GIO: jax.Array, group_M: jax.Array | None = None) -> jax.Array:
    """Return rows times the factor of their group in its type: float32 [M, O].

    For groups see `RowSlots`.

    With `group_M`, one product multiplies all rows with all factors, so that each factor is read
    once; of the narrower side, only the part that belongs to the row is kept. This takes G times
    the arithmetic, which decoding can spare.

    Without `group_M`, a row that is alone in its group is computed twice. XLA on CPU sums the
    products of one row in a different order, and a sample must not depend on how many samples share
    its adapter.
    """
    num_groups, inputs, outputs = factor_GIO.shape
    # Behind a barrier: XLA on GPU would otherwise copy the weight of the map to append the factors
    # to it.
    x_MI = jax.lax.optimization_barrier(x_MI.astype(factor_GIO.dtype))
    if group_M is not None:
        is_own_MG1 = (group_M[:, None] == jnp.arange(num_groups))[..., None]
        if outputs < inputs:
            y_MGO = jnp.einsum("mi,gio->mgo", x_MI, factor_GIO, preferred_element_type=jnp.float32)
            return jnp.where(is_own_MG1, y_MGO, 0).sum(axis=1)
        x_MGI = jnp.where(is_own_MG1, x_MI[:, None], 0)
        return jnp.einsum("mgi,gio->mo", x_MGI, factor_GIO, preferred_element_type=jnp.float32)

    x_GMI = x_MI.reshape(num_groups, -1, inputs)
    is_single = x_GMI.shape[1] == 1
    if is_single:
        x_GMI = jnp.repeat(x_GMI, 2, axis=1)
    y_GMO = jnp.einsum("gmi,gio->gmo", x_GMI, factor_GIO, preferred_element_type=jnp.float32)
    return (y_GMO[:, :1] if is_single else y_GMO).reshape(-1, outputs)


def linear(x: jax.Array, weight: jax.Array, adapter: RowAdapter | None, bias: jax.Array | None = None) -> jax.Array:
    """Return `x` [B, ..., I] times `weight` [I, O], plus the adapter's update and the bias.

    Products are in the weight's type and accumulate in float32. The sum is rounded to the weight's
    type, in which the backward pass keeps it, and returned as float32, in which norms and sums
    compute. The gradient of an adapter that all rows share is written by hand; it treats the weight
    and the scale as constants.
    """
    dtype = weight.dtype
    if adapter is None:
        y = multiply(x.astype(dtype), weight)
    elif adapter.scale.ndim == 0:
        flat_MI = x.reshape(-1, x.shape[-1]).astype(jnp.float32)  # so that its gradient accumulates in float32
        flat_MO: jax.Array = _multiply_adapted(flat_MI, weight, adapter.pair, adapter.scale, adapter.may_concatenate)
        y = flat_MO.reshape(*x.shape[:-1], weight.shape[-1])
    else:
        x = x.astype(dtype)
        y = multiply(x, weight) + adapter.compute_delta(x, dtype)
    y = mark_matmul(y.astype(dtype)).astype(jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)


@struct.dataclass
class AdaptedMap:
    """A linear map with one adapter for all rows, and its gradient, for many rows.

    In float32 and with enough rows, the update is merged into the weight once instead of being
    applied to every row: a product [I, R] x [R, O] replaces products of M rows with A and with B.
    The update is merged when this takes no more arithmetic. In bfloat16 the update stays separate,
    because the rounding of the weight would lose a small update.

    A separate update is computed in the type `product_dtype`, and then added in float32 to the
    product with the weight. The product with the weight is the largest term, so it is always
    float32. A 16-bit `product_dtype` halves the time of a device that waits for its memory.
    """

    weight: jax.Array  # [I, O], or [O, I] if transposed; includes the update if merged
    pair: LoraPair  # in the weight's type
    scale: jax.Array
    is_merged: bool = struct.field(pytree_node=False)
    is_transposed: bool = struct.field(pytree_node=False, default=False)
    product_dtype: Any = struct.field(pytree_node=False, default=jnp.float32)

    @classmethod
    def from_weight(
        cls,
        weight: jax.Array,
        pair: LoraPair,
        scale: jax.Array,
        num_rows: int,
        product_dtype: Any = jnp.float32,
        *,
        is_transposed: bool = False,
    ) -> "AdaptedMap":
        """Prepare the map for a total of `num_rows` rows.

        A transposed weight stays [O, I], so that a loop reads it as it is stored. XLA on CPU would
        copy a weight that enters a loop in another order of dims.
        """
        sizes = weight.shape
        is_merged = weight.dtype == jnp.float32 and num_rows * sum(sizes) >= math.prod(sizes)
        pair = LoraPair(a=pair.a.astype(weight.dtype), b=pair.b.astype(weight.dtype))
        if is_merged:
            a = pair.a * scale
            weight = weight + (multiply(pair.b.T, a.T) if is_transposed else multiply(a, pair.b))
        return cls(weight, pair, scale, is_merged=is_merged, is_transposed=is_transposed, product_dtype=product_dtype)

    @property
    def weight_IO(self) -> jax.Array:
        """The weight as [I, O]."""
        return self.weight.T if self.is_transposed else self.weight

    def apply(self, x_MI: jax.Array, inner_MR: jax.Array | None = None) -> jax.Array:
        """Return the map of `x`, float32 [M, O].

        `inner_MR` is scale (x A), if known.
        """
        y_MO = multiply(x_MI, self.weight_IO)
        if self.is_merged:
            return y_MO
        inner_MR = _compute_inner(x_MI, self.pair, self.scale) if inner_MR is None else inner_MR
        return y_MO + multiply(inner_MR, self.pair.b, self.product_dtype).astype(jnp.float32)

    def compute_gradient(
        self, x_MI: jax.Array, d_y_MO: jax.Array, inner_MR: jax.Array | None = None
    ) -> tuple[jax.Array, LoraPair]:
        """Return the gradients of `x` and of the pair, float32, given the gradient of the product."""
        d_h_MR = multiply(d_y_MO, self.pair.b.T) * self.scale
        d_x_MI = multiply(d_y_MO, self.weight_IO.T, self.product_dtype).astype(jnp.float32)
        if not self.is_merged:
            d_x_MI = d_x_MI + multiply(d_h_MR, self.pair.a.T, self.product_dtype).astype(jnp.float32)
        inner_MR = _compute_inner(x_MI, self.pair, self.scale) if inner_MR is None else inner_MR
        dtype = self.weight.dtype
        return d_x_MI, LoraPair(
            a=_sum_outer_products(d_h_MR, x_MI, dtype).T, b=_sum_outer_products(inner_MR, d_y_MO, dtype)
        )


@struct.dataclass
class ConcatenatedMap:
    """An `AdaptedMap` with the second factor appended to the weight, for a single product.

    This copies the weight and the rows, which pays off on GPUs: XLA runs one kernel per product
    there, and another kernel to add the update, which reads and writes the result again.
    """

    weight_KO: jax.Array  # K is the inputs of the map, then the ranks
    pair: LoraPair  # in the weight's type
    scale: jax.Array

    @classmethod
    def from_adapted(cls, adapted: AdaptedMap) -> "ConcatenatedMap":
        """Append the second factor to the weight. The update of `adapted` must not be merged."""
        weight_KO = jnp.concatenate([adapted.weight_IO, adapted.pair.b])
        return cls(weight_KO=weight_KO, pair=adapted.pair, scale=adapted.scale)

    @staticmethod
    def is_faster(num_rows: int, weight_IO: jax.Array) -> bool:
        """Return whether the copies take less time than adding the update.

        The rule compares bytes, and was derived for layers of Qwen3-0.6B and 8B.
        """
        inputs, outputs = weight_IO.shape
        return weight_IO.dtype != jnp.float32 and num_rows >= inputs and 2 * outputs >= inputs

    def apply(self, x_MI: jax.Array, inner_MR: jax.Array | None = None, out_dtype: Any = jnp.float32) -> jax.Array:
        """Return the map of `x` [M, O] in the type `out_dtype`, with `inner_MR` as in `AdaptedMap`."""
        x_MI = x_MI.astype(self.weight_KO.dtype)
        inner_MR = _compute_inner(x_MI, self.pair, self.scale) if inner_MR is None else inner_MR
        return multiply(jnp.concatenate([x_MI, inner_MR], axis=1), self.weight_KO, out_dtype)

    def compute_gradient(self, x_MI: jax.Array, d_y_MO: jax.Array) -> tuple[jax.Array, LoraPair]:
        """Return the gradients of `x` and of the pair, float32, given the gradient of the product."""
        dtype = self.weight_KO.dtype
        d_x_MI, d_h_MR = jnp.split(multiply(d_y_MO, self.weight_KO.T), [x_MI.shape[1]], axis=1)
        d_h_MR = d_h_MR * self.scale
        d_a_RI, d_b_RO = (
            _sum_outer_products(d_h_MR, x_MI, dtype),
            _sum_outer_products(_compute_inner(x_MI, self.pair, self.scale), d_y_MO, dtype),
        )
        return d_x_MI + multiply(d_h_MR, self.pair.a.T), LoraPair(a=d_a_RI.T, b=d_b_RO)


def _compute_inner(x_MI: jax.Array, pair: LoraPair, scale: jax.Array) -> jax.Array:
    """Return scale (x A) in the type of the factors, which the second factor and its gradient read."""
    return (multiply(x_MI, pair.a) * scale).astype(pair.a.dtype)


@struct.dataclass
class ExpertMap:
    """A linear map of one expert with its adapter: x -> x W + scale (x A) B.

    If all experts share A, the caller passes x A. If all experts share B, scale (x A) is returned
    in addition to x W.
    """

    weight_IO: jax.Array
    a_IR: jax.Array | None  # in the weight's type, like B
    b_RO: jax.Array | None
    scale: jax.Array

    def apply(self, x_PI: jax.Array, inner_PR: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
        """Return the map of `x`, float32, and scale (x A) if B is shared."""
        y_PO, h_PR = multiply(x_PI, self.weight_IO), self._compute_inner(x_PI, inner_PR)
        return (y_PO, h_PR) if self.b_RO is None else (y_PO + multiply(h_PR, self.b_RO), None)

    def compute_gradient(
        self, x_PI: jax.Array, inner_PR: jax.Array | None, d_y_PO: jax.Array, d_outer_PR: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None, LoraPair]:
        """Return the gradients of `x`, `inner` and the pair, float32, from gradients of both results."""
        dtype = self.weight_IO.dtype
        if self.b_RO is not None:
            d_outer_PR = multiply(d_y_PO, self.b_RO.T)
        assert d_outer_PR is not None, "the gradient of scale (x A) must be given without B"
        d_h_PR = d_outer_PR * self.scale
        d_x_PI = multiply(d_y_PO, self.weight_IO.T)
        d_b = None if self.b_RO is None else _sum_outer_products(self._compute_inner(x_PI, inner_PR), d_y_PO, dtype)
        if self.a_IR is None:
            return d_x_PI, d_h_PR, LoraPair(a=None, b=d_b)  # type: ignore[arg-type]
        d_a = _sum_outer_products(d_h_PR, x_PI, dtype).T
        return d_x_PI + multiply(d_h_PR, self.a_IR.T), None, LoraPair(a=d_a, b=d_b)  # type: ignore[arg-type]

    def _compute_inner(self, x_PI: jax.Array, inner_PR: jax.Array | None) -> jax.Array:
        if self.a_IR is not None:
            inner_PR = multiply(x_PI, self.a_IR)
        assert inner_PR is not None, "x A must be given without A"
        return inner_PR * self.scale


def _sum_outer_products(narrow_MR: jax.Array, wide_MI: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the sum over M of outer products, float32 [R, I], multiplied in `dtype`.

    The barrier keeps XLA from turning a transpose of the result into the product the other way
    round: on CPU, [I, R] took three times as long as [R, I].
    """
    narrow, wide = narrow_MR.astype(dtype), wide_MI.astype(dtype)
    over_rows = (((0,), (0,)), ((), ()))
    summed = jax.lax.dot_general(narrow, wide, over_rows, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(summed)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def multiply_factor(x_MI: jax.Array, factor_IO: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return rows times one factor of an adapter, multiplied in `dtype`, float32 [M, O].

    The gradient is float32 too.
    """
    return multiply(x_MI, factor_IO.astype(dtype))


def _multiply_factor_forward(x_MI: jax.Array, factor_IO: jax.Array, dtype: jnp.dtype):
    return multiply_factor(x_MI, factor_IO, dtype), (x_MI, factor_IO)


def _multiply_factor_backward(dtype: jnp.dtype, kept: tuple[jax.Array, jax.Array], d_y_MO: jax.Array):
    x_MI, factor_IO = kept
    inputs, outputs = factor_IO.shape
    d_factor_IO = (
        _sum_outer_products(d_y_MO, x_MI, dtype).T if outputs < inputs else _sum_outer_products(x_MI, d_y_MO, dtype)
    )
    return multiply(d_y_MO, factor_IO.astype(dtype).T), d_factor_IO


multiply_factor.defvjp(_multiply_factor_forward, _multiply_factor_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _multiply_adapted(
    x_MI: jax.Array, weight_IO: jax.Array, pair: LoraPair, scale: jax.Array, may_concatenate: bool
) -> jax.Array:
    """Return the map of `x` in the weight's type."""
    return _multiply_adapted_forward(x_MI, weight_IO, pair, scale, may_concatenate)[0]


def _multiply_adapted_forward(
    x_MI: jax.Array, weight_IO: jax.Array, pair: LoraPair, scale: jax.Array, may_concatenate: bool
):
    dtype = weight_IO.dtype
    x_MI = x_MI.astype(dtype)
    adapted = AdaptedMap.from_weight(weight_IO, pair, scale, x_MI.shape[0], product_dtype=dtype)
    # Kept for the backward pass: it is so narrow that reading `x` takes all the time of recomputing
    # it.
    inner_MR = None if adapted.is_merged else mark_matmul(_compute_inner(x_MI, adapted.pair, adapted.scale))

    def apply_separately(adapted: AdaptedMap, x_MI: jax.Array, inner_MR: jax.Array | None) -> jax.Array:
        return adapted.apply(x_MI, inner_MR).astype(dtype)

    def apply_concatenated(adapted: AdaptedMap, x_MI: jax.Array, inner_MR: jax.Array | None) -> jax.Array:
        return ConcatenatedMap.from_adapted(adapted).apply(x_MI, inner_MR, dtype)

    if may_concatenate and ConcatenatedMap.is_faster(x_MI.shape[0], weight_IO):
        y_MO = jax.lax.platform_dependent(adapted, x_MI, inner_MR, cuda=apply_concatenated, default=apply_separately)
    else:
        y_MO = apply_separately(adapted, x_MI, inner_MR)
    return y_MO, (x_MI, inner_MR, weight_IO, pair, scale)


def _multiply_adapted_backward(
    may_concatenate: bool, kept: tuple[jax.Array, jax.Array | None, jax.Array, LoraPair, jax.Array], d_y_MO: jax.Array
):
    x_MI, inner_MR, weight_IO, pair, scale = kept
    adapted = AdaptedMap.from_weight(weight_IO, pair, scale, x_MI.shape[0], product_dtype=weight_IO.dtype)
    d_x_MI, d_pair = adapted.compute_gradient(x_MI, d_y_MO, inner_MR)
    return d_x_MI, None, d_pair, None


_multiply_adapted.defvjp(_multiply_adapted_forward, _multiply_adapted_backward)


def gather_rows(adapter: Adapter, slot_G: jax.Array) -> RowsByLayer:
    """Return the adapters of groups of rows by layer. The adapters of experts are not gathered."""
    rows, slots = RowsByLayer(), RowSlots(slot_G)
    for name, pair in adapter.weights.items():
        if pair.a.ndim == 3:
            rows[name] = (select_rows(adapter, name, slots, None),)
        elif pair.a.ndim == 4:
            rows[name] = tuple(select_rows(adapter, name, slots, layer) for layer in range(pair.a.shape[1]))
    return rows


def select_rows(adapter: Adapter, name: str, slots: RowSlots | None, layer: Any) -> RowAdapter:
    """Return the adapters of the rows for one target of a *slots* adapter.

    `layer` is None for the unembedding.
    """
    if isinstance(adapter, GatheredAdapter) and name in adapter.rows:
        return adapter.rows[name][layer or 0]
    assert slots is not None, "an adapter with slots needs the slots of the rows"
    return _select_pair(adapter.weights[name], adapter.scale, slots, layer)


@jax.jit  # equal layers are traced and lowered once
def _select_pair(pair: LoraPair, scale: jax.Array, slots: RowSlots, layer: Any) -> RowAdapter:
    index = slots.slot_G if layer is None else (slots.slot_G, layer)
    return RowAdapter(LoraPair(a=pair.a[index], b=pair.b[index]), scale[slots.slot_G], slots.group_M)
