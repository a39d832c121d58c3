"""The JAX backend: one base model and many adapters on the devices of this machine.

`JaxBackend.start` plans the memory, loads the base model while programs are compiled, and sets up
sampling and training. The other methods call the parts: training passes in `train`, sampling in
`sample`, files in `checkpoint`.
"""

import logging
import os
import sys
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
from typing_extensions import override

from skyrl_tx import models
from skyrl_tx.backends.jax import checkpoint, devices, memory, mesh
from skyrl_tx.backends.jax.compiler import Compiler, configure_jax, disable_compilation_cache
from skyrl_tx.backends.jax.config import JaxConfig, JaxFlags
from skyrl_tx.backends.jax.devices import CompilationMonitor, check_devices, convert_memory_errors
from skyrl_tx.backends.jax.kernel_choice import explain_kernels, pad_cached_dims
from skyrl_tx.backends.jax.memory_plan import ActiveMemoryPlan
from skyrl_tx.backends.jax.sample.logit_adjustment import list_controls
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.start_plan import StartPlan, plan_start, warm_up
from skyrl_tx.backends.jax.train.custom_losses import CustomLossPrograms, LossShape
from skyrl_tx.backends.jax.train.optimizer import global_norm
from skyrl_tx.backends.jax.train.passes import DispatchLimit, JaxPass
from skyrl_tx.backends.jax.train.training_programs import MicroBatchShapes, TrainingPrograms, make_param_shapes
from skyrl_tx.backends.jax.train.training_state import (
    SMALLEST_RANK,
    TrainingState,
    TrainingStates,
    apply_gradient,
    choose_smallest_rank,
    make_training_state,
    pad_rank,
    put_on_devices,
)
from skyrl_tx.contract.backend import AbstractBackend, HostRank, Pass, Snapshot, StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams
from skyrl_tx.contract.results import Metrics, SampleDelta
from skyrl_tx.contract.state_files import hash_of_base_model
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.losses import LOSSES
from skyrl_tx.models.family import ModelFamily
from skyrl_tx.process.progress import report_progress
from skyrl_tx.weights import hf
from skyrl_tx.weights.peft import AdapterFormat

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class JaxBackend(AbstractBackend):
    """The backend for JAX devices. `start` sets the attributes that are only declared here."""

    # Devices and model
    _compilation: CompilationMonitor
    _family: ModelFamily
    _model: models.ModelConfig
    _dtype: Any
    _directory: Path
    _plan: StartPlan
    _params: models.DecoderParams
    _training_params: models.DecoderParams
    _shards: tuple[int, int]
    """In training, the number of shards of batch rows, and the number of shards of a row's tokens.
    """
    _placement: mesh.Placement
    _format: AdapterFormat
    # Sampling
    _scheduler: SampleScheduler
    # Training
    _memory: ActiveMemoryPlan
    _smallest_rank: int
    _pool: TrainingStates
    _custom_losses: CustomLossPrograms
    _dispatch_limit: DispatchLimit

    def __init__(self, base_model: str, config: JaxFlags) -> None:
        self._base_model = base_model
        self._config = JaxConfig.from_flags(config)
        self._is_started = False
        self._compiler: Compiler[Any] | None = None
        self._training_programs: TrainingPrograms | None = None
        self._compilers = ExitStack()  # closes everything that compiles in the background

    @override
    def join_hosts(self, rank: HostRank) -> None:
        devices.join(rank)

    @override
    def start(self) -> Capabilities:
        """Load the base model and set up sampling and training.

        Raises UserError if the model or the mesh is not supported.
        """
        try:
            return self._start()
        except BaseException:
            self._compilers.close()
            raise

    def _start(self) -> Capabilities:
        with self._convert_errors():
            config, layout = self._choose_devices()
            self._read_model_config(config, layout)
            self._plan_memory(config, layout)
            runner, usual = self._start_compiling(config, layout)
            self._load_weights(config, layout)
        runner.set_params(self._params)
        self._scheduler = SampleScheduler(runner, config, self._plan.samples, hf.read_eos_token_ids(self._directory))
        self._start_training(config)
        self.check_devices()  # compile its program now: it could not be compiled after a device is lost
        self._is_started = True
        capabilities = self._make_capabilities(config)

        # Compile before the server is ready.
        if config.warmup:
            with report_progress(self._describe_compilation):
                warm_up(
                    self,
                    config,
                    self._scheduler,
                    usual,
                    max_length=capabilities.max_context_length,
                    micro_batch_tokens=self._memory.plan.micro_batch_tokens,
                    num_rows=self._shards[0],
                )
        return capabilities

    @contextmanager
    def _convert_errors(self) -> Generator[None]:
        """Convert errors about the model or the mesh to UserError.

        The message names the setting.
        """
        try:
            yield
        except (models.UnsupportedModel, hf.CheckpointError) as error:
            raise UserError(f"base_model {self._base_model!r}: {error}") from error
        except mesh.MeshError as error:
            raise UserError(f"--backend-config.mesh: {error}") from error

    def _choose_devices(self) -> tuple[JaxConfig, Layout]:
        """Configure JAX and make the mesh.

        Returns the settings with the defaults of the mesh's platform.
        """
        config = configure_jax(self._config)
        self._compilation = devices.get_compilation_monitor()
        layout = mesh.make_layout(config.mesh)
        if (warning := mesh.describe_unused_devices(jax.devices(), config.mesh)) is not None:
            log.warning(warning)

        if mesh.get_platform(layout) == "cpu" and layout.is_sharded:
            disable_compilation_cache()
            config = config.model_copy(update={"compile_cache_dir": None})
        if layout.is_sharded:
            num_threads = 0 if devices.is_distributed() else config.compile_threads  # hosts must compile in one order
            config = config.model_copy(update={"compile_threads": num_threads, "warmup": bool(config.warmup)})
        return config.with_platform_defaults(mesh.get_platform(layout)), layout

    def _read_model_config(self, config: JaxConfig, layout: Layout) -> None:
        """Read the config of the base model, and check it against the mesh."""
        platform = mesh.get_platform(layout)

        # Check the config before weights are downloaded.
        content = hf.read_json(hf.resolve_model(self._base_model, with_weights=False), "config.json")
        mesh.check_divisible(layout, pad_cached_dims(models.find_family(content).config_from_hf(content), platform))

        # The files of the weights may say that embeddings are not tied.
        self._directory = hf.resolve_model(self._base_model, with_weights=config.load_format == "auto")
        self._family, model = models.read_model(self._directory)
        self._model = pad_cached_dims(replace(model, expert_lora=config.expert_lora), platform)
        self._dtype = mesh.choose_dtype(config, layout)

    def _plan_memory(self, config: JaxConfig, layout: Layout) -> None:
        """Plan all allocations, and choose kernels."""
        assert layout.mesh is not None
        all_devices = list(layout.mesh.devices.flat)
        self._plan = plan_start(
            config,
            layout,
            self._model,
            self._dtype,
            platform=mesh.get_platform(layout),
            limit_bytes=memory.read_memory_limit(all_devices),
            offload_bytes=memory.get_offload_limit(all_devices),
        )
        self._memory = ActiveMemoryPlan(self._plan.passes)
        for line in explain_kernels(self._plan.kernels, self._model):
            log.info(line)

    def _start_compiling(self, config: JaxConfig, layout: Layout) -> tuple[ModelRunner, TrainingPrograms | None]:
        """Begin to compile programs from shapes, in the background while the weights are loaded.

        Returns the runner of sampling programs, and the training programs if an accelerator compiles
        the usual ones before the server is ready.
        """
        plan, is_cpu = self._plan, mesh.get_platform(layout) == "cpu"
        plan.check_weights_fit()
        if is_cpu and not devices.is_distributed():
            memory.check_weights_fit(plan.host_weight_bytes)
        shapes = make_param_shapes(models.describe_params(self._model), layout, plan.kernels, self._dtype)

        if config.compile_threads:
            self._compiler = Compiler(config.compile_threads, self._compilation)
            self._compilers.callback(self._compiler.close)
        runner = ModelRunner(
            shapes,
            self._model,
            config,
            plan.samples,
            num_adapter_slots=plan.num_adapter_slots,
            pool_rank=plan.pool_rank,
            compiler=None if is_cpu and layout.is_sharded else self._compiler,
        )
        if self._compiler is None or layout.is_sharded:
            return runner, None

        # Likely programs
        programs = self._training_programs = TrainingPrograms(shapes, self._model, self._compiler)
        self._compilers.callback(programs.close)
        sizes = MicroBatchShapes.from_plan(plan.passes, config, programs.layout, plan.shares_prefixes)
        if is_cpu:
            runner.queue_first_samples(sizes.rank)
        programs.start(sizes, config.compile_cache_dir)

        # Usual programs. A CPU compiles none of them now, because its cores are needed to compute.
        usual = programs if config.warmup and not is_cpu else None
        if usual is not None:
            usual.queue_usual()
            runner.queue_usual()
        return runner, usual

    def _load_weights(self, config: JaxConfig, layout: Layout) -> None:
        described, load = models.describe_params(self._model), hf.make_dummy
        if config.load_format != "dummy":
            load = partial(hf.load, self._directory, weights=self._family.weights)
        params = load(parameters=described, dtype=self._dtype, placement=partial(mesh.get_parameter_sharding, layout))

        in_training = mesh.make_training_layout(layout)
        self._params = replace(params, layout=layout, kernels=self._plan.kernels)
        self._training_params = replace(self._params, layout=in_training)
        self._shards = in_training.num_shards("batch"), in_training.num_shards("tokens")
        self._placement = mesh.make_adapter_placement(layout, self._model)
        self._format = models.make_adapter_format(self._model, self._family.weights, self._base_model)

    def _start_training(self, config: JaxConfig) -> None:
        """Set up what passes need."""
        if self._plan.free_bytes is None:
            memory.warn_if_memory_is_scarce(self._plan.host_bytes)
        self._smallest_rank = choose_smallest_rank(config)
        self._pool = TrainingStates(self._plan.max_models)
        self._custom_losses = CustomLossPrograms(
            None if devices.is_distributed() else Compiler[LossShape](0, self._compilation)
        )
        self._compilers.callback(self._custom_losses.close)
        self._dispatch_limit = DispatchLimit()

    def _describe_compilation(self) -> str | None:
        return None if self._compiler is None else self._compiler.progress()

    @override
    def close(self) -> None:
        self._compilers.close()
        if self._is_started:
            del self._params, self._training_params, self._pool, self._scheduler
            self._is_started = False
            devices.leave()

    @override
    def check_devices(self) -> None:
        device_mesh = self._params.layout.mesh
        assert device_mesh is not None
        check_devices(device_mesh)

    @override
    def is_compiling(self) -> bool:
        return self._is_started and self._compilation.is_compiling

    @override
    def meters(self) -> Meters:
        limit, compilation = self._dispatch_limit, self._compilation
        compilation.return_memory()
        return replace(
            self._scheduler.meters(),
            progress=self._describe_compilation(),
            device_memory=memory.read_device_memory(self._params.embed.devices()),
            compilations=compilation.num_compiled,
            compile_seconds=compilation.seconds,
            out_of_memory_retries=limit.num_retries,
            micro_batches=limit.num_micro_batches,
            padding_tokens=limit.num_padding_tokens,
            shared_tokens=limit.num_shared_tokens,
        )

    # Models

    @override
    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        self._check_spec(spec)
        self._pool.check_capacity(model_id)
        with convert_memory_errors("another model in training"):
            state = self._make_training_state(spec)
            state = put_on_devices(state, self._placement)
        self._pool.put(model_id, state)

    def _make_training_state(self, spec: ModelSpec) -> TrainingState:
        shares, alpha = self._plan.shares_prefixes and spec.shares_prefixes is True, self._config.lora_alpha
        return make_training_state(self._model, spec.lora, self._smallest_rank, alpha, shares_prefixes=shares)

    @override
    def delete_model(self, model_id: ModelId) -> None:
        self._pool.drop(model_id)

    @override
    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        return JaxPass(
            batch,
            backward=backward,
            params=self._training_params,
            config=self._model,
            pool=self._pool,
            memory=self._memory,
            limit=self._dispatch_limit,
            shards=self._shards,
            programs=self._training_programs,
            losses=self._custom_losses,
        )

    @override
    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        before = self._pool.get(model_id)
        with convert_memory_errors("an optimizer step, which needs the new and the old weights and moments"):
            after, norm = apply_gradient(before, params)
            grad_norm = float(norm)  # an asynchronous out-of-memory error is raised here
        metrics = {
            "unclipped_grad_l2:mean": grad_norm,
            "learning_rate:mean": params.learning_rate,
            "step:max": float(after.optimizer.step),
        }
        self._pool.put(model_id, after)
        return metrics

    @override
    def gradient_norm(self, model_id: ModelId) -> float:
        gradient = self._pool.get(model_id).gradient
        with convert_memory_errors("the norm of a gradient"):
            return 0.0 if gradient is None else float(global_norm(gradient))

    @override
    def clear_gradient(self, model_id: ModelId) -> None:
        self._pool.put(model_id, self._pool.get(model_id).with_gradient(None))

    # Snapshots

    @override
    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        """Return a snapshot and start to copy it to the host.

        `Snapshot.write` waits for the copy.
        """
        return checkpoint.capture(self._pool.get(model_id), parts, self._format)

    @override
    def open_snapshot(self, directory: Path) -> Snapshot:
        return checkpoint.open_snapshot(directory, self._format, self._smallest_rank)

    @override
    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        self._check_spec(spec)
        self._pool.check_capacity(model_id)
        fresh = self._make_training_state(spec)
        state = checkpoint.restore(fresh, checkpoint.as_adapter_snapshot(source), parts)
        with convert_memory_errors("another model in training"):
            state = put_on_devices(state, self._placement)
        self._pool.put(model_id, state)

    @override
    def fingerprint_changes(self) -> Mapping[str, str]:
        """Return the entries of the memory plan, which changes when a device runs out of memory."""
        return self._memory.plan.fingerprint

    # Sampling

    @override
    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        snapshot = checkpoint.as_adapter_snapshot(source)
        self._scheduler.load(sampler, snapshot.make_adapter(pad_rank(snapshot.rank)))

    @override
    def drop_sampler(self, sampler: SamplerId) -> None:
        self._scheduler.drop(sampler)

    @override
    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        self._scheduler.begin(batch)

    @override
    def step_sample(self) -> list[SampleDelta]:
        return self._scheduler.step()

    @override
    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        self._scheduler.cancel(request_ids)

    @override
    def end_sample(self, request_id: RequestId, index: int) -> None:
        self._scheduler.end(request_id, index)

    @override
    def text_of(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    @override
    def make_tokenizer_reader(self) -> Callable[[], str]:
        return lambda: self._tokenizer.backend_tokenizer.to_str()

    @cached_property
    def _tokenizer(self) -> Any:
        # Without these files, transformers may return an empty tokenizer, whose text matches nothing.
        if not any((self._directory / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(f"stop: {self._base_model} has no tokenizer, which stop strings need; pass token ids")
        from transformers import AutoTokenizer  # slow to import, and few requests need it

        # Without this argument, transformers asks on the terminal whether it may run the model's code.
        return AutoTokenizer.from_pretrained(self._directory, trust_remote_code=False)

    def _hash_base_model(self) -> str:
        weights = hash_of_base_model(self._directory, with_weights=self._config.load_format == "auto")
        has_experts = any(target.num_experts is not None for target in models.get_targets(self._model).values())
        return f"{weights}+expert_lora=shared" if has_experts and self._config.expert_lora == "shared" else weights

    def _check_spec(self, spec: ModelSpec) -> None:
        assert 1 <= spec.lora.rank <= self._config.max_lora_rank and spec.optimizer == "adamw", spec

    def _make_capabilities(self, config: JaxConfig) -> Capabilities:
        all_devices = sorted(jax.tree.leaves(self._params)[0].devices(), key=lambda device: device.id)
        assert config.max_sampler_adapters is not None
        return Capabilities(
            max_context_length=self._plan.samples.max_length,
            max_training_length=min(self._plan.longest_row or sys.maxsize, self._model.max_context_length),
            vocab_size=self._model.vocab_size,
            eos_token_ids=hf.read_eos_token_ids(self._directory),
            num_parameters=sum(leaf.size for leaf in jax.tree.leaves(self._params)),
            devices=(f"{all_devices[0].device_kind} ({all_devices[0].platform})",) * len(all_devices),
            # Limits
            max_models=self._plan.max_models,
            max_samplers=config.max_sampler_adapters,
            max_sample_tokens=self._plan.samples.tokens,
            max_pass_tokens=config.max_pass_tokens,
            micro_batch_tokens=self._memory.plan.micro_batch_tokens,
            sample_slots=self._plan.samples.num_slots,
            max_lora_rank=config.max_lora_rank,
            # Features
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            losses={name: loss.spec for name, loss in LOSSES.items()},
            max_topk_logprobs=config.max_topk_logprobs,
            max_alt_tokens=config.max_topk_logprobs,
            offers_custom_losses=True,
            offers_target_logprobs=True,
            sampling_controls=list_controls(is_distributed=devices.is_distributed()),
            sampled_logprobs=frozenset({"tempered", "raw"}),
            fingerprint=self._make_fingerprint(config, all_devices[0]),
            base_model_hash=self._hash_base_model(),
        )

    def _make_fingerprint(self, config: JaxConfig, device: Any) -> dict[str, str]:
        """Return what the last bits of results depend on; see `Capabilities.fingerprint`."""
        return {
            "jax": jax.__version__,
            "device": device.device_kind,
            "mesh": str(config.mesh),
            **devices.make_fingerprint(),
            **self._plan.make_fingerprint(self._model),
            **self.fingerprint_changes(),
            **{name: str(getattr(config, name)) for name in ("prefill_chunk_tokens", "lora_alpha")},
            **({} if self._smallest_rank == SMALLEST_RANK else {"smallest_rank": str(self._smallest_rank)}),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }
