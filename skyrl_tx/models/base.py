"""The interface of model families.

A model is a frozen `ModelConfig` (static under jit) and a `DecoderParams` tree (an argument, never a captured
constant). Everything below is a pure function; `adapter` may be None (the base model), one `Adapter` for all rows, or
slots with the slot of each row (see `skyrl_tx.layers.lora`). Hidden states, logits and log-probabilities are float32.

    forward(params, config, tokens_BT, adapter, adapter_B, remat=...) -> hidden [B, T, D]
    target_logprobs(params, hidden_BTD, targets, adapter, adapter_B)     -> log p, [B, T] or [B, T, K] as the targets
    target_logprobs_and_gradient(params, hidden_BTD, targets, adapter, logprob_gradient, inputs)
                                                                         -> log p, d hidden, d unembedding pair
    logits(params, hidden, adapter, adapter_B)                           -> [B, ..., V]
    extend(params, config, tokens_BT, start, past, adapter, adapter_B)   -> hidden [B, T, D], KeyValues [L, B, K, C, H]
    decode_step(params, config, token_S, cache, adapter, adapter_S)      -> hidden [S, D], SliceCache
    by_layer(params, config)                                             -> DecoderParams, each layer by itself
    describe_params(config)                                              -> DecoderParams of Parameter
    adapter_shapes(config, rank), init_adapter(config, spec, max_rank)   -> Adapter of shapes, of numpy arrays

Prompts and cache are `KeyValues`, zeros at first; `kv_cache.insert(cache, prompt, size, ...)` copies a prompt.
Steps of decoding lie between `kv_cache.open_slice(cache, ...)` and `kv_cache.close_slice(cache, ...)`.
Weights: `weights.hf.load(directory, describe_params(config), family.weights)` or `weights.hf.dummy(...)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_tx.models.config import (
    Experts,
    HfConfig,
    ModelConfig,
    UnsupportedModel,
    read_rope,
    refuse_what_changes_the_maths,
)
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
        """Read a `config.json`.

        Raises UnsupportedModel, naming the key and its value, when something is missing or would change the maths.
        """
        hf = {**self.defaults, **hf}
        refuse_what_changes_the_maths(hf, has_experts=self.read_experts is not None)

        def need(key: str) -> Any:
            if hf.get(key) is None:
                raise UnsupportedModel(f"config.json of a {self.architecture} lacks {key!r}")
            return hf[key]

        hidden, heads = need("hidden_size"), need("num_attention_heads")
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=need("vocab_size"),
            hidden_size=hidden,
            num_layers=need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hidden // heads,
            mlp_size=need("intermediate_size"),
            norm_epsilon=float(need("rms_norm_eps")),
            rope=read_rope(hf),
            max_context_length=need("max_position_embeddings"),
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            experts=None if self.read_experts is None else self.read_experts(hf),
        )
