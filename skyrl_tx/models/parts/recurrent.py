"""The base of recurrent mixers (delta nets and Mamba), which have a state instead of a KV cache.

All of them work in the same way: linear maps, a short convolution of the results, a recurrent rule
that reads and updates the state, and a gated output map. A subclass defines the maps and the rule.

Legend: B batch, T tokens, S slots, D embed, I channels, W width of a convolution, K groups of
heads, G heads of a group.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from typing_extensions import override

from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
from skyrl_tx.layers.flash_attention import KeyRange
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.recurrence import (
    ChunkMasks,
    get_last_inputs,
    make_conv_masks,
    make_prefix_conv_masks,
    short_conv,
    short_conv_step,
)
from skyrl_tx.layers.sharding import Layout, shard_before_exchange
from skyrl_tx.models.parts.base import (
    Axis,
    CacheSpec,
    LayerAdapters,
    LayerContext,
    LayerParams,
    Mixer,
    Rotation,
)

Heads = Mapping[str, jax.Array]
"""The outputs of the convolutions, split into heads, by name."""

Rates = tuple[jax.Array, jax.Array]
"""Two numbers of each head and position. Where both are 0, the rule does not change the state."""

Masks = tuple[jax.Array, jax.Array | None, ChunkMasks]
"""Masks at the starts of sequences: for the convolutions, with positions to read, and for the rule."""

Rule = Callable[..., tuple[jax.Array, jax.Array]]
"""Computes outputs and the new state from the rule's inputs and the state."""


class RecurrentMixer(Mixer):
    """A mixer whose cache has a state of fixed size, and the last inputs of each convolution.

    Subclasses are frozen dataclasses.
    """

    conv_names: ClassVar[tuple[str, ...]]
    """The names of the maps whose results are convolved."""
    shares_prefixes: ClassVar[bool] = False
    """Whether the rule for whole rows starts a sequence with the state after its shared prefix."""

    conv_width: int

    @property
    @override
    def rotation(self) -> Rotation | None:
        return None

    @property
    @override
    def heads(self) -> None:
        return None

    @property
    @override
    def cache_heads(self) -> None:
        return None

    @override
    def with_cached_dims(self, multiple: int) -> Self:
        """Return the mixer itself, because the cache has no positions."""
        return self

    @override
    def describe_cache(self) -> CacheSpec:
        # The first dimension of the state is sharded like heads.
        axes: tuple[Axis, ...] = ("heads", "head_dim", "head_dim", "head_dim")
        tails = {
            f"{name}_tail": Parameter((self.conv_width - 1, size), ("head_dim", "heads"), "zeros")
            for name, size in self._get_channels().items()
        }
        return CacheSpec(fixed={"state": Parameter(self._state_shape, axes, "zeros", is_float32=True), **tails})

    @override
    def prepare(self, start_BT: jax.Array | None, prefix: KeyRange | None = None) -> Masks | None:
        """Return masks that separate the sequences of a row, or None if it has one sequence."""
        if start_BT is None:
            return None
        chunk_masks = ChunkMasks.from_starts(start_BT, prefix)
        if prefix is None:
            return make_conv_masks(start_BT, self.conv_width), None, chunk_masks
        return *make_prefix_conv_masks(start_BT, prefix, self.conv_width), chunk_masks

    @override
    def forward(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, context: LayerContext) -> jax.Array:
        """Run whole rows from an empty state."""
        dtype = params[f"in_proj_{self.conv_names[0]}"].dtype
        empty = {
            name: jnp.zeros((x.shape[0], *array.shape), jnp.float32 if array.is_float32 else dtype)
            for name, array in self.describe_cache().fixed.items()
        }
        output, _ = self._mix_rows(x, params, adapters, empty, context, masks=context.prepared[self])
        return output

    @override
    def prefill(
        self,
        x: jax.Array,
        params: LayerParams,
        adapters: LayerAdapters,
        cache: PrefillLayerCache,
        context: LayerContext,
    ) -> tuple[jax.Array, LayerCache]:
        """Continue from the cached state.

        Padding after `context.size` tokens does not change the state.
        """
        output, fixed = self._mix_rows(x, params, adapters, cache.fixed, context, size=context.size)
        return output, LayerCache(fixed=fixed)

    @override
    def decode(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, cache: DecodeLayerCache, context: LayerContext
    ) -> tuple[jax.Array, LayerCache]:
        projected, fixed, convolved = self._project(x, params, adapters), {}, {}
        for name in self.conv_names:
            convolved[name], fixed[f"{name}_tail"] = short_conv_step(
                projected[name], _get_conv_kernel(params, name), cache.fixed[f"{name}_tail"]
            )

        heads = self._split_heads(convolved, params)
        inputs = self._get_rule_inputs(heads, self._compute_rates(x, params))
        mixed, fixed["state"] = self._step(*inputs, cache.fixed["state"])
        output = self._project_output(mixed, self._get_skipped(heads), projected["z"], params, adapters)
        return output, LayerCache(fixed=fixed)

    def _mix_rows(
        self,
        x_BTD: jax.Array,
        params: LayerParams,
        adapters: LayerAdapters,
        fixed: Mapping[str, jax.Array],
        context: LayerContext,
        *,
        masks: Masks | None = None,
        size: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Run rows from the cached arrays `fixed`.

        Returns the output and the arrays after `size` tokens.
        """
        # Maps and convolutions, on whole rows.
        layout, projected = context.layout, self._project(x_BTD, params, adapters)
        projected |= {name: _gather_rows(projected[name], layout) for name in self.conv_names}
        conv_masks, sources, chunk_masks = (None, None, None) if masks is None else masks
        convolved = {
            name: short_conv(
                projected[name], _get_conv_kernel(params, name), fixed[f"{name}_tail"], conv_masks, sources
            )
            for name in self.conv_names
        }

        # The rule. Padding gets rates of 0, which leave the state unchanged.
        heads = self._split_heads(convolved, params)
        first, second = self._compute_rates(x_BTD, params)
        length = x_BTD.shape[1]
        if size is not None:
            is_token_BT11 = (jnp.arange(length) < size[..., None])[..., None, None]
            first, second = jnp.where(is_token_BT11, first, 0.0), jnp.where(is_token_BT11, second, 0.0)
        inputs = self._get_rule_inputs(heads, (first, second))
        mixed, state = _run_rule(self._get_rule(context), inputs, fixed["state"], chunk_masks, layout)

        # The output of each device's part of a row, and the last inputs of the convolutions.
        mixed, skipped = _shard_rows(mixed, layout), self._get_skipped(heads)
        skipped = None if skipped is None else _shard_rows(skipped, layout)
        last = length if size is None else size
        tails = {
            f"{name}_tail": get_last_inputs(projected[name], fixed[f"{name}_tail"], last) for name in self.conv_names
        }
        return self._project_output(mixed, skipped, projected["z"], params, adapters), {"state": state, **tails}

    @property
    @abstractmethod
    def _state_shape(self) -> tuple[int, int, int, int]:
        """The shape of the state, whose first dimension is the number of groups of heads."""

    @abstractmethod
    def _get_channels(self) -> dict[str, int]:
        """Return the number of channels of each convolution."""

    @abstractmethod
    def _project(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters) -> dict[str, jax.Array]:
        """Return the inputs of the convolutions, and the input "z" of the gate."""

    @abstractmethod
    def _split_heads(self, convolved: Mapping[str, jax.Array], params: LayerParams) -> Heads:
        """Apply the activation to the convolved channels and split them into heads."""

    @abstractmethod
    def _compute_rates(self, x: jax.Array, params: LayerParams) -> Rates:
        """Return the rates of each head, float32 [..., K, G]."""

    @abstractmethod
    def _get_rule_inputs(self, heads: Heads, rates: Rates) -> tuple[jax.Array, ...]:
        """Return the arguments of the rule before the state."""

    @abstractmethod
    def _get_rule(self, context: LayerContext) -> Rule:
        """Return the rule for whole rows."""

    @abstractmethod
    def _step(self, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Run the rule for one token."""

    def _get_skipped(self, heads: Heads) -> jax.Array | None:
        """Return the heads that the output map reads in addition to the results of the rule."""
        return None

    @abstractmethod
    def _project_output(
        self, mixed: jax.Array, skipped: jax.Array | None, z: jax.Array, params: LayerParams, adapters: LayerAdapters
    ) -> jax.Array:
        """Return the output of the mixer, given the results of the rule."""


def _get_conv_kernel(params: LayerParams, name: str) -> jax.Array:
    """Return the weights of a convolution, [W, I]."""
    return params[f"{name}_conv"][:, 0].T


def _gather_rows(x: jax.Array, layout: Layout) -> jax.Array:
    """Exchange [B, T, heads or channels, ...] so that a device has whole rows of some heads."""
    if not layout.shards_rows:
        return x
    return layout.constrain(shard_before_exchange(x, layout), "batch", None, "row_heads", *[None] * (x.ndim - 3))


def _shard_rows(x: jax.Array, layout: Layout) -> jax.Array:
    """Exchange [B, T, heads or channels, ...] so that a device has its part of the tokens again."""
    return layout.constrain(x, "batch", "tokens", "heads", *[None] * (x.ndim - 3)) if layout.shards_rows else x


def _run_rule(
    rule: Rule, inputs: tuple[jax.Array, ...], state: jax.Array, masks: ChunkMasks | None, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """Return `rule(*inputs, state, masks)`. While it runs, devices do not communicate.

    Inputs and outputs are [B, T, heads, ...], and states are [B, heads, ...].
    """
    if not layout.is_sharded:
        return rule(*inputs, state, masks)

    assert layout.mesh is not None
    rows: tuple[Axis | None, ...] = ("batch", None, "row_heads")

    def get_spec(x: jax.Array, axes: tuple[Axis | None, ...]) -> Any:
        return layout.spec((*axes, *[None] * (x.ndim - len(axes))), x.shape)

    state_spec = get_spec(state, ("batch", "row_heads"))
    mask_specs = jax.tree.map(lambda mask: get_spec(mask, (None, "batch")), masks)
    in_specs = (*(get_spec(x, rows) for x in inputs), state_spec, mask_specs)
    outputs, _ = jax.eval_shape(rule, *inputs, state, masks)
    out_specs = get_spec(outputs, rows), state_spec
    run = jax.shard_map(rule, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return run(*inputs, state, masks)
