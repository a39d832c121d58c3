"""Results: those that backends return, and those that the engine makes of them and stores, see `codec`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from skyrl_tx.contract.arrays import Cells, Float32Array, Int32Array
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId

StopReason = Literal["stop", "length"]
Metrics = Mapping[str, float]
"""Numbers by name. A name has one colon, followed by one of `REDUCTIONS`."""
REDUCTIONS = frozenset({"mean", "sum", "min", "max", "slack", "hash2", "unique"})
"""How the SDK combines the metrics of the requests of one call (`tinker.lib.chunked_fwdbwd_helpers`)."""


@dataclass(frozen=True, slots=True)
class MeanTerm:
    """The share of one example in a mean: the engine divides the sum of totals by the sum of counts."""

    total: float
    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The result of one example.

    `logprobs` is float32, in the shape of the example's `target_tokens`. Names in `sums` and `means` have no reduction;
    `sums` has at least "loss". A policy-gradient loss reports three means over the positions whose advantage and weight
    are not 0: "ratio" exp(l - q), "kl_to_sampler" q - l, and "clip_fraction", the share of ratios outside the clip
    thresholds. l is the model's log-probability and q the sampler's.

    `metrics` are those of a custom loss, by their full names: `:sum` or `:mean` over examples.
    """

    logprobs: Float32Array
    sums: Mapping[str, float]
    means: Mapping[str, MeanTerm] = field(default_factory=dict[str, MeanTerm])
    metrics: Metrics = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The k likeliest tokens of N positions, likeliest first: `token_ids` int32 [N, K], `logprobs` float32 [N, K]."""

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """The results about a prompt of T tokens that `PromptOptions` requests.

    Log-probabilities of the prompt are at temperature 1, whatever the request's; those of `alt_tokens` are as a
    sample's, see `SampleDelta`.

    `logprobs` is float32 [T], NaN where it was not computed, which includes position 0. `topk` has T rows, with id 0
    and -99999.0 where it was not computed. `targets` is float32 [T-1, K], 0.0 in skipped cells. `alt_tokens` has T-1
    rows of independent draws. `cache_hit_tokens` is the number of tokens copied from the prefix cache.
    """

    logprobs: Float32Array | None = None
    topk: TopK | None = None
    targets: Float32Array | None = None
    alt_tokens: TopK | None = None
    cache_hit_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerGap:
    """How far the log-probabilities of one sample are from the trainer's with the same weights, in nats."""

    mean: float
    """The mean of the absolute differences."""
    largest: float
    num_tokens: int
    """The first tokens of the sample, which were compared."""


class SampleDelta(Struct, frozen=True, kw_only=True):
    """New tokens of one sample from one decode slice: tokens int32 [n], logprobs float32 [n].

    Log-probabilities, those of `topk` as well, are of the logits divided by the temperature, over the whole vocabulary:
    before `top_k` and `top_p`. At temperature 0 they are those of temperature 1.

    `stop_reason` is None until the sample ends. A delta without tokens means that there is no new one yet.
    `prompt` comes with the first tokens of index 0. `error` fails the whole request; no delta of it follows.
    `trainer_gap` comes with the stop reason if the sample was drawn elsewhere and compared with the trainer.

    There is one for each sample and slice, and a dataclass would take several times as long to make.
    """

    request_id: RequestId
    index: int
    tokens: Int32Array
    logprobs: Float32Array
    stop_reason: StopReason | None = None
    topk: TopK | None = None
    prompt: PromptResult | None = None
    error: str | None = None
    trainer_gap: TrainerGap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModelOutput:
    """The model was created."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """One float32 array of log-probabilities per datum, in input order, and metrics such as "loss:sum"."""

    logprobs: tuple[Float32Array, ...]
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOutput:
    """The metrics of one step."""

    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsOutput:
    """The saved weights: either `path`, or `sampling_session_id` of an ephemeral sampler."""

    kind: Literal["weights", "sampler_weights", "external_weights"]
    path: str | None = None
    sampling_session_id: SamplingSessionId | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeightsOutput:
    """The checkpoint that was loaded, and its model."""

    path: str
    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateCustomLossOutput:
    """The stored loss."""

    loss_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModelOutput:
    """The model was deleted."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One complete sample. Unset, `trainer_gap` takes no byte, as `ModelPass.sampled`."""

    tokens: Int32Array
    logprobs: Float32Array
    stop_reason: StopReason
    topk: TopK | None = None
    trainer_gap: TrainerGap | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """All samples of one prompt, in index order. `target_cells` is that of PromptOptions, for `prompt.targets`."""

    sequences: tuple[SampledSequence, ...]
    prompt: PromptResult = field(default_factory=PromptResult)
    target_cells: Cells | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error with which a request failed."""

    message: str
    category: ErrorCategory


Result = (
    CreateModelOutput
    | ForwardBackwardOutput
    | OptimStepOutput
    | SaveWeightsOutput
    | LoadWeightsOutput
    | UnloadModelOutput
    | CreateCustomLossOutput
    | SampleOutput
    | Failure
)
