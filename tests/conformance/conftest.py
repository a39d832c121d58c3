"""Tiny random models with reference results from transformers, peft and torch, computed once per session."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.layers.lora import Adapter, LoraPair
from skyrl_tx.testing.tiny_models import LLAMA3_ROPE, write_model
from skyrl_tx.weights import hf
from skyrl_tx.weights.weight_map import expand_pattern, name_adapter_modules
from tests.support.client_environments import TORCH
from tests.support.tiny import DENSE, MODEL, load_model

VARIANTS = {
    "qwen3-tied": {"architecture": "Qwen3ForCausalLM", "tied_embeddings": True, "head_dim": 8},
    "qwen3-untied": {"architecture": DENSE, **MODEL},  # programs are shared with the tests of the JAX backend
    "qwen2-tied": {"architecture": "Qwen2ForCausalLM", "tied_embeddings": True, "head_dim": 8},
    "qwen2-untied": {"architecture": "Qwen2ForCausalLM", "tied_embeddings": False},
    "llama3-untied": {"architecture": "LlamaForCausalLM", "tied_embeddings": False, "rope_scaling": LLAMA3_ROPE},
    "qwen3-moe-untied": {"architecture": "Qwen3MoeForCausalLM", "tied_embeddings": False},
    "qwen3-moe-mixed": {
        "architecture": "Qwen3MoeForCausalLM",
        "tied_embeddings": True,
        "num_layers": 4,
        "experts": {"mlp_only_layers": [1], "norm_topk_prob": False, "num_experts_per_tok": 3},
    },
    "qwen3-moe-alternating": {
        "architecture": "Qwen3MoeForCausalLM",
        "tied_embeddings": True,
        "num_layers": 4,
        "experts": {"decoder_sparse_step": 2},
    },
    "llama3-tied": {"architecture": "LlamaForCausalLM", "tied_embeddings": True, "rope_scaling": LLAMA3_ROPE},
    "qwen3_5-untied": {"architecture": "Qwen3_5ForCausalLM", "tied_embeddings": False, "num_layers": 4},
    "qwen3_5-tied": {"architecture": "Qwen3_5ForCausalLM", "tied_embeddings": True, "num_layers": 8},
    "qwen3_5-moe-untied": {"architecture": "Qwen3_5MoeForCausalLM", "tied_embeddings": False, "num_layers": 4},
    "qwen3_5-moe-tied": {
        "architecture": "Qwen3_5MoeForCausalLM",
        "num_layers": 8,
        "experts": {"num_experts_per_tok": 3},
    },
    "qwen3-next-untied": {"architecture": "Qwen3NextForCausalLM", "tied_embeddings": False, "num_layers": 4},
    "qwen3-next-tied": {
        "architecture": "Qwen3NextForCausalLM",
        "num_layers": 4,
        "experts": {"mlp_only_layers": [1], "norm_topk_prob": False},
        "split_experts": True,
    },
    "mistral-untied": {"architecture": "MistralForCausalLM", "tied_embeddings": False, "keys": {"sliding_window": 16}},
    "gpt-oss-untied": {"architecture": "GptOssForCausalLM", "tied_embeddings": False, "mlp_size": 24},
    "deepseek-untied": {"architecture": "DeepseekV3ForCausalLM", "tied_embeddings": False, "num_layers": 3},
    "deepseek-tied": {
        "architecture": "DeepseekV3ForCausalLM",
        "experts": {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        "keys": {"q_lora_rank": None, "rope_scaling": None, "rope_interleave": False},
    },
    "glm-untied": {"architecture": "Glm4MoeForCausalLM", "tied_embeddings": False, "num_layers": 3},
    "glm-tied": {
        "architecture": "Glm4MoeForCausalLM",
        "keys": {"use_qk_norm": False, "attention_bias": False, "partial_rotary_factor": 0.25},
    },
    "glm-lite-untied": {"architecture": "Glm4MoeLiteForCausalLM", "tied_embeddings": False, "num_layers": 3},
    "glm-lite-tied": {
        "architecture": "Glm4MoeLiteForCausalLM",
        "num_layers": 3,
        "keys": {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None},
    },
    "nemotron-untied": {"architecture": "NemotronHForCausalLM"},
    "nemotron-dense": {
        "architecture": "NemotronHForCausalLM",
        "experts": {"moe_latent_size": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        "keys": {"hybrid_override_pattern": "M-M-*EM-M-*E", "num_hidden_layers": 12, "use_conv_bias": False},
    },
    "gemma3-tied": {"architecture": "Gemma3ForCausalLM"},
    "gemma3-untied": {
        "architecture": "Gemma3ForCausalLM",
        "tied_embeddings": False,
        "num_layers": 7,
        "keys": {
            "sliding_window_pattern": 3,
            "rope_scaling": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            },
        },
    },
    "gpt-oss-tied": {
        "architecture": "GptOssForCausalLM",
        "num_layers": 3,
        "experts": {"num_experts_per_tok": 4},
        # The limit of the published models. With a limit of 1, rounding moves some values across
        # it, where the derivative jumps. Torch's gradients in float32 and float64 would then differ
        # by 1.6e-3 of the largest value instead of 1.1e-5.
        "keys": {"swiglu_limit": 7.0},
    },
}
OWN = (
    *("qwen3-moe-untied", "qwen3-moe-alternating", "qwen3_5-moe-untied", "qwen3_5-moe-tied", "qwen3-next-tied"),
    *("deepseek-tied", "glm-tied", "glm-lite-tied", "nemotron-dense", "gpt-oss-tied"),
)
"""Variants whose experts each have their own LoRA factors.

In other variants, the experts of a layer share the factors next to the hidden size.
"""
UNTIED = "qwen3-untied"
DEFAULT = (
    UNTIED,
    "qwen3-moe-mixed",
    "gpt-oss-untied",
    "deepseek-untied",
    "qwen3_5-moe-untied",
    "nemotron-untied",
)
"""Variants of the default run.

Together they contain every kind of layer. `.ci/run` also runs the slow variants.
"""
EXHAUSTIVE = (
    *("qwen3-tied", "qwen2-untied", "qwen3-moe-untied", "qwen3-moe-alternating", "llama3-tied", "gemma3-untied"),
    *("qwen3_5-untied", "qwen3_5-tied", "qwen3_5-moe-tied", "qwen3-next-untied", "nemotron-dense"),
    *("gpt-oss-tied", "deepseek-tied", "glm-tied", "glm-lite-tied"),
)
"""Variants of families that other variants cover. The remaining variants are slow tests."""

BATCH, LENGTH = 3, 96  # longer than the original context of the scaled rope
ALPHA = 32.0


@dataclass(frozen=True)
class Reference:
    """A tiny model, its inputs, and the arrays that `reference/transformers_reference.py` wrote."""

    family: models.ModelFamily
    config: models.ModelConfig
    params: models.DecoderParams
    inputs: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]

    def adapter(self, prefix: str) -> Adapter:
        """Return the arrays `prefix/<module>.lora_A|lora_B` as an adapter.

        Modules without arrays are zero.
        """
        rank = next(v.shape[0] for k, v in self.arrays.items() if k.startswith(prefix) and k.endswith("lora_A"))
        modules = name_adapter_modules(
            self.family.weights, tied_embeddings=self.config.tied_embeddings, stacks_experts=False
        )
        weights = {}

        for name, empty in models.describe_adapter(self.config, rank).weights.items():
            layers = models.get_target_layers(self.config, name)
            a, b = (
                self._stack(
                    f"{prefix}/{{}}.{part}", [module for _, module in expand_pattern(modules[name], shape, layers)]
                )
                for part, shape in (("lora_A", empty.a.shape), ("lora_B", empty.b.shape))
            )
            if a is None or b is None:
                a, b = np.zeros(empty.a.shape, np.float32), np.zeros(empty.b.shape, np.float32)
            weights[name] = LoraPair(a=jnp.asarray(a.reshape(empty.a.shape)), b=jnp.asarray(b.reshape(empty.b.shape)))

        return Adapter(weights=weights, scale=jnp.float32(ALPHA / rank))

    def _stack(self, pattern: str, names: list[str]) -> np.ndarray | None:
        found = [self.arrays[pattern.format(name)].T for name in names if pattern.format(name) in self.arrays]
        return np.stack(found) if found else None


@pytest.fixture(scope="session")
def directories(request, tmp_path_factory, client_environment) -> dict[str, Path]:
    """Write the models of the selected tests and their reference results.

    One process computes all results, because importing torch is slow.
    """
    environment = client_environment(TORCH)
    generator = np.random.default_rng(0)
    needed, made = {UNTIED, *_parameters(request.session.items)}, {}
    for name, variant in VARIANTS.items():
        inputs = {
            "tokens": generator.integers(0, 256, (BATCH, LENGTH)),
            "targets": generator.integers(0, 256, (BATCH, LENGTH)),
            # Positive weights, so that no sum cancels.
            "weights": generator.uniform(0.0, 1.0, (BATCH, LENGTH)).astype(np.float32),
            "shares_factors": np.array(name not in OWN),
        }
        if name in needed:
            made[name] = write_model(tmp_path_factory.mktemp(name), std=0.2, **variant)
            np.savez(made[name] / "inputs.npz", **inputs)
    environment.run(Path(__file__).parent / "reference" / "transformers_reference.py", *made.values())
    return made


def _parameters(items: list[pytest.Item]) -> set[str]:
    """Return all test parameters that are strings."""
    calls = [item.callspec for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return {value for call in calls for value in call.params.values() if isinstance(value, str)}


def _mark_variant(name: str) -> Any:
    """Return a variant as a parameter, with the marks of its test level."""
    if name in DEFAULT:
        return name
    return pytest.param(name, marks=[pytest.mark.slow, *([pytest.mark.exhaustive] if name in EXHAUSTIVE else [])])


@pytest.fixture(scope="session", params=list(map(_mark_variant, VARIANTS)))
def reference(request, directories) -> Reference:
    directory = directories[request.param]
    model = load_model(directory)
    with np.load(directory / "inputs.npz") as inputs, np.load(directory / "reference.npz") as arrays:
        return Reference(
            family=models.find_family(hf.read_json(directory, "config.json")),
            config=replace(model.config, expert_lora="own" if request.param in OWN else "shared"),
            params=model.params,
            inputs=dict(inputs),
            arrays=dict(arrays),
        )
