"""The history that people read, written with each result: points, usage, and kept samples with their sums."""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import UnsetType
from sqlmodel import Session

from skyrl_tx.apps.history import kept_samples, points, sampled_steps
from skyrl_tx.apps.history.kept_groups import KeptGroups
from skyrl_tx.apps.history.kept_samples import NewGroup, NewSample, TrainedSequence
from skyrl_tx.apps.history.points import Point
from skyrl_tx.apps.history.sampled_steps import SampledStep
from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import Work
from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId, SamplingSessionId
from skyrl_tx.contract.requests import ModelPass, Sample, SampledSpan
from skyrl_tx.contract.results import ForwardBackwardOutput, OptimStepOutput, SampleOutput
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.request_log import HistoryRows, QueuedRequest
from skyrl_tx.engine.residency import LiveModel
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store import samplers
from skyrl_tx.store.database import Store
from skyrl_tx.store.samplers import BASE_WEIGHTS, Origin

_MAX_ORIGINS = 4096
_MIN_TEMPERATURE = 0.5
"""Below it, the most likely tokens are drawn whatever the model has learned."""


@dataclass(slots=True)
class History:
    """Makes the rows of each completed request; `RequestLog` writes them in the transaction of its result.

    Replay completes no request, so that it adds nothing.
    """

    store: Store
    settings: EngineSettings
    grown_runs: set[ModelId] = field(default_factory=set[ModelId])
    """Runs with new points, until housekeeping has counted them."""
    grown_samples: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Model and owner of newly kept samples, until housekeeping has added them up."""
    _groups: KeptGroups = field(init=False)
    _origins: OrderedDict[tuple[SamplingSessionId | None, SamplerId], Origin] = field(
        default_factory=OrderedDict[tuple[SamplingSessionId | None, SamplerId], Origin]
    )

    def __post_init__(self) -> None:
        self._groups = KeptGroups(self.store, self.settings.keep_samples)

    def of_pass(
        self, queued: QueuedRequest, model: LiveModel, output: ForwardBackwardOutput, num_tokens: int, time: DeviceTime
    ) -> HistoryRows:
        """Return the rows of a forward_backward or a forward."""
        request, step = queued.model_pass, model.num_steps
        assert request is not None
        work = Work(kind="training" if request.backward else "forward", tokens=num_tokens, device_s=time.device_s)
        kind = "train" if request.backward else "forward"
        self.grown_runs.add(model.model_id)

        def rows(tx: Session, now: float) -> None:
            point = Point(
                position=queued.position,
                model_id=model.model_id,
                kind=kind,
                step=step,
                created_at=queued.created_at,
                started_at=time.started_at,
                at=now,
                device_s=time.device_s,
                tokens=num_tokens,
                datums=len(request.data),
                values=output.metrics,
            )
            points.add(tx, point)
            usage.add(tx, queued.owner, queued.session_id, model.model_id, now, (work,))
            if request.backward and not isinstance(request.sampled, UnsetType) and self.settings.keep_samples:
                kept = kept_samples.find(tx, queued.owner, {span.sequence_id for span in request.sampled})
                trained = _trained_sequences(request, request.sampled, output, kept)
                kept_samples.record_training(tx, model.model_id, step, trained)

        return rows

    def of_step(
        self, queued: QueuedRequest, model: LiveModel, output: OptimStepOutput, time: DeviceTime
    ) -> HistoryRows:
        """Return the rows of an optimizer step, which `model` has counted."""
        step = model.num_steps
        self.grown_runs.add(model.model_id)

        def rows(tx: Session, now: float) -> None:
            point = Point(
                position=queued.position,
                model_id=model.model_id,
                kind="step",
                step=step,
                created_at=queued.created_at,
                started_at=time.started_at,
                at=now,
                device_s=time.device_s,
                tokens=0,
                datums=0,
                values=output.metrics,
            )
            points.add(tx, point)
            work = Work(kind="training", device_s=time.device_s)
            usage.add(tx, queued.owner, queued.session_id, model.model_id, now, (work,))

        return rows

    def of_sample(
        self, queued: QueuedRequest, request: Sample, output: SampleOutput, now: float, device_s: float
    ) -> HistoryRows:
        """Return the rows of a sample request: its usage, and its sequences if its group is chosen."""
        origin = self._origin(queued.sampling_session_id, request.sampler)
        num_cached = output.prompt.cache_hit_tokens
        work = [
            Work(kind="prefill", tokens=request.prompt.size - num_cached),
            Work(kind="sampled", tokens=sum(each.tokens.size for each in output.sequences), device_s=device_s),
        ]
        if num_cached:
            work.append(Work(kind="prefill_cached", tokens=num_cached))
        # Prompts that are only scored are no samples, and private ones are none of the run.
        is_scoring = request.options.wants_prompt and (request.params.max_tokens or 0) == 1
        is_left_out = is_scoring or request.is_private is True
        sampled = None if is_left_out or origin.step is None else _sums(origin.step, request, output)
        group, replaced = (None, []) if is_left_out else self._chosen_group(queued, request, output, origin, now)

        def rows(tx: Session, now: float) -> None:
            usage.add(tx, queued.owner, queued.session_id, origin.model_id, now, work)
            if sampled is not None:
                sampled_steps.add(tx, origin.model_id, queued.owner, sampled)
            if group is not None:
                kept_samples.remove(tx, replaced)
                kept_samples.add(tx, group, now)

        return rows

    def of_save(self, queued: QueuedRequest, model_id: ModelId) -> HistoryRows:
        """Return the rows of a save with a name."""
        work = (Work(kind="checkpoint"),)
        return lambda tx, now: usage.add(tx, queued.owner, queued.session_id, model_id, now, work)

    def note_sampler(self, sampler: SamplerId, model: LiveModel) -> None:
        """Remember the step of an ephemeral sampler, because in-flight sessions forget it at the next save."""
        self._remember(None, sampler, Origin(model.model_id, model.num_steps))

    def _origin(self, name: SamplingSessionId | None, sampler: SamplerId | None) -> Origin:
        if sampler is None or name is None:
            return BASE_WEIGHTS
        found = self._origins.get((name, sampler)) or self._origins.get((None, sampler))
        if found is None:
            found = self.store.read(lambda tx: samplers.origin(tx, name, sampler))
            self._remember(name, sampler, found)
        return found

    def _remember(self, name: SamplingSessionId | None, sampler: SamplerId, origin: Origin) -> None:
        if len(self._origins) >= _MAX_ORIGINS:
            self._origins.popitem(last=False)
        self._origins[name, sampler] = origin

    def _chosen_group(
        self, queued: QueuedRequest, request: Sample, output: SampleOutput, origin: Origin, now: float
    ) -> tuple[NewGroup | None, list[RequestId]]:
        """Return the samples to keep, and the groups that they replace."""
        if not self.settings.keep_samples:
            return None, []
        sequence_ids = request.sequence_ids or [f"{queued.request_id}-{n}" for n in range(len(output.sequences))]
        samples = [
            NewSample(
                sequence_id=name,
                tokens=sequence.tokens,
                logprobs=sequence.logprobs,
                stop_reason=sequence.stop_reason,
                trainer_gap=None if isinstance(sequence.trainer_gap, UnsetType) else sequence.trainer_gap.mean,
            )
            for name, sequence in zip(sequence_ids, output.sequences, strict=True)
        ]
        group = NewGroup(
            request_id=queued.request_id,
            model_id=origin.model_id,
            step=origin.step,
            owner=queued.owner,
            prompt=request.prompt,
            samples=samples,
        )
        if group.num_bytes > self.settings.max_kept_sample_bytes:
            return None, []
        choice = self._groups.choose(queued.owner, origin, queued.request_id, now)
        if not choice.is_kept:
            return None, []
        self.grown_samples.add((origin.model_id, queued.owner))
        return group, [] if choice.replaced is None else [choice.replaced]


def _sums(step: int, request: Sample, output: SampleOutput) -> SampledStep:
    """Return what a request adds to the sums of its step."""
    is_scored = request.params.temperature >= _MIN_TEMPERATURE
    tokens = sum(sequence.tokens.size for sequence in output.sequences)
    logprob_sum = sum(float(sequence.logprobs.sum(dtype=np.float64)) for sequence in output.sequences if is_scored)
    is_scored = is_scored and math.isfinite(logprob_sum)
    return SampledStep(
        step=step,
        samples=len(output.sequences),
        cut=sum(sequence.stop_reason == "length" for sequence in output.sequences),
        tokens=tokens,
        scored_tokens=tokens if is_scored else 0,
        logprob_sum=logprob_sum if is_scored else 0.0,
    )


def _trained_sequences(
    request: ModelPass, spans: Sequence[SampledSpan], output: ForwardBackwardOutput, kept: Collection[str]
) -> Iterator[TrainedSequence]:
    """Yield the mean advantage of each kept sequence, and how far its log-probabilities moved since it was sampled."""
    of_sequence: dict[str, list[SampledSpan]] = {}
    for span in spans:
        if span.sequence_id in kept:
            of_sequence.setdefault(span.sequence_id, []).append(span)
    for sequence_id, parts in of_sequence.items():
        advantages: list[NumberArray] = []
        differences: list[NumberArray] = []
        for span in parts:
            inputs, trained = request.data[span.datum].loss_inputs, output.logprobs[span.datum]
            of_span = slice(span.first, span.first + span.length)
            if (advantage := inputs.get("advantages")) is not None and advantage.ndim == 1:
                advantages.append(advantage[of_span])
            if (sampled := inputs.get("logprobs")) is not None and sampled.shape == trained.shape:
                differences.append(sampled[of_span] - trained[of_span])
        yield TrainedSequence(sequence_id=sequence_id, advantage=_mean(advantages), kl=_mean(differences))


def _mean(parts: Sequence[NumberArray]) -> float | None:
    """Return the mean of all values; None if there are none, or if it is not finite."""
    values = np.concatenate(parts) if parts else np.empty(0)
    mean = float(values.mean(dtype=np.float64)) if values.size else math.nan
    return mean if math.isfinite(mean) else None
