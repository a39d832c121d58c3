"""Write tiny random models in Hugging Face format, without torch or a download.

Equal seeds give equal files.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from skyrl_tx.layers.parameter import Parameter, flatten
from skyrl_tx.models import FAMILIES, describe_params
from skyrl_tx.weights import weight_map
from skyrl_tx.weights.weight_map import bind_rows, get_rule_path

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""The RoPE scaling of Llama 3.1.

Its original context is so short that scaling affects tiny models.
"""

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
"""The RoPE scaling of gpt-oss.

Its original context is so short that scaling affects tiny models.
"""

DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
"""The RoPE scaling of DeepSeek-V3.

`mscale` equals `mscale_all_dim`, so cosine and sine are not scaled.
"""

DELTA_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,  # the products of shorter queries and keys are more often near 0: see _CORRELATED
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
LATENTS = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,  # as transformers writes it, in the RoPE config
    "num_key_value_heads": None,
}
ROUTED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

TINY_KEYS: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {**EXPERTS, "norm_topk_prob": True},
    "GptOssForCausalLM": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "sliding_window": 16,
        "swiglu_limit": 1.0,
        "rope_scaling": YARN,
    },
    "DeepseekV3ForCausalLM": {
        **LATENTS,
        **ROUTED_EXPERTS,
        "n_group": 4,
        "topk_group": 2,
        "rope_scaling": DEEPSEEK_YARN,
        "num_nextn_predict_layers": 0,
    },
    "Glm4MoeForCausalLM": {
        **ROUTED_EXPERTS,
        "n_group": 2,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 0,
    },
    "Glm4MoeLiteForCausalLM": {**LATENTS, **ROUTED_EXPERTS, "num_key_value_heads": 4},
    "NemotronHForCausalLM": {
        **{key: value for key, value in ROUTED_EXPERTS.items() if key != "first_k_dense_replace"},
        "hybrid_override_pattern": "MEME*-",  # one cycle twice, then one layer of each other kind
        "num_hidden_layers": 6,
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-5,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "mlp_hidden_act": "relu2",
    },
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "Qwen3_5ForCausalLM": {
        **DELTA_NETS,
        "model_type": "qwen3_5_text",  # without the suffix it would be the model with images
    },
    "Qwen3NextForCausalLM": {
        **DELTA_NETS,
        **EXPERTS,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 40,
    },
    "Qwen3_5MoeForCausalLM": {
        **DELTA_NETS,
        **EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 40,
    },
}
"""Config keys of families.

Sizes, windows and limits are so small that each has an effect in tiny models.
"""

_CORRELATED = {"layers.in_proj_k": "layers.in_proj_q", "layers.k_conv": "layers.q_conv"}
"""Maps of keys of linear attention, each with the map of queries that it is correlated with.

The first outputs of a sequence are products of few queries and keys, and a norm divides by them.
Without the correlation, some outputs are 1,000 times smaller than the rest. A change of the last
bit of a weight then changes logits by up to 4e-5.
"""


_PREFIXES = {"NemotronHForCausalLM": "backbone."}
"""First part of tensor names, if it is not `model.`. transformers reads and writes both."""


_30M: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "mlp_size": 1536,
}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "mlp_size": 192},
    "30M": _30M,
    "150M": {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_layers": 7,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 64,
        "mlp_size": 3072,
    },
    "80M-A30M": {
        **_30M,
        "architecture": "Qwen3MoeForCausalLM",
        "experts": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384},
    },
    "44M-delta": {
        **_30M,
        "architecture": "Qwen3_5ForCausalLM",
        "num_layers": 8,
        "keys": {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_value_head_dim": 64},
    },
}
"""Models for benchmarks, by number of parameters (A: parameters active per token).

The unembedding is not tied.

80M-A30M uses 4 of 16 experts per token, so it has as many active parameters as 30M. 44M-delta is a
Qwen3.5 with six delta nets and two attention layers, as wide as 30M.
"""


def write_preset(name: str, directory: Path) -> Path:
    """Write a random model with a size of PRESETS and untied embeddings. Returns the directory."""
    return write_model(directory, tied_embeddings=False, max_context_length=8192, std=0.02, **PRESETS[name])


def write_model(
    directory: Path,
    architecture: str = "Qwen3ForCausalLM",
    *,
    vocab_size: int = 256,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    mlp_size: int = 64,
    max_context_length: int = 512,
    tied_embeddings: bool = True,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    experts: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    split_experts: bool = False,
    eos_token_id: int | list[int] = 1,
    seed: int = 0,
    std: float = 0.05,
) -> Path:
    """Write config.json, generation_config.json and model.safetensors. Returns the directory.

    With `split_experts`, experts have separate tensors in families that may stack them. The numbers
    do not change. `experts` has config keys of a mixture of experts, and `keys` has further keys of
    the family; both come after TINY_KEYS. Weights are normal with standard deviation `std`. Norms
    are drawn around 1 and biases around 0, so that a test detects if they are ignored.
    """
    family = FAMILIES[architecture]

    # Write the sizes under the keys that most families share.
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", architecture.removesuffix("ForCausalLM")).lower(),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": mlp_size,
        "hidden_act": "silu",
        # Norms, positions and tokens.
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "max_position_embeddings": max_context_length,
        "tie_word_embeddings": tied_embeddings,
        "eos_token_id": eos_token_id,
        "torch_dtype": "float32",
    }

    if rope_scaling is not None:
        config["rope_scaling"] = rope_scaling
    config |= TINY_KEYS.get(architecture, {}) | (experts or {}) | (keys or {})

    # Draw the values of each parameter, in the order of the rules.
    parameters: dict[str, Parameter] = flatten(describe_params(family.config_from_hf(config)))
    generator = np.random.Generator(np.random.Philox(key=seed))
    tensors: dict[str, np.ndarray] = {}
    queries: dict[tuple[str, int], np.ndarray] = {}
    weights = weight_map.split_experts(family.weights) if split_experts else family.weights
    for rule in bind_rows(weights, parameters):
        stacks = [parameter for path, parameter in parameters.items() if get_rule_path(path) == rule.path]
        for layer, (name, parameter) in enumerate(rule.sort_by_layer(stacks)):
            shape = parameter.shape[rule.num_stacked :]
            if (prefix := _PREFIXES.get(architecture)) and name.startswith("model."):
                name = prefix + name.removeprefix("model.")
            tensor = tensors.setdefault(name, np.zeros(rule.get_tensor_shape(shape), np.float32))

            value = _draw(generator, rule.path, parameter, shape, std)
            if rule.path in _CORRELATED:
                value = 0.8 * queries[_CORRELATED[rule.path], layer] + 0.6 * value
            elif rule.path in _CORRELATED.values():
                queries[rule.path, layer] = value
            rule.put(tensor, value - rule.offset)

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _draw(
    generator: np.random.Generator, path: str, parameter: Parameter, shape: tuple[int, ...], std: float
) -> np.ndarray:
    """Draw the values of one parameter."""
    if path == "layers.decay_log":  # with the usual values, up to 16, the state would be forgotten within a token
        return np.log(generator.uniform(0.05, 0.95, shape))
    if path.endswith("_conv"):  # large, for the same reason as _CORRELATED
        std = 2.0
    center = 1.0 if parameter.init == "ones" else 0.0
    return center + std * generator.standard_normal(shape)
