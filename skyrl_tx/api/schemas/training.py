"""Making models and training them."""

from typing import Literal

from skyrl_tx.api.schemas.base import Answer, Int, SeqId, WireModel
from skyrl_tx.api.schemas.inputs import Datum


class LoraConfig(WireModel):
    """Which adapter to train."""

    changes_maths = True
    rank: Int
    seed: Int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(WireModel):
    """The optimizer that a model keeps for life."""

    changes_maths = True
    type: str = "adamw"


class CreateModelRequest(WireModel):
    """A fresh adapter."""

    session_id: str
    model_seq_id: SeqId
    base_model: str
    user_metadata: dict[str, object] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    type: str | None = None


class AdamParams(WireModel):
    """One step's hyper-parameters; a release that does not know one does not send it, and None is NaN or infinity."""

    changes_maths = True
    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip_norm: float | None = None


class OptimStepRequest(WireModel):
    """One optimizer step; `optimizer_params` are those of another optimizer than AdamW."""

    model_id: str
    seq_id: SeqId | None = None
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, object] | None = None
    type: str | None = None


class PassInput(WireModel):
    """What `forward` and `forward_backward` run on."""

    changes_maths = True
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackwardRequest(WireModel):
    """A training pass in JSON (SDK up to 0.24)."""

    model_id: str
    seq_id: SeqId | None = None
    forward_backward_input: PassInput


class ForwardRequest(WireModel):
    """A pass without gradients in JSON (SDK up to 0.24)."""

    model_id: str
    seq_id: SeqId | None = None
    forward_input: PassInput


class UnloadModelRequest(WireModel):
    """The end of a model."""

    model_id: str
    seq_id: SeqId | None = None
    type: str | None = None


class GetInfoRequest(WireModel):
    """A question about a model."""

    model_id: str
    type: str | None = None


class ModelData(Answer):
    """Names of a model; the SDK makes the tokenizer from `tokenizer_id`."""

    arch: str | None = None
    model_name: str
    tokenizer_id: str


class OptimizerAnswer(Answer):
    """The optimizer of a model."""

    type: str = "adamw"


class GetInfoAnswer(Answer):
    """What a training client knows of its model."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    model_name: str
    is_lora: bool = True
    lora_rank: int
    optimizer_config: OptimizerAnswer


class Promise(Answer):
    """Acknowledges a request; its result comes from `retrieve_future`."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
