"""Drawing tokens."""

from typing import Literal

from skyrl_tx.api.schemas.base import Answer, Int, SeqId, WireModel
from skyrl_tx.api.schemas.inputs import ModelInput, TensorData


class SamplingParams(WireModel):
    """How to draw."""

    changes_maths = True
    max_tokens: Int | None = None
    seed: Int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = 1.0
    top_k: Int = -1
    top_p: float = 1.0


class SampleRequest(WireModel):
    """One prompt and what to report of it."""

    num_samples: Int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: SeqId | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Int | None = 0
    topk_sample_logprobs: Int | None = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Int | None = 0
    prompt_logprobs_last_n: Int | None = None
    record_stability_info: bool | None = None
    type: str | None = None


class CreateSamplingSessionRequest(WireModel):
    """Weights to sample from: the base model, or those at a `tinker://` path."""

    session_id: str
    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None
    type: str | None = None


class CreateSamplingSessionAnswer(Answer):
    """A sampling session exists."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionRequest(WireModel):
    """A copy of a sampling client begins, in another process."""

    sampling_session_id: str
    type: str | None = None


class JoinSamplingSessionAnswer(Answer):
    """The copy numbers its requests from so many billions."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class SamplerAnswer(Answer):
    """What a sampling session samples from."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
