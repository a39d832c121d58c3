"""Schemas of tokens and tensors: in JSON for training up to SDK 0.24, and for sampling in all releases."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_tx.server.schemas.base import Int, List, Table, WireModel


class Chunk(WireModel):
    """A chunk of a model input.

    SDKs up to 0.16 send no `type`; the fields that are set identify it, so all fields are optional.
    """

    changes_maths = True
    type: str | None = None
    tokens: List[int] | None = None
    data: str | None = None
    dmel: str | None = None
    location: str | None = None
    format: str | None = None
    expected_tokens: Int | None = None


class ModelInput(WireModel):
    """A model input as a list of chunks."""

    chunks: Annotated[List[Chunk], Field(max_length=4096)]


class TensorData(WireModel):
    """A tensor as a flat list; with both index lists it is in compressed sparse row form."""

    changes_maths = True
    data: List[int] | List[float]
    dtype: Literal["int64", "float32", "int32", "bfloat16"]
    shape: List[int] | None = None
    sparse_crow_indices: List[int] | None = None
    sparse_col_indices: List[int] | None = None


SpanSource = Literal["prompt_tokens", "sampled_tokens"]


class TokenRun(WireModel):
    """Positions [offset, offset + length) of a sequence's prompt, or of its sampled tokens."""

    sequence_id: str
    offset: Int = 0
    length: Int


class ProvenanceSpan(WireModel):
    """A provenance span: one of the two fields says which sequence the tokens came from."""

    prompt_tokens: TokenRun | None = None
    sampled_tokens: TokenRun | None = None

    @property
    def source(self) -> SpanSource | None:
        """The field that is set; None if it is not exactly one."""
        if (self.prompt_tokens is None) == (self.sampled_tokens is None):
            return None
        return "sampled_tokens" if self.prompt_tokens is None else "prompt_tokens"


class Datum(WireModel):
    """One training sequence."""

    model_input: ModelInput
    loss_fn_inputs: Table[TensorData] = Field(default_factory=dict[str, TensorData])
    model_input_spans: List[ProvenanceSpan] | None = None
    loss_fn_input_spans: List[ProvenanceSpan] | None = None
