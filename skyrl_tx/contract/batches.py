"""What the engine hands to a backend: one record per sequence or prompt, checked and complete."""

from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_tx.contract.arrays import Int32Array, NumberArray
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LossConfigValue, PromptOptions, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PassExample:
    """One training sequence of one request.

    `tokens` int32 [T]. `loss_inputs` holds exactly the inputs of the loss, absent ones filled in: each [T], those of
    cross_entropy also [T, K]; `target_tokens` int32, the others float32. `loss_config` holds exactly the loss's
    config, defaults filled in.
    """

    request_id: RequestId
    model_id: ModelId
    tokens: Int32Array
    loss: str
    loss_inputs: Mapping[str, NumberArray]
    loss_config: Mapping[str, LossConfigValue]

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1 and self.tokens.size > 0
        assert all(array.shape[0] == self.tokens.shape[0] for array in self.loss_inputs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModelPassBatch:
    """Examples of whole requests, a request's examples side by side, requests of one model in `seq_id` order."""

    examples: tuple[PassExample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One prompt int32 [T], prefilled once, and `num_samples` continuations, numbered from `first_index` on.

    `sampler` None is the base model; any other was loaded before. `params.max_tokens` is settled (never None) and
    prompt + max_tokens fits the context; `params.stop_strings` are the engine's business, not the backend's.

    A request of many samples may come in parts under one `request_id`, those of the lowest numbers first, while
    earlier ones run; what is asked of the prompt comes with the first part. A sample is the same in any part.
    """

    request_id: RequestId
    sampler: SamplerId | None
    prompt: Int32Array
    num_samples: int
    params: SamplingParams
    options: PromptOptions
    first_index: int = 0

    def __post_init__(self) -> None:
        assert self.prompt.ndim == 1 and self.prompt.size > 0 and self.num_samples > 0 and self.first_index >= 0
        assert self.params.max_tokens is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSampleBatch:
    """Prompts to sample from; any mix of samplers and parameters."""

    requests: tuple[SampleRequest, ...]
