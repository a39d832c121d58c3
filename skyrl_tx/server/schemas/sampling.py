"""Schemas of sampling sessions and samples."""

from typing import Literal

from skyrl_tx.server.schemas.base import Int, List, Response, SampleRequestIds, SeqId, WireModel
from skyrl_tx.server.schemas.training import ModelInput, TensorData


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
    """One prompt with sampling parameters and prompt options."""

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
    """The weights of a new sampling session: the base model, or those at a `tinker://` path."""

    session_id: str
    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None
    type: str | None = None


class JoinSamplingSessionRequest(WireModel):
    """A copy of a sampling client in another process."""

    sampling_session_id: str
    type: str | None = None


class JoinSamplingSessionResponse(Response):
    """The number of the copy; its sequence numbers start at this multiple of a billion."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class SamplerResponse(Response):
    """The base model and checkpoint of a sampling session."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
