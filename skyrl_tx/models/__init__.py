"""All model families by architecture name, and the functions that run their models."""

from collections.abc import Mapping

from skyrl_tx.models.adapters import (
    CutAdapter,
    GroupPairs,
    choose_expert_lora,
    cut_pairs,
    describe_adapter,
    fit_adapter,
    get_adapter_axes,
    get_target_layers,
    get_targets,
    get_trained_targets,
    init_adapter,
    join_pairs,
    make_adapter_format,
)
from skyrl_tx.models.config import HfConfig, ModelConfig
from skyrl_tx.models.decoder import (
    constrain_cache,
    decode_step,
    embed,
    forward,
    logits,
    loss_and_gradient,
    prefill,
    target_logprobs,
)
from skyrl_tx.models.deepseek_v3 import DEEPSEEK_V3
from skyrl_tx.models.family import ModelFamily
from skyrl_tx.models.gemma3 import GEMMA3
from skyrl_tx.models.glm4_moe import GLM4_MOE
from skyrl_tx.models.glm4_moe_lite import GLM4_MOE_LITE
from skyrl_tx.models.gpt_oss import GPT_OSS
from skyrl_tx.models.llama import LLAMA
from skyrl_tx.models.mistral import MISTRAL
from skyrl_tx.models.nemotron_h import NEMOTRON_H
from skyrl_tx.models.params import DecoderParams, describe_cache, describe_params, make_empty_cache, unstack_params
from skyrl_tx.models.parts.base import UnsupportedModel
from skyrl_tx.models.qwen2 import QWEN2
from skyrl_tx.models.qwen3 import QWEN3
from skyrl_tx.models.qwen3_5 import QWEN3_5
from skyrl_tx.models.qwen3_5_moe import QWEN3_5_MOE
from skyrl_tx.models.qwen3_moe import QWEN3_MOE
from skyrl_tx.models.qwen3_next import QWEN3_NEXT

FAMILIES: Mapping[str, ModelFamily] = {
    name: family
    for family in (
        *(QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, QWEN3, QWEN3_MOE, QWEN2, LLAMA, MISTRAL, GPT_OSS),
        *(DEEPSEEK_V3, GLM4_MOE, GLM4_MOE_LITE, NEMOTRON_H, GEMMA3),
    )
    for name in family.names
}


def find_family(hf: HfConfig) -> ModelFamily:
    """Return the family of a `config.json`. Raises UnsupportedModel for an unknown architecture."""
    names = hf.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedModel(f"config.json has architectures = {names!r}; supported: {', '.join(FAMILIES)}")


__all__ = [
    "FAMILIES",
    "CutAdapter",
    "DecoderParams",
    "GroupPairs",
    "ModelConfig",
    "ModelFamily",
    "UnsupportedModel",
    "choose_expert_lora",
    "constrain_cache",
    "cut_pairs",
    "decode_step",
    "describe_adapter",
    "describe_cache",
    "describe_params",
    "embed",
    "find_family",
    "fit_adapter",
    "forward",
    "get_adapter_axes",
    "get_target_layers",
    "get_targets",
    "get_trained_targets",
    "init_adapter",
    "join_pairs",
    "logits",
    "loss_and_gradient",
    "make_adapter_format",
    "make_empty_cache",
    "prefill",
    "target_logprobs",
    "unstack_params",
]
