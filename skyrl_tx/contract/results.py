"""Results of backends, and the results that the engine makes of them and stores.

`skyrl_tx.contract.codec` encodes the stored results.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from skyrl_tx.contract.arrays import Cells, Float32Array, Int32Array
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId

StopReason = Literal["stop", "length"]
"""Why a sample ended: "stop" at a stop token, end token or stop string, "length" at `max_tokens`."""
Metrics = Mapping[str, float]
"""Numbers by name.

A name has one colon, followed by one of `REDUCTIONS`, for example "loss:sum".
"""
REDUCTIONS = frozenset({"mean", "sum", "min", "max", "slack", "hash2", "unique"})
"""How the SDK combines the metrics of the requests that it splits a call into.

See `tinker.lib.chunked_fwdbwd_helpers`.
"""

SHARED_TOKENS = "num_shared_tokens:sum"
"""The metric of a pass that says how many of its tokens were not computed.

Another example of the pass begins with them. Only passes of runs that share prefixes have it.
"""


@dataclass(frozen=True, slots=True)
class MeanTerm:
    """The contribution of one example to a mean.

    The engine divides the sum of totals by the sum of counts.
    """

    total: float
    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The result of one example.

    `logprobs` is float32 and has the shape of the example's `target_tokens`. Names in `sums` and
    `means` have no reduction suffix. `sums` contains at least "loss".

    A policy-gradient loss reports three means over the positions whose advantage and weight are not
    0. "ratio" is exp(l - q), "kl_to_sampler" is q - l, and "clip_fraction" is the share of ratios
    outside the clip thresholds. Here l is the model's log-probability and q is the sampler's.

    `metrics` are the metrics of a custom loss and of the experts of a mixture, under their full
    names. A name ends in `:sum`, `:mean` or `:max` over examples. A metric of the whole request has
    the same value in all its examples, and its name does not end in `:sum`.
    """

    logprobs: Float32Array
    sums: Mapping[str, float]
    means: Mapping[str, MeanTerm] = field(default_factory=dict[str, MeanTerm])
    metrics: Metrics = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The K likeliest tokens at each of N positions, likeliest first.

    `token_ids` is int32 [N, K] and `logprobs` is float32 [N, K].
    """

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """The results about a prompt of T tokens that `PromptOptions` asks for.

    Log-probabilities of the prompt are at temperature 1, regardless of the request's temperature.
    Log-probabilities of `alt_tokens` are computed as for samples, see `SampleDelta`.

    `logprobs` is float32 [T]; it is NaN at position 0 and where it was not computed. `topk` has T
    rows, with id 0 and -99999.0 where it was not computed. `targets` is float32 [T-1, K], with 0.0
    in skipped cells. `alt_tokens` has T-1 rows of independent draws. `cache_hit_tokens` is the
    number of prompt tokens found in the prefix cache.
    """

    logprobs: Float32Array | None = None
    topk: TopK | None = None
    targets: Float32Array | None = None
    alt_tokens: TopK | None = None
    cache_hit_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerGap:
    """How far a sampler's log-probabilities of one sample are from the trainer's, in nats.

    Both compute them with the same weights.
    """

    mean: float
    """Mean of the absolute differences."""
    largest: float
    num_tokens: int
    """Number of tokens compared, from the start of the sample."""


class SampleDelta(Struct, frozen=True, kw_only=True):
    """New tokens of one sample from one decode slice: tokens int32 [n] and logprobs float32 [n].

    `logprobs` and `topk` refer to the full vocabulary with logits divided by the temperature,
    before `top_k` and `top_p`. At temperature 0 they are the log-probabilities of temperature 1.
    With `SamplingParams.raw_logprobs`, both refer to the model's own logits at temperature 1.

    `stop_reason` is None until the sample ends. A delta without tokens means that there is no new
    token yet. `prompt` comes with the first tokens of the sample with index 0. If `error` is set,
    the whole request fails and no more deltas of it follow. `trainer_gap` comes with the stop
    reason if a separate sampler drew the sample and the trainer checked it.

    This is a msgspec Struct because one is created per sample and slice, and a dataclass is
    multiple times slower.
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

    @classmethod
    def make_empty(cls, request_id: RequestId, index: int = 0, *, error: str | None = None) -> "SampleDelta":
        """Return a delta without tokens."""
        none = np.zeros(0, np.int32)
        return cls(request_id=request_id, index=index, tokens=none, logprobs=none.astype(np.float32), error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModelOutput:
    """The model was created."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """One float32 array of log-probabilities per datum, in input order, and metrics."""

    logprobs: tuple[Float32Array, ...]
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOutput:
    """The metrics of one optimizer step."""

    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsOutput:
    """The saved weights: either `path`, or the `sampling_session_id` of an ephemeral sampler."""

    kind: Literal["weights", "sampler_weights", "external_weights"]
    path: str | None = None
    sampling_session_id: SamplingSessionId | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeightsOutput:
    """The checkpoint that was loaded, and the model that it was loaded into."""

    path: str
    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateCustomLossOutput:
    """The custom loss was stored."""

    loss_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModelOutput:
    """The model was deleted."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One complete sample. An unset `trainer_gap` takes no bytes, like `ModelPass.sampled`."""

    tokens: Int32Array
    logprobs: Float32Array
    stop_reason: StopReason
    topk: TopK | None = None
    trainer_gap: TrainerGap | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """All samples of one prompt, in index order.

    `target_cells` is copied from `PromptOptions` and selects the cells of `prompt.targets` in the
    response.
    """

    sequences: tuple[SampledSequence, ...]
    prompt: PromptResult = field(default_factory=PromptResult)
    target_cells: Cells | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The request failed with this error."""

    message: str
    category: ErrorCategory
    field: str | UnsetType = UNSET
    """The path of the field that is wrong, if the error names one."""


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
