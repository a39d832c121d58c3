"""The settings of the JAX backend."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from skyrl_tx.contract.state_files import ALPHA
from skyrl_tx.process.paths import get_home

MAX_TRAINING_COMPILE_THREADS = 4
"""Maximum number of threads that compile training programs on CPU."""
SPARE_CORES = 2
"""Cores that the compiler threads leave to the rest of the engine on accelerators."""

CHANGES_RESULTS: dict[str, JsonValue] = {"changes_results": True}
"""Marks a field that changes the last bits of results, so it is part of `Capabilities.fingerprint`.
"""


def count_compile_threads(limit: int) -> int:
    """Return the number of compiler threads: half of the cores, but at least 1 and at most `limit`.

    Half, because XLA uses more than one core for each program.
    """
    return min(limit, max(1, (os.cpu_count() or 1) // 2))


def _default_compile_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or get_home() / ".cache") / "skyrl_tx" / "xla"


class MeshConfig(BaseModel):
    """The size of each axis of the device mesh.

    Their product is the number of devices that the backend uses.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    dp: int = Field(default=1, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Data parallel degree: shards batch rows. Each shard has a copy of all parameters.
    The fastest axis if they fit."""
    fsdp: int = Field(default=1, gt=0, json_schema_extra=CHANGES_RESULTS)
    """FSDP degree: shards batch rows and the storage of parameters.
    Each layer gathers its parameters before use."""
    tp: int = Field(default=1, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Tensor parallel degree: shards attention heads, feed-forward layers and the vocabulary."""
    ep: int = Field(default=1, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Expert parallel degree: shards experts and batch rows."""
    cp: int = Field(default=1, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Context parallel degree: shards the tokens of each row in training.
    In sampling it works like fsdp. Use it for examples that are too long for the memory of one
    device. With cp, ep also shards the tokens of rows."""

    @property
    def num_devices(self) -> int:
        """The number of devices in the mesh."""
        return self.dp * self.fsdp * self.tp * self.ep * self.cp

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes.

        `dp` and `cp` are left out if they are 1, so that compiled programs and fingerprints from
        releases without these axes stay valid.
        """
        return {name: size for name, size in self.model_dump().items() if name not in ("dp", "cp") or size > 1}

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes.items())


class JaxFlags(BaseModel):
    """The settings of the JAX backend that an operator can set.

    Lengths and budgets are in tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    load_format: Literal["auto", "dummy"] = "auto"
    """'auto' reads the weights of the checkpoint; 'dummy' makes random weights, to measure speed.
    """
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", json_schema_extra=CHANGES_RESULTS)
    """Type of the base weights. 'auto' is bfloat16 on accelerators and float32 on CPU.
    Adapters, gradients and optimizer moments are always float32."""
    max_context_length: int | None = Field(default=None, gt=1)
    """Longest sequence, prompt and new tokens together. Unset: the limit of the model.
    The limit is at most max_sample_tokens, divided by the product of dp, fsdp, cp and ep."""
    compile_cache_dir: Path | None = Field(default_factory=_default_compile_cache)
    """Directory for compiled programs.
    After a restart the server reads them instead of compiling; null: no directory."""
    warmup: bool | None = None
    """Compile the programs of all usual shapes before the server is ready.
    This takes minutes if compile_cache_dir is empty. Unset: on a single GPU or TPU, if there is a
    compile_cache_dir."""

    gpu_memory_share: float | None = Field(default=None, gt=0, le=1)
    """The share of each GPU's memory that JAX takes.
    Unset: the value of XLA_PYTHON_CLIENT_MEM_FRACTION, or else 0.92. The server does not start if
    other programs use too much of a GPU for this default."""
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    """Device mesh. Unset: the first device only."""

    kernels: Literal["auto", "loops"] = Field(default="auto", json_schema_extra=CHANGES_RESULTS)
    """Kernels for attention, for experts and for the KV cache.
    'auto' uses the kernels for the device; there are some for TPU, and for GPU with bfloat16.
    'loops' uses plain JAX, which runs on every device. Try it to find out whether a kernel causes a
    problem."""

    # Training
    expert_lora: Literal["shared", "own"] = "shared"
    """Form of the adapters of experts.
    'shared': all experts of a layer share the LoRA factor on the side of the hidden size, as on the
    hosted service. 'own': each expert has its own two factors. A model that was trained with one
    form cannot be continued with the other one."""
    max_lora_adapters: int | None = Field(default=None, gt=0)
    """How many models can be in training on the device at the same time.
    Further models are evicted to disk. A model takes memory when it is created. Unset: as many
    models of rank max_lora_rank as fit, at most 64."""
    max_lora_rank: int = Field(default=64, gt=0)
    """Highest LoRA rank that a client may request."""
    lora_alpha: float = Field(default=ALPHA, gt=0, le=1e6, json_schema_extra=CHANGES_RESULTS)
    """LoRA's alpha of new models: the update of a linear map is B A times alpha / rank.
    The protocol has no such field. Models and checkpoints that exist keep the alpha that they were
    trained with."""
    micro_batch_tokens: int | None = Field(default=None, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Tokens of a training micro-batch on all devices together, padding included.
    A lower value takes less memory. Unset: as many as fit; 1024 on CPU."""
    remat: bool | None = Field(default=None, json_schema_extra=CHANGES_RESULTS)
    """Activation checkpointing: recompute layers in the backward pass.
    It takes less memory and more time. Unset: only if fewer than 4096 tokens per device would fit
    without it, or for longer rows that need it, and never on CPU."""
    offload: bool | None = Field(default=None, json_schema_extra=CHANGES_RESULTS)
    """Keep the inputs of recomputed layers in host memory.
    Longer rows fit, but the copies take time. Implies remat. Unset: only for rows that would not
    fit otherwise, and never on CPU."""

    # Sampling
    max_sampler_adapters: int | None = Field(default=None, gt=0)
    """How many adapters can be loaded for sampling at the same time, without the base model.
    Unset: 8 on CPU, where they take memory of the host, and 16 elsewhere."""
    sample_slots: int | None = Field(default=None, gt=0, json_schema_extra=CHANGES_RESULTS)
    """How many samples are decoded at the same time. Unset: 32 on CPU.
    On accelerators 256, 128, 64 or 32 for each copy of the weights (dp): the largest of these
    numbers that leaves 512 tokens of KV cache for each sample."""
    max_sample_tokens: int | None = Field(default=None, gt=0, json_schema_extra=CHANGES_RESULTS)
    """Capacity of the KV cache: prompt and new tokens of all running samples together.
    Unset: as many as fit; at most 65536 on CPU. After a change, programs must be compiled again."""
    prefix_cache_tokens: int | None = Field(default=None, ge=0)
    """Capacity of the prefix cache in tokens; 0: no prefix cache.
    The cache keeps recent prompts for later prompts with an equal beginning. A state of linear
    attention counts as the number of tokens that take as many bytes. Unset: a quarter of
    max_sample_tokens."""

    @model_validator(mode="after")
    def _validate_offload(self) -> Self:
        if self.offload and self.remat is False:
            raise ValueError(
                "offload: true needs remat, but remat is false. Remove `remat: false`, or set offload to false"
            )
        return self

    @field_validator("compile_cache_dir")
    @classmethod
    def _expand_home(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()


class JaxConfig(JaxFlags):
    """All settings of the backend, including constants that only tests and benchmarks change.

    Fields that are None get a value from `with_platform_defaults` or from the memory plan.
    """

    compile_threads: int | None = Field(default=None, ge=0)
    """Threads that compile programs in the background, most likely shapes first.
    0: each program is compiled on first use, and all requests wait for it."""
    smallest_rank: int | None = Field(default=None, gt=0)
    """Adapters in training are padded to at least this rank, or to max_lora_rank if that is lower."""
    max_pass_tokens: int = Field(default=65536, gt=0)
    """Maximum tokens of one training pass, which may combine multiple requests.

    A larger pass would not be faster, because a pass runs in micro-batches, and its requests would
    get their results later, because they all end with the pass.
    """
    decode_slice_tokens: int = Field(default=16, gt=0)
    """Tokens decoded for each sample in one decode slice. Training runs between two slices.

    With shorter slices, the host's work between two slices takes a larger share of the time.
    """
    async_decoding: bool | None = None
    """Dispatch the next decode slice before the tokens of the previous one are read.
    The device then does not wait for the host.
    On a single CPU device the host always waits."""
    prefill_tokens: int | None = Field(default=None, gt=0)
    """Maximum prompt tokens that are prefilled between two decode slices, padding included."""
    prefill_chunk_tokens: int | None = Field(default=None, ge=32)
    """Largest prefill chunk, a power of two.

    Chunks end at 128, 256, 512 … tokens up to this size, then at its multiples. Prompts with equal
    beginnings share whole chunks.
    """
    max_topk_logprobs: int = Field(default=20, ge=0)
    """Largest top-k of log-probabilities that a client may request, as in the OpenAI API."""

    @classmethod
    def from_flags(cls, flags: JaxFlags) -> "JaxConfig":
        """Return the operator's settings together with the constants."""
        return flags if isinstance(flags, cls) else cls.model_validate(flags.model_dump(exclude_unset=True))

    def with_platform_defaults(self, platform: str) -> Self:
        """Replace fields that are None by the defaults of a platform (`cpu`, `gpu` or `tpu`).

        Accelerators prefill larger chunks, which keep them busy and would take too long on CPU.
        Their programs take long to compile, but they have few of them, and idle CPU cores. So all
        usual programs are compiled before the server is ready, and ranks below the default rank
        share the programs of that rank. A CPU, whose cores compute, compiles in the background.
        """
        is_cpu, has_cache = platform == "cpu", self.compile_cache_dir is not None
        chunk_tokens, prefill_tokens = (256, 2048) if is_cpu else (512, 8192)
        num_threads = max(1, (os.cpu_count() or 1) - SPARE_CORES)
        if is_cpu:
            num_threads = count_compile_threads(MAX_TRAINING_COMPILE_THREADS) if has_cache else 0

        defaults = {
            "prefill_chunk_tokens": chunk_tokens,
            "prefill_tokens": prefill_tokens,
            "max_sampler_adapters": 8 if is_cpu else 16,
            "async_decoding": not is_cpu,
            "compile_threads": num_threads,
            "smallest_rank": 8 if is_cpu else 32,
            "warmup": has_cache and not is_cpu,
        }
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return self.model_copy(update=unset)

    @field_validator("prefill_chunk_tokens")
    @classmethod
    def _validate_chunk_tokens(cls, value: int | None) -> int | None:
        if value is not None and value & (value - 1):
            raise ValueError(f"{value} is not a power of two; use for example {1 << value.bit_length() - 1}")
        return value
