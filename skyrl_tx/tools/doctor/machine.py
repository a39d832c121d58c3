"""Checks of the installed packages, and of the limits and the memory of the machine."""

import os
import resource
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from skyrl_tx import DISTRIBUTION, __version__
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
