"""Requests as the API stores them and the engine executes them.

The API has validated their form; the engine validates their values against the backend's capabilities. Records are
stored, see `codec`: names of fields and types must not change.

A request with `is_barrier` is one that the client sends only after all earlier requests of the model were acknowledged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from msgspec import UNSET, UnsetType

from skyrl_tx.contract.arrays import Cells, Int32Array, Int64Array, NumberArray
from skyrl_tx.contract.custom_loss import CustomLoss
from skyrl_tx.contract.ids import ArtifactId, SamplerId, SamplingSessionId

LossConfigValue = float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The LoRA adapter to train (SDK: `lora_config`). The API draws `seed` if the client sends none."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model in addition to the base weights: its adapter and its optimizer."""

    lora: LoraSpec
    optimizer: str = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerParams:
    """AdamW as in torch: decoupled weight decay, bias correction (Loshchilov & Hutter 2019, arXiv:1711.05101).

    Defaults are the SDK's (tinker/types/optimizer.py). `grad_clip_norm` bounds the global L2 norm of the accumulated
    gradient; 0 turns clipping off.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """Create a model with a fresh adapter on the base model."""

    base_model: str
    spec: ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence as sent: tokens [T], and loss inputs, each [T] or [T, K]."""

    tokens: Int32Array
    loss_inputs: Mapping[str, NumberArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSpan:
    """Targets [first, first + length) of a datum that are tokens of one sampled sequence."""

    datum: int
    first: int
    length: int
    sequence_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPass:
    """A `forward` request, or with `backward` a `forward_backward` request.

    `sampled` says which targets the client sampled here; it is for people to read and changes no number. Unset it takes
    no byte, so that a pass without it has the same bytes and the same idempotency digest as in earlier releases.

    `custom` is the loss itself if `loss` is "custom": the API fills it in, so that a replay needs nothing else.
    """

    data: tuple[Datum, ...]
    loss: str
    loss_config: Mapping[str, LossConfigValue]
    backward: bool
    sampled: tuple[SampledSpan, ...] | UnsetType = UNSET
    custom: CustomLoss | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateCustomLoss:
    """Store a loss for the passes of a session. The API executes it."""

    loss: CustomLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """Apply the accumulated gradient, then clear it."""

    is_barrier: ClassVar[bool] = True
    params: OptimizerParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights:
    """Save a model's weights as of this position in its log.

    The kind "weights" includes the optimizer state. The kind "external_weights" is for download; each file is encrypted
    to `age_recipients`, if there are any. Without a `name`, create an ephemeral sampler for `sampling_session_id`. With
    `is_inflight`, later saves of this type replace the weights of that sampling session.
    """

    is_barrier: ClassVar[bool] = True
    kind: Literal["weights", "sampler_weights", "external_weights"]
    name: str | None
    sampling_session_id: SamplingSessionId | None = None
    is_inflight: bool = False
    ttl_s: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None
    age_recipients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Load a training checkpoint into a model, which `create` creates first.

    The API resolves `path` to `artifact_id` and fills in `spec` of the checkpoint; its seed has no effect.
    Without `optimizer`, the optimizer state is that of a fresh model.
    """

    is_barrier: ClassVar[bool] = True
    path: str
    artifact_id: ArtifactId
    spec: ModelSpec
    optimizer: bool
    create: bool
    base_model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """Delete a model. Later requests for it fail."""

    is_barrier: ClassVar[bool] = True


MAX_STOP_STRINGS = 64
"""The most stop strings of a sample: each is looked for in every step."""
MAX_STOP_TOKENS = 4096
MAX_STOP_CHARS = 1000
"""The longest stop string: the engine decodes that much text again in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn (SDK: `sampling_params`). The API draws `seed` if the client sends none.

    Logits are divided by `temperature`; 0 selects the likeliest token, of equal ones that of the lowest id. Then
    `top_k` keeps the likeliest k tokens (at most 0: all of them), and `top_p` of those the likeliest ones until their
    sum reaches `top_p` of the sum of what `top_k` has kept; at least one. The token is drawn from the kept ones by
    their probabilities. A draw depends on (`seed`, index of the sample, position) and on nothing else.

    `max_tokens` None means up to the context limit. A sample ends after the first match of `stop_strings`, or after a
    token of `stop_token_ids`, which it includes. `eos_stops` is False only for `stop=[]`.
    """

    seed: int
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    eos_stops: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Results to report in addition to the samples.

    `logprobs` asks for the log-probability of each prompt token after the first, `topk` for the likeliest tokens at its
    place, both for the last `last_n` tokens of the prompt only (None: for all). `sample_topk` is the number of
    likeliest tokens at each sampled position. `alt_tokens_k` independent tokens are drawn at each prompt position, at
    the request's temperature and without `top_k` and `top_p`.

    For the prompt's T tokens, `target_tokens` is int64 [T-1, K], where -1 skips a cell: row i has tokens for position
    i + 1. `target_cells` are the cells that the response contains; None means all.
    """

    logprobs: bool = False
    last_n: int | None = None
    topk: int = 0
    sample_topk: int = 0
    target_tokens: Int64Array | None = None
    target_cells: Cells | None = None
    alt_tokens_k: int = 0

    @property
    def wants_prompt(self) -> bool:
        """Whether any result about prompt positions is requested."""
        return self.logprobs or self.topk > 0 or self.target_tokens is not None or self.alt_tokens_k > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Draw `num_samples` continuations of one prompt [T] from a sampler, or from the base model if it is None.

    With `is_recorded`, the log-probabilities of the samples are stored by `sequence_ids`, for later training on them.
    With `is_private`, the samples are not kept for people to read. Unset it takes no byte, as `ModelPass.sampled`.
    """

    prompt: Int32Array
    num_samples: int
    sampler: SamplerId | None
    params: SamplingParams
    options: PromptOptions = field(default_factory=PromptOptions)
    sequence_ids: tuple[str, ...] = ()
    is_recorded: bool = False
    is_private: bool | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A request that failed validation in the API. It keeps its sequence number and fails with `message`.

    `kind` is the kind of the invalid request. With `backward` it makes the accumulated gradient incomplete.
    """

    kind: str
    message: str
    backward: bool = False


Request = (
    CreateModel | CreateCustomLoss | ModelPass | OptimStep | SaveWeights | LoadWeights | UnloadModel | Sample | Rejected
)
