"""What a user may choose of the quickstart."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class QuickstartSettings(BaseModel):
    """The flags of `skyrl-tx quickstart`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: Path | None = Field(
        None, description="JSON lines with 'question' and 'answer', such as all of GSM8K; default: the built-in excerpt"
    )
    output: Path = Field(Path("skyrl-tx-quickstart"), description="directory of model, checkpoints, curves and log")
    steps: int = Field(160, ge=1, description="supervised steps of 16 questions each")
    rl_steps: int = Field(24, ge=1, description="reinforcement steps of 8 questions with 8 answers each")
    seed: int = Field(0, ge=0, description="seed of the adapter, the order of questions and the samples")
