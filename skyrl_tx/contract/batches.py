"""The input of a backend: one validated, complete record per training sequence or prompt."""

from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_tx.contract.arrays import Int32Array, NumberArray
from skyrl_tx.contract.constraints import MakeConstraint
from skyrl_tx.contract.custom_loss import CustomLoss
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LossConfigValue, PromptOptions, SamplingParams

STARVATION_BOUND = 64
"""Maximum number of other samples that may overtake a sample that waits for memory.

The engine applies the bound to samples that wait for an adapter slot of their sampler. A backend
applies it to samples that wait for a longer KV cache slot.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassExample:
    """One training sequence of one request.

    `tokens` is int32 [T]. `loss_inputs` contains exactly the inputs of the loss's `LossSpec`; the
    engine has filled in absent inputs. They are int32 if they hold token ids, else float32. All of
    them have the shape [T], or all have the shape [T, K]. `loss_config` contains exactly the config
    values of the loss, with defaults filled in.

    If `custom` is set, it is the loss and `loss` is "custom". Then `loss_inputs` contains the
    targets, and as float32 the inputs that the custom loss declares besides `logprobs`. All
    examples of a request have the same `custom`.
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
    """The examples of whole requests.

    Examples of one request are adjacent, and requests of one model are in `seq_id` order.
    """

    examples: tuple[PassExample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request for `num_samples` samples that continue one prompt, int32 [T].

    The samples are numbered from `first_index`. `sampler` is loaded, or None for the base model.
    `params.max_tokens` is set, and the prompt and `max_tokens` together fit into the context. The
    engine finds `params.stop_strings`, so a backend ignores them.

    The engine may split the samples of a request into parts with the same `request_id`, lowest
    indices first. A part may arrive while earlier parts are running. Only the first part asks for
    results about the prompt. The tokens of a sample depend on its index, not on the part that it is
    in.

    A backend with a prefix cache shares cached prompts only between requests with the same
    `cache_scope`. Otherwise a cache hit would reveal to one tenant what another tenant asked.
    """

    request_id: RequestId
    sampler: SamplerId | None
    prompt: Int32Array
    num_samples: int
    params: SamplingParams
    options: PromptOptions
    first_index: int = 0
    cache_scope: str = ""
    make_constraint: MakeConstraint | None = None
    """Makes the constraint of one sample. Set if the parameters have a constraint."""

    def __post_init__(self) -> None:
        assert self.prompt.ndim == 1 and self.prompt.size > 0 and self.num_samples > 0 and self.first_index >= 0
        assert self.params.max_tokens is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSampleBatch:
    """Requests to start together, with any mix of samplers and parameters."""

    requests: tuple[SampleRequest, ...]
