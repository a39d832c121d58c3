"""Schemas for models, tensors, training passes, optimizer steps, custom losses and sampling.

SDK releases up to 0.24 send training data as JSON, and later ones as protobuf. All releases send
sample requests as JSON.
"""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.server.schemas.base import (
    CreationIds,
    Int,
    List,
    ModelRequestIds,
    Name,
    Response,
    SampleRequestIds,
    SeqId,
    Table,
    WireModel,
)


class InputChunk(WireModel):
    """A chunk of a model input.

    SDK releases up to 0.16 do not send `type`, so all fields are optional: the fields that are set
    identify the type.
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

    chunks: Annotated[List[InputChunk], Field(max_length=4096)]


class TensorData(WireModel):
    """A tensor as a flat list.

    With both index lists, it is in compressed sparse row (CSR) format.
    """

    changes_maths = True
    data: List[int] | List[float]
    dtype: Literal["int64", "float32", "int32", "bfloat16"]
    shape: List[int] | None = None
    sparse_crow_indices: List[int] | None = None
    sparse_col_indices: List[int] | None = None


SpanSource = Literal["prompt_tokens", "sampled_tokens"]


class TokenRun(WireModel):
    """Positions [offset, offset + length) in the prompt or in the sampled tokens of a sequence."""

    sequence_id: str
    offset: Int = 0
    length: Int


class ProvenanceSpan(WireModel):
    """Says which sequence some tokens came from. Exactly one of the two fields is set."""

    prompt_tokens: TokenRun | None = None
    sampled_tokens: TokenRun | None = None

    @property
    def source(self) -> SpanSource | None:
        """The field that is set. None if both or neither are set."""
        if (self.prompt_tokens is None) == (self.sampled_tokens is None):
            return None
        return "sampled_tokens" if self.prompt_tokens is None else "prompt_tokens"


class WireDatum(WireModel):
    """One training sequence."""

    model_input: ModelInput
    loss_fn_inputs: Table[TensorData] = Field(default_factory=dict[str, TensorData])
    model_input_spans: List[ProvenanceSpan] | None = None
    loss_fn_input_spans: List[ProvenanceSpan] | None = None


class LoraConfig(WireModel):
    """The LoRA adapter to train."""

    changes_maths = True
    rank: Int
    seed: Int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def make_spec(self, seed: int) -> LoraSpec:
        """Return the adapter as the engine trains it."""
        return LoraSpec(
            rank=self.rank,
            seed=seed,
            train_attn=self.train_attn,
            train_mlp=self.train_mlp,
            train_unembed=self.train_unembed,
        )


class OptimizerConfig(WireModel):
    """The optimizer of a model."""

    changes_maths = True
    type: str = "adamw"


class CreateModelRequest(CreationIds):
    """Creates a model with a new LoRA adapter."""

    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    type: str | None = None


class AdamParams(WireModel):
    """AdamW hyperparameters.

    An SDK release only sends the parameters that it knows. It sends NaN and infinity as null.
    """

    changes_maths = True
    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip_norm: float | None = None


class OptimStepRequest(ModelRequestIds):
    """One optimizer step. `optimizer_params` is for optimizers other than AdamW."""

    adam_params: AdamParams | None = None
    optimizer_params: dict[str, object] | None = None


class PassInput(WireModel):
    """The data and the loss of a forward or forward/backward request."""

    changes_maths = True
    data: List[WireDatum]
    loss_fn: str
    loss_fn_config: Table[float | str] | None = None


class ForwardBackwardRequest(ModelRequestIds):
    """A forward/backward request in JSON (SDK up to 0.24)."""

    forward_backward_input: PassInput


class ForwardRequest(ModelRequestIds):
    """A forward request in JSON (SDK up to 0.24)."""

    forward_input: PassInput


class UnloadModelRequest(ModelRequestIds):
    """Removes a model."""


class GetInfoRequest(WireModel):
    """Asks for a description of a model."""

    model_id: str
    type: str | None = None


class ModelData(Response):
    """The names of a model. The SDK loads the tokenizer from `tokenizer_id`."""

    arch: str | None = None
    model_name: str
    tokenizer_id: str


class GetInfoResponse(Response):
    """A description of a model."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    model_name: str
    is_lora: bool = True
    lora_rank: int
    optimizer_config: OptimizerConfig


class FutureHandle(Response):
    """The future of a queued request. `retrieve_future` returns its result."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


MAX_NODES = 512
"""Maximum number of nodes in a graph."""
_MAX_ARGUMENTS = 64


class LossGraphNode(WireModel):
    """A node of the graph. `args` and `kwargs` use the SDK's encoding."""

    changes_maths = True
    op: Name
    name: Name
    target: Name
    args: Annotated[list[object], Field(max_length=_MAX_ARGUMENTS)] = Field(default_factory=list[object])
    kwargs: Table[object] = Field(default_factory=dict[str, object])


class LossGraph(WireModel):
    """The nodes of a loss in execution order."""

    changes_maths = True
    format: Int = 1
    nodes: Annotated[List[LossGraphNode], Field(max_length=MAX_NODES)]


class GraphInput(WireModel):
    """An input of a loss: its name, and its number of dimensions per datum."""

    changes_maths = True
    name: Name
    rank: Int


class CreateCustomLossRequest(WireModel):
    """Stores a custom loss for a session."""

    changes_maths = True
    session_id: str
    custom_loss_seq_id: SeqId
    name: Name
    inputs: Annotated[List[GraphInput], Field(max_length=_MAX_ARGUMENTS)]
    graph: LossGraph
    type: str | None = None


class WireSamplingParams(WireModel):
    """Sampling parameters."""

    changes_maths = True
    max_tokens: Int | None = None
    seed: Int | None = None
    stop: str | List[int] | List[str] | None = None
    temperature: float = 1.0
    top_k: Int = -1
    top_p: float = 1.0


class AsampleRequest(SampleRequestIds):
    """A prompt with sampling parameters and prompt options."""

    prompt: ModelInput
    sampling_params: WireSamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Int | None = 0
    topk_sample_logprobs: Int | None = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Int | None = 0
    prompt_logprobs_last_n: Int | None = None
    record_stability_info: bool | None = None
    type: str | None = None


class CreateSamplingSessionRequest(WireModel):
    """Creates a sampling session on the base model, or on the weights at a `tinker://` path."""

    session_id: str
    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None
    type: str | None = None


class JoinSamplingSessionRequest(WireModel):
    """Registers a copy of a sampling client in another process."""

    sampling_session_id: str
    type: str | None = None


class JoinSamplingSessionResponse(Response):
    """The number of the copy. Its sequence numbers start at this number times a billion."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class SamplerResponse(Response):
    """The base model and the checkpoint of a sampling session."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
