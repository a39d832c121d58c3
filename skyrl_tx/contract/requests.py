"""Requests as the API stores them and the engine executes them.

The API has validated the form of each request. The engine validates the values against the
backend's capabilities. Records are stored (see `skyrl_tx.contract.codec`), so the names of fields
and types must not change.

If a request class has `is_barrier`, the client sends the request only after the server acknowledged
all earlier requests of the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from msgspec import UNSET, UnsetType

from skyrl_tx.contract.arrays import Cells, Int32Array, Int64Array, NumberArray
from skyrl_tx.contract.custom_loss import CustomLoss
from skyrl_tx.contract.ids import ArtifactId, SamplerId, SamplingSessionId

LossConfigValue = float | str
SampledLogprobs = Literal["tempered", "raw"]
"""Kinds of log-probabilities of samples, see `SamplingParams.raw_logprobs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The adapter to train (SDK: `lora_config`). The API draws `seed` if the client sends none."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that a training run adds to the base model: its adapter and its optimizer.

    With `shares_prefixes`, a pass may compute the common beginning of its examples once. Results are
    equal up to rounding. The API sets it for each new run, so a run from an earlier release is
    replayed without it. An unset field takes no bytes, like `ModelPass.sampled`.
    """

    lora: LoraSpec
    optimizer: str = "adamw"
    shares_prefixes: bool | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerParams:
    """Parameters of AdamW as in torch: decoupled weight decay and bias correction.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101. The defaults are the SDK's
    (tinker/types/optimizer.py). `grad_clip_norm` limits the global L2 norm of the accumulated
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
    """Create a model with a fresh adapter."""

    base_model: str
    spec: ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence as the client sent it: tokens [T], and loss inputs [T] or [T, K]."""

    tokens: Int32Array
    loss_inputs: Mapping[str, NumberArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSpan:
    """Marks targets [first, first + length) of a datum as tokens of one sampled sequence."""

    datum: int
    first: int
    length: int
    sequence_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPass:
    """A `forward` request, or a `forward_backward` request if `backward` is set.

    `sampled` says which targets were sampled on this server. It is only shown to users and changes
    no number. An unset field takes no bytes, so a pass without it has the same bytes and the same
    idempotency digest as in earlier releases.

    If `loss` is "custom", the API copies the loss into `custom`, so that a replay needs nothing
    else.
    """

    data: tuple[Datum, ...]
    loss: str
    loss_config: Mapping[str, LossConfigValue]
    backward: bool
    sampled: tuple[SampledSpan, ...] | UnsetType = UNSET
    custom: CustomLoss | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateCustomLoss:
    """Store a custom loss for the passes of a session. The API executes this request."""

    loss: CustomLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """Apply the accumulated gradient, then clear it."""

    is_barrier: ClassVar[bool] = True
    params: OptimizerParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights:
    """Save the weights of a model, including the effect of all earlier requests.

    The kind "weights" includes the optimizer state. The kind "external_weights" is for download:
    each file is encrypted to `age_recipients` if there are any. Without a `name`, the request
    creates an ephemeral sampler for `sampling_session_id`. With `is_inflight`, later saves of this
    type replace the weights of that sampling session.
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
    """Load a training checkpoint into a model. With `create`, create the model first.

    The API resolves `path` to `artifact_id` and fills in the `spec` of the checkpoint; the seed in
    it has no effect. Without `optimizer`, the model gets the optimizer state of a fresh model.
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
"""Maximum number of stop strings of a sample.

The engine looks for each of them in every decode slice.
"""
MAX_STOP_TOKENS = 4096
MAX_STOP_CHARS = 1000
"""Maximum length of a stop string.

The engine decodes that much text again in every decode slice.
"""


MAX_LOGIT_BIAS = 1024
"""Maximum number of entries of `SamplingControls.logit_bias`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Text that a sample has to match, for example a JSON schema or a regular expression."""

    kind: str
    text: str
    field: str = ""
    """The field of the client's request that has the constraint, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingControls:
    """Parameters of vLLM that change the distribution of the next token. The defaults change nothing.

    Before the division by the temperature, the logits change in this order:

    1. The logits of tokens that `constraint` does not allow become -inf. Until the sample has
       `min_tokens` tokens, the logits of stop tokens become -inf too, unless no token would be
       left.
    2. `logit_bias`, pairs of a token and a number, is added.
    3. For tokens of the prompt or the sample, positive logits are divided by `repetition_penalty`,
       and other logits are multiplied by it.
    4. `frequency_penalty`, times the number of times that the token is in the sample, is
       subtracted.
    5. `presence_penalty` is subtracted for tokens that are in the sample.

    The log-probabilities that a sample reports include these changes, unless they are raw. After
    the temperature and before top-k, `min_p` removes the tokens that are less than `min_p` times as
    likely as the likeliest token. Like top-k, it does not change the reported log-probabilities.
    """

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    constraint: Constraint | None = None

    def list_used(self) -> list[str]:
        """Return the names of the fields that change something, see `Capabilities.sampling_controls`."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


_NO_CONTROLS = SamplingControls()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn (SDK: `sampling_params`), and which log-probabilities a sample reports.

    If the client sends no `seed`, the API draws one.

    First, the logits are divided by `temperature`. At temperature 0 the likeliest token is chosen;
    of equally likely tokens, the one with the lowest id. Then `top_k` keeps the k likeliest tokens;
    a value of 0 or less keeps all. Of these, `top_p` keeps the likeliest tokens until their
    probabilities sum to `top_p` of the total that `top_k` kept, but at least one token. Finally, a
    token is drawn from the remaining tokens by probability. For example, top_k=2 and top_p=0.5
    leave one token of the probabilities 0.5, 0.3 and 0.2, because 0.5 is at least half of 0.8. The
    draw depends only on `seed`, the index of the sample, and the position.

    `max_tokens=None` means up to the context limit. A sample ends after the first match of a stop
    string or after a stop token, which is part of the sample. `eos_stops` is False only if the
    client sent `stop=[]`. Unset fields take no bytes, like `ModelPass.sampled`.

    With `raw_logprobs`, a sample reports the log-probabilities of the model itself, before
    `controls` and temperature, as `forward` does. Otherwise it reports tempered ones, after both. It
    changes no token. See `Capabilities.sampled_logprobs`.
    """

    seed: int
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    eos_stops: bool = True
    controls: SamplingControls | UnsetType = UNSET
    raw_logprobs: bool | UnsetType = UNSET

    @property
    def active_controls(self) -> SamplingControls:
        """The controls, with defaults if they are unset."""
        return self.controls or _NO_CONTROLS

    @property
    def logprobs_kind(self) -> SampledLogprobs:
        """The kind of log-probabilities that a sample reports."""
        return "raw" if self.raw_logprobs else "tempered"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Results to report in addition to the samples.

    `logprobs` asks for the log-probability of each prompt token after the first. `topk` asks for
    the likeliest tokens at the same positions. Both cover only the last `last_n` tokens of the
    prompt, or all tokens if it is None. `sample_topk` is the number of likeliest tokens to report
    at each sampled position. `alt_tokens_k` is the number of independent tokens to draw at each
    prompt position, at the request's temperature, without `top_k` and `top_p`.

    For a prompt of T tokens, `target_tokens` is int64 [T-1, K]: row i has tokens for position i +
    1, and -1 skips a cell. `target_cells` selects the cells that the response contains; None means
    all.
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
        """Whether a result about prompt positions is requested."""
        return self.logprobs or self.topk > 0 or self.target_tokens is not None or self.alt_tokens_k > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Draw `num_samples` continuations of one prompt [T].

    If `sampler` is None, the base model is sampled.

    With `is_recorded`, the server stores the log-probabilities under `sequence_ids`, so that
    clients can train on the samples later. With `is_private`, the server does not keep the samples
    for users to read in the console. An unset `is_private` takes no bytes, like
    `ModelPass.sampled`.
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
    """A request that failed validation in the API.

    It keeps its sequence number and fails with `message`.

    `kind` is the kind of the invalid request. `backward` means that the invalid request was a
    forward-backward pass, so the accumulated gradient is incomplete.
    """

    kind: str
    message: str
    backward: bool = False


Request = (
    CreateModel | CreateCustomLoss | ModelPass | OptimStep | SaveWeights | LoadWeights | UnloadModel | Sample | Rejected
)
