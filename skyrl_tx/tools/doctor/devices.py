"""Checks of the devices: driver, what JAX finds, and whether the model fits."""

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from skyrl_tx import DISTRIBUTION
from skyrl_tx.backends.jax.config import JaxFlags
from skyrl_tx.launch.command_line import format_bytes
from skyrl_tx.tools.doctor.findings import ExaminedServer, Finding, error, ok, warning
from skyrl_tx.tools.doctor.machine import find_version, get_physical_memory, read_memory_limit

_TIMEOUT_S = 180.0
"""Some drivers take a minute to start, and a busy TPU never answers."""
_QUERY = ("name", "driver_version", "memory.total", "memory.used")
_BUSY_MIB = 2048
_ADVICE = {
    "--base-model": "name the directory or hub id of a supported model; for the hub, look at the network and HF_TOKEN",
    "--backend-config.mesh": "its product must be the number of devices, and each size must divide the model's",
}
"""Advice by the setting that a problem of the model concerns."""
_SHORT_TOKENS = 4096
"""A KV cache with fewer tokens holds less than one usual sample."""


class ProbeQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A model, which may be empty, and the settings of the backend."""

    base_model: str
    backend_config: dict[str, Any]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device; its memory is None if it does not report that."""

    kind: str
    platform: str
    limit_bytes: int | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one device, and what it bounds."""

    num_parameters: int
    dtype: str
    weight_bytes: int
    """Base weights on each device."""
    free_bytes: int
    """Memory that is left for all else on each device, or on the host if devices do not report their memory."""
    max_context_length: int
    kv_tokens: int
    max_length: int
    """Prompt and new tokens of one sample."""
    micro_batch_tokens: int
    is_remat: bool
    max_models: int
    file_bytes: int | None
    """Size of the weight files; None if they are not here yet, or are not needed."""
    has_end: bool
    """Whether the files name a token that ends a sample."""


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The devices and the plan. `problem` says why there is no plan; `setting` is the one that it concerns."""

    devices: list[Device]
    plan: Plan | None = None
    problem: str = ""
    setting: str = ""


def check_devices(subject: ExaminedServer) -> Iterator[Finding]:
    """Check the driver, the devices that JAX finds, and the memory plan of the model on them."""
    settings = subject.settings
    if not isinstance(settings.backend_config, JaxFlags):
        yield ok("devices", f"backend {settings.backend} is not examined: it is none of this package's for devices")
        return
    gpus = list(_list_nvidia_gpus())
    is_serving = "engine" in subject.server_pids
    for name, driver, total, used in gpus:
        yield ok("driver", f"{name}, driver {driver}, {total} MiB")
        if not is_serving and int(used) > _BUSY_MIB:
            yield warning(
                "driver",
                f"other programs use {used} MiB of {name}",
                "end them: the server plans with all of the memory that JAX may take",
            )
    answer = _ask(settings.base_model, settings.backend_config)
    if isinstance(answer, Finding):
        yield answer
        return
    yield from _check_found(answer, has_gpus=bool(gpus))
    if answer.problem and answer.devices:
        yield error("model", f"{answer.setting}: {answer.problem}", _ADVICE[answer.setting])
    if answer.plan is not None:
        yield from _check_files(answer.plan, settings.backend_config)
        yield from _check_plan(answer, answer.plan, settings.backend_config)


def _list_nvidia_gpus() -> Iterator[list[str]]:
    """Yield name, driver, memory in MiB and used memory of each GPU, as the driver's own program prints them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        if done.returncode == 0 and len(row) == len(_QUERY) and row[2].isdigit() and row[3].isdigit():
            yield row


def _ask(base_model: str, config: JaxFlags) -> ProbeAnswer | Finding:
    """Run the probe; return its answer, or a finding if it gave none."""
    question = ProbeQuestion(base_model=base_model, backend_config=config.model_dump(mode="json"))
    # Without preallocation, so that it works next to a running server.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "skyrl_tx.tools.doctor.probe"]
    advice = (
        "look at the driver and at programs that hold the devices; `skyrl-tx status --stacks` shows what a server does"
    )
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(question), env=environment, capture_output=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return error("devices", f"JAX did not answer within {_TIMEOUT_S:.0f} s", advice)
    try:
        return msgspec.json.decode(done.stdout, type=ProbeAnswer)
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return error("devices", f"JAX failed: {said[-1] if said else f'status {done.returncode}'}", advice)


def _check_found(answer: ProbeAnswer, *, has_gpus: bool) -> Iterator[Finding]:
    if not answer.devices:
        yield error("devices", f"JAX finds no device: {answer.problem}", "look at the driver and at JAX_PLATFORMS")
        return
    kinds = dict.fromkeys((each.kind, each.platform, each.limit_bytes) for each in answer.devices)
    for kind, platform, limit in kinds:
        number = sum((each.kind, each.platform, each.limit_bytes) == (kind, platform, limit) for each in answer.devices)
        memory = "" if limit is None else f", of which JAX takes {format_bytes(limit)} each"
        yield ok("devices", f"JAX {find_version('jax')} finds {number} × {kind} ({platform}){memory}")
    if has_gpus and all(each.platform == "cpu" for each in answer.devices):
        yield error(
            "devices",
            "there is a GPU, and JAX does not use it",
            f"pip install '{DISTRIBUTION}[cuda12]' or '{DISTRIBUTION}[cuda13]', by the driver's version; "
            "unset JAX_PLATFORMS",
        )


def _check_files(plan: Plan, config: JaxFlags) -> Iterator[Finding]:
    if plan.file_bytes is not None:
        yield ok("model", f"{plan.num_parameters:,} parameters, weight files of {format_bytes(plan.file_bytes)}")
    elif config.load_format == "auto":
        yield ok("model", f"{plan.num_parameters:,} parameters; the first start downloads the weights")
    else:
        yield ok("model", f"{plan.num_parameters:,} parameters with random weights")
    if not plan.has_end:
        yield warning("model", "its files name no token that ends a sample", "clients must send `stop` or `max_tokens`")


def _check_plan(answer: ProbeAnswer, plan: Plan, config: JaxFlags) -> Iterator[Finding]:
    limits = [device.limit_bytes for device in answer.devices if device.limit_bytes is not None]
    # On CPU the backend plans with the memory of the machine, and decoding holds a second copy of the weights.
    host = min(read_memory_limit() or get_physical_memory(), get_physical_memory())
    limit, weights = (min(limits), plan.weight_bytes) if limits else (host, 2 * plan.weight_bytes)
    copies = "" if limits else ", twice"
    shown = f"weights of {format_bytes(plan.weight_bytes)} in {plan.dtype}{copies}, of {format_bytes(limit)}"
    if weights >= limit:
        yield error(
            "memory",
            f"the model does not fit: {shown}",
            "use a mesh of more devices, --backend-config.dtype bfloat16, or a smaller model",
        )
        return
    yield ok(
        "memory",
        f"{shown}; KV cache of {plan.kv_tokens} tokens; micro-batches of {plan.micro_batch_tokens} tokens"
        f"{' with rematerialization' if plan.is_remat else ''}; "
        f"{plan.max_models} models of rank {config.max_lora_rank} in training",
    )
    if not limits and host < get_physical_memory():
        yield warning(
            "memory",
            f"the plan is for the machine's {format_bytes(get_physical_memory())}, and only {format_bytes(host)} may be used",
            "set --backend-config.max-sample-tokens and --backend-config.max-lora-adapters",
        )
    if plan.max_length < min(_SHORT_TOKENS, plan.max_context_length):
        yield warning(
            "memory",
            f"the longest sample has {plan.max_length} tokens, the model's context {plan.max_context_length}",
            "free memory: a lower --backend-config.max-lora-rank, bfloat16, or a mesh of more devices",
        )
    if plan.max_models == 1:
        yield warning(
            "memory",
            f"only one model of rank {config.max_lora_rank} is in training at a time; others are evicted to disk",
            "lower --backend-config.max-lora-rank if clients ask for less",
        )
