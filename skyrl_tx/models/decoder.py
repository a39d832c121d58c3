"""The decoder that all families share; what differs between them is data in `ModelConfig`.

Legend: B batch, T tokens, D embed, N heads, K kv heads, H head dim, F mlp, V vocab, E experts, L layers, S slots,
C cache.
The interface is described in `skyrl_tx.models.base`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from skyrl_tx.layers import kv_cache, logprobs
from skyrl_tx.layers.attention import cached_attention, causal_attention, extending_attention
from skyrl_tx.layers.kept import Kept
from skyrl_tx.layers.kv_cache import KeyValues, SliceCache
from skyrl_tx.layers.lora import Adapter, AdapterWeights, RowAdapter, RowAdapters, linear, select_rows
from skyrl_tx.layers.mlp import gated_mlp
from skyrl_tx.layers.moe import ExpertAdapters, ExpertWeights, mixture, pool_experts, share_experts
from skyrl_tx.layers.norm import rms_norm
from skyrl_tx.layers.rope import rotate
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.layers.stack import apply_stack
from skyrl_tx.models.adapters import ATTENTION_TARGETS, EXPERT_PREFIX, EXPERT_TARGETS, MLP_TARGETS
from skyrl_tx.models.config import LayerRun, ModelConfig
from skyrl_tx.models.params import DecoderParams, LayerParams, Layers, layers_of


def forward(
    params: DecoderParams,
    config: ModelConfig,
    tokens_BT: jax.Array,
    adapter: Adapter | None = None,
    adapter_B: jax.Array | None = None,
    *,
    start_BT: jax.Array | None = None,
    kept: Kept = Kept.PRODUCTS,
) -> jax.Array:
    """Return the hidden states after the final norm, float32 [B, T, D], of rows padded at their right.

    A row may hold several sequences, one behind the other: `start_BT` says where that of each position begins.
    `kept` says what a gradient keeps of each layer.
    """
    layout = params.layout
    position = jnp.arange(tokens_BT.shape[1])  # [T], or [B, T] where sequences begin within rows
    angles = config.rope.angles(position if start_BT is None else position - start_BT, config.head_dim)

    def block(x_BTD: jax.Array, layer: LayerParams, rows: LayerAdapters, _: jax.Array):
        x_BTD = layout.constrain(x_BTD, "batch", None, None)
        q_BTNH, k_BTKH, v_BTKH = _project_heads(x_BTD, layer, rows, config, angles)
        mixed_BTNH = _attend(q_BTNH, k_BTKH, v_BTKH, start_BT, layout)
        return _finish_block(x_BTD, mixed_BTNH, layer, rows, config, layout), None

    x_BTD, _ = _apply_layers(block, _embed(params, tokens_BT), params.layers, config, adapter, adapter_B, kept=kept)
    return layout.constrain(rms_norm(x_BTD, params.final_norm, config.norm_epsilon), "batch", None, None)


def extend(
    params: DecoderParams,
    config: ModelConfig,
    tokens_BT: jax.Array,
    start: jax.Array,
    past: KeyValues,
    adapter: Adapter | None = None,
    adapter_B: jax.Array | None = None,
) -> tuple[jax.Array, KeyValues]:
    """Run the tokens at positions `start` (a scalar) and after, which see `past` [L, B, K, C, H] before it.

    Return their hidden states [B, T, D], and `past` with their keys and values; it must have C >= `start` + T.
    """
    layout = params.layout
    angles = config.rope.angles(start + jnp.arange(tokens_BT.shape[1]), config.head_dim)

    def block(x_BTD: jax.Array, layer: LayerParams, rows: LayerAdapters, index: jax.Array):
        x_BTD = layout.constrain(x_BTD, "batch", None, None)
        q_BTNH, k_BTKH, v_BTKH = _project_heads(x_BTD, layer, rows, config, angles)
        mixed_BTNH = extending_attention(q_BTNH, k_BTKH, v_BTKH, past, index, start)
        mixed_BTNH = layout.constrain(mixed_BTNH, "batch", None, "heads", None)
        new = KeyValues(k=jnp.swapaxes(k_BTKH, 1, 2), v=jnp.swapaxes(v_BTKH, 1, 2))
        return _finish_block(x_BTD, mixed_BTNH, layer, rows, config, layout), new

    x_BTD, new = _apply_layers(block, _embed(params, tokens_BT), params.layers, config, adapter, adapter_B)
    hidden_BTD = layout.constrain(rms_norm(x_BTD, params.final_norm, config.norm_epsilon), "batch", None, None)
    past = kv_cache.extend(past, new, start)
    return hidden_BTD, jax.tree.map(lambda leaf: layout.constrain(leaf, *kv_cache.AXES), past)


def _attend(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, start_BT: jax.Array | None, layout: Layout
) -> jax.Array:
    """Return `causal_attention`, in which no device needs anything of another's rows or heads."""
    if not layout.is_split:
        return causal_attention(q_BTNH, k_BTKH, v_BTKH, start_BT)
    assert layout.mesh is not None
    start_BT = jnp.zeros(q_BTNH.shape[:2], jnp.int32) if start_BT is None else start_BT
    heads = layout.spec(("batch", None, "heads", None), q_BTNH.shape)
    kv_heads = layout.spec(("batch", None, "kv_heads", None), k_BTKH.shape)
    specs = (heads, kv_heads, kv_heads, layout.spec(("batch", None), start_BT.shape))
    alone = jax.shard_map(causal_attention, mesh=layout.mesh, in_specs=specs, out_specs=heads, check_vma=False)
    return alone(q_BTNH, k_BTKH, v_BTKH, start_BT)


def _embed(params: DecoderParams, tokens: jax.Array) -> jax.Array:
    """Return the tokens' embeddings, float32 [B, ..., D].

    Each device looks its part of D up for all rows, and they exchange: the table stays where it is.
    """
    x = params.embed[tokens].astype(jnp.float32)
    others = [None] * (x.ndim - 2)
    x = params.layout.constrain(x, None, *others, "embed")
    x = params.layout.constrain(x, "expert_batch", *others, None)
    return params.layout.constrain(x, "batch", *others, None)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """What the rows see of their adapters in one layer; nothing of the base model."""

    maps: RowAdapters
    experts: ExpertAdapters | None


Block = Callable[[jax.Array, LayerParams, LayerAdapters, jax.Array], tuple[jax.Array, Any]]


def _apply_layers(
    block: Block,
    x: jax.Array,
    layers: Layers,
    config: ModelConfig,
    adapter: Adapter | None,
    adapter_B: jax.Array | None,
    *,
    kept: Kept = Kept.ALL,
) -> tuple[jax.Array, Any]:
    """Run `x` through all layers, one loop for each run of layers of a kind; return it and what they give besides."""
    outputs: list[Any] = []
    for run in config.runs():
        x, output = _apply_run(block, x, layers, run, adapter, adapter_B, kept=kept)
        outputs.append(output)
    if len(outputs) == 1:
        return x, outputs[0]
    if isinstance(layers, tuple):
        return x, tuple(chain.from_iterable(outputs))
    return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


def _apply_run(
    block: Block,
    x: jax.Array,
    layers: Layers,
    run: LayerRun,
    adapter: Adapter | None,
    adapter_B: jax.Array | None,
    *,
    kept: Kept,
) -> tuple[jax.Array, Any]:
    is_pool = adapter is not None and adapter.scale.ndim > 0
    targets: dict[str, int] = dict.fromkeys(ATTENTION_TARGETS, run.layers.start)
    if not run.is_sparse:
        targets |= dict.fromkeys(MLP_TARGETS, run.of_kind.start)
    elif not is_pool:
        targets |= dict.fromkeys(EXPERT_TARGETS, run.of_kind.start)

    def one(x: jax.Array, layer: LayerParams, rows: RowAdapters, index: jax.Array) -> tuple[jax.Array, Any]:
        experts = None
        if run.is_sparse and adapter is not None and is_pool:
            assert adapter_B is not None
            experts = pool_experts(adapter, EXPERT_PREFIX, adapter_B, run.of_kind.start + index)
        elif run.is_sparse:
            experts = share_experts(rows, EXPERT_PREFIX)
        return block(x, layer, LayerAdapters(rows, experts), run.layers.start + index)

    if run.is_sparse and kept is Kept.PRODUCTS:
        kept = Kept.ALL  # those of experts are not marked
    return apply_stack(one, x, layers_of(layers, run), adapter, adapter_B, targets, kept=kept)


def decode_step(
    params: DecoderParams,
    config: ModelConfig,
    token_S: jax.Array,
    cache: SliceCache,
    adapter: Adapter | None = None,
    adapter_S: jax.Array | None = None,
) -> tuple[jax.Array, SliceCache]:
    """Run one token per slot: return hidden states [S, D] and the cache with the token after what it held.

    Slot s sees what was before its place, and its token. Where the cache has each layer by itself, so must `params`.
    """
    layout = params.layout
    angles = config.rope.angles(cache.start_S + cache.num_recent, config.head_dim)

    def block(x_SD: jax.Array, layer: LayerParams, rows: LayerAdapters, index: jax.Array):
        x_SD = layout.constrain(x_SD, "batch", None)
        q_SNH, k_SKH, v_SKH = _project_heads(x_SD, layer, rows, config, angles)
        past, recent = cache.layer(index)
        recent = kv_cache.append(recent, KeyValues(k=k_SKH, v=v_SKH), cache.num_recent)
        mixed_SNH = cached_attention(q_SNH, past, recent, cache.start_S, cache.num_recent + 1)
        mixed_SNH = layout.constrain(mixed_SNH, "batch", "heads", None)
        return _finish_block(x_SD, mixed_SNH, layer, rows, config, layout), recent

    x_SD, recent = _apply_layers(block, _embed(params, token_S), params.layers, config, adapter, adapter_S)
    hidden_SD = rms_norm(x_SD, params.final_norm, config.norm_epsilon)
    if layout.is_split:
        recent = jax.tree.map(lambda leaf: layout.constrain(leaf, *kv_cache.AXES), recent)
    return hidden_SD, replace(cache, recent=recent, num_recent=cache.num_recent + 1)


def logits(
    params: DecoderParams, hidden: jax.Array, adapter: Adapter | None = None, adapter_B: jax.Array | None = None
) -> jax.Array:
    """Return float32 logits [B, ..., V] of hidden states [B, ..., D]; `adapter_B` has a slot for each index of B."""
    y = logprobs.logits(hidden, params.unembed_VD, unembed_rows(adapter, adapter_B))
    return params.layout.constrain(y, "batch", *[None] * (y.ndim - 1))  # whole rows: they are sorted and summed up


def target_logprobs(
    params: DecoderParams,
    hidden_BTD: jax.Array,
    targets: jax.Array,
    adapter: Adapter | None = None,
    adapter_B: jax.Array | None = None,
) -> jax.Array:
    """Return log p(target), float32 in the shape of `targets` ([B, T] or [B, T, K]), never holding [B, T, V]."""
    return logprobs.target_logprobs(hidden_BTD, params.unembed_VD, targets, unembed_rows(adapter, adapter_B))


def target_logprobs_and_gradient(
    params: DecoderParams,
    hidden_BTD: jax.Array,
    targets: jax.Array,
    adapter: Adapter,
    slope: logprobs.Slope,
    inputs: Any,
) -> tuple[jax.Array, jax.Array, AdapterWeights]:
    """Return log p(target), and the gradient of a loss by the hidden states and by the adapter's unembedding pair.

    `slope` and `inputs` are those of `layers.logprobs.target_logprobs_and_gradient`.
    """
    rows = RowAdapter(pair=adapter.weights["unembed"], scale=adapter.scale)
    found, d_hidden_BTD, d_pair = logprobs.target_logprobs_and_gradient(
        hidden_BTD, params.unembed_VD, targets, rows, slope, inputs
    )
    return found, d_hidden_BTD, {"unembed": d_pair}


def unembed_rows(adapter: Adapter | None, adapter_B: jax.Array | None) -> RowAdapter | None:
    """Return what the rows see of the unembedding's adapter."""
    if adapter is None:
        return None
    if adapter.scale.ndim == 0:
        return RowAdapter(pair=adapter.weights["unembed"], scale=adapter.scale)
    return select_rows(adapter, "unembed", adapter_B, layer=None)


def _project_heads(
    x: jax.Array, layer: LayerParams, rows: LayerAdapters, config: ModelConfig, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rotated queries [..., N, H] and keys [..., K, H], and values, in the weights' type."""
    y = rms_norm(x, layer.attn_norm, config.norm_epsilon)

    def heads(name: str, num_heads: int) -> jax.Array:
        z = linear(y, getattr(layer, f"{name}_proj"), rows.maps.get(f"{name}_proj"), getattr(layer, f"{name}_bias"))
        return z.reshape(*z.shape[:-1], num_heads, config.head_dim)

    q, k, v = heads("q", config.num_heads), heads("k", config.num_kv_heads), heads("v", config.num_kv_heads)
    if config.qk_norm:
        q = rms_norm(q, layer.q_norm, config.norm_epsilon)
        k = rms_norm(k, layer.k_norm, config.norm_epsilon)
    dtype = layer.q_proj.dtype
    return rotate(q, *angles).astype(dtype), rotate(k, *angles).astype(dtype), v.astype(dtype)


def _finish_block(
    x: jax.Array, mixed: jax.Array, layer: LayerParams, rows: LayerAdapters, config: ModelConfig, layout: Layout
) -> jax.Array:
    """Add to `x` the attention's output projection, then the feed-forward of the sum."""
    x = x + linear(mixed.reshape(*mixed.shape[:-2], -1), layer.o_proj, rows.maps.get("o_proj"))
    y = rms_norm(x, layer.mlp_norm, config.norm_epsilon)
    if layer.router is None:
        return x + gated_mlp(y, layer.gate_proj, layer.up_proj, layer.down_proj, rows.maps)
    assert config.experts is not None
    weights = ExpertWeights(layer.expert_gate_proj, layer.expert_up_proj, layer.expert_down_proj)
    return x + mixture(y, layer.router, weights, rows.experts, config.experts.routing, layout)
