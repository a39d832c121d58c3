"""All model families by architecture name, and the functions for their models and LoRA adapters."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_tx.models.adapters import (
    GroupPairs,
    SplitAdapter,
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
from skyrl_tx.models.config import (
    DecoderParams,
    ModelConfig,
    describe_cache,
    describe_params,
    make_empty_cache,
    unstack_params,
)
from skyrl_tx.models.decoder import (
    constrain_cache,
    decode_step,
    embed,
    forward,
    forward_and_count,
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
from skyrl_tx.models.parts.base import UnsupportedModel
from skyrl_tx.models.qwen2 import QWEN2
from skyrl_tx.models.qwen3 import QWEN3
from skyrl_tx.models.qwen3_5 import QWEN3_5
from skyrl_tx.models.qwen3_5_moe import QWEN3_5_MOE
from skyrl_tx.models.qwen3_moe import QWEN3_MOE
from skyrl_tx.models.qwen3_next import QWEN3_NEXT
from skyrl_tx.weights.hf import has_other_unembedding, read_json

_log = logging.getLogger(__name__)

FAMILIES: Mapping[str, ModelFamily] = {
    name: family
    for family in (
        *(QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, QWEN3, QWEN3_MOE, QWEN2, LLAMA, MISTRAL, GPT_OSS),
        *(DEEPSEEK_V3, GLM4_MOE, GLM4_MOE_LITE, NEMOTRON_H, GEMMA3),
    )
    for name in family.names
}


def find_family(hf: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a `config.json`. Raises UnsupportedModel for an unknown architecture."""
    names = hf.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedModel(f"config.json has architectures = {names!r}; supported: {', '.join(FAMILIES)}")


def read_model(directory: Path) -> tuple[ModelFamily, ModelConfig]:
    """Return the family and the configuration of a checkpoint.

    If `config.json` says that the embeddings are tied, but the files have an unembedding that
    differs from the embedding, the model has untied embeddings, as in transformers 5. Raises
    UnsupportedModel, or CheckpointError for a `config.json` that cannot be read.
    """
    content = read_json(directory, "config.json")
    family = find_family(content)
    config = family.config_from_hf(content)
    if config.tied_embeddings and has_other_unembedding(directory, family.weights):
        _log.warning(
            "%s: config.json has tie_word_embeddings = true, but the unembedding in the files differs from the "
            "embedding. The model is used with untied embeddings, as in transformers 5; "
            "set tie_word_embeddings = false to confirm this",
            directory,
        )
        config = replace(config, tied_embeddings=False)
    return family, config


__all__ = [
    "FAMILIES",
    "DecoderParams",
    "GroupPairs",
    "ModelConfig",
    "ModelFamily",
    "SplitAdapter",
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
    "forward_and_count",
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
    "read_model",
    "target_logprobs",
    "unstack_params",
]
