"""What can be set about the fake backend."""

from pydantic import BaseModel, ConfigDict, Field


class FakeConfig(BaseModel):
    """Sizes and delays of the fake backend."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(
        default=256, ge=4, description="Number of tokens; token i is followed by i + 1 half of the time."
    )
    eos_token_id: int = Field(default=0, ge=0, description="The token that ends a sample.")
    max_context_length: int = Field(default=4096, ge=2, description="Longest sequence, in tokens.")
    max_models: int = Field(default=32, ge=1, description="Models resident for training at once.")
    max_samplers: int = Field(default=8, ge=1, description="Frozen samplers resident at once.")
    max_sample_tokens: int = Field(
        default=1 << 20, ge=2, description="Prompt and new tokens resident at once, all samples."
    )
    max_pass_tokens: int = Field(default=4096, ge=1, description="Target number of tokens in one training batch.")
    micro_batch_tokens: int = Field(
        default=0, ge=0, description="What a training step is said to compute; 0: not said."
    )
    sample_slots: int = Field(default=0, ge=0, description="Samples decoded side by side at most; 0: all.")
    max_lora_rank: int = Field(default=64, ge=1, description="Largest adapter rank.")
    slice_tokens: int = Field(default=16, ge=1, description="Tokens that one decoding slice adds to each sample.")
    step_delay_s: float = Field(
        default=0.0, ge=0, description="Time that each training step and decoding slice takes longer."
    )
