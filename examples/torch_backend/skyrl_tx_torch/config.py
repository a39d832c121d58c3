"""Settings of the torch backend."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TorchConfig(BaseModel):
    """Device and limits of the torch backend."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device; auto: the first CUDA device if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the base weights; auto: float32 on a CPU, else bfloat16. Adapters are float32."""
    num_threads: int = Field(default=0, ge=0)
    """Threads of one computation on a CPU; 0: torch's choice. They spin, so leave cores for the other processes."""
    max_context_length: int = Field(default=4096, ge=2)
    """Longest sequence in tokens, at most the model's own limit."""
    max_models: int = Field(default=8, ge=1)
    """Models in training at once."""
    max_samplers: int = Field(default=8, ge=1)
    """Samplers loaded at once."""
    max_lora_rank: int = Field(default=64, ge=1)
    """Largest adapter rank."""
    max_topk_logprobs: int = Field(default=20, ge=0)
    """Largest number of likeliest tokens that a request may ask for."""
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens of one step of a pass: between two steps the engine may run other models and samples."""
    sample_slots: int = Field(default=16, ge=1)
    """Samples that decode in turns, each with keys and values of its own."""
    slice_tokens: int = Field(default=8, ge=1)
    """Tokens that one decode slice adds to each sample."""
    logits_chunk: int = Field(default=512, ge=1)
    """Positions whose logits exist at the same time."""
