"""Adapters have as many parameters as on the hosted service, for every family that it lists.

There, experts share factors.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.models import ModelConfig, describe_adapter, find_family, get_targets
from skyrl_tx.models.config import ExpertLora

FOLDER = Path(__file__).parent / "hub_configs"


def sizes(architecture: str, *dims: int, **more: Any) -> dict[str, Any]:
    """Return a config with these published sizes."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    rest = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096}
    return {"architectures": [architecture], **dict(zip(names, dims, strict=True)), **rest, **more}


def qwen3(*dims: int, width: int) -> dict[str, Any]:
    return sizes("Qwen3ForCausalLM", 151936, *dims, intermediate_size=width)


def qwen3_moe(*dims: int, width: int) -> dict[str, Any]:
    more = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width, "intermediate_size": 6144}
    return sizes("Qwen3MoeForCausalLM", 151936, *dims, **more)


def llama(*dims: int, width: int) -> dict[str, Any]:
    return sizes("LlamaForCausalLM", 128256, *dims, intermediate_size=width)


def hub(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


COUNTS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "Qwen/Qwen3-4B-Instruct-2507": (qwen3(2560, 36, 32, 8, 128, width=9728), (1_327_104, 737_280, 154_496)),
    "Qwen/Qwen3-8B": (qwen3(4096, 36, 32, 8, 128, width=12288), (1_769_472, 958_464, 156_032)),
    "Qwen/Qwen3-32B": (qwen3(5120, 64, 64, 8, 128, width=25600), (5_898_240, 2_490_368, 157_056)),
    "Qwen/Qwen3-30B-A3B": (qwen3_moe(2048, 48, 32, 4, 128, width=768), (14_450_688, 835_584, 153_984)),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (
        qwen3_moe(4096, 94, 64, 4, 128, width=1536),
        (56_598_528, 3_176_448, 156_032),
    ),
    "Qwen/Qwen3.5-4B": (hub("Qwen3.5-4B"), (1_130_496, 897_024, 250_880)),
    "Qwen/Qwen3.5-9B": (hub("Qwen3.5-9B"), (1_572_864, 1_130_496, 252_416)),
    "Qwen/Qwen3.5-27B": (hub("Qwen3.5-27B"), (4_325_376, 2_965_504, 253_440)),
    "Qwen/Qwen3.8-27B": (hub("Qwen3.8-27B"), (4_325_376, 2_965_504, 253_440)),
    "Qwen/Qwen3.5-35B-A3B": (hub("Qwen3.5-35B-A3B"), (16_281_600, 1_013_760, 250_368)),
    "Qwen/Qwen3.6-35B-A3B": (hub("Qwen3.6-35B-A3B"), (16_281_600, 1_013_760, 250_368)),
    "Qwen/Qwen3.5-397B-A17B": (hub("Qwen3.5-397B-A17B"), (96_030_720, 2_841_600, 252_416)),
    "meta-llama/Llama-3.1-8B": (llama(4096, 32, 32, 8, 128, width=14336), (1_769_472, 851_968, 132_352)),
    "meta-llama/Llama-3.1-70B": (llama(8192, 80, 64, 8, 128, width=28672), (8_847_360, 4_096_000, 136_448)),
    "meta-llama/Llama-3.2-1B": (llama(2048, 16, 32, 8, 64, width=8192), (491_520, 212_992, 130_304)),
    "meta-llama/Llama-3.2-3B": (llama(3072, 28, 24, 8, 128, width=8192), (946_176, 573_440, 131_328)),
    "deepseek-ai/DeepSeek-V3.1": (hub("DeepSeek-V3.1"), (94_307_328, 2_440_000, 136_448)),
    "moonshotai/Kimi-K2-Thinking": (hub("Kimi-K2-Thinking"), (144_583_680, 1_940_288, 171_008)),
    "moonshotai/Kimi-K2.5": (hub("Kimi-K2.5"), (144_583_680, 1_940_288, 171_008)),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (hub("Nemotron-3-Nano-30B-A3B"), (11_346_176, 584_832, 133_760)),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": (
        hub("Nemotron-3.5-Lightning-30B-A3B"),
        (11_346_176, 584_832, 133_760),
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (
        hub("Nemotron-3-Super-120B-A12B"),
        (111_349_760, 1_675_264, 135_168),
    ),
    "openai/gpt-oss-20b": (hub("gpt-oss-20b"), (6_842_880, 497_664, 203_968)),
    "openai/gpt-oss-120b": (hub("gpt-oss-120b"), (40_124_160, 746_496, 203_968)),
}
"""Configs of hosted models, and their parameters of `mlp`, `attn` and `unembed` per rank.

The numbers come from tinker-cookbook 0.6.1, hyperparam_utils.py,
_LORA_PARAMS_PER_RANK_BY_COMPONENT.
"""


def read(content: dict[str, Any], form: ExpertLora) -> ModelConfig:
    return replace(find_family(content).config_from_hf(content), expert_lora=form)


def count(config: ModelConfig, rank: int = 1) -> dict[str, int]:
    found = {"mlp": 0, "attn": 0, "unembed": 0}
    for name, pair in describe_adapter(config, rank).weights.items():
        found[get_targets(config)[name].group] += math.prod(pair.a.shape) + math.prod(pair.b.shape)
    return found


@pytest.mark.parametrize("name", COUNTS)
def test_adapters_are_as_large_as_on_the_hosted_service(name: str) -> None:
    content, expected = COUNTS[name]
    config = read(content, "shared")
    assert tuple(count(config).values()) == expected
    assert tuple(count(config, rank=3).values()) == tuple(3 * number for number in expected)


def test_experts_with_factors_of_their_own_have_several_times_as_many_parameters() -> None:
    content, (shared, attn, unembed) = COUNTS["Qwen/Qwen3-30B-A3B"]
    found = count(read(content, "own"))
    assert found == {"mlp": 48 * 3 * 128 * (2048 + 768), "attn": attn, "unembed": unembed}
    assert 3 < found["mlp"] / shared < 4


def test_the_form_changes_nothing_without_experts() -> None:
    content, _ = COUNTS["Qwen/Qwen3-8B"]
    assert count(read(content, "own")) == count(read(content, "shared"))


@pytest.mark.parametrize(
    ("name", "layers", "size", "width", "queries", "keys", "vocabulary"),
    [
        ("gemma-3-270m", 18, 640, 2048, 4 * 256, 256, 262144),
        ("gemma-3-1b-it", 26, 1152, 6912, 4 * 256, 256, 262144),
        ("gemma-3-4b-it", 34, 2560, 10240, 8 * 256, 4 * 256, 262208),
        ("gemma-3-27b-it", 62, 5376, 21504, 32 * 128, 16 * 128, 262208),
    ],
)
def test_adapters_of_a_family_that_the_service_does_not_list(
    name: str, layers: int, size: int, width: int, queries: int, keys: int, vocabulary: int
) -> None:
    """Attention has four maps (query, key, value, output), and the feed-forward has three."""
    attn = layers * (2 * (size + queries) + 2 * (size + keys))
    expected = {"mlp": layers * 3 * (size + width), "attn": attn, "unembed": vocabulary + size}
    assert count(read(hub(name), "shared")) == expected
