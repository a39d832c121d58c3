"""The decoder that all dense families share; what differs between them is data in `ModelConfig`.

Legend: B batch, T tokens, D embed, N heads, K kv heads, H head dim, F mlp, V vocab, L layers, S decode slots, C cache.
The interface is described in `skyrl_tx.models.base`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers import kv_cache, logprobs
from skyrl_tx.layers.attention import cached_attention, causal_attention
from skyrl_tx.layers.kv_cache import KeyValues
from skyrl_tx.layers.lora import Adapter, AdapterWeights, RowAdapter, RowAdapters, linear, select_rows
from skyrl_tx.layers.mlp import gated_mlp
from skyrl_tx.layers.norm import rms_norm
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.rope import rotate
from skyrl_tx.layers.stack import apply_stack
from skyrl_tx.models.adapters import BLOCK_TARGETS
from skyrl_tx.models.config import ModelConfig


@struct.dataclass
class LayerParams:
    """The layers' parameters, each with a leading L; of one layer inside the loop. Linear maps are [in, out]."""

    attn_norm: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    mlp_norm: Any
    gate_proj: Any
    up_proj: Any
    down_proj: Any
    q_bias: Any = None
    k_bias: Any = None
    v_bias: Any = None
    q_norm: Any = None
    k_norm: Any = None


@struct.dataclass
class DecoderParams:
    """All base weights: arrays, or `Parameter`s that describe them."""

    embed: Any  # [V, D]
    layers: LayerParams
    final_norm: Any  # [D]
    unembed: Any = None  # [V, D]; None when tied to `embed`

    @property
    def unembed_VD(self) -> Any:
        """The matrix that turns hidden states into logits."""
        return self.embed if self.unembed is None else self.unembed


def describe_params(config: ModelConfig) -> DecoderParams:
    """Return shape, logical axes and initialisation of every parameter, as a tree of `Parameter`."""
    L, D, F, V, H = config.num_layers, config.hidden_size, config.mlp_size, config.vocab_size, config.head_dim
    NH, KH = config.num_heads * H, config.num_kv_heads * H

    def norm(size: int, axis: Any) -> Parameter:
        return Parameter((L, size), ("layers", axis), "ones")

    def bias(size: int, axis: Any) -> Parameter | None:
        return Parameter((L, size), ("layers", axis), "zeros") if config.qkv_bias else None

    layers = LayerParams(
        attn_norm=norm(D, "embed"),
        q_proj=Parameter((L, D, NH), ("layers", "embed", "heads")),
        k_proj=Parameter((L, D, KH), ("layers", "embed", "kv_heads")),
        v_proj=Parameter((L, D, KH), ("layers", "embed", "kv_heads")),
        o_proj=Parameter((L, NH, D), ("layers", "heads", "embed")),
        mlp_norm=norm(D, "embed"),
        gate_proj=Parameter((L, D, F), ("layers", "embed", "mlp")),
        up_proj=Parameter((L, D, F), ("layers", "embed", "mlp")),
        down_proj=Parameter((L, F, D), ("layers", "mlp", "embed")),
        q_bias=bias(NH, "heads"),
        k_bias=bias(KH, "kv_heads"),
        v_bias=bias(KH, "kv_heads"),
        q_norm=norm(H, "head_dim") if config.qk_norm else None,
        k_norm=norm(H, "head_dim") if config.qk_norm else None,
    )
    return DecoderParams(
        embed=Parameter((V, D), ("vocab", "embed")),
        layers=layers,
        final_norm=Parameter((D,), ("embed",), "ones"),
        unembed=None if config.tied_embeddings else Parameter((V, D), ("vocab", "embed")),
    )


def forward(
    params: DecoderParams,
    config: ModelConfig,
    tokens_BT: jax.Array,
    adapter: Adapter | None = None,
    adapter_B: jax.Array | None = None,
    *,
    remat: bool = False,
) -> jax.Array:
    """Return the hidden states after the final norm, float32 [B, T, D], of rows padded at their right."""
    hidden_BTD, _ = _run(params, config, tokens_BT, adapter, adapter_B, remat=remat, keep_keys=False)
    return hidden_BTD


def prefill(
    params: DecoderParams,
    config: ModelConfig,
    tokens_BT: jax.Array,
    adapter: Adapter | None = None,
    adapter_B: jax.Array | None = None,
) -> tuple[jax.Array, KeyValues]:
    """Return what `forward` returns, and every layer's keys and values [L, B, K, T, H]."""
    hidden_BTD, keys = _run(params, config, tokens_BT, adapter, adapter_B, remat=False, keep_keys=True)
    assert keys is not None
    return hidden_BTD, keys


def _run(
    params: DecoderParams,
    config: ModelConfig,
    tokens_BT: jax.Array,
    adapter: Adapter | None,
    adapter_B: jax.Array | None,
    *,
    remat: bool,
    keep_keys: bool,
) -> tuple[jax.Array, KeyValues | None]:
    dtype = params.embed.dtype
    angles = config.rope.angles(jnp.arange(tokens_BT.shape[1]), config.head_dim)

    def block(x_BTD: jax.Array, layer: LayerParams, rows: RowAdapters, _: jax.Array):
        q_BTNH, k_BTKH, v_BTKH = _project_heads(x_BTD, layer, rows, config, angles)
        mixed_BTNH = causal_attention(q_BTNH, k_BTKH, v_BTKH)
        kept = KeyValues(k=jnp.swapaxes(k_BTKH, 1, 2), v=jnp.swapaxes(v_BTKH, 1, 2)) if keep_keys else None
        return _finish_block(x_BTD, mixed_BTNH, layer, rows, config), kept

    x_BTD = params.embed[tokens_BT].astype(jnp.float32)
    x_BTD, keys = apply_stack(block, x_BTD, params.layers, adapter, adapter_B, BLOCK_TARGETS, remat=remat)
    assert keys is None or keys.k.dtype == dtype
    return rms_norm(x_BTD, params.final_norm, config.norm_epsilon), keys


def decode_step(
    params: DecoderParams,
    config: ModelConfig,
    token_S: jax.Array,
    position_S: jax.Array,
    cache: KeyValues,
    adapter: Adapter | None = None,
    adapter_S: jax.Array | None = None,
    *,
    bucket: int | None = None,
) -> tuple[jax.Array, KeyValues]:
    """Run one token per slot: return hidden states [S, D] and the cache with the token written at its position.

    Slot s sees what the cache holds before `position_S[s]`, and its token. `bucket` (static) bounds how much of the
    cache is read; it must be at least the largest position in use.
    """
    length = cache.k.shape[3] if bucket is None else bucket
    angles = config.rope.angles(position_S, config.head_dim)

    def block(x_SD: jax.Array, layer: LayerParams, rows: RowAdapters, index: jax.Array):
        q_SNH, k_SKH, v_SKH = _project_heads(x_SD, layer, rows, config, angles)
        past = kv_cache.read_layer(cache, index, length)
        mixed_SNH = cached_attention(q_SNH, k_SKH, v_SKH, past, position_S)
        return _finish_block(x_SD, mixed_SNH, layer, rows, config), (k_SKH, v_SKH)

    x_SD = params.embed[token_S].astype(jnp.float32)
    x_SD, (k_LSKH, v_LSKH) = apply_stack(block, x_SD, params.layers, adapter, adapter_S, BLOCK_TARGETS)
    hidden_SD = rms_norm(x_SD, params.final_norm, config.norm_epsilon)
    return hidden_SD, kv_cache.append(cache, k_LSKH, v_LSKH, position_S)


def logits(
    params: DecoderParams, hidden: jax.Array, adapter: Adapter | None = None, adapter_B: jax.Array | None = None
) -> jax.Array:
    """Return float32 logits [B, ..., V] of hidden states [B, ..., D]; `adapter_B` has a slot for each index of B."""
    return logprobs.logits(hidden, params.unembed_VD, unembed_rows(adapter, adapter_B))


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
    x: jax.Array, layer: LayerParams, rows: RowAdapters, config: ModelConfig, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rotated queries [..., N, H] and keys [..., K, H], and values, in the weights' type."""
    y = rms_norm(x, layer.attn_norm, config.norm_epsilon)

    def heads(name: str, num_heads: int) -> jax.Array:
        z = linear(y, getattr(layer, f"{name}_proj"), rows.get(f"{name}_proj"), getattr(layer, f"{name}_bias"))
        return z.reshape(*z.shape[:-1], num_heads, config.head_dim)

    q, k, v = heads("q", config.num_heads), heads("k", config.num_kv_heads), heads("v", config.num_kv_heads)
    if config.qk_norm:
        q = rms_norm(q, layer.q_norm, config.norm_epsilon)
        k = rms_norm(k, layer.k_norm, config.norm_epsilon)
    dtype = layer.q_proj.dtype
    return rotate(q, *angles).astype(dtype), rotate(k, *angles).astype(dtype), v.astype(dtype)


def _finish_block(
    x: jax.Array, mixed: jax.Array, layer: LayerParams, rows: RowAdapters, config: ModelConfig
) -> jax.Array:
    """Add to `x` the attention's output projection, then the feed-forward of the sum."""
    x = x + linear(mixed.reshape(*mixed.shape[:-2], -1), layer.o_proj, rows.get("o_proj"))
    y = rms_norm(x, layer.mlp_norm, config.norm_epsilon)
    return x + gated_mlp(y, layer.gate_proj, layer.up_proj, layer.down_proj, rows)
