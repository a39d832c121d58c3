"""A complete backend in numpy, for tests and as an example. Its numbers can be checked by hand."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from skyrl_tx.contract.backend import AbstractBackend, BackendSpec


class FakeConfig(BaseModel):
    """Sizes and delays of the fake backend."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    vocab_size: int = Field(default=256, ge=4)
    """Number of tokens. Token i is followed by token i + 1 half of the time."""
    eos_token_id: int = Field(default=0, ge=0)
    """The token that ends a sample."""
    max_context_length: int = Field(default=4096, ge=2)
    """Longest sequence, in tokens."""
    max_models: int = Field(default=32, ge=1)
    """Number of models in training at once."""
    max_samplers: int = Field(default=8, ge=1)
    """Number of samplers loaded at once."""
    max_sample_tokens: int = Field(default=1 << 20, ge=2)
    """Tokens of all running samples, prompts and new tokens."""
    max_pass_tokens: int = Field(default=4096, ge=1)
    """Target number of tokens in one training batch."""
    micro_batch_tokens: int = Field(default=0, ge=0)
    """Tokens of one micro-batch, as reported in the capabilities; 0: not reported."""
    sample_slots: int = Field(default=0, ge=0)
    """Maximum number of samples decoded at once; 0: all."""
    max_lora_rank: int = Field(default=64, ge=1)
    """Largest adapter rank."""
    slice_tokens: int = Field(default=16, ge=1)
    """Tokens that one decode slice adds to each sample."""
    step_delay_s: float = Field(default=0.0, ge=0)
    """Seconds of delay in each micro-batch, optimizer step and decode slice."""
    tokenizer_file: Path | None = None
    """A `tokenizer.json` for samples with a constraint; without it they are refused."""


def _load() -> type[AbstractBackend]:
    from skyrl_tx.testing.fake.backend import FakeBackend

    return FakeBackend


BACKEND = BackendSpec(config=FakeConfig, load=_load)
