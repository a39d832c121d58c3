"""What backends return, and what the engine makes of it for storage."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from skyrl_tx.contract.arrays import Cells, Float32Array, Int32Array
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId

StopReason = Literal["stop", "length"]
Metrics = Mapping[str, float]
"""Numbers by name. A name has one colon, and behind it one of `REDUCTIONS`."""
REDUCTIONS = frozenset({"mean", "sum", "min", "max", "slack", "hash2", "unique"})
"""The ways in which the SDK folds the metrics of a call's chunks (`tinker.lib.chunked_fwdbwd_helpers`)."""


@dataclass(frozen=True, slots=True)
class MeanTerm:
    """One example's share of a mean: the engine divides the summed totals by the summed counts."""

    total: float
    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What one example gave.

    `logprobs` float32, shape of its `target_tokens`. `sums` and `means` are named without the SDK's suffix; `sums`
    has at least "loss".
    """

    logprobs: Float32Array
    sums: Mapping[str, float]
    means: Mapping[str, MeanTerm] = field(default_factory=dict[str, MeanTerm])


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The k likeliest tokens of N positions, best first: `token_ids` int32 [N, K], `logprobs` float32 [N, K]."""

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """What was asked about the prompt's T positions.

    `logprobs` float32 [T], NaN where not computed (position 0 always). `topk` has T rows, id 0 and -99999.0 where not
    computed. `targets` float32 [T-1, K], 0.0 in skipped cells. `alt_tokens` has T-1 rows of i.i.d. draws.
    `cache_hit_tokens`: how much of the prompt was known from others.
    """

    logprobs: Float32Array | None = None
    topk: TopK | None = None
    targets: Float32Array | None = None
    alt_tokens: TopK | None = None
    cache_hit_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelta:
    """What one slice of decoding added to one sample: tokens int32 [n], logprobs float32 [n].

    `stop_reason` None: the sample goes on. No tokens: its prompt is still being computed. `prompt` comes with the
    first tokens of index 0. `error` ends the whole request: nothing more comes of any of its samples.
    """

    request_id: RequestId
    index: int
    tokens: Int32Array
    logprobs: Float32Array
    stop_reason: StopReason | None = None
    topk: TopK | None = None
    prompt: PromptResult | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModelOutput:
    """A model exists."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """One float32 array per datum, in input order; metrics named with the SDK's suffixes ("loss:sum")."""

    logprobs: tuple[Float32Array, ...]
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOutput:
    """Metrics of one step."""

    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsOutput:
    """Exactly one is set: a path for a named save, a sampling session for an unnamed one."""

    kind: Literal["weights", "sampler_weights", "external_weights"]
    path: str | None = None
    sampling_session_id: SamplingSessionId | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeightsOutput:
    """Where the weights came from and went to."""

    path: str
    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModelOutput:
    """A model is gone."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One finished continuation."""

    tokens: Int32Array
    logprobs: Float32Array
    stop_reason: StopReason
    topk: TopK | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """All continuations of one prompt, in index order. `target_cells`: those asked of `prompt.targets`, None: all."""

    sequences: tuple[SampledSequence, ...]
    prompt: PromptResult = field(default_factory=PromptResult)
    target_cells: Cells | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request gave nothing."""

    message: str
    category: ErrorCategory


Result = (
    CreateModelOutput
    | ForwardBackwardOutput
    | OptimStepOutput
    | SaveWeightsOutput
    | LoadWeightsOutput
    | UnloadModelOutput
    | SampleOutput
    | Failure
)
