"""One backend of two: a trainer, and a sampler that draws the samples in its place.

At the start a model is trained for one step, and both compute the log-probabilities of one row of tokens. So a sampler
with another base model, or that ignores adapters, is found before anybody trains on its samples. Later the trainer
scores a share of the samples, see `trainer_checks`, and may draw them while the sampler is away, see
`trainer_fallback`.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from skyrl_tx.backends.trainer_checks import MAX_GAP, TrainerChecks
from skyrl_tx.backends.trainer_fallback import TrainerFallback, TrainerSamplers
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.backend import AbstractBackend, BackendSpec, Pass, Snapshot, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.contract.results import Metrics, SampleDelta
from skyrl_tx.contract.sampler import Sampler, SamplerSpec

_log = logging.getLogger(__name__)
_CHECK_TOKENS = 32
_CHECK_OPTIMIZER = OptimizerParams(learning_rate=2e-3)
_MODEL, _SAMPLER, _REQUEST = ModelId("start-check"), SamplerId("start-check"), RequestId("start-check")
_OMITTED_TARGETS: tuple[frozenset[str], ...] = (frozenset(), frozenset({"unembed"}), frozenset({"mlp", "unembed"}))
"""Layers whose adapters the sampler may lack, in the order in which they are left out."""


class ComposedConfig(BaseModel):
    """The two parts and their settings."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    trainer: BackendSpec
    trainer_config: BaseModel
    sampler: SamplerSpec
    sampler_config: BaseModel
    check_share: float = 0.0
    """The share of samples that are compared with the trainer."""
    falls_back: bool = False
    """Whether the trainer draws samples while the sampler is away."""


def _load() -> type[AbstractBackend]:
    return ComposedBackend


def compose(
    trainer: BackendSpec,
    trainer_config: BaseModel,
    sampler: SamplerSpec,
    sampler_config: BaseModel,
    *,
    check_share: float = 0.0,
    falls_back: bool = False,
) -> tuple[BackendSpec, BaseModel]:
    """Return the spec and the settings of a backend made of a trainer and a sampler."""
    config = ComposedConfig(
        trainer=trainer,
        trainer_config=trainer_config,
        sampler=sampler,
        sampler_config=sampler_config,
        check_share=check_share,
        falls_back=falls_back,
    )
    return BackendSpec(config=ComposedConfig, load=_load), config


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far the log-probabilities of the sampler are from the trainer's, in nats, as means of absolute values."""

    base: float
    """The difference for the base model."""
    adapted: float
    """The difference for a model that was trained for one step."""
    effect: float
    """The change by that step."""

    def check(self) -> None:
        """Raise UserError if the sampler cannot have the same adapter."""
        if not self.adapted <= MAX_GAP or self.adapted > self.base + self.effect / 2:
            raise UserError(
                f"the sampler's log-probabilities of an adapter differ from the trainer's by {self.adapted:.3g} on "
                f"average, those of the base model by {self.base:.3g}: it does not apply adapters as trained"
            )


class _AdapterRefused(Exception):
    """The sampler does not load the adapter of the check."""


class ComposedBackend(AbstractBackend):
    """See AbstractBackend. Training is the trainer's, and so are tokenizer and files; samples are the sampler's."""

    def __init__(self, base_model: str, config: BaseModel) -> None:
        assert isinstance(config, ComposedConfig)
        self._trainer = config.trainer.load()(base_model, config.trainer_config)
        self._sampler: Sampler = config.sampler.load()(base_model, config.sampler_config)
        are_needed = config.check_share > 0 or config.falls_back
        self._on_trainer = TrainerSamplers(self._trainer, are_needed=are_needed)
        self._checks = TrainerChecks(self._trainer, self._on_trainer, config.check_share)
        self._fallback = TrainerFallback(self._trainer, self._on_trainer) if config.falls_back else None

    # Life cycle

    def start(self) -> Capabilities:
        """See AbstractBackend. Raises UserError if the sampler does not agree with the trainer."""
        trainer = self._trainer.start()
        both = self._on_trainer.limit_capabilities(trainer, self._sampler.start(trainer))
        reason = ""
        for missing in _OMITTED_TARGETS:
            targets = both.lora_targets - missing
            if not targets:
                break
            try:
                agreement = self._compare_logprobs(both, targets)
            except _AdapterRefused as error:
                reason = reason or str(error)
                continue
            agreement.check()
            if missing & both.lora_targets:
                names = ", ".join(sorted(missing & both.lora_targets))
                _log.warning("models with adapters of %s are refused, because the sampler has none: %s", names, reason)
            _log.info(
                "log-probabilities of trainer and sampler differ by %.2g on average, with an adapter by %.2g",
                agreement.base,
                agreement.adapted,
            )
            return replace(both, lora_targets=targets)
        raise UserError(f"the sampler cannot sample from adapters of this model: {reason}")

    def close(self) -> None:
        """See AbstractBackend."""
        try:
            self._sampler.close()
        finally:
            self._trainer.close()

    def check_devices(self) -> None:
        """See AbstractBackend. A lost server is not a lost device: its samples wait for it, and training goes on."""
        self._trainer.check_devices()

    def is_compiling(self) -> bool:
        """See AbstractBackend."""
        return self._trainer.is_compiling()

    def meters(self) -> Meters:
        """See AbstractBackend."""
        held = self._checks.meters(self._sampler.meters(self._trainer.meters()))
        if self._fallback is not None:
            held = replace(held, fallback_samples=self._fallback.num_samples)
        if self._sampler.is_away:
            meanwhile = "samples wait" if self._fallback is None else "the trainer draws samples"
            held = replace(held, outage=f"{held.outage}; {meanwhile}")
        return held

    def fingerprint_changes(self) -> Mapping[str, str]:
        """See AbstractBackend."""
        return self._trainer.fingerprint_changes()

    def text_of(self, tokens: list[int]) -> str:
        """See AbstractBackend."""
        return self._trainer.text_of(tokens)

    # Training

    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        """See AbstractBackend."""
        self._trainer.create_model(model_id, spec)

    def delete_model(self, model_id: ModelId) -> None:
        """See AbstractBackend."""
        self._trainer.delete_model(model_id)

    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        """See AbstractBackend."""
        return self._trainer.begin_pass(batch, backward=backward)

    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        """See AbstractBackend."""
        return self._trainer.optim_step(model_id, params)

    def gradient_norm(self, model_id: ModelId) -> float | None:
        """See AbstractBackend."""
        return self._trainer.gradient_norm(model_id)

    def clear_gradient(self, model_id: ModelId) -> None:
        """See AbstractBackend."""
        self._trainer.clear_gradient(model_id)

    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        """See AbstractBackend."""
        return self._trainer.capture(model_id, parts)

    def open_snapshot(self, directory: Path) -> Snapshot:
        """See AbstractBackend."""
        return self._trainer.open_snapshot(directory)

    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        """See AbstractBackend."""
        self._trainer.restore(model_id, spec, source, parts)

    # Sampling

    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        """See AbstractBackend."""
        self._sampler.load_sampler(sampler, source)
        self._on_trainer.load(sampler, source)

    def drop_sampler(self, sampler: SamplerId) -> None:
        """See AbstractBackend."""
        self._checks.drop(sampler)
        self._on_trainer.drop(sampler)
        self._sampler.drop_sampler(sampler)

    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        """See AbstractBackend. What the sampler refuses is refused also while it is away."""
        self._sampler.begin_sample(batch)
        self._checks.begin(batch)
        if self._fallback is not None:
            self._fallback.begin(batch)

    def step_sample(self) -> list[SampleDelta]:
        """See AbstractBackend."""
        deltas = self._step_trainer()
        drawn = self._sampler.step_sample()
        if self._fallback is not None:
            self._fallback.record_progress(drawn)
            if self._sampler.is_away:
                self._move_to_trainer(self._fallback)
        deltas += self._checks.watch(drawn)
        return deltas or self._checks.get_waiting_deltas()

    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        """See AbstractBackend."""
        self._checks.cancel(request_ids)
        if self._fallback is not None:
            self._fallback.cancel(request_ids)
        self._sampler.cancel_sample(request_ids)

    def end_sample(self, request_id: RequestId, index: int) -> None:
        """See AbstractBackend."""
        self._sampler.end_sample(request_id, index)
        self._checks.end_sample(request_id, index)
        if self._fallback is not None:
            self._fallback.end_sample(request_id, index)

    def _step_trainer(self) -> list[SampleDelta]:
        """Let the trainer score and draw samples for one slice. A failure to score is none of the samples."""
        fallback = self._fallback
        is_drawing = fallback is not None and fallback.is_drawing
        if not is_drawing and not self._checks.is_running:
            return []
        try:
            deltas = self._trainer.step_sample()
        except BackendLost:
            raise
        except Exception as error:
            if is_drawing:
                raise
            self._trainer.check_devices()
            _log.error("samples could not be compared with the trainer", exc_info=error)
            return self._checks.give_up()
        return self._checks.read(deltas) + ([] if fallback is None else fallback.read(deltas))

    def _move_to_trainer(self, fallback: TrainerFallback) -> None:
        """Move samples that have no tokens from the sampler, which is away, to the trainer."""
        for key in fallback.move_unstarted():
            self._checks.forget(key)
            self._sampler.end_sample(*key)

    # The comparison at the start

    def _compare_logprobs(self, capabilities: Capabilities, targets: Collection[str]) -> Agreement:
        """Compare both on one row of tokens.

        Raises _AdapterRefused if the sampler takes no adapter of `targets`, UserError if it has another base model.
        """
        num_tokens = min(_CHECK_TOKENS, capabilities.max_context_length - 1)
        row = np.random.default_rng(0).integers(0, capabilities.vocab_size, num_tokens, dtype=np.int32)
        lora = LoraSpec(
            rank=capabilities.max_lora_rank,
            seed=0,
            train_attn="attn" in targets,
            train_mlp="mlp" in targets,
            train_unembed="unembed" in targets,
        )
        trainer, spec = self._trainer, ModelSpec(lora=lora)
        trainer.create_model(_MODEL, spec)
        try:
            fresh = trainer.forward(_make_scoring_batch(row))[0].logprobs
            base = _mean_abs(self._score_with_sampler(None, row) - fresh)
            if not base <= MAX_GAP:  # NaN as well
                raise UserError(
                    f"the sampler's log-probabilities of the base model differ from the trainer's by {base:.3g} on "
                    f"average, where rounding gives {MAX_GAP} at most: does it serve the same base model?"
                )
            trainer.forward_backward(_make_scoring_batch(row))
            trainer.optim_step(_MODEL, _CHECK_OPTIMIZER)
            trained = trainer.forward(_make_scoring_batch(row))[0].logprobs
            self._sampler.load_sampler(_SAMPLER, trainer.capture(_MODEL, {StatePart.WEIGHTS}))
            try:
                adapted = self._score_with_sampler(_SAMPLER, row)
            finally:
                self._sampler.drop_sampler(_SAMPLER)
        finally:
            trainer.delete_model(_MODEL)
        return Agreement(base=base, adapted=_mean_abs(adapted - trained), effect=_mean_abs(trained - fresh))

    def _score_with_sampler(self, sampler: SamplerId | None, row: Int32Array) -> Float32Array:
        """Return the sampler's log-probabilities of a row's tokens, except the first."""
        request = SampleRequest(
            request_id=_REQUEST,
            sampler=sampler,
            prompt=row,
            num_samples=1,
            params=SamplingParams(seed=0, max_tokens=1, temperature=0.0),
            options=PromptOptions(logprobs=True),
        )
        deltas = self._sampler.sample(PreparedSampleBatch(requests=(request,)))
        if (error := deltas[-1].error) is not None:
            raise UserError(f"the sampler does not sample: {error}") if sampler is None else _AdapterRefused(error)
        [prompt] = [delta.prompt for delta in deltas if delta.prompt is not None]
        assert prompt.logprobs is not None
        return prompt.logprobs[1:]


def _make_scoring_batch(row: Int32Array) -> PreparedModelPassBatch:
    """Return a batch that computes the log-probabilities of a row's tokens, except the first."""
    inputs = {"target_tokens": row[1:], "weights": np.ones(row.size - 1, np.float32)}
    example = PassExample(
        request_id=_REQUEST,
        model_id=_MODEL,
        tokens=row[:-1],
        loss="cross_entropy",
        loss_inputs=inputs,
        loss_config={},
    )
    return PreparedModelPassBatch(examples=(example,))


def _mean_abs(differences: Float32Array) -> float:
    return float(np.abs(differences.astype(np.float64)).mean())
