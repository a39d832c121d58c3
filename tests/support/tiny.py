"""One tiny dense model, one tiny mixture of experts, and one configuration for tests of the JAX backend.

A compiled program depends on the shapes of model and configuration. Tests that use these constants share their
programs, in the process and in the compilation cache on disk. Use `TINY_CONFIG.model_copy(update=...)` for settings
that change no shape (numbers of models, samplers), and another value of a shape only where the test is about it.
"""

import functools
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.compiler import Compiler
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory import (
    FreeMemory,
    choose_adapter_slots,
    count_host_weight_bytes,
    plan_sample_memory,
    read_memory_limit,
)
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf

DENSE, MOE, WINDOWS, SINKS = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MistralForCausalLM", "GptOssForCausalLM"
HYBRID, HYBRID_MOE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
BY_HEAD = "Qwen3NextForCausalLM"
LATENTS = "DeepseekV3ForCausalLM"
MAMBA = "NemotronHForCausalLM"
OUTPUT_NORMS = "Gemma3ForCausalLM"
GLM, GLM_LATENTS = "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"
VOCAB_SIZE = 256
MODEL: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "tied_embeddings": False, "rope_theta": 1e6}
"""Arguments of `write_model` for all; the conformance tests compare the dense one with transformers."""
OWN: dict[str, dict[str, Any]] = {
    **{name: {"keys": {"sliding_window": 9}} for name in (WINDOWS, SINKS, OUTPUT_NORMS)},
    **{name: {"num_layers": 4} for name in (HYBRID, HYBRID_MOE, BY_HEAD)},
    MAMBA: {"keys": {"ssm_state_size": 64}},  # a state as large as many positions
}
"""Further arguments of some. The window is shorter than prompts and slices; four layers are one cycle."""
RANK = 4
"""The rank of adapters in tests that need no other."""

TINY_CONFIG = JaxConfig(
    compile_cache_dir=None,
    dtype="float32",  # also on a GPU
    max_context_length=256,
    max_lora_adapters=3,
    max_lora_rank=8,
    max_sampler_adapters=2,
    micro_batch_tokens=64,
    sample_slots=16,
    max_sample_tokens=16 * 64,
    decode_slice_tokens=4,
    prefill_tokens=64,
    prefill_chunk_tokens=32,
    max_topk_logprobs=4,
)
"""KV cache layouts of 16 slots of 64 positions, 8 of 128 and 4 of 256; micro-batches of 64 tokens."""


@dataclass(frozen=True)
class TinyModel:
    """A model's files, its configuration and its weights on the device."""

    directory: Path
    config: models.ModelConfig
    params: models.DecoderParams

    def adapter(self, seed: int) -> Adapter:
        """Return an adapter of rank RANK whose B is not zero, so that it changes the logits."""
        made = models.init_adapter(self.config, LoraSpec(rank=RANK, seed=seed), RANK)
        generator = np.random.default_rng(seed)
        for pair in made.weights.values():
            np.asarray(pair.b)[:] = 0.1 * generator.standard_normal(pair.b.shape)
        return made


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-models-")  # removed when the process ends


@functools.cache
def tiny_directory(architecture: str = DENSE, std: float = 0.3) -> Path:
    """Return the files of a model with two layers.

    By default its weights are large enough for distinct samples. Another standard deviation changes no program.
    """
    arguments = {**MODEL, **OWN.get(architecture, {}), "architecture": architecture}
    return write_model(Path(_directory().name) / f"{architecture}-{std}", std=std, **arguments)


@functools.cache
def _load(architecture: str) -> TinyModel:
    return load_model(tiny_directory(architecture))


def load_model(directory: Path) -> TinyModel:
    """Load a model, placed as by the backend, so that its programs are the same."""
    content = hf.read_json(directory, "config.json")
    family = models.find_family(content)
    config = family.config_from_hf(content)
    layout = mesh.make_layout(TINY_CONFIG.mesh)
    placement = functools.partial(mesh.get_parameter_sharding, layout)
    params = hf.load(directory, models.describe_params(config), family.weights, placement=placement)
    return TinyModel(directory=directory, config=config, params=replace(params, layout=layout))


def get_free_memory(params: models.DecoderParams, num_bytes: int | None = None) -> FreeMemory:
    """Return the memory besides the weights. With `num_bytes`, devices report that this much is free."""
    if num_bytes is not None:
        return FreeMemory(num_bytes, params.layout, is_reported=True)
    weight_bytes = count_host_weight_bytes(params)
    limit = read_memory_limit(params.embed.devices())
    return FreeMemory.after_weights(
        params.layout, limit_bytes=limit, weight_bytes=weight_bytes, host_weight_bytes=weight_bytes
    )


def plan_samples(
    params: models.DecoderParams, model: models.ModelConfig, config: JaxConfig, num_bytes: int | None = None
) -> SampleMemory:
    """Return the memory of the KV cache, with the free memory that `get_free_memory` returns."""
    free = get_free_memory(params, num_bytes)
    return plan_sample_memory(config, model, free, params.layout, params.embed.dtype.itemsize)


def make_model_runner(
    params: models.DecoderParams,
    model: models.ModelConfig,
    config: JaxConfig,
    compiler: Compiler[Hashable] | None = None,
) -> ModelRunner:
    """Return a runner with the memory that the backend would plan."""
    memory, num_slots = (
        plan_samples(params, model, config),
        choose_adapter_slots(config, model, get_free_memory(params)),
    )
    return ModelRunner(params, model, config, memory, num_adapter_slots=num_slots, compiler=compiler)


def tiny_dense() -> TinyModel:
    """Return the dense model, loaded once per process."""
    return _load(DENSE)


def tiny_moe() -> TinyModel:
    """Return the mixture of experts, loaded once per process."""
    return _load(MOE)


@contextmanager
def tiny_backend(architecture: str = DENSE, *, std: float = 0.3, **changed: Any) -> Iterator[JaxBackend]:
    """Give a started backend with TINY_CONFIG and the given changes; close it at the end."""
    backend = JaxBackend(str(tiny_directory(architecture, std)), TINY_CONFIG.model_copy(update=changed))
    backend.start()
    try:
        yield backend
    finally:
        backend.close()
