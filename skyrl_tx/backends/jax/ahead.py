"""The largest programs of the backend, compiled for devices that are not here, with the compiler's account of them.

JAX describes a topology of TPUs to their compiler, which needs no device (jax.experimental.topologies). What it says of
memory is to be trusted. It says nothing of time.
"""

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from skyrl_tx import models
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.costs import RANK
from skyrl_tx.backends.jax.memory import is_exhausted
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.backends.jax.sample.jax_programs import slot_batch
from skyrl_tx.backends.jax.sample.running import BASE
from skyrl_tx.backends.jax.shapes import PrefillShapes, tiles
from skyrl_tx.backends.jax.start_plan import StartPlan
from skyrl_tx.backends.jax.train import packing, step
from skyrl_tx.backends.jax.train.adapters import padded_rank
from skyrl_tx.backends.jax.warmup import NAME, training_batch
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.layers.lora import Adapter, LoraPair
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.sharding import Layout

_COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
_LOOP = re.compile(r" while\(")
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton)"')


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """The compiler's account of one program. Bytes are of each device."""

    name: str
    detail: str
    compile_s: float
    argument_bytes: int = 0
    """Weights, adapters and cache included."""
    temporary_bytes: int = 0
    output_bytes: int = 0
    """Results that do not reuse the memory of an argument."""
    planned_bytes: int = 0
    """The plan's account of the same."""
    accessed_bytes: int = 0
    """Bytes that instructions read and write, those of a loop's body counted once; 0 if the compiler does not say."""
    num_loops: int | None = None
    """Loops, whose steps run one after another: the compiler's text does not say how many steps they have.

    None, like the next two, if the program has no text: libtpu 0.0.52 cannot write that of some programs.
    """
    num_kernels: int | None = None
    """Calls of kernels (`layers.kernels`). In a loop over layers they run once a cycle of layers."""
    collectives: Mapping[str, int] | None = None
    """Instructions by which devices send each other arrays. In a loop over layers they run once a cycle of layers."""
    problem: str = ""
    """The compiler's message if the program needs more memory than the device has."""

    @property
    def total_bytes(self) -> int:
        """All memory of the program."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes


def tpu_layout(topology: str, config: MeshConfig) -> Layout:
    """Return a layout over the devices of a TPU topology, such as `v5e:2x4`. Raises UserError without its compiler."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks a server of the cloud which TPU this is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (RuntimeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        cause = " ".join(str(error).split())[:300]
        raise UserError(f"--compile: no compiler for {topology}: pip install 'skyrl_tx[tpu]' ({cause})") from error
    axes = config.model_dump()
    placed = Mesh(np.array(devices[: config.num_devices]).reshape(tuple(axes.values())), tuple(axes))
    return Layout(placed, tuple(mesh.RULES.items()))


def gpu_layout(target: str, config: MeshConfig) -> Layout:
    """Return a layout over GPUs of one host that XLA's GpuTargetConfigProto describes, as text.

    The compiler comes with the plugin of JAX for CUDA and needs neither a GPU nor CUDA.
    """
    topology = f"1x1x{config.num_devices}"  # slices, hosts, GPUs
    devices = topologies.get_topology_desc(platform="cuda", target_config=target, topology=topology).devices
    axes = config.model_dump()
    return Layout(Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes)), tuple(mesh.RULES.items()))


def compile_programs(
    config: JaxConfig, layout: Layout, model: models.ModelConfig, plan: StartPlan
) -> Iterator[CompiledProgram]:
    """Compile a gradient, a prefill chunk and a decode slice for the shapes of a plan, each when it is asked for."""
    shapes = _Shapes(config, layout, model, plan)
    for name, make in (("gradient", shapes.gradient), ("prefill", shapes.prefill), ("decode", shapes.decode)):
        started = time.monotonic()
        with jax.default_matmul_precision("highest"):  # as `configure_jax` sets it
            lowered, detail, planned = make()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            seconds, text = time.monotonic() - started, " ".join(str(error).split())
            yield CompiledProgram(name=name, detail=detail, compile_s=seconds, planned_bytes=planned, problem=text)
            continue
        memory, text = compiled.memory_analysis(), _text_of(compiled)
        yield CompiledProgram(
            name=name,
            detail=detail,
            compile_s=time.monotonic() - started,
            argument_bytes=memory.argument_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            planned_bytes=planned,
            accessed_bytes=int((compiled.cost_analysis() or {}).get("bytes accessed", 0)),
            num_loops=None if text is None else len(_LOOP.findall(text)),
            num_kernels=None if text is None else len(_KERNEL.findall(text)),
            collectives=None if text is None else dict(sorted(Counter(_COLLECTIVE.findall(text)).items())),
        )


def _text_of(compiled: Any) -> str | None:
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        log.warning("the compiler cannot write its program as text: %s", " ".join(str(error).split())[:200])
        return None


_Lowered = tuple[Any, str, int]
"""A lowered program, its sizes as text, and the bytes that the plan counts for it."""


class _Shapes:
    """The arguments of programs as shapes with shardings."""

    def __init__(self, config: JaxConfig, layout: Layout, model: models.ModelConfig, plan: StartPlan) -> None:
        self._config, self._layout, self._model, self._plan = config, layout, model, plan
        dtype = jnp.dtype(plan.dtype)

        def array(each: Parameter) -> jax.ShapeDtypeStruct:
            sharding = mesh.parameter_sharding(layout, each)
            return jax.ShapeDtypeStruct(each.shape, jnp.float32 if each.is_float32 else dtype, sharding=sharding)

        described = models.describe_params(model)
        self._params = replace(jax.tree.map(array, described), layout=layout, kernels=plan.kernels)

    def gradient(self) -> _Lowered:
        """Return the gradient of one micro-batch of the plan."""
        plan, num_rows = self._plan, self._layout.num_shards("batch")
        length = plan.passes.micro_batch_tokens // num_rows
        examples = training_batch(ModelId(NAME), length, self._plan.samples.max_length, num_rows).examples
        first = packing.plan_micro_batches(examples, length * num_rows, num_rows)[0]
        batch = self._replicated(packing.fill(first, examples))
        rank = padded_rank(min(RANK, self._config.max_lora_rank))
        adapter = self._adapter(rank)
        lowered = step.accumulate.lower(
            self._params, adapter, adapter.weights, batch, config=self._model, remat=plan.passes.remat
        )
        planned = (
            plan.weight_bytes
            + plan.pass_bytes
            + 2 * plan.model_bytes // 4 * rank // padded_rank(self._config.max_lora_rank)
        )
        return lowered, f"{first.num_rows} rows of {first.length} tokens, rank {rank}", planned

    def prefill(self) -> _Lowered:
        """Return one chunk of the longest prompt, with the base model."""
        samples = self._plan.samples
        shapes = PrefillShapes.of(self._config, samples.max_length)
        prompt = models.cache_shapes(self._params, self._model, 1, shapes.longest)
        number, tokens = self._replicated(np.int32(0)), self._replicated(np.zeros(shapes.chunk_size, np.int32))
        lowered = programs.extend.lower(self._params, self._model, None, number, tokens, number, number, prompt)
        planned = self._plan.weight_bytes + samples.prompt_bytes // samples.prompt_tokens * shapes.longest
        return lowered, f"{shapes.chunk_size} tokens of {shapes.longest}", planned

    def decode(self) -> _Lowered:
        """Return a decode slice of the most slots, with the base model."""
        layout, config = self._plan.samples.layout_for(1), self._config
        cache = models.cache_shapes(self._params, self._model, layout.num_slots, layout.length)
        batch = slot_batch({}, layout.num_slots, [BASE] * len(tiles(layout.num_slots)))
        lowered = programs.decode_slice.lower(
            self._params,
            self._model,
            None,
            cache,
            self._replicated(batch),
            self._replicated(np.int32(0)),
            read_length=layout.length,
            max_steps=config.decode_slice_tokens,
            max_topk=config.max_topk_logprobs,
        )
        cached = self._plan.kv_bytes * layout.num_slots * layout.length // self._plan.samples.tokens
        return lowered, f"{layout.num_slots} slots of {layout.length} tokens", self._plan.weight_bytes + cached

    def _adapter(self, rank: int) -> Adapter:
        shapes, axes = models.adapter_shapes(self._model, rank), models.adapter_axes(self._model)

        def array(leaf: jax.Array, of: tuple[Any, ...]) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._layout.sharding(of, leaf.shape))

        weights = {
            name: LoraPair(a=array(pair.a, axes[name][0]), b=array(pair.b, axes[name][1]))
            for name, pair in shapes.weights.items()
        }
        return Adapter(weights=weights, scale=self._replicated(np.float32(0)))

    def _replicated(self, tree: Any) -> Any:
        def array(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = np.shape(leaf)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self._layout.sharding((None,) * len(shape), shape))

        return jax.tree.map(array, tree)
