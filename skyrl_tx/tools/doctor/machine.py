"""Checks of the installed packages, and of the limits and the memory of the machine."""

import csv
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import Requirement
from packaging.version import Version

from skyrl_tx import DISTRIBUTION, __version__
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.backends.jax.config import JaxFlags
from skyrl_tx.contract.errors import UserError
from skyrl_tx.launch.command_line import format_bytes
from skyrl_tx.process.setup import OPEN_FILES
from skyrl_tx.tools.doctor.findings import ExaminedServer, Finding, error, ok, warning

OLDEST_SDK = "0.16.1"
"""The oldest release of the Tinker SDK that is tested; `tests/support/client_environments.py` has all."""
_JAX_PARTS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_CGROUP = Path("/sys/fs/cgroup")
_MIN_PROCESSES = 4096
"""Processes and threads of one user: a server has some hundreds, and other programs need some too."""


def check_packages(subject: ExaminedServer) -> Iterator[Finding]:
    """Check the installed version of each required package, and those that must be equal."""
    found = list(_find_unmet())
    yield from found
    if not found:
        yield ok("packages", f"skyrl_tx {__version__} with JAX {find_version('jax')}; all required packages are there")
    parts = {name: text for name in _JAX_PARTS if (text := find_version(name)) is not None}
    if len({Version(text).release for text in parts.values()}) > 1:
        shown = ", ".join(f"{name} {text}" for name, text in parts.items())
        yield error("packages", f"parts of JAX have different versions: {shown}", "install them together, as an extra")
    if (subject.settings.store_url or "").startswith("postgres") and find_version("psycopg") is None:
        advice = f"pip install '{DISTRIBUTION}[postgres]'"
        yield error("packages", "psycopg is not installed, which PostgreSQL needs", advice)
    yield from _check_sdk()


def _find_unmet() -> Iterator[Finding]:
    if find_version(DISTRIBUTION) is None:
        advice = "pip uninstall skyrl_tx, its name in earlier releases, then pip install . in a clone"
        yield error("packages", f"{DISTRIBUTION} is not installed, so its requirements are not known", advice)
        return
    for text in requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue  # of an extra, which need not be installed
        present, advice = find_version(requirement.name), f"pip install '{requirement.name}{requirement.specifier}'"
        if present is None:
            yield error("packages", f"{requirement.name} is not installed", advice)
        elif not requirement.specifier.contains(present, prereleases=True):
            yield error("packages", f"{requirement.name} {present} is installed, needed is {requirement}", advice)


def _check_sdk() -> Iterator[Finding]:
    present = find_version("tinker")
    if present is None:
        yield ok("sdk", f"the Tinker SDK is not installed here; clients need {OLDEST_SDK} or newer")
    elif Version(present) < Version(OLDEST_SDK):
        advice = f"pip install 'tinker>={OLDEST_SDK}'"
        yield warning("sdk", f"tinker {present} is older than any that is tested", advice)
    else:
        yield ok("sdk", f"tinker {present}")


def find_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_limits(subject: ExaminedServer) -> Iterator[Finding]:
    """Check the limits of open files, processes, address space and memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if num_files < OPEN_FILES:
        yield warning(
            "limits",
            f"at most {hard} open files: each open poll of a client is one",
            f"raise it to {OPEN_FILES}: `LimitNOFILE` of systemd, `ulimit -n`, or `--ulimit nofile` of a container",
        )
    else:
        yield ok("limits", f"{num_files} open files")
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if hard != resource.RLIM_INFINITY and hard < _MIN_PROCESSES:
        yield warning("limits", f"at most {hard} processes and threads of this user", "raise it: `ulimit -u`")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield warning(
            "limits",
            f"the address space is limited to {format_bytes(soft)}: JAX reserves more than it uses",
            "remove the limit: `ulimit -v unlimited`",
        )
    limit, physical = read_memory_limit(), get_physical_memory()
    if limit is not None and limit < physical:
        yield ok(
            "limits", f"memory of {format_bytes(limit)} for this container or service, of {format_bytes(physical)}"
        )
    else:
        yield ok("limits", f"memory of {format_bytes(physical)}")


def get_physical_memory() -> int:
    """Return the memory of the machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_memory_limit() -> int | None:
    """Return the memory limit of this process's control group in bytes; None without one, or if it is not Linux."""
    for path in (_CGROUP / "memory.max", _CGROUP / "memory" / "memory.limit_in_bytes"):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:  # version 1 has a very large number for no limit
            return int(text)
    return None


_MESSAGES: tuple[Mapping[str, object], ...] = ({"role": "user", "content": "Hello"},)
_TOOLS: tuple[Mapping[str, object], ...] = (
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},
)


def check_text(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that text can be encoded, decoded and rendered as a chat."""
    settings = subject.settings.make_api_settings()
    if not _is_local(settings.tokenizer_id or settings.base_model):
        yield ok("tokenizer", "not examined: the files of the model are not here yet")
        return
    text = ModelText(settings)
    try:
        encoded = text.encode("Hello", add_special=False)
        decoded = text.decode(encoded, skip_special=True)
    except UserError as problem:
        yield warning("tokenizer", str(problem), "stop strings and the OpenAI and Anthropic endpoints need it")
        return
    if decoded.strip() != "Hello":
        advice = "compare its files with those of the model"
        yield warning("tokenizer", f"it decodes its tokens of 'Hello' as {decoded!r}", advice)
    else:
        yield ok("tokenizer", f"tokenizer.json with {text.tokenizer.get_vocab_size()} tokens")
    if text.eos_token_id is None:
        yield warning(
            "tokenizer",
            "tokenizer_config.json names no eos_token among the tokens",
            "chat completions end at the model's own end tokens only: compare the file with the model's",
        )
    yield from _check_template(text, is_given=settings.chat_template is not None)


def _is_local(model: str) -> bool:
    """Whether a model is a directory, or in the cache of the hub."""
    if Path(model).expanduser().is_dir() or model.count("/") != 1:
        return True
    from huggingface_hub import try_to_load_from_cache  # takes half a second

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _check_template(text: ModelText, *, is_given: bool) -> Iterator[Finding]:
    what = "--chat-template" if is_given else "the model's chat template"
    try:
        prompt = text.template.render(_MESSAGES)
    except UserError as problem:
        finding = error if is_given else warning
        yield finding("template", str(problem), "give a template with --chat-template; training does not need one")
        return
    try:
        has_tools = text.template.render(_MESSAGES, _TOOLS) != prompt
    except UserError:
        has_tools = False
    yield ok("template", f"{what} renders messages{' and tools' if has_tools else ', and ignores tools'}")


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
