"""The settings of the JAX backend."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

MAX_TRAINING_COMPILE_THREADS = 4
"""Threads that compile programs of training on CPU, at most."""


def count_compile_threads(most: int) -> int:
    """Return how many threads compile: half of the cores, as each program uses more than one, between 1 and `most`."""
    return min(most, max(1, (os.cpu_count() or 1) // 2))


def _default_compile_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl_tx" / "xla"


CHANGES_RESULTS: dict[str, JsonValue] = {"changes_results": True}
"""Marks a field whose value is a part of `Capabilities.fingerprint`: another value gives other bits."""


class MeshConfig(BaseModel):
    """The size of each mesh axis. The product is the number of devices, all of which are used."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    dp: int = Field(default=1, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Data parallel degree: shards batch rows, and each shard has all parameters. The fastest where these fit."""
    fsdp: int = Field(default=1, gt=0, json_schema_extra=CHANGES_RESULTS)
    """FSDP degree: shards batch rows and parameter storage. Each layer gathers its parameters before use."""
    tp: int = Field(default=1, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Tensor parallel degree: shards heads, feed-forward layers and the vocabulary."""
    ep: int = Field(default=1, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Expert parallel degree: shards experts and batch rows."""
    cp: int = Field(default=1, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Context parallel degree: shards the tokens of each row in training, and parameter storage and samples like fsdp.
    For examples that are too long for the memory of one device. With it, ep shards tokens of rows too."""

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return self.dp * self.fsdp * self.tp * self.ep * self.cp

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes, without `dp` and `cp` if they are 1: programs and fingerprints are then older ones."""
        return {name: size for name, size in self.model_dump().items() if name not in ("dp", "cp") or size > 1}

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes.items())


class JaxFlags(BaseModel):
    """The operator's settings. Lengths and budgets count tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    load_format: Literal["auto", "dummy"] = "auto"
    """'auto' reads the checkpoint's weights; 'dummy' generates random weights, to measure speed."""
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", json_schema_extra=CHANGES_RESULTS)
    """Type of the base weights; 'auto': bfloat16 on accelerators, float32 on CPU.
    Adapters, gradients and optimizer moments are always float32."""
    max_context_length: int | None = Field(default=None, gt=1)
    """Longest sequence, prompt and new tokens. Unset: the model's limit.
    Never more than max_sample_tokens, divided by dp, fsdp, cp and ep of the mesh."""
    compile_cache_dir: Path | None = Field(default_factory=_default_compile_cache)
    """Directory of compiled programs, which a restart reads instead of compiling; null: none."""
    warmup: bool = False
    """Compile every common shape before the server is ready, not on first use.
    Takes minutes with an empty compile_cache_dir."""

    mesh: MeshConfig = Field(default_factory=MeshConfig)
    """Mesh of devices. Unset: the first device."""

    kernels: Literal["auto", "loops"] = Field(default="auto", json_schema_extra=CHANGES_RESULTS)
    """Kernels of attention, of experts and of the KV cache.
    'auto': those for the device, which are written for TPU, and for GPU with bfloat16. 'loops': plain JAX, which runs
    everywhere, to find out whether a kernel is the cause of a problem."""

    # Training
    expert_lora: Literal["shared", "own"] = "shared"
    """Form of experts' adapters.
    'shared': all experts of a layer share the factor next to the hidden size, as on the hosted service. 'own': each
    expert has both factors of its own. Models of one form cannot be continued in the other."""
    max_lora_adapters: int | None = Field(default=None, gt=0)
    """Models in training on the device at the same time; others are evicted to disk.
    A model takes memory when it is created. Unset: what fits for models of rank max_lora_rank, at most 64."""
    max_lora_rank: int = Field(default=64, gt=0)
    """Highest LoRA rank that a client may request."""
    micro_batch_tokens: int | None = Field(default=None, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Tokens of a micro-batch in training, padding included, on all devices; bounds memory.
    Unset: what fits, 1024 on CPU."""
    remat: bool | None = Field(default=None, json_schema_extra=CHANGES_RESULTS)
    """Rematerialize layers in the backward pass instead of keeping their activations: less memory, more time. Unset:
    only where few tokens would fit otherwise, and never on CPU."""
    offload: bool | None = Field(default=None, json_schema_extra=CHANGES_RESULTS)
    """Keep the inputs of rematerialized layers in the host's memory: longer rows, for the time of the copies.
    Implies remat. Unset: only for rows that would not fit otherwise, and never on CPU."""

    # Sampling
    max_sampler_adapters: int = Field(default=16, gt=0)
    """Adapters loaded for sampling at the same time, without the base model."""
    sample_slots: int | None = Field(default=None, gt=0, json_schema_extra=CHANGES_RESULTS)
    """KV cache slots: samples that are decoded at the same time.
    Unset: 32 on CPU; on accelerators up to 256, as many as have 512 tokens each in the KV cache."""
    max_sample_tokens: int | None = Field(default=None, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Prompt and new tokens in the KV cache, over all samples.
    Unset: what fits, at most 65536 on CPU. Changing this value compiles other programs."""
    prefix_cache_tokens: int | None = Field(default=None, ge=0)
    """Tokens in the prefix cache, which stores recent prompts for later ones with an equal beginning; 0: none.
    A state of linear attention counts as the tokens that take as many bytes. Unset: a quarter of max_sample_tokens."""

    @model_validator(mode="after")
    def _validate_offload(self) -> Self:
        if self.offload and self.remat is False:
            raise ValueError("offload: only the inputs of rematerialized layers are offloaded; remove remat: false")
        return self

    @field_validator("compile_cache_dir")
    @classmethod
    def _expand_home(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()


class JaxConfig(JaxFlags):
    """The settings of the backend: what an operator sets, and constants. Only tests and benchmarks set constants.

    Those that are unset depend on the devices, see `with_platform_defaults`.
    """

    compile_threads: int | None = Field(default=None, ge=0)
    """Threads that compile the programs of training in the background, the likeliest first, before requests need them.
    0: each program is compiled when it is first used, and all requests wait."""
    max_pass_tokens: int = Field(default=65536, gt=0)
    """Tokens of all requests that one training pass may batch together.

    The pass runs in micro-batches, so more tokens would not be faster, and the results of all its requests arrive at
    its end.
    """
    decode_slice_tokens: int = Field(default=16, gt=0)
    """Tokens decoded for each sample before the next training step may run.

    With fewer tokens, the host's work between two slices takes a larger part of the time.
    """
    async_decoding: bool | None = None
    """Dispatch a decode slice before the tokens of the last one are read: the device does not wait for the host.
    On one CPU device the host always waits."""
    prefill_tokens: int | None = Field(default=None, gt=0)
    """Prompt tokens computed between two decode slices, padding included."""
    prefill_chunk_tokens: int | None = Field(default=None, ge=32)
    """Size of a prefill chunk, a power of two.

    Prompts with equal beginnings share whole chunks, which end at 128, 256, 512 … tokens up to this size, then at its
    multiples.
    """
    max_topk_logprobs: int = Field(default=20, ge=0)
    """Largest top-k of log-probabilities that a client may request, as on the OpenAI API."""

    @classmethod
    def from_flags(cls, flags: JaxFlags) -> "JaxConfig":
        """Return what an operator set, with constants."""
        return flags if isinstance(flags, cls) else cls.model_validate(flags.model_dump(exclude_unset=True))

    def with_platform_defaults(self, platform: str) -> Self:
        """Return the settings with what is unset and depends on the devices alone. `platform` is as JAX names it.

        Larger chunks of prompts keep an accelerator busy, and take too long on CPU. Programs are compiled ahead on CPU
        only, and if they are stored: on accelerators, XLA would measure kernels on a GPU at work.
        """
        is_cpu = platform == "cpu"
        chunk, step = (256, 2048) if is_cpu else (512, 8192)
        has_threads = is_cpu and self.compile_cache_dir is not None
        defaults = {
            "prefill_chunk_tokens": chunk,
            "prefill_tokens": step,
            "async_decoding": not is_cpu,
            "compile_threads": count_compile_threads(MAX_TRAINING_COMPILE_THREADS) if has_threads else 0,
        }
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return self.model_copy(update=unset)

    @field_validator("prefill_chunk_tokens")
    @classmethod
    def _validate_chunk_tokens(cls, value: int | None) -> int | None:
        if value is not None and value & (value - 1):
            raise ValueError(f"{value} is not a power of two")
        return value
