"""Requests as the API stores them and the engine takes them out: validated in form, not yet in substance."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from skyrl_tx.contract.arrays import Cells, Int32Array, Int64Array, NumberArray
from skyrl_tx.contract.ids import ArtifactId, SamplerId, SamplingSessionId

LossConfigValue = float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Which adapter to train (SDK: `lora_config`). `seed` is drawn at submission when the client gave none."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model is made of, beside the base weights."""

    lora: LoraSpec
    optimizer: str = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerParams:
    """AdamW as in torch: decoupled decay, bias-corrected (Loshchilov & Hutter 2019, arXiv:1711.05101).

    Defaults are the SDK's (tinker/types/optimizer.py). `grad_clip_norm` bounds the global L2 norm of the summed
    gradient; 0 is off.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """Make a fresh adapter on the base model."""

    base_model: str
    spec: ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence as sent: tokens [T] and whatever loss inputs came with it."""

    tokens: Int32Array
    loss_inputs: Mapping[str, NumberArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPass:
    """`forward` (backward False) or `forward_backward`."""

    data: tuple[Datum, ...]
    loss: str
    loss_config: Mapping[str, LossConfigValue]
    backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """Apply the summed gradient, then clear it."""

    params: OptimizerParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights:
    """Keep the weights as they are at this place in the model's order.

    `kind` "weights" keeps the optimizer too; "external_weights" are for download, each file encrypted to
    `age_recipients` if there are any. `name` None: an unnamed sampler save, which makes `sampling_session_id`;
    with `is_inflight` that session follows the model: each such save gives new weights to all of them.
    """

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
    """Put a training checkpoint into a model; with `create`, the model is made by it.

    `artifact_id` was resolved and pinned at submission; `spec` is the checkpoint's own (its seed is of no effect).
    `optimizer` False: moments and step start anew.
    """

    path: str
    artifact_id: ArtifactId
    spec: ModelSpec
    optimizer: bool
    create: bool
    base_model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """Free a model; nothing can be asked of it afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens (SDK: `sampling_params`), with the seed settled.

    `max_tokens` None: up to the context limit. `stop_strings` end a sample after the match; `stop_token_ids` are kept
    once; `eos_stops` is False only for `stop=[]`.
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
    """What to report beside the samples.

    `target_tokens` is int64 [T-1, K], -1 = skip; `target_cells` are those to answer with, None: all.
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
        """Whether anything about prompt positions is to be computed."""
        return self.logprobs or self.topk > 0 or self.target_tokens is not None or self.alt_tokens_k > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Draw `num_samples` continuations of one prompt, tokens [T], from frozen weights (None: the base model).

    `is_recorded`: what was drawn is kept under its `sequence_ids`, for training on it.
    """

    prompt: Int32Array
    num_samples: int
    sampler: SamplerId | None
    params: SamplingParams
    options: PromptOptions = field(default_factory=PromptOptions)
    sequence_ids: tuple[str, ...] = ()
    is_recorded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A request that the API could not translate: it keeps its place in the order and fails with this text.

    `kind` is the kind it would have had; `backward` says that a gradient is missing because of it.
    """

    kind: str
    message: str
    backward: bool = False


Request = CreateModel | ModelPass | OptimStep | SaveWeights | LoadWeights | UnloadModel | Sample | Rejected
