"""Settings of the torch backend."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TorchConfig(BaseModel):
    """The device and the limits of the torch backend."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device. auto: the first CUDA device, or the CPU if there is none."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the base weights. auto: float32 on a CPU, else bfloat16. Adapters are always float32."""
    num_threads: int = Field(default=0, ge=0)
    """Threads of one computation on a CPU; 0: torch decides. They busy-wait, so leave cores for other processes."""
    max_context_length: int = Field(default=4096, ge=2)
    """Length of the longest sequence in tokens. The limit of the model applies as well."""
    max_models: int = Field(default=8, ge=1)
    """How many models may train at the same time."""
    max_samplers: int = Field(default=8, ge=1)
    """How many samplers may be loaded at the same time."""
    max_lora_rank: int = Field(default=64, ge=1)
    """The highest LoRA rank."""
    max_topk_logprobs: int = Field(default=20, ge=0)
    """How many top log-probabilities a request may ask for."""
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens of one micro-batch. Between two micro-batches the engine may run other models and samples."""
    sample_slots: int = Field(default=16, ge=1)
    """How many samples are decoded at the same time. Each has its own keys and values."""
    slice_tokens: int = Field(default=8, ge=1)
    """Tokens that one decode slice adds to each sample."""
    logits_chunk: int = Field(default=512, ge=1)
    """For how many positions logits are computed at a time."""
