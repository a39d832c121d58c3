"""The input of a backend: one record per training sequence or prompt, validated and complete."""

from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_tx.contract.arrays import Int32Array, NumberArray
from skyrl_tx.contract.custom_loss import CustomLoss
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LossConfigValue, PromptOptions, SamplingParams

STARVATION_BOUND = 64
"""How many other samples may start before one that waits for memory, at most.

The engine applies it to samples whose sampler waits for an adapter slot, a backend to samples that wait for a longer
KV cache slot.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassExample:
    """One training sequence of one request.

    `tokens` is int32 [T]. `loss_inputs` has exactly the inputs of the loss's `LossSpec`, with absent ones filled in:
    float32 or, if they hold token ids, int32, each [T], or all [T, K]. `loss_config` has exactly the numbers of the
    loss's config, with defaults filled in.

    With `custom`, the loss is that one, `loss` is "custom", and `loss_inputs` has the targets and the inputs that it
    declares other than `logprobs`, as float32 of their ranks. The examples of a request share it.
    """

    request_id: RequestId
    model_id: ModelId
    tokens: Int32Array
    loss: str
    loss_inputs: Mapping[str, NumberArray]
    loss_config: Mapping[str, LossConfigValue]
    custom: CustomLoss | None = None

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1 and self.tokens.size > 0
        assert all(array.shape[:1] in ((), self.tokens.shape) for array in self.loss_inputs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModelPassBatch:
    """The examples of whole requests. Those of a request are adjacent; requests of one model are in `seq_id` order."""

    examples: tuple[PassExample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """`num_samples` continuations of one prompt, int32 [T], numbered from `first_index`.

    `sampler` is loaded, or None for the base model. `params.max_tokens` is an int, and prompt + `max_tokens` fits the
    context. The engine finds `params.stop_strings`; a backend ignores them.

    The engine may split the samples of a request into parts with the same `request_id`, lowest indices first. A part
    may arrive while earlier parts are running. Only the first part asks for results about the prompt. A sample's tokens
    depend on its index, not on the part.

    A backend that keeps computed prompts uses them only for requests of the same `cache_scope`: a hit would tell one
    owner what another one asked.
    """

    request_id: RequestId
    sampler: SamplerId | None
    prompt: Int32Array
    num_samples: int
    params: SamplingParams
    options: PromptOptions
    first_index: int = 0
    cache_scope: str = ""

    def __post_init__(self) -> None:
        assert self.prompt.ndim == 1 and self.prompt.size > 0 and self.num_samples > 0 and self.first_index >= 0
        assert self.params.max_tokens is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSampleBatch:
    """Prompts to sample from, with any mix of samplers and parameters."""

    requests: tuple[SampleRequest, ...]
