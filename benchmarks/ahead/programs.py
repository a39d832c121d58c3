"""Compiles the largest programs of the backend without the devices, and reads what the compiler reports about them.

The compiler's memory figures are reliable. It reports no times.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.ahead.program_text import ProgramText, read_program
from skyrl_tx import models
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.devices import is_out_of_memory
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.backends.jax.sample.layer_views import separate_layers, should_separate_layers
from skyrl_tx.backends.jax.sample.row_inputs import RowInputs
from skyrl_tx.backends.jax.sample.running_sample import BASE_SLOT
from skyrl_tx.backends.jax.sample.slice_rows import SliceRows
from skyrl_tx.backends.jax.shapes import MAX_PROMPTS_TOGETHER, PrefillShapes
from skyrl_tx.backends.jax.start_plan import WARM_UP_ID, StartPlan, make_training_batch
from skyrl_tx.backends.jax.train import forward_backward, optimizer, packing
from skyrl_tx.backends.jax.train.training_programs import make_adapter_shapes, make_param_shapes
from skyrl_tx.backends.jax.train.training_state import pad_rank
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, count_adapter_bytes
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import OptimizerParams
from skyrl_tx.layers.cache_state import BlockTable, Cache
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.layers.sharding import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """The compiler's account of one program. Bytes are of each device."""

    name: str
    detail: str
    compile_s: float
    argument_bytes: int = 0
    """Weights, adapters and cache included."""
    temporary_bytes: int = 0
    host_bytes: int = 0
    """Temporary memory of the host."""
    output_bytes: int = 0
    """Results that do not reuse the memory of an argument."""
    planned_bytes: int = 0
    """The plan's account of the same."""
    accessed_bytes: int = 0
    """Bytes that instructions read and write, with the body of a loop counted once; 0 if the compiler reports none."""
    code_bytes: int = 0
    """Instructions and constants; 0 if the compiler does not say."""
    text: ProgramText | None = None
    """Loops, kernels and collectives; None if the program does not compile."""
    problem: str = ""
    """The compiler's message if the program needs more memory than the device has."""

    @property
    def total_bytes(self) -> int:
        """All memory of the program."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes


def compile_programs(
    config: JaxConfig,
    layout: Layout,
    model: models.ModelConfig,
    plan: StartPlan,
    names: Sequence[str],
) -> Iterator[CompiledProgram]:
    """Compile programs for the shapes of a plan, each when it is asked for.

    The names are methods of `_Shapes`: forward, gradient, optimizer, prefill, decode, adapter, adapters.
    """
    assert layout.mesh is not None
    shapes = _Shapes(config.with_platform_defaults(mesh.get_platform(layout)), layout, model, plan)
    layer_steps = {group.num_repeats for group in model.groups} - {1}

    for name in names:
        started = time.monotonic()
        # GPU kernels depend on the GPU of the mesh; `configure_jax` sets the precision.
        with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh), jax.default_matmul_precision("highest"):
            lowered, detail, planned = getattr(shapes, name)()

        try:
            compiled, text = _compile(lowered, layout)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            seconds, problem = time.monotonic() - started, " ".join(str(error).split())
            yield CompiledProgram(name=name, detail=detail, compile_s=seconds, planned_bytes=planned, problem=problem)
            continue

        memory = compiled.memory_analysis()
        yield CompiledProgram(
            name=name,
            detail=detail,
            compile_s=time.monotonic() - started,
            argument_bytes=memory.argument_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            host_bytes=memory.host_temp_size_in_bytes,
            output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            planned_bytes=planned,
            accessed_bytes=int((compiled.cost_analysis() or {}).get("bytes accessed", 0)),
            text=read_program(text, layer_steps),
        )


def _compile(lowered: Any, layout: Layout) -> tuple[Any, str]:
    """Return a compiled program and its text."""
    assert layout.mesh is not None
    if layout.mesh.devices.flat[0].platform != "tpu":
        compiled = lowered.compile()
        return compiled, compiled.as_text()
    # JAX cannot read every program that libtpu 0.0.52 returns, so libtpu writes the text itself.
    with TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (file,) = Path(folder).glob("*.after_optimizations.txt")
        return compiled, file.read_text()


_Lowered = tuple[Any, str, int]
"""A lowered program, its sizes as text, and the bytes that the plan counts for it."""


class _Shapes:
    """The arguments of programs as shapes with shardings."""

    def __init__(self, config: JaxConfig, layout: Layout, model: models.ModelConfig, plan: StartPlan) -> None:
        self._config, self._layout, self._model, self._plan = config, layout, model, plan
        described = models.describe_params(model)
        stacks = make_param_shapes(described, layout, plan.kernels, jnp.dtype(plan.dtype))
        self._params = separate_layers(stacks) if should_separate_layers(mesh.get_platform(layout), layout) else stacks
        self._training_params = replace(stacks, layout=mesh.make_training_layout(layout))

    def forward(self) -> _Lowered:
        """Return one micro-batch without gradient. The plan has no account of it: it takes less than one with."""
        batch, detail = self._micro_batch()
        adapter = make_adapter_shapes(self._layout, self._model, self._rank)
        return forward_backward.forward.lower(self._training_params, adapter, batch, config=self._model), detail, 0

    def gradient(self) -> _Lowered:
        """Return the gradient of one micro-batch of the plan."""
        plan = self._plan
        batch, detail = self._micro_batch()
        adapter = make_adapter_shapes(self._layout, self._model, self._rank)
        num_shards = math.prod(map(self._training_params.layout.num_shards, ("batch", "tokens")))
        remat = plan.passes.get_remat_policy(plan.passes.micro_batch_tokens // num_shards)
        lowered = forward_backward.accumulate.lower(
            self._training_params, adapter, adapter.weights, batch, config=self._model, remat=remat
        )
        return lowered, detail, plan.weight_bytes + plan.pass_bytes + 2 * self._adapter_bytes

    def optimizer(self) -> _Lowered:
        """Return a step of AdamW: weights, gradient and moments, and the new ones of all but the gradient."""
        weights = make_adapter_shapes(self._layout, self._model, self._rank).weights
        state = optimizer.OptimizerState(first=weights, second=weights, step=self._replicate(np.int32(0)))
        factors = self._replicate(optimizer.compute_coefficients(OptimizerParams(), 1))
        lowered = optimizer.adamw_step.lower(weights, state, weights, factors)
        return lowered, f"rank {self._rank}", 7 * self._adapter_bytes

    @property
    def _rank(self) -> int:
        return pad_rank(min(DEFAULT_RANK, self._config.max_lora_rank))

    @property
    def _adapter_bytes(self) -> int:
        return count_adapter_bytes(self._model, self._rank, self._layout)

    def _micro_batch(self) -> tuple[Any, str]:
        plan, layout = self._plan, self._training_params.layout
        num_rows = layout.num_shards("batch")
        length = plan.passes.micro_batch_tokens // num_rows
        examples = make_training_batch(ModelId(WARM_UP_ID), length, plan.samples.max_length, num_rows).examples
        first = packing.plan_micro_batches(examples, length * num_rows, num_rows, layout.num_shards("tokens"))[0]
        detail = f"{first.num_rows} rows of {first.length} tokens, rank {self._rank}"
        return self._replicate(packing.fill_micro_batch(first, examples)), detail

    def prefill(self) -> _Lowered:
        """Return one chunk of the most prompts that are computed at the same time, with the base model."""
        samples, is_exact = self._plan.samples, self._plan.dtype == "float32"
        size = PrefillShapes.from_config(self._config, samples.max_length).chunk_size
        rows = samples.shards if samples.shards > 1 or is_exact else MAX_PROMPTS_TOGETHER
        number, tokens = (self._replicate(np.zeros(shape, np.int32)) for shape in (rows, (rows, size)))
        lowered = programs.prefill.lower(
            self._params, self._model, None, number, tokens, number, number, self._cache(), self._table(rows)
        )
        detail = f"{size} tokens of {rows} prompts" if rows > 1 else f"{size} tokens"
        return lowered, detail, self._plan.weight_bytes + self._plan.kv_bytes

    def decode(self) -> _Lowered:
        """Return a decode slice of the most samples, with the base model."""
        lowered = self._decode(None, SliceRows((None,) * self._plan.samples.num_rows, (BASE_SLOT,)))
        planned = self._plan.weight_bytes + self._plan.kv_bytes + self._plan.slice_bytes
        return lowered, f"{self._plan.samples.num_slots} samples", planned

    def adapter(self) -> _Lowered:
        """Return a decode slice of the most samples, all with the same adapter."""
        return self._decode_adapters(SliceRows((None,) * self._plan.samples.num_rows, (BASE_SLOT + 1,)))

    def adapters(self) -> _Lowered:
        """Return a decode slice of the most samples, with as few adapters as a program of several has."""
        plan, merges = self._plan, self._plan.dtype != "float32"
        assert self._config.max_sampler_adapters is not None
        most = 1 + self._config.max_sampler_adapters
        first, *others = SliceRows.iter_shapes(plan.samples.num_rows, BASE_SLOT + 1, merges=merges, max_adapters=most)
        return self._decode_adapters(others[0] if merges else first)

    def _decode_adapters(self, rows: SliceRows) -> _Lowered:
        plan, num_slots = self._plan, self._plan.num_adapter_slots

        def add_slots(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, *leaf.sharding.spec))
            return jax.ShapeDtypeStruct((num_slots, *leaf.shape), leaf.dtype, sharding=sharding)

        pool = jax.tree.map(add_slots, make_adapter_shapes(self._layout, self._model, self._rank))
        planned = plan.weight_bytes + plan.kv_bytes + plan.slice_bytes + num_slots * self._adapter_bytes
        detail = f"{plan.samples.num_slots} samples, {len(rows.adapters)} adapters at once, {num_slots} places"
        return self._decode(pool, rows), f"{detail}, rank {self._rank}", planned

    def _decode(self, pool: Adapter | None, rows: SliceRows) -> Any:
        config, num_rows = self._config, len(rows.samples)
        return programs.decode_slice.lower(
            self._params,
            self._model,
            pool,
            self._cache(),
            self._table(num_rows),
            self._replicate(RowInputs(config.decode_slice_tokens).make_batch(rows)),
            self._replicate(np.full(num_rows, programs.ENDED, np.int32)),
            self._replicate(np.int32(0)),
            max_steps=config.decode_slice_tokens,
            max_topk=config.max_topk_logprobs,
        )

    def _cache(self) -> Cache:
        samples = self._plan.samples
        return models.describe_cache(self._params, self._model, samples.num_pages, samples.num_states, samples.page)

    def _table(self, num_rows: int) -> BlockTable:
        page_BM = np.zeros((num_rows, self._plan.samples.table_pages), np.int32)
        return self._replicate(BlockTable(page_BM, np.zeros(num_rows, np.int32)))  # type: ignore[arg-type]

    def _replicate(self, tree: Any) -> Any:
        def array(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = np.shape(leaf)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self._layout.sharding((None,) * len(shape), shape))

        return jax.tree.map(array, tree)
