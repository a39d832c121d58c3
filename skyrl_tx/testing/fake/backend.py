"""The backend of the fake model."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import BaseModel
from typing_extensions import override

from skyrl_tx.contract import loss_reference
from skyrl_tx.contract.backend import AbstractBackend, HostRank, Pass, Snapshot, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, CapacityError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.passes import ScratchPass
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams, SamplingControls
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta
from skyrl_tx.contract.samples import MASK_WAIT_S, OpenSamples, select_ready
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.model import (
    FakeSnapshot,
    Pair,
    State,
    compute_gradient,
    decode,
    fresh_adapter,
    log_softmax,
    logits,
)


class FakeBackend(AbstractBackend):
    """A bigram model in float64. See `model` for its numbers."""

    @override
    def __init__(self, base_model: str, config: BaseModel) -> None:
        assert isinstance(config, FakeConfig)
        self._config = config
        self._models: dict[ModelId, State] = {}
        self._samplers: dict[SamplerId, Pair] = {}
        self._open = OpenSamples((config.eos_token_id,), config.vocab_size)
        self._num_steps = 0  # micro-batches so far
        self.is_lost = False
        """Tests set it to simulate a lost device: calls that compute raise RuntimeError."""

    @override
    def check_devices(self) -> None:
        if self.is_lost:
            raise BackendLost("the fake device is lost")

    @override
    def join_hosts(self, rank: HostRank) -> None:
        """Do nothing, because every host computes everything itself."""

    @override
    def start(self) -> Capabilities:
        config = self._config
        return Capabilities(
            max_context_length=config.max_context_length,
            vocab_size=config.vocab_size,
            eos_token_ids=(config.eos_token_id,),
            num_parameters=config.vocab_size**2,
            devices=("fake",),
            # Limits from the configuration.
            max_models=config.max_models,
            max_samplers=config.max_samplers,
            max_sample_tokens=config.max_sample_tokens,
            max_pass_tokens=config.max_pass_tokens,
            micro_batch_tokens=config.micro_batch_tokens,
            sample_slots=config.sample_slots,
            max_lora_rank=config.max_lora_rank,
            # Features.
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            losses=LOSS_SPECS,
            max_topk_logprobs=min(20, config.vocab_size),
            max_alt_tokens=20,
            offers_target_logprobs=True,
            sampling_controls=frozenset(field.name for field in fields(SamplingControls)),
            sampled_logprobs=frozenset({"tempered", "raw"}),
            fingerprint={"dtype": "float64", "numpy": np.__version__},
            base_model_hash=f"fake-{config.vocab_size}",
        )

    @override
    def close(self) -> None:
        self._models.clear()
        self._samplers.clear()
        self._open = OpenSamples(())

    @override
    def meters(self) -> Meters:
        """Return the meters. Slots are reported only if `sample_slots` is set."""
        slots = self._config.sample_slots
        return Meters(
            decode_slots=slots or None,
            decode_slots_used=min(len(self._open), slots) if slots else None,
            micro_batches=self._num_steps,
            padding_tokens=0,
        )

    @override
    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        self._compute()
        self._put(model_id, State.make_untrained(fresh_adapter(spec.lora, self._config.vocab_size)))

    @override
    def delete_model(self, model_id: ModelId) -> None:
        self._models.pop(model_id, None)

    @override
    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        return _FakePass(batch, self._models, self._start_micro_batch, backward=backward)

    @override
    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        self._compute(self._config.step_delay_s)
        with np.errstate(all="ignore"):  # no warnings for a model that has diverged
            state, norm = self._models[model_id].take_step(params)
        self._models[model_id] = state
        return {
            "unclipped_grad_l2:mean": norm,
            "learning_rate:mean": params.learning_rate,
            "step:max": float(state.moments.step),
        }

    @override
    def gradient_norm(self, model_id: ModelId) -> float:
        gradient = self._models[model_id].gradient
        with np.errstate(all="ignore"):
            return 0.0 if gradient is None else gradient.norm

    @override
    def clear_gradient(self, model_id: ModelId) -> None:
        self._models[model_id] = replace(self._models[model_id], gradient=None)

    @override
    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        self._open.begin(batch)

    @override
    def step_sample(self) -> list[SampleDelta]:
        if not self._open:
            return []
        self._compute(self._config.step_delay_s)
        config = self._config
        samples = self._open.first(config.sample_slots or sys.maxsize)
        deltas: list[SampleDelta] = []
        for sample in select_ready(samples, time.monotonic() + MASK_WAIT_S):
            sampler = sample.request.sampler
            adapter = None if sampler is None else self._samplers[sampler]
            deltas.append(decode(sample, adapter, config.vocab_size, config.slice_tokens))
        self._open.drop_ended()
        return deltas or [SampleDelta.make_empty(samples[0].request.request_id, samples[0].index)]

    @override
    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        self._open.cancel(request_ids)

    @override
    def end_sample(self, request_id: RequestId, index: int) -> None:
        self._open.end(request_id, index)

    @override
    def text_of(self, tokens: list[int]) -> str:
        """Return one character per token, the one with the token's number as code point."""
        return "".join(chr(token) for token in tokens)

    @override
    def make_tokenizer_reader(self) -> Callable[[], str]:
        file = self._config.tokenizer_file
        return super().make_tokenizer_reader() if file is None else partial(file.read_text, encoding="utf-8")

    @override
    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        self._compute()
        return FakeSnapshot(self._models[model_id], frozenset(parts))

    @override
    def open_snapshot(self, directory: Path) -> Snapshot:
        return FakeSnapshot.read(directory, self._config.vocab_size)

    @override
    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        assert isinstance(source, FakeSnapshot)
        self._compute()
        self._put(model_id, source.restore(spec, parts))

    @override
    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        assert isinstance(source, FakeSnapshot)
        self._compute()
        if sampler not in self._samplers and len(self._samplers) >= self._config.max_samplers:
            raise CapacityError(f"all {self._config.max_samplers} sampler slots are in use")
        self._samplers.setdefault(sampler, source.state.weights)

    @override
    def drop_sampler(self, sampler: SamplerId) -> None:
        self._samplers.pop(sampler, None)

    def _compute(self, delay_s: float = 0.0) -> None:
        """Wait for the configured time. Raises RuntimeError if the device is lost."""
        time.sleep(delay_s)
        if self.is_lost:
            raise RuntimeError("INTERNAL: the fake device does not respond")

    def _start_micro_batch(self) -> None:
        self._compute(self._config.step_delay_s)
        self._num_steps += 1

    def _put(self, model_id: ModelId, state: State) -> None:
        if model_id not in self._models and len(self._models) >= self._config.max_models:
            raise CapacityError(f"all {self._config.max_models} model slots are in use")
        self._models[model_id] = state


class _FakePass(ScratchPass[Pair]):
    """A pass with one example per micro-batch."""

    def __init__(
        self,
        batch: PreparedModelPassBatch,
        models: dict[ModelId, State],
        start_micro_batch: Callable[[], None],
        *,
        backward: bool,
    ) -> None:
        super().__init__(batch, micro_batch_tokens=1)
        self.models = models
        self._start_micro_batch = start_micro_batch
        self._backward = backward

    @override
    def compute(self, examples: Sequence[PassExample]) -> tuple[list[PassResult], Pair | None]:
        self._start_micro_batch()
        [example] = examples
        with np.errstate(all="ignore"):
            result, gradient = self._run_example(example)
        return [result], gradient

    @override
    def commit(self, model_id: ModelId, gradient: Pair) -> None:
        state = self.models[model_id]
        with np.errstate(all="ignore"):
            total = gradient if state.gradient is None else state.gradient + gradient
        self.models[model_id] = replace(state, gradient=total)

    def _run_example(self, example: PassExample) -> tuple[PassResult, Pair | None]:
        weights = self.models[example.model_id].weights
        logprobs_TV = log_softmax(logits(example.tokens, weights, len(weights.b_VR)))
        targets = example.loss_inputs["target_tokens"]
        targets_TK = targets.reshape(len(targets), -1)
        logprobs = np.take_along_axis(logprobs_TV, targets_TK, axis=1).reshape(targets.shape)

        value = loss_reference.evaluate(example.loss, logprobs, example.loss_inputs, example.loss_config)
        sums = {"loss": float(value.loss.sum())}
        result = PassResult(logprobs=logprobs.astype(np.float32), sums=sums, means=value.means)
        if not self._backward:
            return result, None
        d_logprobs_TK = value.slope.reshape(targets_TK.shape)
        return result, compute_gradient(example.tokens, targets_TK, d_logprobs_TK, logprobs_TV, weights)
