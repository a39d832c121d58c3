"""A backend made of two parts: a trainer, and a sampler such as a group of vLLM servers.

When the backend starts, it trains a temporary model for one optimizer step, and compares the
log-probabilities that the trainer and the sampler compute for one row of tokens. This finds a
sampler that serves another base model or ignores adapters before any client trains on its samples.

While the backend runs, the trainer scores a share of the samples (see `trainer_checks`). It can
also draw samples while the sampling servers are unreachable (see `TrainerFallback`).
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from msgspec import structs
from pydantic import BaseModel, ConfigDict
from typing_extensions import override

from skyrl_tx.backends.trainer_checks import (
    MAX_GAP,
    SampleKey,
    TrainerChecks,
    TrainerSamplers,
    list_samples,
    make_scoring_request,
)
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.backend import AbstractBackend, BackendSpec, Snapshot, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.contract.sampler import Sampler, SamplerSpec

_log = logging.getLogger(__name__)
_CHECK_TOKENS = 32
_CHECK_OPTIMIZER = OptimizerParams(learning_rate=2e-3)
_MODEL, _SAMPLER, _REQUEST = ModelId("start-check"), SamplerId("start-check"), RequestId("start-check")
_OMITTED_TARGETS: tuple[frozenset[str], ...] = (frozenset(), frozenset({"unembed"}), frozenset({"mlp", "unembed"}))
"""Layers that a sampler may have no adapters for.
The start tries these sets in order until the sampler accepts."""


class ComposedConfig(BaseModel):
    """The settings of a composed backend: its two parts, and the settings of each."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    trainer: BackendSpec
    trainer_config: BaseModel
    sampler: SamplerSpec
    sampler_config: BaseModel
    check_share: float = 0.0
    """Share of the samples that the trainer scores for comparison, for example 0.01."""
    falls_back: bool = False
    """Whether the trainer draws samples while the sampling servers are unreachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Mean absolute differences of log-probabilities, in nats, that the start measures."""

    base: float
    """Sampler against trainer, for the base model."""
    adapted: float
    """Sampler against trainer, for a model that was trained for one optimizer step."""
    effect: float
    """Trained model against base model, both on the trainer: the effect of the adapter."""

    def check(self) -> None:
        """Raise UserError if the sampler does not apply the adapter of the trained model."""
        if not self.adapted <= MAX_GAP or self.adapted > self.base + self.effect / 2:
            raise UserError(
                f"the sampler does not apply adapters as the trainer does: its log-probabilities differ from the "
                f"trainer's by {self.adapted:.3g} nats on average with an adapter, and by {self.base:.3g} for the "
                "base model. Its samples would not come from the trained weights: check the LoRA settings of the "
                "sampling servers"
            )


class _AdapterRefused(Exception):
    """The sampler rejected the adapter of the check at the start."""


class TrainerFallback:
    """The samples that can still be moved to the trainer, and the samples that the trainer draws.

    With the same seed, the trainer draws different tokens than the sampler. So only samples without
    tokens are moved to the trainer. The trainer finishes a sample that was moved to it, even if a
    sampling server returns in the meantime.

    Each sample is offered to the trainer at most once. If the trainer refuses it, it stays with the
    sampler.
    """

    def __init__(self, trainer: AbstractBackend, samplers: TrainerSamplers) -> None:
        self._trainer = trainer
        self._samplers = samplers
        self._unstarted: dict[SampleKey, SampleRequest] = {}
        """Samples on the sampler that have no tokens yet, each with a request for this sample only.
        """
        self._moved: dict[RequestId, SampleKey] = {}
        """Samples on the trainer, by the id of their request there, for example `fallback-0`."""
        self._numbers = count()
        self.num_samples = 0
        """How many samples were moved to the trainer since the start."""

    @property
    def is_drawing(self) -> bool:
        """Whether the trainer is drawing samples."""
        return bool(self._moved)

    def begin(self, batch: PreparedSampleBatch) -> None:
        """Record the samples of requests that the sampler has accepted."""
        self._unstarted |= {key: _select_sample(request, key[1]) for key, request in list_samples(batch)}

    def record_progress(self, deltas: Sequence[SampleDelta]) -> None:
        """Forget the samples that have tokens now, or have ended. They stay with the sampler."""
        for delta in deltas:
            if delta.tokens.size or delta.stop_reason is not None or delta.error is not None:
                self._unstarted.pop((delta.request_id, delta.index), None)

    def move_unstarted(self) -> list[SampleKey]:
        """Move the samples without tokens to the trainer.

        Returns the samples that the trainer accepted.
        """
        candidates, self._unstarted = self._unstarted, {}
        return [key for key, request in candidates.items() if self._begin(key, request)]

    def read(self, deltas: Sequence[SampleDelta]) -> list[SampleDelta]:
        """Return the trainer's deltas of moved samples, with the request ids of the engine."""
        own_deltas: list[SampleDelta] = []
        for delta in deltas:
            if (key := self._moved.get(delta.request_id)) is None:
                continue
            if delta.stop_reason is not None or delta.error is not None:
                del self._moved[delta.request_id]
            own_deltas.append(structs.replace(delta, request_id=key[0]))
        return own_deltas

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Forget the samples of requests."""
        for key in [key for key in self._unstarted if key[0] in request_ids]:
            del self._unstarted[key]
        trainer_ids = [trainer_id for trainer_id, key in self._moved.items() if key[0] in request_ids]
        if trainer_ids:
            self._trainer.cancel_sample(trainer_ids)
            for trainer_id in trainer_ids:
                del self._moved[trainer_id]

    def end_sample(self, key: SampleKey) -> None:
        """End one sample: forget it, and end it on the trainer if it was moved there."""
        self._unstarted.pop(key, None)
        for trainer_id in [trainer_id for trainer_id, moved in self._moved.items() if moved == key]:
            self._trainer.end_sample(trainer_id, key[1])
            del self._moved[trainer_id]

    def _begin(self, key: SampleKey, request: SampleRequest) -> bool:
        """Start a sample on the trainer.

        Returns False if it is too long, or if the trainer refuses it.
        """
        assert request.params.max_tokens is not None
        fits = request.prompt.size + request.params.max_tokens <= self._samplers.max_tokens
        if not fits or not self._samplers.has_weights(request):
            return False

        # A new request id, because a backend expects the parts of one request in the order of their
        # indices.
        trainer_id = RequestId(f"fallback-{next(self._numbers)}")
        moved = replace(request, request_id=trainer_id)
        if not self._samplers.begin(moved, "draw a sample, which waits for the sampling servers"):
            return False
        self._moved[trainer_id] = key
        self.num_samples += 1
        return True


def _select_sample(request: SampleRequest, index: int) -> SampleRequest:
    """Return a request for one sample of a request.

    Only sample 0 asks for results about the prompt.
    """
    options = request.options if index == 0 else PromptOptions(sample_topk=request.options.sample_topk)
    return replace(request, first_index=index, num_samples=1, options=options)


def _make_trainer_method(name: str) -> Callable[..., Any]:
    """Return a method of `AbstractBackend` that calls the same method of the trainer."""

    def method(self: "ComposedBackend", *args: Any, **kwargs: Any) -> Any:
        return getattr(self._trainer, name)(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]

    method.__name__, method.__doc__ = name, f"Call `AbstractBackend.{name}` of the trainer."
    return method


class ComposedBackend(AbstractBackend):
    """A backend that trains on one part and samples on the other.

    The trainer also decodes tokens, and reads and writes snapshots.
    """

    def __init__(self, base_model: str, config: BaseModel) -> None:
        assert isinstance(config, ComposedConfig)
        self._trainer = config.trainer.load()(base_model, config.trainer_config)
        self._sampler: Sampler = config.sampler.load()(base_model, config.sampler_config)
        are_needed = config.check_share > 0 or config.falls_back
        self._on_trainer = TrainerSamplers(self._trainer, are_needed=are_needed)
        self._checks = TrainerChecks(self._trainer, self._on_trainer, config.check_share)
        self._fallback = TrainerFallback(self._trainer, self._on_trainer)
        self._falls_back = config.falls_back

    # Life cycle

    @override
    def start(self) -> Capabilities:
        """Start both parts and compare them.

        Raises UserError if the log-probabilities of trainer and sampler differ too much.
        """
        trainer = self._trainer.start()
        # The sampler adds the controls and kinds of log-probabilities that it has.
        own = replace(trainer, sampling_controls=frozenset(), sampled_logprobs=frozenset({"tempered"}))
        capabilities = self._on_trainer.limit_capabilities(trainer, self._sampler.start(own))

        # Find the most layers whose adapters the sampler accepts.
        reason = ""
        for omitted in _OMITTED_TARGETS:
            targets = capabilities.lora_targets - omitted
            if not targets:
                break
            try:
                agreement = self._compare_logprobs(capabilities, targets)
            except _AdapterRefused as error:
                reason = reason or str(error)
                continue

            agreement.check()
            if omitted & capabilities.lora_targets:
                names = ", ".join(sorted(omitted & capabilities.lora_targets))
                _log.warning(
                    "the sampler does not support adapters of %s, so the server refuses models that train them: %s",
                    names,
                    reason,
                )

            _log.info(
                "log-probabilities of sampler and trainer differ by %.2g nats on average for the base model, "
                "and by %.2g with an adapter",
                agreement.base,
                agreement.adapted,
            )
            return replace(capabilities, lora_targets=targets)
        raise UserError(f"the sampler does not load adapters of this model: {reason}")

    @override
    def close(self) -> None:
        try:
            self._sampler.close()
        finally:
            self._trainer.close()

    # A sampling server that is lost is not a lost device: its samples wait for it, and training
    # continues.
    check_devices: Any = _make_trainer_method("check_devices")
    is_compiling: Any = _make_trainer_method("is_compiling")
    fingerprint_changes: Any = _make_trainer_method("fingerprint_changes")
    text_of: Any = _make_trainer_method("text_of")
    make_tokenizer_reader: Any = _make_trainer_method("make_tokenizer_reader")

    @override
    def meters(self) -> Meters:
        meters = self._checks.meters(self._sampler.meters(self._trainer.meters()))
        if self._falls_back:
            meters = replace(meters, fallback_samples=self._fallback.num_samples)
        if self._sampler.is_away:
            meanwhile = "the trainer draws samples" if self._falls_back else "samples wait"
            meters = replace(meters, outage=f"{meters.outage}; {meanwhile}")
        return meters

    # Training

    create_model: Any = _make_trainer_method("create_model")
    delete_model: Any = _make_trainer_method("delete_model")
    begin_pass: Any = _make_trainer_method("begin_pass")
    optim_step: Any = _make_trainer_method("optim_step")
    gradient_norm: Any = _make_trainer_method("gradient_norm")
    clear_gradient: Any = _make_trainer_method("clear_gradient")
    capture: Any = _make_trainer_method("capture")
    open_snapshot: Any = _make_trainer_method("open_snapshot")
    restore: Any = _make_trainer_method("restore")

    # Sampling

    @override
    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        self._sampler.load_sampler(sampler, source)
        self._on_trainer.load(sampler, source)

    @override
    def drop_sampler(self, sampler: SamplerId) -> None:
        self._checks.drop(sampler)
        self._on_trainer.drop(sampler)
        self._sampler.drop_sampler(sampler)

    @override
    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        # First the sampler, which may refuse a request. It does so even while its servers are
        # unreachable.
        self._sampler.begin_sample(batch)
        self._checks.begin(batch)
        if self._falls_back:
            self._fallback.begin(batch)

    @override
    def step_sample(self) -> list[SampleDelta]:
        deltas = self._step_trainer()
        drawn = self._sampler.step_sample()

        self._fallback.record_progress(drawn)
        if self._sampler.is_away:
            self._move_to_trainer()

        # Deltas without tokens tell the engine that samples still wait for their comparison.
        deltas += self._checks.watch(drawn)
        return deltas or self._checks.get_waiting_deltas()

    @override
    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        self._checks.cancel(request_ids)
        self._fallback.cancel(request_ids)
        self._sampler.cancel_sample(request_ids)

    @override
    def end_sample(self, request_id: RequestId, index: int) -> None:
        self._sampler.end_sample(request_id, index)
        self._checks.end_sample((request_id, index))
        self._fallback.end_sample((request_id, index))

    def _step_trainer(self) -> list[SampleDelta]:
        """Run one decode slice of the trainer if it scores or draws samples.

        If the trainer only scores, an error ends the comparisons, but no sample fails.
        """
        is_drawing = self._fallback.is_drawing
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
            _log.error("the trainer could not score samples; the running comparisons are dropped", exc_info=error)
            return self._checks.give_up()
        return self._checks.read(deltas) + self._fallback.read(deltas)

    def _move_to_trainer(self) -> None:
        """Move samples without tokens from the unreachable sampler to the trainer."""
        for key in self._fallback.move_unstarted():
            self._checks.forget(key)
            self._sampler.end_sample(*key)

    # The comparison at the start

    def _compare_logprobs(self, capabilities: Capabilities, targets: Collection[str]) -> Agreement:
        """Compare the log-probabilities of trainer and sampler on one row of random tokens.

        Raises:
            _AdapterRefused: If the sampler does not accept an adapter of the layers `targets`.
            UserError: If the sampler serves another base model.
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
        trainer, batch = self._trainer, _make_scoring_batch(row)
        trainer.create_model(_MODEL, ModelSpec(lora=lora))
        try:
            # The base model: the adapter of a new model has no effect.
            fresh = trainer.forward(batch)[0].logprobs
            base = _mean_abs(self._score_with_sampler(None, row) - fresh)
            if not base <= MAX_GAP:  # also true for NaN
                raise UserError(
                    f"the sampler's log-probabilities of the base model differ from the trainer's by {base:.3g} nats "
                    f"on average, and rounding explains at most {MAX_GAP}. Check that the sampling servers serve the "
                    "same base model as this server"
                )

            # The same model after one optimizer step.
            trainer.forward_backward(batch)
            trainer.optim_step(_MODEL, _CHECK_OPTIMIZER)
            trained = trainer.forward(batch)[0].logprobs
            self._sampler.load_sampler(_SAMPLER, trainer.capture(_MODEL, {StatePart.WEIGHTS}))
            try:
                adapted = self._score_with_sampler(_SAMPLER, row)
            finally:
                self._sampler.drop_sampler(_SAMPLER)
        finally:
            trainer.delete_model(_MODEL)
        return Agreement(base=base, adapted=_mean_abs(adapted - trained), effect=_mean_abs(trained - fresh))

    def _score_with_sampler(self, sampler: SamplerId | None, row: Int32Array) -> Float32Array:
        """Return the sampler's log-probabilities of all tokens of a row but the first."""
        request = make_scoring_request(_REQUEST, sampler, row)
        deltas = self._sampler.sample(PreparedSampleBatch(requests=(request,)))
        if (error := deltas[-1].error) is not None:
            if sampler is not None:
                raise _AdapterRefused(error)
            raise UserError(f"the sampler cannot sample from the base model: {error}")
        [prompt] = [delta.prompt for delta in deltas if delta.prompt is not None]
        assert prompt.logprobs is not None
        return prompt.logprobs[1:]


def _make_scoring_batch(row: Int32Array) -> PreparedModelPassBatch:
    """Return a batch that computes the log-probabilities of all tokens of a row but the first."""
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


COMPOSED = BackendSpec(config=ComposedConfig, load=lambda: ComposedBackend)
"""The spec of a composed backend. A `ComposedConfig` says which parts it has."""
