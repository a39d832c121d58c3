"""Tokens and tensors in JSON, as SDKs up to 0.24 send them for training and all of them for sampling."""

from typing import Literal

from pydantic import Field

from skyrl_tx.api.schemas.base import Int, WireModel


class Chunk(WireModel):
    """A piece of a model input.

    Releases up to 0.16 send no `type`; the fields that are there tell the kinds apart, so all are optional.
    """

    changes_maths = True
    type: str | None = None
    tokens: list[int] | None = None
    data: str | None = None
    dmel: str | None = None
    location: str | None = None
    format: str | None = None
    expected_tokens: Int | None = None


class ModelInput(WireModel):
    """What a model reads."""

    chunks: list[Chunk]


class TensorData(WireModel):
    """A tensor as a flat list; with both index lists set, compressed sparse rows."""

    changes_maths = True
    data: list[int] | list[float]
    dtype: Literal["int64", "float32", "int32", "bfloat16"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class TokenRun(WireModel):
    """Positions [offset, offset + length) of a sequence's prompt, or of its sampled tokens."""

    sequence_id: str
    offset: Int = 0
    length: Int


class ProvenanceSpan(WireModel):
    """Where a run of tokens came from, one of the two; only `stable_reinforce` reads it."""

    prompt_tokens: TokenRun | None = None
    sampled_tokens: TokenRun | None = None


class Datum(WireModel):
    """One training sequence."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = Field(default_factory=dict[str, TensorData])
    model_input_spans: list[ProvenanceSpan] | None = None
    loss_fn_input_spans: list[ProvenanceSpan] | None = None
