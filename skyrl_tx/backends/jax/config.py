"""The JAX backend's settings."""

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


def _default_compile_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl_tx" / "xla"


class MeshConfig(BaseModel):
    """How many ways the model is cut; the product is the number of devices, all of which are used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fsdp: int = Field(default=1, gt=0, description="Ways that rows are cut, and all weights for storage.")
    tp: int = Field(default=1, gt=0, description="Ways that heads, feed-forwards and the vocabulary are cut.")
    ep: int = Field(default=1, gt=0, description="Ways that experts are spread, and rows cut further.")

    @property
    def num_devices(self) -> int:
        """How many devices that takes."""
        return self.fsdp * self.tp * self.ep

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.model_dump().items())


class JaxConfig(BaseModel):
    """What the operator may choose; lengths and budgets count tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="'auto' reads the checkpoint's weights; 'dummy' makes some up, for measuring speed."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of the base weights; 'auto': bfloat16 on accelerators, float32 on CPU. "
        "Adapters, gradients and moments are float32 always.",
    )
    max_context_length: int | None = Field(
        default=None,
        gt=1,
        description="Longest sequence, prompt and continuation; unset: what the model allows. "
        "Never more than max_sample_tokens.",
    )
    compile_cache_dir: Path | None = Field(
        default_factory=_default_compile_cache,
        description="Where compiled programs are kept, so that a restart need not compile again; null: nowhere.",
    )
    warmup: bool = Field(
        default=False,
        description="Compile every common shape before the server is ready, not on first use: minutes, once per cache.",
    )

    mesh: MeshConfig = Field(default_factory=MeshConfig, description="Devices: unset, the first that JAX sees.")

    # Training
    max_lora_adapters: int | None = Field(
        default=None,
        gt=0,
        description="Models resident for training at once; others wait on disk. Room that is not in use costs nothing. "
        "Unset: what the memory allows for models of rank max_lora_rank, at most 64.",
    )
    max_lora_rank: int = Field(default=64, gt=0, description="Largest LoRA rank a client may ask for.")
    micro_batch_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Tokens computed at once in training, padding included, on all devices; bounds memory. Unset: what "
        "the device's memory allows, 1024 on CPU. Another value, other bits.",
    )
    max_pass_tokens: int = Field(
        default=65536, gt=0, description="Tokens of all requests that one training pass should take together."
    )
    remat: bool | None = Field(
        default=None,
        description="Compute each layer twice in training rather than keep its activations: less memory. Unset: where "
        "few tokens would fit otherwise, and never on CPU.",
    )

    # Sampling
    max_sampler_adapters: int = Field(
        default=16, gt=0, description="Frozen adapters resident for sampling at once, the base model not counted."
    )
    sample_slots: int = Field(default=32, gt=0, description="Samples that are decoded side by side.")
    max_sample_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Prompt and new tokens in the key/value cache at once, over all samples. Unset: what the device's "
        "memory allows, at most 65536 on CPU. Another value, other shapes.",
    )
    prefix_cache_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Tokens of prompts that are kept for those that begin alike; 0: none. Unset: a quarter of "
        "max_sample_tokens.",
    )
    decode_slice_tokens: int = Field(
        default=16, gt=0, description="Tokens decoded for each sample before training gets its turn."
    )
    prefill_tokens: int = Field(
        default=2048,
        gt=0,
        description="Prompt tokens computed before running samples get their turn, padding included.",
    )
    prefill_chunk_tokens: int = Field(
        default=256,
        ge=32,
        description="Prompt tokens computed at once, a power of two. Prompts that begin alike share whole chunks, that "
        "is 128 tokens, 256, 512 … up to that many, then so many each time.",
    )
    max_topk_logprobs: int = Field(default=20, ge=0, description="Largest top-k of log-probabilities to report.")

    @field_validator("prefill_chunk_tokens")
    @classmethod
    def _is_power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is not a power of two")
        return value
