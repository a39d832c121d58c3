"""The JAX backend: one base model on this machine's device, many adapters; here the parts are only wired together."""

import os
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from skyrl_tx import models
from skyrl_tx.backends.jax import checkpoint, mesh
from skyrl_tx.backends.jax.adapters import (
    AdapterPool,
    apply_gradient,
    fresh_training_state,
    padded_rank,
    placed,
)
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory import Memory, choose, model_room, said_if_exhausted
from skyrl_tx.backends.jax.passes import Ahead, JaxPass
from skyrl_tx.backends.jax.sampler import Sampler
from skyrl_tx.backends.jax.warmup import warm_up
from skyrl_tx.contract.backend import AbstractBackend, Pass, Snapshot, StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta
from skyrl_tx.losses import LOSSES
from skyrl_tx.weights import hf
from skyrl_tx.weights.weight_map import adapter_modules

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class JaxBackend(AbstractBackend):
    """See AbstractBackend."""

    def __init__(self, base_model: str, config: JaxConfig) -> None:
        self._base_model = base_model
        self._config = config
        self._is_started = False

    def start(self) -> Capabilities:
        """See AbstractBackend. Raises UserError for a checkpoint that we cannot run."""
        config = self._config
        configure_jax(config)
        try:
            layout = mesh.make_layout(config.mesh)
            content = hf.read_json(hf.resolve(self._base_model, with_weights=False), "config.json")
            family = models.find_family(content)
            self._model = family.config_from_hf(content)
            mesh.check_divides(layout, self._model)
            self._directory = hf.resolve(self._base_model, with_weights=config.load_format == "auto")
            self._dtype = mesh.choose_dtype(config, layout)
            load = (
                hf.dummy if config.load_format == "dummy" else partial(hf.load, self._directory, weights=family.weights)
            )
            described = models.describe_params(self._model)
            params = load(parameters=described, dtype=self._dtype, placement=partial(mesh.place, layout))
            self._params = replace(params, layout=layout)
        except (models.UnsupportedModel, hf.CheckpointError) as error:
            raise UserError(f"base_model {self._base_model!r}: {error}") from error
        except mesh.MeshError as error:
            raise UserError(f"--backend-config.mesh: {error}") from error
        self._place = mesh.adapter_place(layout, self._model)
        modules = adapter_modules(family.weights, tied_embeddings=self._model.tied_embeddings)
        self._format = checkpoint.AdapterFormat(base_model=self._base_model, config=self._model, modules=modules)
        self._sampler = Sampler(self._params, self._model, config, hf.read_eos_token_ids(self._directory))
        promised = self._sampler.room.prompt_bytes
        self._memory = Memory(choose(config, self._params, self._model, promised=promised))
        self._max_models = model_room(config, self._params, self._model, promised=promised)
        self._pool = AdapterPool(self._max_models)
        self._ahead = Ahead()
        self._is_started = True
        capabilities = self._capabilities()
        if config.warmup:
            warm_up(
                self,
                config,
                self._sampler,
                max_length=capabilities.max_context_length,
                micro_batch_tokens=self._memory.plan.micro_batch_tokens,
                num_rows=layout.num_shards("batch"),
            )
        return capabilities

    def close(self) -> None:
        """See AbstractBackend."""
        if self._is_started:
            del self._params, self._pool, self._sampler
            self._is_started = False

    # Models

    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        """See AbstractBackend."""
        self._check(spec)
        self._pool.check_room(model_id)
        with said_if_exhausted("another model in training"):
            state = placed(fresh_training_state(self._model, spec.lora), self._place)
        self._pool.put(model_id, state)

    def delete_model(self, model_id: ModelId) -> None:
        """See AbstractBackend."""
        self._pool.drop(model_id)

    def forward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """See AbstractBackend."""
        return self.begin_pass(batch, backward=False).results()

    def forward_backward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """See AbstractBackend."""
        return self.begin_pass(batch, backward=True).results()

    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        """See AbstractBackend."""
        return JaxPass(
            batch,
            backward=backward,
            params=self._params,
            config=self._model,
            pool=self._pool,
            memory=self._memory,
            ahead=self._ahead,
        )

    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        """See AbstractBackend."""
        before = self._pool.take(model_id)
        with said_if_exhausted("an optimizer step, which holds new weights and moments beside the old"):
            after, norm = apply_gradient(before, params)
            told = float(norm)  # a device may say only now that it had no memory
        metrics = {
            "unclipped_grad_l2:mean": told,
            "learning_rate:mean": params.learning_rate,
            "step:max": float(after.optimizer.step),
        }
        self._pool.put(model_id, after)
        return metrics

    def clear_gradient(self, model_id: ModelId) -> None:
        """See AbstractBackend."""
        self._pool.put(model_id, self._pool.take(model_id).with_gradient(None))

    # Snapshots

    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        """See AbstractBackend. The copy to the host begins here; `write` waits for it."""
        return checkpoint.capture(self._pool.take(model_id), parts, self._format)

    def open_snapshot(self, directory: Path) -> Snapshot:
        """See AbstractBackend."""
        return checkpoint.open_snapshot(directory, self._format)

    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        """See AbstractBackend."""
        self._check(spec)
        self._pool.check_room(model_id)
        state = checkpoint.restore(fresh_training_state(self._model, spec.lora), _own(source), parts)
        with said_if_exhausted("another model in training"):
            state = placed(state, self._place)
        self._pool.put(model_id, state)

    # Sampling

    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        """See AbstractBackend."""
        snapshot = _own(source)
        self._sampler.load(sampler, snapshot.adapter(padded_rank(snapshot.rank)))

    def drop_sampler(self, sampler: SamplerId) -> None:
        """See AbstractBackend."""
        self._sampler.drop(sampler)

    def sample(self, batch: PreparedSampleBatch) -> list[SampleDelta]:
        """See AbstractBackend; nothing else may have been begun."""
        self.begin_sample(batch)
        deltas: list[SampleDelta] = []
        while new := self.step_sample():
            deltas.extend(new)
        return deltas

    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        """See AbstractBackend."""
        self._sampler.begin(batch)

    def step_sample(self) -> list[SampleDelta]:
        """See AbstractBackend."""
        return self._sampler.step()

    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        """See AbstractBackend."""
        self._sampler.cancel(request_ids)

    def end_sample(self, request_id: RequestId, index: int) -> None:
        """See AbstractBackend."""
        self._sampler.end(request_id, index)

    def text_of(self, tokens: list[int]) -> str:
        """See AbstractBackend."""
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    @cached_property
    def _tokenizer(self) -> Any:
        # Without these files transformers may hand out an empty tokenizer, whose text never matches anything.
        if not any((self._directory / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(f"stop: {self._base_model} has no tokenizer to find stop strings with; pass token ids")
        from transformers import AutoTokenizer  # slow to import, and only stop strings need it

        return AutoTokenizer.from_pretrained(self._directory)

    def _check(self, spec: ModelSpec) -> None:
        if not 0 < spec.lora.rank <= self._config.max_lora_rank:
            raise UserError(f"lora_config.rank must be 1 to {self._config.max_lora_rank}, not {spec.lora.rank}")
        if spec.optimizer != "adamw":
            raise UserError(f"optimizer {spec.optimizer!r}: this backend has adamw")

    def _capabilities(self) -> Capabilities:
        config, devices = self._config, jax.tree.leaves(self._params)[0].devices()
        device = min(devices, key=lambda device: device.id)
        return Capabilities(
            max_context_length=self._sampler.max_length,
            vocab_size=self._model.vocab_size,
            eos_token_ids=hf.read_eos_token_ids(self._directory),
            num_parameters=sum(leaf.size for leaf in jax.tree.leaves(self._params)),
            devices=(f"{device.device_kind} ({device.platform})",) * len(devices),
            max_models=self._max_models,
            max_samplers=config.max_sampler_adapters,
            max_sample_tokens=self._sampler.room.tokens,
            max_pass_tokens=config.max_pass_tokens,
            micro_batch_tokens=self._memory.plan.micro_batch_tokens,
            sample_slots=config.sample_slots,
            max_lora_rank=config.max_lora_rank,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            losses={name: loss.spec for name, loss in LOSSES.items()},
            max_topk_logprobs=config.max_topk_logprobs,
            max_alt_tokens=config.max_topk_logprobs,
            offers_target_logprobs=True,
            fingerprint={
                "jax": jax.__version__,
                "device": device.device_kind,
                "dtype": self._dtype.name,
                "mesh": str(config.mesh),
                "micro_batch_tokens": str(self._memory.plan.micro_batch_tokens),
                "remat": str(self._memory.plan.remat),
                "sample_slots": f"{config.sample_slots} of {self._sampler.room.tokens} tokens",
                "prefill_chunk_tokens": str(config.prefill_chunk_tokens),
                "xla_flags": os.environ.get("XLA_FLAGS", ""),
            },
            base_model_hash=hf.identity(self._directory, with_weights=config.load_format == "auto"),
        )


def configure_jax(config: JaxConfig) -> None:
    """Settings of this process's JAX: exact float32 products everywhere, and compiled programs kept on disk."""
    jax.config.update("jax_default_matmul_precision", "highest")
    if config.compile_cache_dir is not None:
        config.compile_cache_dir.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(config.compile_cache_dir))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many quick ones are a slow start


def _own(source: Snapshot) -> checkpoint.AdapterSnapshot:
    assert isinstance(source, checkpoint.AdapterSnapshot), "a snapshot of another backend"
    return source
