"""Checks of the machine: packages, system limits, tokenizer and chat template, devices and the memory plan.

The checks that use JAX run in a child process, `skyrl_tx.tools.doctor.probe`, because starting JAX can hang and takes
memory of the devices.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

import msgspec
from packaging.requirements import Requirement
from packaging.version import Version

from skyrl_tx import DISTRIBUTION, __version__
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.backends.jax.config import JaxFlags
from skyrl_tx.backends.jax.gpu_memory import SHARE_VARIABLE, read_gpu_share
from skyrl_tx.contract.errors import RequestError, UserError
from skyrl_tx.process.memory import get_memory_limit, get_physical_memory, list_gpus
from skyrl_tx.process.setup import OPEN_FILES
from skyrl_tx.process.text import format_bytes
from skyrl_tx.tools.doctor.findings import ExaminedServer, Finding, error, ok, warning

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
_SMOKE_TIMEOUT_S = 300.0


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
    if not settings.base_model or subject.settings.backend == "fake":  # models of the fake backend have no files
        return
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
    """The input of the program `skyrl_tx.tools.doctor.probe`."""

    check: Literal["devices", "smoke"]
    base_model: str
    """Empty if only the devices are of interest."""
    backend_config: dict[str, Any]
    has_gpus: bool
    """Whether the driver lists GPUs."""
    is_serving: bool
    """Whether an engine is running, which uses the memory that the plan needs."""


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
    yield from _run_probe("devices", subject, settings.backend_config, _TIMEOUT_S, has_gpus=bool(gpus))


def check_computation(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that the devices compile and run a training step and a sample of the model `tiny`."""
    config = subject.settings.backend_config
    if not isinstance(config, JaxFlags):
        yield ok("smoke", f"not examined: the checks do not support the backend {subject.settings.backend}")
        return
    yield from _run_probe("smoke", subject, config, _SMOKE_TIMEOUT_S)


def _run_probe(
    check: Literal["devices", "smoke"],
    subject: ExaminedServer,
    config: JaxFlags,
    timeout_s: float,
    *,
    has_gpus: bool = False,
) -> list[Finding]:
    """Run a check that uses JAX in a child process.

    Returns its findings, or one finding if it fails or takes longer than `timeout_s`.
    """
    question = ProbeQuestion(
        check=check,
        base_model=subject.settings.base_model,
        backend_config=config.model_dump(mode="json"),
        has_gpus=has_gpus,
        is_serving="engine" in subject.server_pids,
    )
    # No preallocation, so that the program works while a server is using the devices.
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        SHARE_VARIABLE: str(read_gpu_share(config.gpu_memory_share)),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-m", "skyrl_tx.tools.doctor.probe"]
    advice = "check the driver and programs that use the devices; `skyrl-tx status --stacks` helps if it is a server"

    # Run it, and read its findings.
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(question), env=environment, capture_output=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return [error("devices", f"JAX did not answer within {timeout_s:.0f} s", advice)]
    try:
        return msgspec.json.decode(done.stdout, type=list[Finding])
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return [error("devices", f"JAX failed: {lines[-1] if lines else f'status {done.returncode}'}", advice)]
