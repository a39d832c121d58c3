"""The models, and the prompts and lengths of an iteration."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.model_configs import QWEN3_4B, QWEN3_8B, QWEN3_600M

ROOT = Path(__file__).parents[2]
HUB_CONFIGS = ROOT / "tests" / "unit" / "models" / "hub_configs"
MEDIAN_SHARE, DEVIATION_OF_LOGARITHM, SHORTEST_SHARE = 1 / 3, 0.5, 1 / 32
"""Lengths as GSM8K solutions have them, as shares of the longest. With at most 512 tokens, the median is 170."""
TINY = {
    **QWEN3_600M,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def _hub_config(name: str) -> dict[str, Any]:
    """Return the configuration of the text model of a published model."""
    content: dict[str, Any] = json.loads((HUB_CONFIGS / f"{name}.json").read_text())
    return content["text_config"]


def _shrink(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Qwen3.5 with one of each kind of layer, and small."""
    sizes = {name: TINY[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")}
    heads = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 32)
    counts = {"num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "eos_token_id": 0}
    rope = {**content["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    return {**content, **sizes, **heads, **counts, **layers, "rope_parameters": rope}


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"model_type": "qwen3", **QWEN3_600M},
    "Qwen3-4B": {"model_type": "qwen3", **QWEN3_4B},
    "Qwen3-8B": {"model_type": "qwen3", **QWEN3_8B},
    "Qwen3.5-4B": _hub_config("Qwen3.5-4B"),
    "Qwen3.5-9B": _hub_config("Qwen3.5-9B"),
    "tiny": {"model_type": "qwen3", **TINY},
    "tiny-Qwen3.5": _shrink(_hub_config("Qwen3.5-4B")),
}
"""By name, what transformers needs to make the text model."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an iteration. Samples never stop early: each has exactly as many tokens as it may have."""

    prompts: int
    samples: int
    """Samples of a prompt."""
    prompt_tokens: int
    tokens: int
    """New tokens of a sample, or the most of them if lengths are drawn."""
    are_lengths_drawn: bool = False
    """Whether lengths are distributed like GSM8K solutions.
    If so, each sample is a separate request, as in `rl/train` of tinker-cookbook. Otherwise a request has all samples
    of a prompt, as in its `rl_loop`."""

    @property
    def num_samples(self) -> int:
        return self.prompts * self.samples

    def draw_prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Return prompts of random tokens. The first 1,000 ids are left out, as special tokens may be among them."""
        draw = np.random.default_rng([seed, 0])
        lowest = min(1000, vocab_size // 2)
        return draw.integers(lowest, vocab_size, (self.prompts, self.prompt_tokens)).tolist()

    def draw_lengths(self, seed: int) -> list[int]:
        """Return the number of new tokens of each sample; the samples of a prompt follow each other."""
        if not self.are_lengths_drawn:
            return [self.tokens] * self.num_samples
        draw = np.random.default_rng([seed, 1])
        drawn = draw.lognormal(np.log(MEDIAN_SHARE * self.tokens), DEVIATION_OF_LOGARITHM, self.num_samples)
        return np.clip(drawn, max(SHORTEST_SHARE * self.tokens, 1), self.tokens).astype(int).tolist()


SHAPES = {
    "fixed-512": Shape(prompts=64, samples=16, prompt_tokens=150, tokens=512),
    "gsm8k": Shape(prompts=64, samples=16, prompt_tokens=150, tokens=512, are_lengths_drawn=True),
    "tiny": Shape(prompts=4, samples=4, prompt_tokens=12, tokens=24),
    "tiny-drawn": Shape(prompts=4, samples=4, prompt_tokens=12, tokens=24, are_lengths_drawn=True),
}
"""By name; `fixed-512` is the shape of the targets."""


def count_training_tokens(shape: Shape, lengths: Sequence[int]) -> int:
    """Return the tokens of the datums of an iteration: a prompt and its sample, less the last token."""
    return sum(shape.prompt_tokens + length - 1 for length in lengths)
