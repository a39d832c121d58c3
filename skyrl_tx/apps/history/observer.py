"""Store metric points and some samples of each run, in the transaction that commits a result.

A *point* holds the metrics of one training request. A *group* is the samples of one request.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import UnsetType
from sqlmodel import Session

from skyrl_tx.apps.history import kept_samples, logged_metrics, points
from skyrl_tx.apps.history.kept_samples import KeptGroup, KeptGroups, KeptSample, TrainedSequence
from skyrl_tx.apps.history.points import LOSS_WEIGHT, Point, SampleTotals
from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.custom_loss import CUSTOM
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.contract.requests import ModelPass, Sample, SampledSpan
from skyrl_tx.contract.results import ForwardBackwardOutput, OptimStepOutput, SampleOutput
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.device_cache import LiveModel
from skyrl_tx.engine.extension import EngineExtension, ResultObserver, RetentionClock, RetentionRule, RowLimit
from skyrl_tx.engine.request_log import QueuedRequest, WriteRows
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store import pruning
from skyrl_tx.store.database import Store
from skyrl_tx.store.sampling_sessions import Origin

_MIN_TEMPERATURE = 0.5
"""Samples below this temperature do not count for the curve `surprise`.

The curve is the mean of -log p of the sampled tokens. At a low temperature, the most likely tokens
are drawn, so their probabilities do not show how certain the model is.
"""


@dataclass(slots=True)
class HistoryObserver(ResultObserver):
    """Stores metric points, totals over all samples of a step, and selected samples."""

    store: Store
    settings: EngineSettings
    _groups: KeptGroups = field(init=False)
    _point_limit: RowLimit[ModelId] = field(init=False)
    _sample_limit: RowLimit[tuple[str, str]] = field(init=False)
    """The keys are model and owner."""

    def __post_init__(self) -> None:
        self._groups = KeptGroups(self.store, self.settings.keep_samples)
        self._point_limit = RowLimit(
            find_superfluous=lambda tx, model_id: points.find_superfluous(tx, model_id),
            remove=points.remove,
        )
        self._sample_limit = RowLimit(
            find_superfluous=lambda tx, key: kept_samples.find_superfluous(
                tx, *key, self.settings.max_kept_sample_bytes
            ),
            remove=kept_samples.remove,
        )

    @property
    def row_limits(self) -> Sequence[RowLimit[Any]]:
        """The limits on the points of a run, and on the kept samples per model and owner."""
        return self._point_limit, self._sample_limit

    def observe_pass(
        self, queued: QueuedRequest, model: LiveModel, output: ForwardBackwardOutput, num_tokens: int, time: DeviceTime
    ) -> WriteRows:
        """Return a function that writes a point for this pass.

        The function also records the advantage and the KL of each kept sample that the pass trained on.
        """
        request, step = queued.model_pass, model.num_steps
        assert request is not None
        values = {**output.metrics, LOSS_WEIGHT: sum_loss_weights(request)}
        self._point_limit.keys_to_trim.add(model.model_id)

        def write_rows(tx: Session, now: float) -> None:
            # A point for the curves
            point = Point(
                position=queued.position,
                model_id=model.model_id,
                kind="train" if request.backward else "forward",
                step=step,
                created_at=queued.created_at,
                started_at=time.started_at,
                at=now,
                device_s=time.device_s,
                tokens=num_tokens,
                datums=len(request.data),
                values=values,
            )
            points.add(tx, point)

            # Advantage and KL of kept samples that the pass trained on
            if request.backward and not isinstance(request.sampled, UnsetType) and self.settings.keep_samples:
                kept = kept_samples.find_kept(tx, queued.owner, {span.sequence_id for span in request.sampled})
                trained = _describe_trained_sequences(request, request.sampled, output, kept)
                kept_samples.record_training(tx, model.model_id, step, trained)

        return write_rows

    def observe_step(
        self, queued: QueuedRequest, model: LiveModel, output: OptimStepOutput, time: DeviceTime
    ) -> WriteRows:
        """Return a function that writes a point for an optimizer step."""
        step = model.num_steps
        self._point_limit.keys_to_trim.add(model.model_id)

        def write_rows(tx: Session, now: float) -> None:
            point = Point(
                position=queued.position,
                model_id=model.model_id,
                kind="step",
                step=step,
                created_at=queued.created_at,
                started_at=time.started_at,
                at=now,
                device_s=time.device_s,
                values=output.metrics,
            )
            points.add(tx, point)

        return write_rows

    def observe_sample(
        self, queued: QueuedRequest, request: Sample, output: SampleOutput, origin: Origin, now: float, device_s: float
    ) -> WriteRows | None:
        """Return a function that adds this request to the totals of its training step.

        The totals are, for example, numbers of samples and tokens. The function also stores the samples
        themselves if `KeptGroups` selects this request.
        """
        # Skip requests that only score a prompt, and private requests
        only_scores_prompt = request.options.wants_prompt and (request.params.max_tokens or 0) == 1
        if only_scores_prompt or request.is_private is True:
            return None
        sampled = None if origin.step is None else _sum_samples(origin.step, request, output)
        group, replaced = self._choose_group(queued, request, output, origin, now)
        if sampled is None and group is None:
            return None

        def write_rows(tx: Session, now: float) -> None:
            if sampled is not None:
                points.add_sampled(tx, origin.model_id, queued.owner, sampled)
            if group is not None:
                kept_samples.remove(tx, replaced)
                kept_samples.add(tx, group, now)

        return write_rows

    def _choose_group(
        self, queued: QueuedRequest, request: Sample, output: SampleOutput, origin: Origin, now: float
    ) -> tuple[KeptGroup | None, list[RequestId]]:
        """Return the group if it is to be kept, and the groups that it replaces."""
        if not self.settings.keep_samples:
            return None, []

        # Build the group
        sequence_ids = request.sequence_ids or [f"{queued.request_id}-{n}" for n in range(len(output.sequences))]
        samples = [
            KeptSample(
                sequence_id=name,
                tokens=sequence.tokens,
                logprobs=sequence.logprobs,
                stop_reason=sequence.stop_reason,
                # How much the log-probabilities of sampler and trainer differ
                trainer_gap=None if isinstance(sequence.trainer_gap, UnsetType) else sequence.trainer_gap.mean,
            )
            for name, sequence in zip(sequence_ids, output.sequences, strict=True)
        ]

        group = KeptGroup(
            request_id=queued.request_id,
            model_id=origin.model_id,
            step=origin.step,
            owner=queued.owner,
            prompt=request.prompt,
            samples=samples,
        )
        if group.num_bytes > self.settings.max_kept_sample_bytes:
            return None, []

        # Decide whether to keep it
        replaced = self._groups.choose(queued.owner, origin, queued.request_id, now)
        if replaced is None:
            return None, []
        self._sample_limit.keys_to_trim.add((origin.model_id, queued.owner))
        return group, replaced


def _sum_samples(step: int, request: Sample, output: SampleOutput) -> SampleTotals:
    """Return the totals of one request: samples, tokens, and log-probabilities."""
    counts_for_surprise = request.params.temperature >= _MIN_TEMPERATURE
    tokens = sum(sequence.tokens.size for sequence in output.sequences)
    logprob_sum = sum(
        float(sequence.logprobs.sum(dtype=np.float64)) for sequence in output.sequences if counts_for_surprise
    )
    counts_for_surprise = counts_for_surprise and math.isfinite(logprob_sum)
    return SampleTotals(
        step=step,
        samples=len(output.sequences),
        cut=sum(sequence.stop_reason == "length" for sequence in output.sequences),
        tokens=tokens,
        scored_tokens=tokens if counts_for_surprise else 0,
        logprob_sum=logprob_sum if counts_for_surprise else 0.0,
    )


def sum_loss_weights(request: ModelPass) -> float:
    """Return the sum of the weights of all tokens. The console divides the loss by this sum.

    Without weights, each token counts 1. Tokens with advantage 0 do not count. The absolute values of
    weights are added, because they can be negative: with `forward_backward_custom`, the client sends
    the gradients of a loss as weights. A custom loss that runs on the server has no weights,
    so each datum counts 1.
    """
    if request.loss == CUSTOM:
        return float(len(request.data))
    total = 0.0
    for datum in request.data:
        inputs = datum.loss_inputs
        weights, advantages = inputs.get("weights"), inputs.get("advantages")
        if weights is None:
            total += np.count_nonzero(advantages) if advantages is not None else inputs[TARGET_TOKENS].size
        else:
            counted = weights if advantages is None else weights[advantages != 0]
            total += float(np.abs(counted).sum(dtype=np.float64))
    return float(total)


def _describe_trained_sequences(
    request: ModelPass, spans: Sequence[SampledSpan], output: ForwardBackwardOutput, kept: Collection[str]
) -> Iterator[TrainedSequence]:
    """Yield the mean advantage and KL of each kept sample.

    The KL is the mean difference between the log-probabilities from sampling and from this pass.
    """
    spans_by_sequence: dict[str, list[SampledSpan]] = {}
    for span in spans:
        if span.sequence_id in kept:
            spans_by_sequence.setdefault(span.sequence_id, []).append(span)

    for sequence_id, parts in spans_by_sequence.items():
        advantages: list[NumberArray] = []
        differences: list[NumberArray] = []
        for span in parts:
            inputs, trained = request.data[span.datum].loss_inputs, output.logprobs[span.datum]
            token_range = slice(span.first, span.first + span.length)
            if (advantage := inputs.get("advantages")) is not None and advantage.ndim == 1:
                advantages.append(advantage[token_range])
            if (sampled := inputs.get("logprobs")) is not None and sampled.shape == trained.shape:
                differences.append(sampled[token_range] - trained[token_range])
        yield TrainedSequence(sequence_id=sequence_id, advantage=_average(advantages), kl=_average(differences))


def _average(parts: Sequence[NumberArray]) -> float | None:
    """Return the mean of all values, or None if there are no values or the mean is not finite."""
    values = np.concatenate(parts) if parts else np.empty(0)
    mean = float(values.mean(dtype=np.float64)) if values.size else math.nan
    return mean if math.isfinite(mean) else None


def _expire_samples(tx: Session, clock: RetentionClock) -> int:
    return kept_samples.expire(tx, clock.now - clock.settings.kept_sample_retention_s)


def _prune_logged(tx: Session, clock: RetentionClock) -> int:
    return logged_metrics.prune(tx, clock.now - logged_metrics.RETENTION_S, limit=pruning.MAX_ROWS)


EXTENSION = EngineExtension(
    observer=HistoryObserver,
    retention=(
        RetentionRule(name="points", on_removal=points.remove_runs),
        RetentionRule(name="kept samples", prune=_expire_samples, on_removal=kept_samples.remove_runs),
        RetentionRule(name="logged runs", prune=_prune_logged, on_deletion_by_user=logged_metrics.forget_models),
    ),
)
