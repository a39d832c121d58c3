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
from skyrl_tx.layers.kv_cache import KeyValues, SliceCache
from skyrl_tx.layers.lora import Adapter, AdapterWeights, LoraPair, RowAdapter, RowAdapters, linear, select_rows
from skyrl_tx.layers.moe import ExpertAdapters, ExpertWeights, mixture, pool_experts, share_experts
from skyrl_tx.layers.remat import RematPolicy, with_remat
from skyrl_tx.layers.rope import rotate
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.models.adapters import ATTENTION_TARGETS, EXPERT_PREFIX, EXPERT_TARGETS, MLP_TARGETS
from skyrl_tx.models.config import LayerRun, ModelConfig
from skyrl_tx.models.params import DecoderParams, LayerParams, Layers, cut, layers_of


def forward(
    params: DecoderParams,
    config: ModelConfig,
    tokens_BT: jax.Array,
    adapter: Adapter | None = None,
    adapter_B: jax.Array | None = None,
    *,
    start_BT: jax.Array | None = None,
    remat: RematPolicy = RematPolicy.SAVE_MATMULS,
) -> jax.Array:
    """Return the hidden states after the final norm, float32 [B, T, D], of right-padded rows.

    A row may hold several consecutive sequences: `start_BT` is the start in the row of the sequence of each position.
    `remat` applies to each layer.
    """
    layout = params.layout
    position = jnp.arange(tokens_BT.shape[1])  # [T], or [B, T] if rows hold several sequences
    angles = config.rope.angles(position if start_BT is None else position - start_BT, config.head_dim)

    def block(x_BTD: jax.Array, layer: LayerParams, rows: LayerAdapters, _: jax.Array):
        x_BTD = layout.constrain(x_BTD, "batch", None, None)
        q_BTNH, k_BTKH, v_BTKH = _project_heads(x_BTD, layer, rows, config, angles)
        mixed_BTNH = _attend(q_BTNH, k_BTKH, v_BTKH, start_BT, layout)
        return _finish_block(x_BTD, mixed_BTNH, layer, rows, config, layout), None

    x_BTD, _ = _apply_layers(block, _embed(params, tokens_BT), params.layers, config, adapter, adapter_B, remat=remat)
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
    """Run the tokens at positions `start` (a scalar) and after, which attend to `past` [L, B, K, C, H].

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
    """Return `causal_attention`, computed without communication between devices."""
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

    Each device looks up its part of D for all rows; then the parts are exchanged. The table is not moved.
    """
    x = params.embed[tokens].astype(jnp.float32)
    others = [None] * (x.ndim - 2)
    x = params.layout.constrain(x, None, *others, "embed")
    x = params.layout.constrain(x, "expert_batch", *others, None)
    return params.layout.constrain(x, "batch", *others, None)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of the rows in one layer; empty for the base model."""

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
    remat: RematPolicy = RematPolicy.NONE,
) -> tuple[jax.Array, Any]:
    """Run `x` through all layers, one loop for each run of layers of a kind; return it and their other outputs."""
    outputs: list[Any] = []
    for run in config.runs():
        x, output = _apply_run(block, x, layers, run, adapter, adapter_B, remat=remat)
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
    remat: RematPolicy,
) -> tuple[jax.Array, Any]:
    """Run `x` through one run of layers; return it and each layer's other output, stacked over L.

    A shared adapter is sliced layer by layer like the parameters, so its gradient is stacked; from slots each layer
    gathers those of its rows.

    Stacked layers are computed by a loop, whose compile time does not depend on their number. Layers in a tuple are
    computed without a loop, and the other outputs are a tuple too: a larger program that copies nothing out of a stack.
    """
    is_shared = adapter is not None and adapter.scale.ndim == 0
    targets: dict[str, int] = dict.fromkeys(ATTENTION_TARGETS, run.layers.start)  # the first layer in the map's stack
    if not run.is_sparse:
        targets |= dict.fromkeys(MLP_TARGETS, run.of_kind.start)
    elif is_shared:
        targets |= dict.fromkeys(EXPERT_TARGETS, run.of_kind.start)
    pairs: dict[str, LoraPair] = {}
    if adapter is not None and is_shared:
        pairs = {name: cut(adapter.weights[name], first, len(run.layers)) for name, first in targets.items()}

    def step(x: jax.Array, sliced: tuple[LayerParams, dict[str, LoraPair], Any]) -> tuple[jax.Array, Any]:
        layer, layer_pairs, index = sliced
        rows, experts = dict[str, RowAdapter](), None
        if adapter is not None and is_shared:
            rows = {name: RowAdapter(pair=pair, scale=adapter.scale) for name, pair in layer_pairs.items()}
            experts = share_experts(rows, EXPERT_PREFIX) if run.is_sparse else None
        elif adapter is not None:
            assert adapter_B is not None, "an adapter with slots needs the slot of each row, or group of rows"
            rows = {name: select_rows(adapter, name, adapter_B, first + index) for name, first in targets.items()}
            if run.is_sparse:
                experts = pool_experts(adapter, EXPERT_PREFIX, adapter_B, run.of_kind.start + index)
        return block(x, layer, LayerAdapters(rows, experts), run.layers.start + index)

    if run.is_sparse and remat is RematPolicy.SAVE_MATMULS:
        remat = RematPolicy.NONE  # the matmuls of experts are not marked
    step = with_remat(remat, step)
    own = layers_of(layers, run)
    if not isinstance(own, tuple):
        return jax.lax.scan(step, x, (own, pairs, jnp.arange(len(run.layers), dtype=jnp.int32)))
    outputs: list[Any] = []
    for index, layer in enumerate(own):
        x, output = step(x, (layer, jax.tree.map(lambda leaf, index=index: leaf[index], pairs), index))
        outputs.append(output)
    return x, tuple(outputs)


def decode_step(
    params: DecoderParams,
    config: ModelConfig,
    token_S: jax.Array,
    cache: SliceCache,
    adapter: Adapter | None = None,
    adapter_S: jax.Array | None = None,
) -> tuple[jax.Array, SliceCache]:
    """Run one token per slot: return hidden states [S, D] and the cache with the token appended.

    Slot s attends to its past and its token. If the cache has separate layers, `params` must have them too.
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
    return params.layout.constrain(y, "batch", *[None] * (y.ndim - 1))  # whole rows, because they are sorted and summed


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
    logprob_gradient: logprobs.LogprobGradient,
    inputs: Any,
) -> tuple[jax.Array, jax.Array, AdapterWeights]:
    """Return log p(target), and the gradient of a loss by the hidden states and by the adapter's unembedding pair.

    `logprob_gradient` and `inputs` are those of `layers.logprobs.target_logprobs_and_gradient`.
    """
    rows = RowAdapter(pair=adapter.weights["unembed"], scale=adapter.scale)
    found, d_hidden_BTD, d_pair = logprobs.target_logprobs_and_gradient(
        hidden_BTD, params.unembed_VD, targets, rows, logprob_gradient, inputs
    )
    return found, d_hidden_BTD, {"unembed": d_pair}


def unembed_rows(adapter: Adapter | None, adapter_B: jax.Array | None) -> RowAdapter | None:
    """Return the adapters of the rows for the unembedding."""
    if adapter is None:
        return None
    if adapter.scale.ndim == 0:
        return RowAdapter(pair=adapter.weights["unembed"], scale=adapter.scale)
    return select_rows(adapter, "unembed", adapter_B, layer=None)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Return `x` scaled to unit mean square over its last dim, times `weight`, in float32 (arXiv:1910.07467)."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    return x * scale * weight.astype(jnp.float32)


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
        gate = linear(y, layer.gate_proj, rows.maps.get("gate_proj"))  # SwiGLU: Shazeer 2020, arXiv:2002.05202
        up = linear(y, layer.up_proj, rows.maps.get("up_proj"))
        return x + linear(jax.nn.silu(gate) * up, layer.down_proj, rows.maps.get("down_proj"))
    assert config.experts is not None
    weights = ExpertWeights(layer.expert_gate_proj, layer.expert_up_proj, layer.expert_down_proj)
    return x + mixture(y, layer.router, weights, rows.experts, config.experts.routing, layout)
