"""FakeBackend: wires the fake model to the contract."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from skyrl_tx.contract import loss_reference
from skyrl_tx.contract.backend import AbstractBackend, HostRank, Pass, Snapshot, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, CapacityError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.passes import ScratchPass
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta
from skyrl_tx.contract.samples import OpenSamples
from skyrl_tx.testing.fake import bigram, sampling
from skyrl_tx.testing.fake.bigram import Pair
from skyrl_tx.testing.fake.config import FakeConfig
from skyrl_tx.testing.fake.state import FakeSnapshot, State


class FakeBackend(AbstractBackend):
    """A bigram model in float64; see `bigram` for its numbers."""

    def __init__(self, base_model: str, config: BaseModel) -> None:
        assert isinstance(config, FakeConfig)
        self._config = config
        self._models: dict[ModelId, State] = {}
        self._samplers: dict[SamplerId, Pair] = {}
        self._open = OpenSamples((config.eos_token_id,))
        self._num_steps = 0  # of passes
        self.is_lost = False
        """Set by tests: calls that compute raise RuntimeError, as with a device that is lost."""

    def check_devices(self) -> None:
        """See AbstractBackend."""
        if self.is_lost:
            raise BackendLost("the fake device is lost")

    def join_hosts(self, rank: HostRank) -> None:
        """See AbstractBackend. Every host computes all by itself."""

    def start(self) -> Capabilities:
        """See AbstractBackend."""
        config = self._config
        return Capabilities(
            max_context_length=config.max_context_length,
            vocab_size=config.vocab_size,
            eos_token_ids=(config.eos_token_id,),
            num_parameters=config.vocab_size**2,
            devices=("fake",),
            max_models=config.max_models,
            max_samplers=config.max_samplers,
            max_sample_tokens=config.max_sample_tokens,
            max_pass_tokens=config.max_pass_tokens,
            micro_batch_tokens=config.micro_batch_tokens,
            sample_slots=config.sample_slots,
            max_lora_rank=config.max_lora_rank,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            losses=LOSS_SPECS,
            max_topk_logprobs=min(20, config.vocab_size),
            max_alt_tokens=20,
            offers_target_logprobs=True,
            fingerprint={"dtype": "float64", "numpy": np.__version__},
            base_model_hash=f"fake-{config.vocab_size}",
        )

    def close(self) -> None:
        """See AbstractBackend."""
        self._models.clear()
        self._samplers.clear()
        self._open = OpenSamples(())

    def meters(self) -> Meters:
        """See AbstractBackend. Without `sample_slots` there is no number of slots to tell."""
        slots = self._config.sample_slots
        return Meters(
            decode_slots=slots or None,
            decode_slots_used=min(len(self._open), slots) if slots else None,
            micro_batches=self._num_steps,
            padding_tokens=0,
        )

    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        """See AbstractBackend."""
        self._compute()
        self._put(model_id, State.fresh(spec, self._config.vocab_size))

    def delete_model(self, model_id: ModelId) -> None:
        """See AbstractBackend."""
        self._models.pop(model_id, None)

    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        """See AbstractBackend."""
        return _FakePass(self._models, batch, backward, self._config, self._compute_step)

    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        """See AbstractBackend."""
        self._compute(self._config.step_delay_s)
        with np.errstate(all="ignore"):  # a diverged model is no reason to warn
            state, norm = self._models[model_id].stepped(params)
        self._models[model_id] = state
        return {
            "unclipped_grad_l2:mean": norm,
            "learning_rate:mean": params.learning_rate,
            "step:max": float(state.moments.step),
        }

    def gradient_norm(self, model_id: ModelId) -> float:
        """See AbstractBackend."""
        gradient = self._models[model_id].gradient
        with np.errstate(all="ignore"):
            return 0.0 if gradient is None else gradient.norm

    def clear_gradient(self, model_id: ModelId) -> None:
        """See AbstractBackend."""
        self._models[model_id] = replace(self._models[model_id], gradient=None)

    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        """See AbstractBackend."""
        self._open.begin(batch)

    def step_sample(self) -> list[SampleDelta]:
        """See AbstractBackend."""
        if not self._open:
            return []
        self._compute(self._config.step_delay_s)
        config = self._config
        deltas: list[SampleDelta] = []
        for sample in self._open.first(config.sample_slots or sys.maxsize):
            sampler = sample.request.sampler
            adapter = None if sampler is None else self._samplers[sampler]
            deltas.append(sampling.decode(sample, adapter, config.vocab_size, config.slice_tokens))
        self._open.drop_ended()
        return deltas

    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        """See AbstractBackend."""
        self._open.cancel(request_ids)

    def end_sample(self, request_id: RequestId, index: int) -> None:
        """See AbstractBackend."""
        self._open.end(request_id, index)

    def text_of(self, tokens: list[int]) -> str:
        """One character a token, by code point."""
        return "".join(chr(token) for token in tokens)

    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        """See AbstractBackend."""
        self._compute()
        return FakeSnapshot(self._models[model_id], frozenset(parts))

    def open_snapshot(self, directory: Path) -> Snapshot:
        """See AbstractBackend."""
        return FakeSnapshot.read(directory, self._config.vocab_size)

    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        """See AbstractBackend."""
        assert isinstance(source, FakeSnapshot)
        self._compute()
        self._put(model_id, source.merged(spec, parts))

    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        """See AbstractBackend."""
        assert isinstance(source, FakeSnapshot)
        self._compute()
        if sampler not in self._samplers and len(self._samplers) >= self._config.max_samplers:
            raise CapacityError(f"all {self._config.max_samplers} sampler slots are taken")
        self._samplers.setdefault(sampler, source.state.weights)

    def drop_sampler(self, sampler: SamplerId) -> None:
        """See AbstractBackend."""
        self._samplers.pop(sampler, None)

    def _compute(self, delay_s: float = 0.0) -> None:
        """Take some time. Raises RuntimeError if the device is lost."""
        time.sleep(delay_s)
        if self.is_lost:
            raise RuntimeError("INTERNAL: the fake device does not respond")

    def _compute_step(self, delay_s: float) -> None:
        self._compute(delay_s)
        self._num_steps += 1

    def _put(self, model_id: ModelId, state: State) -> None:
        if model_id not in self._models and len(self._models) >= self._config.max_models:
            raise CapacityError(f"all {self._config.max_models} model slots are taken")
        self._models[model_id] = state


class _FakePass(ScratchPass[Pair]):
    """One example a step."""

    def __init__(
        self,
        models: dict[ModelId, State],
        batch: PreparedModelPassBatch,
        backward: bool,
        config: FakeConfig,
        compute: Callable[[float], None],
    ) -> None:
        super().__init__(batch, micro_batch_tokens=1)
        self._models = models
        self._backward = backward
        self._config = config
        self._compute = compute

    def compute(self, examples: Sequence[PassExample]) -> tuple[list[PassResult], Pair | None]:
        """See ScratchPass."""
        self._compute(self._config.step_delay_s)
        [example] = examples
        with np.errstate(all="ignore"):
            result, gradient = self._run_example(example)
        return [result], gradient

    def commit(self, model_id: ModelId, gradient: Pair) -> None:
        """See ScratchPass."""
        state = self._models[model_id]
        with np.errstate(all="ignore"):
            total = gradient if state.gradient is None else state.gradient + gradient
        self._models[model_id] = replace(state, gradient=total)

    def _run_example(self, example: PassExample) -> tuple[PassResult, Pair | None]:
        weights = self._models[example.model_id].weights
        logprobs_TV = bigram.log_softmax(bigram.logits(example.tokens, weights, self._config.vocab_size))
        targets = example.loss_inputs["target_tokens"]
        targets_TK = targets.reshape(len(targets), -1)
        logprobs = np.take_along_axis(logprobs_TV, targets_TK, axis=1).reshape(targets.shape)
        value = loss_reference.evaluate(example.loss, logprobs, example.loss_inputs, example.loss_config)
        sums = {"loss": float(value.loss.sum())}
        result = PassResult(logprobs=logprobs.astype(np.float32), sums=sums, means=value.means)
        if not self._backward:
            return result, None
        d_logprobs_TK = value.slope.reshape(targets_TK.shape)
        return result, bigram.gradient(example.tokens, targets_TK, d_logprobs_TK, logprobs_TV, weights)
