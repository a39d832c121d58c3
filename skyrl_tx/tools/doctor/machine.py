"""Checks of the machine: packages, system limits, tokenizer and chat template, devices and the memory plan.

`check_devices` asks a child process, `skyrl_tx.tools.doctor.probe`, because starting JAX can hang and takes memory of
the devices.
"""

import logging
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from packaging.requirements import Requirement
from packaging.version import Version

from skyrl_tx import DISTRIBUTION, __version__
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.backends.jax.config import JaxFlags
from skyrl_tx.backends.jax.gpu_memory import SHARE_VARIABLE, read_gpu_share
from skyrl_tx.contract.errors import RequestError, UserError
from skyrl_tx.process.memory import get_memory_limit, get_physical_memory, list_gpus, read_available_memory
from skyrl_tx.process.setup import OPEN_FILES
from skyrl_tx.process.text import format_bytes
from skyrl_tx.tools.doctor.findings import ExaminedServer, Finding, error, ok, warning

Answer = TypeVar("Answer", bound=msgspec.Struct)

OLDEST_SDK = "0.16.1"
"""The oldest tested release of the Tinker SDK. `tests/support/client_environments.py` lists all tested releases."""
_JAX_PARTS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_MIN_PROCESSES = 4096
"""A server has a few hundred processes and threads, and the other programs of the user need some as well."""

_MESSAGES: tuple[Mapping[str, object], ...] = ({"role": "user", "content": "Hello"},)
_TOOLS: tuple[Mapping[str, object], ...] = (
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},
)

_TIMEOUT_S = 180.0
"""Some drivers need a minute to start. A TPU that another process uses never answers."""
_ADVICE = {
    "--base-model": "name the directory or hub id of a supported model; for the hub, check the network and HF_TOKEN",
    "--backend-config.mesh": "the product of the sizes must be the number of devices, and each size must divide the "
    "model's",
}
"""Advice for problems of the model, by the setting that causes the problem."""
_SHORT_TOKENS = 4096
"""The command warns if samples can have fewer tokens than this, because a typical sample would not fit."""


# Packages


def check_packages(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that required packages have the right versions, and that all parts of JAX have the same version."""
    unmet = list(_find_unmet())
    yield from unmet
    if not unmet:
        yield ok("packages", f"skyrl_tx {__version__} with JAX {find_version('jax')}; all required packages are there")

    parts = {name: text for name in _JAX_PARTS if (text := find_version(name)) is not None}
    if len({Version(text).release for text in parts.values()}) > 1:
        versions = ", ".join(f"{name} {text}" for name, text in parts.items())
        advice = f"install them together, for example with pip install '{DISTRIBUTION}[cuda12]'"
        yield error("packages", f"parts of JAX have different versions: {versions}", advice)
    if (subject.settings.store_url or "").startswith("postgres") and find_version("psycopg") is None:
        advice = f"pip install '{DISTRIBUTION}[postgres]'"
        yield error("packages", "psycopg is not installed, but a PostgreSQL database needs it", advice)
    yield from _check_sdk()


def _find_unmet() -> Iterator[Finding]:
    """Yield a finding for each required package that is missing or has a wrong version."""
    if find_version(DISTRIBUTION) is None:
        advice = "pip uninstall skyrl_tx (the name of earlier releases), then pip install . in a clone"
        yield error("packages", f"{DISTRIBUTION} is not installed, so its requirements are unknown", advice)
        return
    for text in requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue  # it belongs to an extra, which need not be installed
        present, advice = find_version(requirement.name), f"pip install '{requirement.name}{requirement.specifier}'"
        if present is None:
            yield error("packages", f"{requirement.name} is not installed", advice)
        elif not requirement.specifier.contains(present, prereleases=True):
            yield error("packages", f"{requirement.name} {present} is installed, but {requirement} is required", advice)


def _check_sdk() -> Iterator[Finding]:
    present = find_version("tinker")
    if present is None:
        yield ok("sdk", f"the Tinker SDK is not installed here; clients need {OLDEST_SDK} or newer")
    elif Version(present) < Version(OLDEST_SDK):
        advice = f"pip install 'tinker>={OLDEST_SDK}'"
        yield warning("sdk", f"tinker {present} is older than {OLDEST_SDK}, the oldest tested release", advice)
    else:
        yield ok("sdk", f"tinker {present}")


def find_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# Limits of the system


def check_limits(subject: ExaminedServer) -> Iterator[Finding]:
    """Check the limits of open files, processes, address space and memory."""
    # Open files.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if num_files < OPEN_FILES:
        yield warning(
            "limits",
            f"at most {hard} files can be open; each waiting request of a client needs one",
            f"raise it to {OPEN_FILES}: LimitNOFILE of systemd, `ulimit -n`, or `--ulimit nofile` of a container",
        )
    else:
        yield ok("limits", f"{num_files} open files")

    # Processes and address space.
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if hard != resource.RLIM_INFINITY and hard < _MIN_PROCESSES:
        yield warning(
            "limits", f"this user can have at most {hard} processes and threads", "raise the limit: `ulimit -u`"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield warning(
            "limits",
            f"the address space is limited to {format_bytes(soft)}, but JAX reserves more than it uses",
            "remove the limit: `ulimit -v unlimited`",
        )

    # Memory.
    limit, physical = get_memory_limit(), get_physical_memory()
    if limit < physical:
        yield ok(
            "limits",
            f"{format_bytes(limit)} of memory for this container or service; the machine has {format_bytes(physical)}",
        )
    else:
        yield ok("limits", f"{format_bytes(physical)} of memory")


# Tokenizer and chat template


def check_text(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that the tokenizer encodes and decodes text, and that the chat template renders messages."""
    settings = subject.settings.make_api_settings()
    if not _is_local(settings.tokenizer_id or settings.base_model):
        yield ok("tokenizer", "not examined, because the model is not downloaded yet")
        return

    # Encode and decode a word.
    text = ModelText(settings)
    try:
        encoded = text.encode("Hello", add_special=False)
        decoded = text.decode(encoded)
    except UserError as problem:
        yield warning("tokenizer", str(problem), "clients and the OpenAI and Anthropic endpoints need a tokenizer")
        return
    if decoded.strip() != "Hello":
        advice = "compare its files with the published files of the model"
        yield warning("tokenizer", f"it encodes 'Hello' and decodes the tokens as {decoded!r}", advice)
    else:
        yield ok("tokenizer", f"tokenizer.json with {text.tokenizer.get_vocab_size()} tokens")

    # End token and chat template.
    if text.eos_token_id is None:
        yield warning(
            "tokenizer",
            "tokenizer_config.json has no eos_token, or its eos_token is unknown to the tokenizer",
            "chat completions end only at the end tokens of config.json and generation_config.json: compare the file "
            "with the published one",
        )
    yield from _check_template(text, is_given=settings.chat_template is not None)


def _is_local(model: str) -> bool:
    """Return whether the files of a model are on this machine: in a directory, or in the cache of the hub."""
    if Path(model).expanduser().is_dir() or model.count("/") != 1:
        return True
    from huggingface_hub import try_to_load_from_cache  # imported here because it takes half a second

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _check_template(text: ModelText, *, is_given: bool) -> Iterator[Finding]:
    what = "--chat-template" if is_given else "the model's chat template"
    try:
        prompt = text.template.render(_MESSAGES)
    except RequestError as problem:
        finding = error if is_given else warning
        yield finding("template", str(problem), "set --chat-template; only the chat endpoints need a template")
        return
    try:
        has_tools = text.template.render(_MESSAGES, _TOOLS) != prompt
    except RequestError:
        has_tools = False
    yield ok("template", f"{what} renders messages{' and tools' if has_tools else ', and ignores tools'}")


# Devices


class ProbeQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the probe: a model and the settings of the backend."""

    base_model: str
    """Empty if only the devices are of interest."""
    backend_config: dict[str, Any]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device that JAX found."""

    kind: str
    platform: str
    limit_bytes: int | None
    """The memory that JAX may take, or None if the device does not report it."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory plan of the model, and the limits that follow from it."""

    num_parameters: int
    dtype: str
    weight_bytes: int
    """Bytes of base weights on each device."""
    free_bytes: int
    """Bytes left after the weights on each device; -1 if the devices do not report their memory."""
    max_context_length: int
    """The limit of the model, in tokens."""
    kv_tokens: int
    """How many tokens fit into the KV cache."""
    max_length: int
    """How many tokens one sample can have, including the prompt."""
    micro_batch_tokens: int
    is_remat: bool
    max_models: int
    """How many models can train at the same time."""
    host_weight_bytes: int
    """Bytes of the weights in host memory, if the devices do not report their memory."""
    host_bytes: int
    """Bytes that the rest of the plan may take in host memory, if the devices do not report their memory."""
    file_bytes: int | None
    """Size of the weight files, or None if they are not downloaded yet or not needed."""
    has_end: bool
    """Whether the model's files name a token that ends a sample."""


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The output of the probe."""

    devices: list[Device]
    plan: Plan | None = None
    """None if the question names no model, or if there is a problem."""
    problem: str = ""
    """Why JAX found no devices or made no plan."""
    setting: str = ""
    """The flag that causes the problem, if a flag does."""


def check_model_name(subject: ExaminedServer) -> Iterator[Finding]:
    """Say which checks are skipped if no model is named."""
    if not subject.settings.base_model:
        yield ok("model", "model, memory, tokenizer and template were not checked: name --base-model")


def check_devices(subject: ExaminedServer) -> Iterator[Finding]:
    """Check the driver, the devices that JAX finds, and the memory plan of the model on them."""
    settings = subject.settings
    if not isinstance(settings.backend_config, JaxFlags):
        yield ok("devices", f"not examined: the checks do not support the backend {settings.backend}")
        return

    # The driver, and the use of the GPUs.
    gpus = list_gpus()
    is_serving = "engine" in subject.server_pids
    share = read_gpu_share(settings.backend_config.gpu_memory_share)
    for gpu in gpus:
        yield ok("driver", f"{gpu.name}, driver {gpu.driver}, {format_bytes(gpu.total_bytes)}")
        if not is_serving and gpu.free_bytes < share * gpu.total_bytes:
            yield warning(
                "driver",
                f"other programs use {format_bytes(gpu.used_bytes)} of {gpu.name}",
                f"stop them: the server takes {share:g} of each GPU",
            )

    # The devices that JAX finds, and the plan of the model.
    answer = _ask(settings.base_model, settings.backend_config)
    if isinstance(answer, Finding):
        yield answer
        return
    yield from _check_jax_devices(answer, has_gpus=bool(gpus))
    if answer.problem and answer.devices:
        yield error("model", f"{answer.setting}: {answer.problem}", _ADVICE[answer.setting])
    if answer.plan is not None:
        yield from _check_files(answer.plan, settings.backend_config)
        yield from _check_plan(answer, answer.plan, settings.backend_config, is_serving=is_serving)


def _ask(base_model: str, config: JaxFlags) -> ProbeAnswer | Finding:
    """Run the probe and return its answer, or a finding if it fails."""
    question = ProbeQuestion(base_model=base_model, backend_config=config.model_dump(mode="json"))
    return ask_child("probe", question, ProbeAnswer, _TIMEOUT_S)


def ask_child(program: str, question: ProbeQuestion, answer: type[Answer], timeout_s: float) -> Answer | Finding:
    """Run a module of this package that uses JAX in a child process.

    Returns its answer, or a finding if it fails or takes longer than `timeout_s`.
    """
    # No preallocation, so that the program works while a server is using the devices.
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        SHARE_VARIABLE: str(read_gpu_share(question.backend_config.get("gpu_memory_share"))),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-m", f"skyrl_tx.tools.doctor.{program}"]
    advice = "check the driver and programs that use the devices; `skyrl-tx status --stacks` helps if it is a server"

    # Run it, and read its answer.
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(question), env=environment, capture_output=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return error("devices", f"JAX did not answer within {timeout_s:.0f} s", advice)
    try:
        return msgspec.json.decode(done.stdout, type=answer)
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return error("devices", f"JAX failed: {lines[-1] if lines else f'status {done.returncode}'}", advice)


def answer_parent(answer_question: Callable[[ProbeQuestion], msgspec.Struct]) -> None:
    """Read a question of `ask_child` from standard input and write the answer to standard output."""
    logging.disable(logging.WARNING)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeQuestion)
    sys.stdout.buffer.write(msgspec.json.encode(answer_question(question)))


def _check_jax_devices(answer: ProbeAnswer, *, has_gpus: bool) -> Iterator[Finding]:
    if not answer.devices:
        yield error("devices", f"JAX finds no device: {answer.problem}", "check the driver and JAX_PLATFORMS")
        return
    counts = Counter((device.kind, device.platform, device.limit_bytes) for device in answer.devices)
    for (kind, platform, limit), number in counts.items():
        memory = "" if limit is None else f"; it may take {format_bytes(limit)} of each"
        yield ok("devices", f"JAX {find_version('jax')} finds {number} × {kind} ({platform}){memory}")
    if has_gpus and all(device.platform == "cpu" for device in answer.devices):
        yield error(
            "devices",
            "there is a GPU, but JAX does not use it",
            f"pip install '{DISTRIBUTION}[cuda12]' or '{DISTRIBUTION}[cuda13]', depending on the driver; unset "
            "JAX_PLATFORMS",
        )


def _check_files(plan: Plan, config: JaxFlags) -> Iterator[Finding]:
    if plan.file_bytes is not None:
        yield ok("model", f"{plan.num_parameters:,} parameters, weight files of {format_bytes(plan.file_bytes)}")
    elif config.load_format == "auto":
        yield ok("model", f"{plan.num_parameters:,} parameters; the first start downloads the weights")
    else:
        yield ok("model", f"{plan.num_parameters:,} parameters with random weights")
    if not plan.has_end:
        yield warning("model", "its files name no token that ends a sample", "clients must set `stop` or `max_tokens`")


def _check_plan(answer: ProbeAnswer, plan: Plan, config: JaxFlags, *, is_serving: bool) -> Iterator[Finding]:
    # Do the weights fit? On CPU the backend plans with the memory that its process may use, and decoding keeps a second
    # copy of the layers.
    limits = [device.limit_bytes for device in answer.devices if device.limit_bytes is not None]
    limit, weights = (min(limits), plan.weight_bytes) if limits else (get_memory_limit(), plan.host_weight_bytes)
    summary = f"the weights take {format_bytes(weights)} in {plan.dtype} of {format_bytes(limit)}"
    if weights >= limit:
        yield error(
            "memory",
            f"the model does not fit: {summary}",
            "use a mesh of more devices, --backend-config.dtype bfloat16, or a smaller model",
        )
        return

    # What the rest of the memory is for.
    yield ok(
        "memory",
        f"{summary}; KV cache of {plan.kv_tokens} tokens; micro-batches of {plan.micro_batch_tokens} tokens"
        f"{' with rematerialization' if plan.is_remat else ''}; "
        f"{plan.max_models} models of rank {config.max_lora_rank} in training",
    )
    if not limits and not is_serving and weights + plan.host_bytes > (available := read_available_memory()):
        finding = error if weights > available else warning
        yield finding(
            "memory",
            f"only {format_bytes(available)} of memory are available, but weights, KV cache and models may take "
            f"{format_bytes(weights + plan.host_bytes)} in time",
            "end other programs, or lower --backend-config.max-sample-tokens and --backend-config.max-lora-adapters",
        )

    # Limits that users will notice.
    if plan.max_length < min(_SHORT_TOKENS, plan.max_context_length):
        yield warning(
            "memory",
            f"samples can have at most {plan.max_length} tokens, although the model allows {plan.max_context_length}",
            "free memory with a lower --backend-config.max-lora-rank, bfloat16, or a mesh of more devices",
        )
    if plan.max_models == 1:
        yield warning(
            "memory",
            f"only one model of rank {config.max_lora_rank} can train at a time; idle models are evicted to disk",
            "lower --backend-config.max-lora-rank if clients use lower ranks",
        )
