"""What a model family is, and the interface of all of them.

A model is a frozen `ModelConfig` (static under jit) and a `DecoderParams` tree (an argument, never a captured
constant). Everything below is a pure function; `adapter` may be None (the base model), one `Adapter` for all rows, or
slots with the slot of each row (see `skyrl_tx.layers.lora`). Hidden states, logits and log-probabilities are float32.

    forward(params, config, tokens_BT, adapter, adapter_B, kept=...)    -> hidden [B, T, D]
    target_logprobs(params, hidden_BTD, targets, adapter, adapter_B)     -> log p, [B, T] or [B, T, K] as the targets
    target_logprobs_and_gradient(params, hidden_BTD, targets, adapter, slope, inputs)
                                                                         -> log p, d hidden, d unembedding pair
    logits(params, hidden, adapter, adapter_B)                           -> [B, ..., V]
    extend(params, config, tokens_BT, start, past, adapter, adapter_B)   -> hidden [B, T, D], KeyValues [L, B, K, C, H]
    decode_step(params, config, token_S, cache, adapter, adapter_S)      -> hidden [S, D], SliceCache
    by_layer(params, config)                                             -> DecoderParams, each layer by itself
    describe_params(config)                                              -> DecoderParams of Parameter
    adapter_shapes(config, rank), init_adapter(config, spec, max_rank)   -> Adapter of shapes, of numpy arrays

Prompts and cache are `kv_cache.allocate(...)`; one goes into the other by `kv_cache.insert(cache, prompts, size, ...)`.
Steps of decoding lie between `kv_cache.open_slice(cache, ...)` and `kv_cache.close_slice(cache, ...)`.
Weights: `weights.hf.load(directory, describe_params(config), family.weights)` or `weights.hf.dummy(...)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_tx.models.config import Experts, HfConfig, ModelConfig, read_config
from skyrl_tx.weights.weight_map import WeightMap


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One architecture name of Hugging Face configs: how it differs from the shared decoder, its tensors' names."""

    architecture: str
    weights: WeightMap
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config keys that a checkpoint may leave out
    qkv_bias: bool = False
    qk_norm: bool = False
    read_experts: Callable[[HfConfig], Experts] | None = None

    def config_from_hf(self, hf: HfConfig) -> ModelConfig:
        """Read a `config.json`; raises UnsupportedModel for what we do not compute."""
        filled = {**self.defaults, **hf}
        return read_config(
            self.architecture,
            filled,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            read_experts=self.read_experts,
        )
