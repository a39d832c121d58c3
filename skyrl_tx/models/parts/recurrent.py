"""The base of recurrent mixers (delta nets and Mamba), which have a state instead of a KV cache.

All of them work in the same way: linear maps, a short convolution of the results, a recurrent rule
that reads and updates the state, and a gated output map. A subclass defines the maps and the rule.

Legend: B batch, T tokens, S slots, D embed, I channels, W width of a convolution, K groups of
heads, G heads of a group.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from skyrl_tx.layers.attention import KeyRange
from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
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
from skyrl_tx.models.parts.base import Axis, CacheSpec, Layer, LayerContext, LayerParams, Mixer

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

    step: ClassVar[Rule]
    """The rule for one token."""

    conv_width: int

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
    def forward(self, x: jax.Array, layer: Layer) -> jax.Array:
        """Run whole rows from an empty state."""
        dtype = layer.params[f"in_proj_{self.conv_names[0]}"].dtype
        empty = {
            name: jnp.zeros((x.shape[0], *array.shape), jnp.float32 if array.is_float32 else dtype)
            for name, array in self.describe_cache().fixed.items()
        }
        output, _ = self._mix_rows(x, layer, empty, masks=layer.context.prepared[self])
        return output

    @override
    def prefill(self, x: jax.Array, layer: Layer, cache: PrefillLayerCache) -> tuple[jax.Array, LayerCache]:
        """Continue from the cached state.

        Padding after `context.size` tokens does not change the state.
        """
        output, fixed = self._mix_rows(x, layer, cache.fixed, size=layer.context.size)
        return output, LayerCache(fixed=fixed)

    @override
    def decode(self, x: jax.Array, layer: Layer, cache: DecodeLayerCache) -> tuple[jax.Array, LayerCache]:
        projected, fixed, convolved = self._project(x, layer), {}, {}
        for name in self.conv_names:
            convolved[name], fixed[f"{name}_tail"] = short_conv_step(
                projected[name], _get_conv_kernel(layer.params, name), cache.fixed[f"{name}_tail"]
            )

        inputs, skipped = self._get_rule_inputs(x, convolved, layer, None)
        mixed, fixed["state"] = self.step(*inputs, cache.fixed["state"])
        return self._project_output(mixed, skipped, projected["z"], layer), LayerCache(fixed=fixed)

    def _mix_rows(
        self,
        x_BTD: jax.Array,
        layer: Layer,
        fixed: Mapping[str, jax.Array],
        *,
        masks: Masks | None = None,
        size: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Run rows from the cached arrays `fixed`.

        Returns the output and the arrays after `size` tokens.
        """
        # Maps and convolutions, on whole rows.
        layout, projected = layer.context.layout, self._project(x_BTD, layer)
        projected |= {name: _gather_rows(projected[name], layout) for name in self.conv_names}
        conv_masks, sources, chunk_masks = (None, None, None) if masks is None else masks
        convolved = {
            name: short_conv(
                projected[name], _get_conv_kernel(layer.params, name), fixed[f"{name}_tail"], conv_masks, sources
            )
            for name in self.conv_names
        }

        # The rule.
        length = x_BTD.shape[1]
        is_token_BT11 = None if size is None else (jnp.arange(length) < size[..., None])[..., None, None]
        inputs, skipped = self._get_rule_inputs(x_BTD, convolved, layer, is_token_BT11)
        mixed, state = _run_rule(self._get_rule(layer.context), inputs, fixed["state"], chunk_masks, layout)

        # The output of each device's part of a row, and the last inputs of the convolutions.
        mixed = _shard_rows(mixed, layout)
        skipped = None if skipped is None else _shard_rows(skipped, layout)
        last = length if size is None else size
        tails = {
            f"{name}_tail": get_last_inputs(projected[name], fixed[f"{name}_tail"], last) for name in self.conv_names
        }
        return self._project_output(mixed, skipped, projected["z"], layer), {"state": state, **tails}

    @property
    @abstractmethod
    def _state_shape(self) -> tuple[int, int, int, int]:
        """The shape of the state, whose first dimension is the number of groups of heads."""

    @abstractmethod
    def _get_channels(self) -> dict[str, int]:
        """Return the number of channels of each convolution."""

    @abstractmethod
    def _project(self, x: jax.Array, layer: Layer) -> dict[str, jax.Array]:
        """Return the inputs of the convolutions, and the input "z" of the gate."""

    @abstractmethod
    def _get_rule_inputs(
        self, x: jax.Array, convolved: Mapping[str, jax.Array], layer: Layer, is_token: jax.Array | None
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Return the arguments of the rule before the state, and what the output map reads besides its results.

        `convolved` are the results of the convolutions, before the activation. `is_token`
        [..., 1, 1] is False at padding, where `mask_padding` sets the two rates [..., K, G] of each
        head to 0, so that the rule does not change the state. None means no padding.
        """

    @abstractmethod
    def _get_rule(self, context: LayerContext) -> Rule:
        """Return the rule for whole rows."""

    @abstractmethod
    def _project_output(self, mixed: jax.Array, skipped: jax.Array | None, z: jax.Array, layer: Layer) -> jax.Array:
        """Return the output of the mixer, given the results of the rule."""


def mask_padding(rate: jax.Array, is_token: jax.Array | None) -> jax.Array:
    """Return numbers of each head [..., K, G], or 0 at padding."""
    return rate if is_token is None else jnp.where(is_token, rate, 0.0)


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
