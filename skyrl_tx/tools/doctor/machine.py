"""Checks of the machine: limits of the process, clock, proxies of the environment."""

import ctypes
import os
import resource
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from skyrl_tx.launch.command_line import in_units
from skyrl_tx.process.setup import OPEN_FILES
from skyrl_tx.tools.doctor.findings import Finding, Subject, ok, warning

_CGROUP = Path("/sys/fs/cgroup")
_MIN_PROCESSES = 4096
"""Processes and threads of one user: a server has some hundreds, and other programs need some too."""
_TIME_ERROR = 5
"""Result of adjtimex(2) for a clock that is not synchronized."""
_FUTURE_S = 300.0


def check_limits(subject: Subject) -> Iterator[Finding]:
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
            f"the address space is limited to {in_units(soft)}: JAX reserves more than it uses",
            "remove the limit: `ulimit -v unlimited`",
        )
    limit, physical = memory_limit(), physical_memory()
    if limit is not None and limit < physical:
        yield ok("limits", f"memory of {in_units(limit)} for this container or service, of {in_units(physical)}")
    else:
        yield ok("limits", f"memory of {in_units(physical)}")


def physical_memory() -> int:
    """Return the memory of the machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limit() -> int | None:
    """Return the memory limit of this process's control group in bytes; None without one, or if it is not Linux."""
    for path in (_CGROUP / "memory.max", _CGROUP / "memory" / "memory.limit_in_bytes"):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:  # version 1 has a very large number for no limit
            return int(text)
    return None


def check_clock(subject: Subject) -> Iterator[Finding]:
    """Check whether the clock is synchronized, and not behind the files of the data directory."""
    newest = _newest_change(subject.settings.data_dir)
    behind_s = newest - time.time()
    if behind_s > _FUTURE_S:
        yield warning(
            "clock",
            f"the clock is {behind_s / 3600:.1f} h behind the newest file in {subject.settings.data_dir}",
            "set the clock: the expiry of keys and checkpoints depends on it",
        )
    match _is_synchronized():
        case True:
            yield ok("clock", "synchronized")
        case False:
            yield warning(
                "clock",
                "the kernel does not know whether the clock is synchronized",
                "run a time service such as chrony or systemd-timesyncd, on the host of a container",
            )
        case None:
            yield ok("clock", "whether it is synchronized cannot be read on this system")


def _newest_change(data_dir: Path) -> float:
    """Return the newest time of change of a file that the server writes often."""
    try:
        return max((path.stat().st_mtime for path in data_dir.glob("skyrl_tx.db*")), default=0.0)
    except OSError:
        return 0.0


def _is_synchronized() -> bool | None:
    """Return what the kernel says about the clock (adjtimex(2)); None where it cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    state = adjtimex(ctypes.create_string_buffer(512))  # struct timex of zeros: `modes` 0 changes nothing
    return None if state < 0 else state != _TIME_ERROR


def check_proxies(subject: Subject) -> Iterator[Finding]:
    """Check that clients on this machine do not send calls for the server to a proxy of the environment."""
    proxies = {scheme: url for scheme, url in urllib.request.getproxies().items() if scheme in ("http", "https", "all")}
    host = "127.0.0.1" if subject.settings.host in ("0.0.0.0", "::") else subject.settings.host
    if proxies and not urllib.request.proxy_bypass(host):
        yield warning(
            "proxies",
            f"{', '.join(f'{scheme}_proxy' for scheme in sorted(proxies))} is set, also for {host}: clients on this "
            "machine reach the server through the proxy, which may end polls",
            f"add {host} to the variable no_proxy",
        )
